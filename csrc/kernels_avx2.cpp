// The kernels for one instruction set; setup.py compiles this file with its flags.
#if defined(__x86_64__)
#include "kernels_impl.h"

namespace bros {
const KernelTable kAvx2Kernels = {rms_norm, rope_and_cache, attention, silu_and_mul,
                                  linear, mlp, embed, kPanelOutputs, kPartRows,
                                  sample};
}  // namespace bros
#endif

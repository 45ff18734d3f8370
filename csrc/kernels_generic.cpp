// The kernels for one instruction set; setup.py compiles this file with its flags.
#include "kernels_impl.h"

namespace bros {
const KernelTable kGenericKernels = {rms_norm, rope_and_cache, attention, silu_and_mul,
                                     linear, mlp, embed, kPanelOutputs, kPartRows,
                                     sample};
}  // namespace bros

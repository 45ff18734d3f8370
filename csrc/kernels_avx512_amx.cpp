// The kernels for one instruction set; setup.py compiles this file with its flags.
#if defined(__x86_64__)
#if defined(__AMX_TILE__)
#include "kernels_impl.h"

namespace bros {
const KernelTable kAvx512AmxKernels = {rms_norm, rope_and_cache, attention, silu_and_mul,
                                       linear, mlp, embed, kPanelOutputs, kPartRows,
                                       sample, tile_product};
}  // namespace bros
#else
#include "kernels.h"

namespace bros {
const KernelTable kAvx512AmxKernels = {};
}  // namespace bros
#endif
#endif

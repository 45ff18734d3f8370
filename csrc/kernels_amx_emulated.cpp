// The kernels of AVX-512 and AMX in plain C++, for any CPU: tests run them where the instructions
// are missing. They have the same source as those of kernels_avx512_amx.cpp, but for the
// instructions.
#define BROS_MODEL
#include "kernels_impl.h"

namespace bros {
const KernelTable kAmxEmulatedKernels = {rms_norm, rope_and_cache, attention, silu_and_mul,
                                         linear, mlp, embed, kPanelOutputs, kPartRows,
                                         sample, tile_product};
}  // namespace bros

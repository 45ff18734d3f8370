// Copies the K and V of single tokens between the KV cache and a contiguous buffer.
//
//   cache    [row][block][head][16 slots][head_dim]     row: K or V of one layer
//   pieces   [token][row][head][head_dim]               a piece: all K and V of one token
//
// The kernels copy bytes, so they serve all dtypes. There are four widths; callers use the widest
// that divides head_dim in bytes. blockIdx.y runs over rows, blockIdx.x over the vectors of all
// tokens in a row; both wrap around, so any grid size works. Each thread has four loads in flight
// before it stores.
//
// NVRTC compiles this at first use, without any header.

namespace {

constexpr int kBlockSize = 16;
constexpr unsigned kLoads = 4;

template <typename Vector, bool kGather>
__device__ __forceinline__ void move_tokens(char* cache, long long row_bytes, char* pieces,
                                            const int* slots, int tokens, int rows, int heads,
                                            int head_vectors) {
  const unsigned token_vectors = static_cast<unsigned>(heads) * head_vectors;
  const unsigned row_vectors = tokens * token_vectors;  // the caller keeps this below 2^31
  const unsigned step = gridDim.x * blockDim.x * kLoads;
  Vector* const buffer = reinterpret_cast<Vector*>(pieces);
  for (int row = blockIdx.y; row < rows; row += gridDim.y) {
    Vector* const kept = reinterpret_cast<Vector*>(cache + row * row_bytes);
    unsigned first = blockIdx.x * blockDim.x * kLoads + threadIdx.x;
    for (; first < row_vectors; first += step) {
      Vector values[kLoads];
      Vector* targets[kLoads];
#pragma unroll
      for (unsigned load = 0; load < kLoads; ++load) {
        // Past the end, load the last vector again, so that no load depends on a branch.
        const unsigned index = first + load * blockDim.x;
        const unsigned valid = index < row_vectors ? index : row_vectors - 1;
        const unsigned token = valid / token_vectors;
        const unsigned place = valid - token * token_vectors;
        const unsigned head = place / head_vectors;
        const int slot = slots[token];
        const long long block_head = static_cast<long long>(slot / kBlockSize) * heads + head;
        Vector* const cached = kept + (block_head * kBlockSize + slot % kBlockSize) * head_vectors +
                               (place - head * head_vectors);
        Vector* const piece =
            buffer + (static_cast<long long>(token) * rows + row) * token_vectors + place;
        values[load] = kGather ? *cached : *piece;
        targets[load] = kGather ? piece : cached;
      }
#pragma unroll
      for (unsigned load = 0; load < kLoads; ++load) {
        if (first + load * blockDim.x < row_vectors) *targets[load] = values[load];
      }
    }
  }
}

}  // namespace

#define KV_COPY_KERNELS(width, Vector)                                                         \
  extern "C" __global__ void __launch_bounds__(256)                                            \
      gather_##width(char* cache, long long row_bytes, char* pieces, const int* slots,         \
                     int tokens, int rows, int heads, int head_vectors) {                      \
    move_tokens<Vector, true>(cache, row_bytes, pieces, slots, tokens, rows, heads,            \
                              head_vectors);                                                   \
  }                                                                                            \
  extern "C" __global__ void __launch_bounds__(256)                                            \
      scatter_##width(char* cache, long long row_bytes, char* pieces, const int* slots,        \
                      int tokens, int rows, int heads, int head_vectors) {                     \
    move_tokens<Vector, false>(cache, row_bytes, pieces, slots, tokens, rows, heads,           \
                               head_vectors);                                                  \
  }

KV_COPY_KERNELS(16, uint4)
KV_COPY_KERNELS(8, uint2)
KV_COPY_KERNELS(4, unsigned int)
KV_COPY_KERNELS(2, unsigned short)

// The tile registers of AMX: eight matrices of up to 16 rows of 64 bytes, and products of them.
//
// A product adds A times B to C. Elements of A and B are pairs of bf16, which lie along the sum:
//
//     C [m][n] fp32  +=  sum over k of  A [m][k] pair  .  B [k][n] pair
//
//     m rows of A and C <= 16,  n columns of B and C <= 16,  k columns of A, rows of B <= 16
//
// Even and odd ones are summed from 0 over k, each in order, in fp32 with FMA and subnormals as zeros;
// then C += even + odd. Kernels use no products of bytes (docs/decisions/0025).
//
// Two implementations have the same functions: instructions, and plain C++ that follows the
// operation sections of Intel's manual (SDM, volume 2, "LDTILECFG", "TILELOADD", "TDPBF16PS"). The
// latter stops the process where the instructions would raise an exception, so that a kernel that
// passes its tests with it also uses the instructions as it may.
#pragma once

#include "avx512_model.h"
#include "kernels.h"
#include "simd.h"

#if defined(BROS_MULTIPLIES_TILES)

namespace bros {
namespace {

constexpr int kTileRegisters = 8;
constexpr int kMostTileRows = 16;
constexpr int kTileRowBytes = 64;

// The operand of LDTILECFG.
struct TileShapes {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int64_t tile_rows, int64_t tile_row_bytes) {
    rows[tile] = static_cast<uint8_t>(tile_rows);
    row_bytes[tile] = static_cast<uint16_t>(tile_row_bytes);
  }
};
static_assert(sizeof(TileShapes) == 64, "");

#if defined(BROS_MODEL)

struct TileRegister {
  int rows, row_bytes;  // 0: not configured
  alignas(64) char data[kMostTileRows][kTileRowBytes];
};

inline TileRegister& tile_register(int tile) {
  static thread_local TileRegister registers[kTileRegisters];
  return registers[tile];
}

inline void demand(bool allowed) {
  if (!allowed) __builtin_trap();
}

inline TileRegister& configured_tile(int tile) {
  TileRegister& t = tile_register(tile);
  demand(t.rows > 0);
  return t;
}

inline void configure_tiles(const TileShapes& shapes) {
  demand(shapes.palette == 1 && shapes.start_row == 0);
  for (uint8_t byte : shapes.reserved) demand(byte == 0);
  for (int i = 0; i < 16; ++i) {
    const int rows = shapes.rows[i], row_bytes = shapes.row_bytes[i];
    demand(rows <= kMostTileRows && row_bytes <= kTileRowBytes && !rows == !row_bytes);
    if (i >= kTileRegisters) {
      demand(rows == 0);
      continue;
    }
    TileRegister& t = tile_register(i);
    t = {};
    t.rows = rows;
    t.row_bytes = row_bytes;
  }
}

inline void release_tiles() {
  for (int i = 0; i < kTileRegisters; ++i) tile_register(i) = {};
}

inline void zero_rows(TileRegister& t) { __builtin_memset(t.data, 0, sizeof t.data); }

template <int kTile>
inline void zero_tile() {
  zero_rows(configured_tile(kTile));
}

// Rows and bytes of rows that are not configured become 0.
template <int kTile>
inline void load_tile(const void* from, int64_t stride) {
  TileRegister& t = configured_tile(kTile);
  zero_rows(t);
  for (int r = 0; r < t.rows; ++r) {
    __builtin_memcpy(t.data[r], static_cast<const char*>(from) + r * stride, t.row_bytes);
  }
}

template <int kTile>
inline void load_tile_once(const void* from, int64_t stride) {
  load_tile<kTile>(from, stride);
}

template <int kTile>
inline void store_tile(void* to, int64_t stride) {
  const TileRegister& t = configured_tile(kTile);
  for (int r = 0; r < t.rows; ++r) {
    __builtin_memcpy(static_cast<char*>(to) + r * stride, t.data[r], t.row_bytes);
  }
}

// The row of a tile as a vector.
BROS_INLINE IntVec row_of(const TileRegister& t, int row) {
  IntVec v;
  static_assert(sizeof v == kTileRowBytes, "");
  __builtin_memcpy(&v, t.data[row], sizeof v);
  return v;
}

// Bytes beyond the shape of C stay 0.
template <int kC, int kA, int kB>
inline void add_product() {
  static_assert(kC != kA && kC != kB && kA != kB, "");
  TileRegister &c = configured_tile(kC), &a = configured_tile(kA), &b = configured_tile(kB);
  demand(a.rows == c.rows && b.row_bytes == c.row_bytes && a.row_bytes == 4 * b.rows);
  demand(c.row_bytes % 4 == 0);
  for (int m = 0; m < c.rows; ++m) {
    const IntVec pairs = row_of(a, m);
    Vec even = {}, odd = {};
    for (int k = 0; k < b.rows; ++k) {
      const IntVec left = splat_int(pairs[k]), right = row_of(b, k);
      even = bf16_mul_add(low_bf16(left), low_bf16(right), even);
      odd = bf16_mul_add(high_bf16(left), high_bf16(right), odd);
    }
    const Vec before = without_subnormals(bit_cast<Vec>(row_of(c, m)));
    const Vec after = without_subnormals(before + without_subnormals(even + odd));
    __builtin_memcpy(c.data[m], &after, c.row_bytes);
  }
}

#else

// Not the intrinsics of GCC: these take no tile number that is a template argument, and do not tell
// the compiler that they read and write memory, so that it might move the stores of what a tile
// loads.

BROS_INLINE void configure_tiles(const TileShapes& shapes) {
  __asm__ volatile("ldtilecfg %0" ::"m"(shapes));
}

BROS_INLINE void release_tiles() { __asm__ volatile("tilerelease"); }

template <int kTile>
BROS_INLINE void zero_tile() {
  __asm__ volatile("tilezero %%tmm%c0" ::"i"(kTile));
}

template <int kTile>
BROS_INLINE void load_tile(const void* from, int64_t stride) {
  __asm__ volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(kTile), "r"(from), "r"(stride) : "memory");
}

// As load_tile. What is loaded should not push other data out of the first cache.
template <int kTile>
BROS_INLINE void load_tile_once(const void* from, int64_t stride) {
  __asm__ volatile("tileloaddt1 (%1,%2,1), %%tmm%c0" ::"i"(kTile), "r"(from), "r"(stride)
                   : "memory");
}

template <int kTile>
BROS_INLINE void store_tile(void* to, int64_t stride) {
  __asm__ volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(kTile), "r"(to), "r"(stride) : "memory");
}

template <int kC, int kA, int kB>
BROS_INLINE void add_product() {
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kC), "i"(kA), "i"(kB));
}

#endif

// Tiles of this thread, configured at first use and released at the end of its part of the work.
//
// The configuration is state of a thread, not of a process: each thread of a team has its own. It is
// released since the caller's thread runs other libraries next, which expect no tiles or set their
// own; and as long as tiles are in use, the system saves 8 KB more at each switch of threads, and the
// core cannot enter its deep sleep.
class ThreadTiles {
 public:
  ThreadTiles() = default;
  ThreadTiles(const ThreadTiles&) = delete;
  ThreadTiles& operator=(const ThreadTiles&) = delete;
  ~ThreadTiles() {
    if (used_) release_tiles();
  }

  // Loads the shapes, unless these are the same as before. Contents of tiles are undefined then.
  void configure(const TileShapes& shapes) {
    if (used_ && __builtin_memcmp(&shapes, &shapes_, sizeof shapes) == 0) return;
    configure_tiles(shapes);
    shapes_ = shapes;
    used_ = true;
  }

 private:
  TileShapes shapes_;
  bool used_ = false;
};

inline const char* tile_product(const TileProductArgs& a) {
  const int64_t sizes[] = {a.rows, a.columns, a.depth};
  for (int64_t size : sizes) {
    if (size < 1 || size > kMostTileRows) return "a tile has 1 to 16 rows and columns";
  }
  TileShapes shapes;
  shapes.set(0, a.rows, 4 * a.columns);
  shapes.set(1, a.rows, 4 * a.depth);
  shapes.set(2, a.depth, 4 * a.columns);
  ThreadTiles tiles;
  tiles.configure(shapes);
  load_tile<0>(a.c, kTileRowBytes);
  load_tile<1>(a.a, kTileRowBytes);
  load_tile<2>(a.b, kTileRowBytes);
  add_product<0, 1, 2>();
  store_tile<0>(a.c, kTileRowBytes);
  return nullptr;
}

}  // namespace
}  // namespace bros

#endif

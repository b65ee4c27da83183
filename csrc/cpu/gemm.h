// The matrix kernel: C (fp32) = or += A B for fp32 and bf16 operands, with packing, after Goto & van de Geijn (TOMS
// 34-3, 2008).
//
// Operands are packed in units of 32 bits. A unit is one float, or two bf16 neighbours along k if the CPU multiplies
// such pairs (AVX512-BF16: 4x the fp32 rate of AVX2, 2x that of AVX-512). On other CPUs bf16 is widened to fp32 during
// packing.
#pragma once

#include <stdlib.h>

#include "vec.h"

namespace frontier::FRONTIER_ISA {

constexpr int kTileColumns = 2 * kLanes;             // n of one register tile
constexpr int kTileRows =
    kVectorBytes == 64 ? 8 : 4;  // m: 8 x 2 accumulators of the 32 registers of AVX-512, 4 x 2 of 16 elsewhere

template <class T>
struct Unit {  // fp32, and bf16 after widening
  static constexpr int kDepth = 1;
  using Element = float;
};
#if defined(__AVX512BF16__)
template <>
struct Unit<bf16> {
  static constexpr int kDepth = 2;
  using Element = bf16;
};
#endif

template <class T>
constexpr int64_t units(int64_t k) { return (k + Unit<T>::kDepth - 1) / Unit<T>::kDepth; }

constexpr int64_t round_up(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }

// Memory of one thread that only grows. The next call overwrites its contents.
class Scratch {
 public:
  ~Scratch() { free(memory_); }
  void* bytes(int64_t count) {
    if (count > capacity_) {
      free(memory_);
      capacity_ = round_up(count, 4096);
      memory_ = aligned_alloc(64, capacity_);
      if (!memory_) abort();
    }
    return memory_;
  }

 private:
  void* memory_ = nullptr;
  int64_t capacity_ = 0;
};

// ---- packing: (k, n) at source[k * k_stride + n * n_stride] -> units[k / depth][width], zeros past `depth_count` and
// `columns` ----

// Packs `valid` rows along k and `columns` columns of one unit. n is contiguous.
template <class T>
ALWAYS_INLINE void pack_row(const T* source, int64_t k_stride, int64_t valid, int64_t columns, float* out,
                            int64_t width) {
  for_vectors(columns, [&](int64_t i, auto load, auto) {
    vf low = load(source);
    if constexpr (Unit<T>::kDepth == 2) {
      const vf high = valid > 1 ? load(source + k_stride) : vf{};
      low = reinterpret_cast<vf>((reinterpret_cast<vu>(low) >> 16) | reinterpret_cast<vu>(high));
    }
    if (i + kLanes <= width)
      store(out + i, low);
    else
      store_part(out + i, low, width - i);
  });
  for (int64_t i = round_up(columns, kLanes); i < width; ++i) out[i] = 0;
}

typedef uint32_t quad __attribute__((vector_size(16)));
typedef uint32_t quad_memory __attribute__((vector_size(16), aligned(2), may_alias));

ALWAYS_INLINE quad load_quad(const float* p, float) { return *reinterpret_cast<const quad_memory*>(p); }
ALWAYS_INLINE quad load_quad(const bf16* p, bf16) { return *reinterpret_cast<const quad_memory*>(p); }
ALWAYS_INLINE quad load_quad(const bf16* p, float) { return quad{p[0].bits, p[1].bits, p[2].bits, p[3].bits} << 16; }

// k is contiguous: 4 x 4 units are transposed at a time.
template <class T>
void pack_transposed(const T* source, int64_t n_stride, int64_t k, int64_t columns, float* out, int64_t width) {
  using Element = typename Unit<T>::Element;
  constexpr int depth = Unit<T>::kDepth;
  const int64_t whole_k = k / (4 * depth) * (4 * depth), whole_n = columns / 4 * 4;
  for (int64_t n = 0; n < whole_n; n += 4) {
    const T* rows = source + n * n_stride;
    for (int64_t i = 0; i < whole_k; i += 4 * depth) {
      const quad a = load_quad(rows + i, Element{}), b = load_quad(rows + n_stride + i, Element{});
      const quad c = load_quad(rows + 2 * n_stride + i, Element{}), d = load_quad(rows + 3 * n_stride + i, Element{});
      const quad ab_low = __builtin_shuffle(a, b, quad{0, 4, 1, 5}),
                 ab_high = __builtin_shuffle(a, b, quad{2, 6, 3, 7});
      const quad cd_low = __builtin_shuffle(c, d, quad{0, 4, 1, 5}),
                 cd_high = __builtin_shuffle(c, d, quad{2, 6, 3, 7});
      float* to = out + i / depth * width + n;
      *reinterpret_cast<quad_memory*>(to) = __builtin_shuffle(ab_low, cd_low, quad{0, 1, 4, 5});
      *reinterpret_cast<quad_memory*>(to + width) = __builtin_shuffle(ab_low, cd_low, quad{2, 3, 6, 7});
      *reinterpret_cast<quad_memory*>(to + 2 * width) = __builtin_shuffle(ab_high, cd_high, quad{0, 1, 4, 5});
      *reinterpret_cast<quad_memory*>(to + 3 * width) = __builtin_shuffle(ab_high, cd_high, quad{2, 3, 6, 7});
    }
  }
  for (int64_t unit = 0; unit < units<T>(k); ++unit)
    for (int64_t n = unit * depth < whole_k ? whole_n : 0; n < width; ++n) {
      Element pair[depth] = {};
      for (int i = 0; i < depth && n < columns && unit * depth + i < k; ++i) {
        const T& from = source[n * n_stride + unit * depth + i];
        if constexpr (depth == 2)
          pair[i] = from;
        else
          pair[i] = load_part(&from, 1)[0];
      }
      memcpy(out + unit * width + n, pair, 4);
    }
}

template <class T>
void pack(const T* source, int64_t k_stride, int64_t n_stride, int64_t k, int64_t columns, float* out, int64_t width) {
  if (n_stride == 1)
    for (int64_t i = 0; i < k; i += Unit<T>::kDepth, source += Unit<T>::kDepth * k_stride, out += width)
      pack_row(source, k_stride, k - i, columns, out, width);
  else
    pack_transposed(source, n_stride, k, columns, out, width);
}

// ---- the register tile ----

template <class T>
ALWAYS_INLINE vf multiply_add(vf sum, const char* a, vf b) {
  uint32_t unit;
  memcpy(&unit, a, 4);
#if defined(__AVX512BF16__)
  if constexpr (Unit<T>::kDepth == 2)
    return reinterpret_cast<vf>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(sum),
                                                 reinterpret_cast<__m512bh>(_mm512_set1_epi32(unit)),
                                                 reinterpret_cast<__m512bh>(b)));
#endif
  float scalar;
  memcpy(&scalar, &unit, 4);
  return sum + scalar * b;
}

// Computes C[Rows][columns <= kTileColumns] from `depth` units. A's strides are in bytes. B is one packed panel.
template <class T, int Rows>
void tile(int64_t depth, const char* a, int64_t a_row, int64_t a_step, const float* b, float* c, int64_t c_row,
          int64_t columns, bool accumulate) {
  vf sums[Rows][2] = {};
  if (accumulate)  // C comes from L3 or memory while the product is computed: weight gradients take 5 to 10 % less time
    for (int row = 0; row < Rows; ++row)
      __builtin_prefetch(c + row * c_row, 1), __builtin_prefetch(c + row * c_row + kLanes, 1);
  for (int64_t unit = 0; unit < depth; ++unit, a += a_step, b += kTileColumns) {
    const vf b0 = load(b), b1 = load(b + kLanes);
#pragma GCC unroll 8
    for (int row = 0; row < Rows; ++row) {
      sums[row][0] = multiply_add<T>(sums[row][0], a + row * a_row, b0);
      sums[row][1] = multiply_add<T>(sums[row][1], a + row * a_row, b1);
    }
  }
  for (int row = 0; row < Rows; ++row, c += c_row) {
    if (columns == kTileColumns) {
      store(c, accumulate ? load(c) + sums[row][0] : sums[row][0]);
      store(c + kLanes, accumulate ? load(c + kLanes) + sums[row][1] : sums[row][1]);
    } else {
      for (int64_t j = 0; j < columns; ++j) c[j] = (accumulate ? c[j] : 0.0f) + sums[row][j / kLanes][j % kLanes];
    }
  }
}

template <class T, int Rows = kTileRows>
ALWAYS_INLINE void tile_of(int64_t rows, int64_t depth, const char* a, int64_t a_row, int64_t a_step, const float* b,
                           float* c, int64_t c_row, int64_t columns, bool accumulate) {
  if (rows >= Rows)
    tile<T, Rows>(depth, a, a_row, a_step, b, c, c_row, columns, accumulate);
  else if constexpr (Rows > 1)
    tile_of<T, Rows - 1>(rows, depth, a, a_row, a_step, b, c, c_row, columns, accumulate);
}

// Computes C[rows][columns] from A (byte strides) and panels of B, which follow each other in memory. A panel has
// `depth` units of kTileColumns.
template <class T>
ALWAYS_INLINE void product(int64_t rows, int64_t columns, int64_t depth, const void* a, int64_t a_row, int64_t a_step,
                           const float* b, float* c, int64_t c_row, bool accumulate) {
  for (int64_t n = 0; n < columns; n += kTileColumns, b += depth * kTileColumns)
    for (int64_t m = 0; m < rows; m += kTileRows)
      tile_of<T>(rows - m, depth, static_cast<const char*>(a) + m * a_row, a_row, a_step, b, c + m * c_row + n, c_row,
                 columns - n < kTileColumns ? columns - n : kTileColumns, accumulate);
}

// ---- the complete product ----

constexpr int64_t kBlockDepth = 256;     // units of k: a panel of B is 256 * 32 * 4 = 32 KiB, two thirds of L1
constexpr int64_t kBlockRows = 128;      // m: a block of A is 128 KiB, in L2
constexpr int64_t kBlockColumns = 2048;  // n: a block of B is 2 MiB, in L3

template <class T>
void gemm(const GemmArgs<T>& args) {
  static thread_local Scratch a_memory, b_memory;
  constexpr int64_t depth = Unit<T>::kDepth, block_k = kBlockDepth * depth;
  float* const a_packed = static_cast<float*>(a_memory.bytes(kBlockRows * kBlockDepth * 4));
  float* const b_packed = static_cast<float*>(b_memory.bytes(kBlockColumns * kBlockDepth * 4));
  // A in row-major order needs no packing: the tile broadcasts from kTileRows rows at once.
  constexpr bool widened = sizeof(T) * depth != 4;
  const bool a_direct = !widened && args.a_column == 1 && args.k % depth == 0;
  for (int64_t n0 = 0; n0 < args.n; n0 += kBlockColumns) {
    const int64_t n_count = args.n - n0 < kBlockColumns ? args.n - n0 : kBlockColumns;
    for (int64_t k0 = 0; k0 < args.k; k0 += block_k) {
      const int64_t k_count = args.k - k0 < block_k ? args.k - k0 : block_k, k_units = units<T>(k_count);
      for (int64_t n = 0; n < n_count; n += kTileColumns)
        pack(args.b + k0 * args.b_row + (n0 + n) * args.b_column, args.b_row, args.b_column, k_count,
             n_count - n < kTileColumns ? n_count - n : kTileColumns, b_packed + n * k_units, kTileColumns);
      for (int64_t m0 = 0; m0 < args.m; m0 += kBlockRows) {
        const int64_t m_count = args.m - m0 < kBlockRows ? args.m - m0 : kBlockRows;
        const T* a = args.a + m0 * args.a_row + k0 * args.a_column;
        float* c = args.c + m0 * args.c_row + n0;
        const bool accumulate = args.accumulate || k0 > 0;
        if (a_direct) {
          product<T>(m_count, n_count, k_units, a, args.a_row * sizeof(T), 4, b_packed, c, args.c_row, accumulate);
        } else {
          pack(a, args.a_column, args.a_row, k_count, m_count, a_packed, kBlockRows);
          product<T>(m_count, n_count, k_units, a_packed, 4, kBlockRows * 4, b_packed, c, args.c_row, accumulate);
        }
      }
    }
  }
}

// out = A B, rounded once to the operands' type. `args.c` is not used. Meant for some hundred rows, because the fp32
// sums of all rows are in memory together.
template <class T>
void gemm_rounded(GemmArgs<T> args, T* out, int64_t out_row) {
  if constexpr (sizeof(T) == 4) {
    args.c = out, args.c_row = out_row;
    gemm(args);
  } else {
    static thread_local Scratch memory;
    args.c_row = round_up(args.n, kLanes);
    args.c = static_cast<float*>(memory.bytes(args.m * args.c_row * 4));
    gemm(args);
    for (int64_t row = 0; row < args.m; ++row, out += out_row)
      for_vectors(args.n, [&](int64_t, auto load, auto store) { store(out, load(args.c + row * args.c_row)); });
  }
}

}  // namespace frontier::FRONTIER_ISA

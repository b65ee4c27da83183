// Dropout with masks from a counter: one block of Philox 4x32-10 (Salmon et al. 2011) for eight features, as in
// frontier_llm/ops/dropout.py.
#pragma once

#include "vec.h"

namespace frontier::FRONTIER_ISA {

typedef uint64_t vq __attribute__((vector_size(kVectorBytes)));

// Returns factor * the lower half of each lane, in 64 bits. Compilers alone would multiply the upper half too.
ALWAYS_INLINE vq multiply(vq x, uint32_t factor) {
#if defined(__AVX512F__)
  return reinterpret_cast<vq>(_mm512_mul_epu32(reinterpret_cast<__m512i>(x), _mm512_set1_epi64(factor)));
#elif defined(__AVX2__)
  return reinterpret_cast<vq>(_mm256_mul_epu32(reinterpret_cast<__m256i>(x), _mm256_set1_epi64x(factor)));
#else
  return (x & 0xffffffffu) * uint64_t{factor};
#endif
}

// One block in each 64-bit lane. The upper halves of the words have parts of the products, which are not used.
ALWAYS_INLINE void philox(vq (&c)[4], uint64_t key) {
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
    const vq first = multiply(c[0], 0xD2511F53u), second = multiply(c[2], 0xCD9E8D57u);
    c[0] = (second >> 32) ^ c[1] ^ uint64_t{k0};
    c[2] = (first >> 32) ^ c[3] ^ uint64_t{k1};
    c[1] = second, c[3] = first;
  }
}

// Features of one token. Blocks with even and odd numbers are computed separately, then interleaved to 32-bit words.
template <class T>
void drop(const T* x, const T* residual, T* out, DropArgs args) {
  const int64_t blocks = (args.columns + 7) / 8;
  vq numbers;
  for (int lane = 0; lane < kLanes / 2; ++lane) numbers[lane] = 2 * lane;
  const vq position = vq{} + uint64_t{args.position}, low = vq{} + (args.sample & 0xffffffffu),
           high = vq{} + (args.sample >> 32);
  for (int64_t block = 0; block < blocks; block += kLanes) {
    vq even[4] = {numbers + static_cast<uint64_t>(block), position, low, high},
       odd[4] = {even[0] + 1, position, low, high};
    philox(even, args.key);
    philox(odd, args.key);
    for (int half = 0; half < 8; ++half) {
      const vu word = reinterpret_cast<vu>((even[half / 2] & 0xffffffffu) | (odd[half / 2] << 32));
      const vi kept = reinterpret_cast<vi>(half % 2 ? word >> 16 : word & 0xffffu) >= args.threshold;
      const auto put = [&](auto load, auto store) {
        const vf value = kept ? load(x) * args.scale : vf{};
        store(out, residual ? load(residual) + value : value);
      };
      const int64_t i = half * blocks + block, count = (block + kLanes < blocks ? i + kLanes : (half + 1) * blocks) - i;
      const int64_t inside =
          i + count < args.columns ? count : args.columns - i;  // the last ranges can be shorter or empty
      if (inside == kLanes)
        put([i](const T* p) { return load(p + i); }, [i](T* p, vf v) { store(p + i, v); });
      else if (inside > 0)
        put([i, inside](const T* p) { return load_part(p + i, inside); },
            [i, inside](T* p, vf v) { store_part(p + i, v, inside); });
    }
  }
}

}  // namespace frontier::FRONTIER_ISA

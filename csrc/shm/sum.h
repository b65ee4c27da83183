// Sums and maxima over the ranks' slots, for collectives.h. Ranks are added in rank order. 16-bit types have an fp32
// accumulator.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define FL_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FL_CLONES
#endif

namespace {

enum Type : int32_t { kFloat32, kFloat64, kBfloat16, kFloat16, kInt64, kInt32, kByte };
constexpr uint64_t kTypeBytes[] = {4, 8, 2, 2, 8, 4, 1};

// ---- sums: blocks of 1024 elements keep the accumulator in the first-level cache

constexpr uint64_t kBlock = 1024;

struct Bfloat16 {
    uint16_t bits;
};
struct Float16 {
    _Float16 value;
};

inline float widen(Bfloat16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
inline float widen(Float16 x) { return float(x.value); }
template <class T>
inline T widen(T x) {
    return x;
}

inline void narrow(float value, Bfloat16& out) {  // round to nearest even; a NaN stays a NaN
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    out.bits = uint16_t(value != value ? (bits >> 16) | 0x40 : rounded);
}
inline void narrow(float value, Float16& out) { out.value = _Float16(value); }
template <class T>
inline void narrow(T value, T& out) {
    out = value;
}

template <class T, class Sum, bool kMax>
inline __attribute__((always_inline)) void reduce_as(void* out, const void* const* sources, int count,
                                                     uint64_t elements) {
  Sum block[kBlock];
  for (uint64_t start = 0; start < elements; start += kBlock) {
    const uint64_t n = std::min(kBlock, elements - start);
    const T* first = static_cast<const T*>(sources[0]) + start;
    for (uint64_t i = 0; i < n; ++i) block[i] = widen(first[i]);
    for (int source = 1; source < count; ++source) {
      const T* next = static_cast<const T*>(sources[source]) + start;
      for (uint64_t i = 0; i < n; ++i) {
        const Sum value = widen(next[i]);
        block[i] = kMax ? (block[i] > value || block[i] != block[i] ? block[i] : value) : Sum(block[i] + value);
      }
    }
    T* target = static_cast<T*>(out) + start;
    for (uint64_t i = 0; i < n; ++i) narrow(block[i], target[i]);
  }
}

template <bool kMax>
inline __attribute__((always_inline)) void reduce_by(Type type, void* out, const void* const* sources, int count,
                                                     uint64_t elements) {
  switch (type) {
    case kFloat32: return reduce_as<float, float, kMax>(out, sources, count, elements);
    case kFloat64: return reduce_as<double, double, kMax>(out, sources, count, elements);
    case kBfloat16: return reduce_as<Bfloat16, float, kMax>(out, sources, count, elements);
    case kFloat16: return reduce_as<Float16, float, kMax>(out, sources, count, elements);
    case kInt64: return reduce_as<int64_t, int64_t, kMax>(out, sources, count, elements);
    case kInt32: return reduce_as<int32_t, int32_t, kMax>(out, sources, count, elements);
    case kByte: return reduce_as<uint8_t, uint8_t, kMax>(out, sources, count, elements);
  }
}

FL_CLONES void sum(Type type, void* out, const void* const* sources, int count, uint64_t elements) {
    reduce_by<false>(type, out, sources, count, elements);
}
FL_CLONES void maximum(Type type, void* out, const void* const* sources, int count, uint64_t elements) {
    reduce_by<true>(type, out, sources, count, elements);
}

}  // namespace

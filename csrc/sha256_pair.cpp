// Two SHA-256 digests in one thread: each round instruction takes four cycles but a new one may start every two, so that a single stream
// leaves half of the unit idle. Used for the blocks of a checkpoint's shards; frontier_llm/checkpoint/digest.py takes hashlib elsewhere.
//
// Plain C ABI, loaded with ctypes; no Python, no torch. The algorithm is that of FIPS 180-4, the instructions Intel's SHA extensions (also AMD Zen).

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>

namespace {

constexpr int kStreams = 2;
constexpr uint32_t kInitial[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
alignas(16) constexpr uint32_t kRound[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01, 0x243185be,
    0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa,
    0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967, 0x27b70a85,
    0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3,
    0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f,
    0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

// The instructions keep the eight words a … h as (a, b, e, f) and (c, d, g, h), the first in the highest lane.
struct State {
    __m128i abef, cdgh;
};

#define SHA_TARGET __attribute__((target("sha,sse4.1")))

SHA_TARGET inline State initial() {
    const uint32_t* h = kInitial;
    return {_mm_set_epi32(h[0], h[1], h[4], h[5]), _mm_set_epi32(h[2], h[3], h[6], h[7])};
}

// One 64-byte block of each stream; the loops over streams are unrolled, so that independent rounds stand side by side.
SHA_TARGET inline void compress(State* states, const uint8_t* const* blocks) {
    const __m128i big_endian = _mm_set_epi64x(0x0c0d0e0f08090a0bLL, 0x0405060700010203LL);
    State before[kStreams];
    __m128i words[kStreams][4];
#pragma GCC unroll 2
    for (int s = 0; s < kStreams; ++s) {
        before[s] = states[s];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i)
            words[s][i] = _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(blocks[s]) + i), big_endian);
    }
#pragma GCC unroll 16
    for (int group = 0; group < 16; ++group) {  // four rounds each
        const __m128i constants = _mm_load_si128(reinterpret_cast<const __m128i*>(kRound) + group);
#pragma GCC unroll 2
        for (int s = 0; s < kStreams; ++s) {
            const __m128i now = words[s][group % 4], sum = _mm_add_epi32(now, constants);
            states[s].cdgh = _mm_sha256rnds2_epu32(states[s].cdgh, states[s].abef, sum);
            states[s].abef = _mm_sha256rnds2_epu32(states[s].abef, states[s].cdgh, _mm_shuffle_epi32(sum, 0x0e));
            if (group < 12) {  // the words of the group after the next three
                const __m128i next = words[s][(group + 1) % 4], later = words[s][(group + 2) % 4], last = words[s][(group + 3) % 4];
                const __m128i mixed = _mm_add_epi32(_mm_sha256msg1_epu32(now, next), _mm_alignr_epi8(last, later, 4));
                words[s][group % 4] = _mm_sha256msg2_epu32(mixed, last);
            }
        }
    }
#pragma GCC unroll 2
    for (int s = 0; s < kStreams; ++s) {
        states[s].abef = _mm_add_epi32(states[s].abef, before[s].abef);
        states[s].cdgh = _mm_add_epi32(states[s].cdgh, before[s].cdgh);
    }
}

SHA_TARGET void store(const State& state, uint8_t* digest) {
    alignas(16) uint32_t high[4], low[4];
    _mm_store_si128(reinterpret_cast<__m128i*>(high), state.abef);
    _mm_store_si128(reinterpret_cast<__m128i*>(low), state.cdgh);
    const uint32_t words[8] = {high[3], high[2], low[3], low[2], high[1], high[0], low[1], low[0]};
    for (int i = 0; i < 8; ++i) {
        const uint32_t swapped = __builtin_bswap32(words[i]);
        std::memcpy(digest + 4 * i, &swapped, 4);
    }
}

SHA_TARGET void hash_pair(const uint8_t* first, const uint8_t* second, uint64_t bytes, uint8_t* digests) {
    State states[kStreams] = {initial(), initial()};
    for (uint64_t done = 0; done < bytes; done += 64) {
        const uint8_t* const blocks[kStreams] = {first + done, second + done};
        compress(states, blocks);
    }
    uint8_t padding[64] = {0x80};  // a whole block of it, as `bytes` is a multiple of 64
    const uint64_t bits = __builtin_bswap64(8 * bytes);
    std::memcpy(padding + 56, &bits, 8);
    const uint8_t* const blocks[kStreams] = {padding, padding};
    compress(states, blocks);
    for (int s = 0; s < kStreams; ++s) store(states[s], digests + 32 * s);
}

bool has_instructions() {
    unsigned a, b = 0, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & (1u << 29));
}

}  // namespace
#endif

#define EXPORT extern "C" __attribute__((visibility("default")))

// 1 where this processor has the instructions.
EXPORT int fl_sha256_pair_available() {
#if defined(__x86_64__)
    return has_instructions();
#else
    return 0;
#endif
}

// The digests of two buffers of the same size, a multiple of 64 bytes, one after the other in `digests` (64 bytes).
EXPORT void fl_sha256_pair([[maybe_unused]] const uint8_t* first, [[maybe_unused]] const uint8_t* second,
                           [[maybe_unused]] uint64_t bytes, [[maybe_unused]] uint8_t* digests) {
#if defined(__x86_64__)
    hash_pair(first, second, bytes, digests);
#endif
}

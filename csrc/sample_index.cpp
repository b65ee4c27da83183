// Sample index of a token dataset: where in a shuffled stream of documents does token p lie?
//
// Plain C ABI, loaded with ctypes by frontier_llm/data/native.py; no Python, no torch. Compile:
//   g++ -O3 -std=c++17 -fPIC -shared -pthread -o frontier_llm/_native/libsample_index.so csrc/sample_index.cpp
//
// One epoch is the concatenation of all documents in the order of a keyed permutation that is computed, not stored: a
// Feistel network over the next power of two with cycle walking, O(1) memory. The only thing kept is the running token count
// at every `block`-th position of that order (one u64 per 64 documents: 125 MB for a billion documents); a lookup is a binary
// search there and a walk of at most one block. All functions return 0 or more on success, a negative code on damaged input.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

namespace {

constexpr int kAbi = 1;
constexpr int kRounds = 6;
constexpr int kMinimumBits = 10;  // below this the halves are too small to mix well; walking 2^10 positions costs microseconds
constexpr uint64_t kMaximumBlock = 4096;

enum Failure : int64_t { kNegativeLength = -1, kIndexMismatch = -2, kOutOfRange = -3, kBadArgument = -4, kInfeasible = -5 };

// The tables of a .idx start at byte 34 and so are not aligned; memcpy compiles to one plain load.
template <class T>
T load(const void* base, uint64_t index) {
    T value;
    std::memcpy(&value, static_cast<const char*>(base) + index * sizeof(T), sizeof(T));
    return value;
}

uint64_t mix(uint64_t x) {  // splitmix64's finaliser: every input bit reaches every output bit
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
    return x ^ (x >> 31);
}

class Permutation {
   public:
    Permutation(uint64_t size, uint64_t key) : size_(size) {
        int bits = kMinimumBits;
        while (bits < 63 && (1ULL << bits) < size) ++bits;
        right_bits_ = bits / 2;
        left_bits_ = bits - right_bits_;
        for (int round = 0; round < kRounds; ++round) keys_[round] = mix(key + 0x9e3779b97f4a7c15ULL * (round + 1));
    }

    uint64_t operator()(uint64_t position) const {
        do position = once(position);
        while (position >= size_);  // fewer than two tries on average: the domain is less than twice the size
        return position;
    }

   private:
    uint64_t once(uint64_t x) const {
        // Alternating unbalanced Feistel: even rounds change the left half by the right one, odd rounds the other way round.
        const uint64_t left_mask = (1ULL << left_bits_) - 1, right_mask = (1ULL << right_bits_) - 1;
        uint64_t left = x >> right_bits_, right = x & right_mask;
        for (int round = 0; round < kRounds; round += 2) {
            left ^= mix(right ^ keys_[round]) & left_mask;
            right ^= mix(left ^ keys_[round + 1]) & right_mask;
        }
        return (left << right_bits_) | right;
    }

    uint64_t size_;
    int left_bits_, right_bits_;
    uint64_t keys_[kRounds];
};

struct Corpus {
    const void* lengths;    // i32 per sequence
    const void* documents;  // i64 first sequence of each document, one more than documents; null: document d is sequence d
    uint64_t count;         // documents

    int64_t length(uint64_t document) const {  // negative when a sequence has a negative length, or lies outside the table
        if (!documents) return load<int32_t>(lengths, document);
        const int64_t last = load<int64_t>(documents, document + 1);
        const int64_t first = load<int64_t>(documents, document), end = load<int64_t>(documents, count);  // `end`: the reader checked it
        if (first < 0 || last < first || last > end) return kNegativeLength;
        int64_t total = 0;
        for (int64_t sequence = first; sequence < last; ++sequence) {
            const int32_t length = load<int32_t>(lengths, sequence);
            if (length < 0) return length;
            total += length;
        }
        return total;
    }

    void prefetch(uint64_t document) const {
        if (documents) __builtin_prefetch(static_cast<const char*>(documents) + 8 * document);
        else __builtin_prefetch(static_cast<const char*>(lengths) + 4 * document);
    }
};

// Tokens of the documents at positions [first, last) of the epoch's order. The documents of a block are asked for together
// (prefetch), so that their cache misses overlap: 64 misses cost about as much as a few.
int64_t block_tokens(const Corpus& corpus, const Permutation& order, uint64_t first, uint64_t last) {
    uint64_t documents[kMaximumBlock];
    for (uint64_t i = 0; i < last - first; ++i) {
        documents[i] = order(first + i);
        corpus.prefetch(documents[i]);
    }
    int64_t total = 0;
    for (uint64_t i = 0; i < last - first; ++i) {
        const int64_t length = corpus.length(documents[i]);
        if (length < 0) return kNegativeLength;
        total += length;
    }
    return total;
}

}  // namespace

#pragma GCC visibility push(default)  // the build hides everything else
extern "C" {

int fl_abi() { return kAbi; }

// out[i] = image of positions[i] under the permutation of [0, size) with this key.
int64_t fl_permute(uint64_t size, uint64_t key, const uint64_t* positions, uint64_t count, uint64_t* out) {
    const Permutation order(size, key);
    for (uint64_t i = 0; i < count; ++i) {
        if (positions[i] >= size) return kOutOfRange;
        out[i] = order(positions[i]);
    }
    return 0;
}

// prefix[b] = tokens before position b * block of the epoch's order; prefix has ceil(count / block) + 1 entries, the last is the total.
int64_t fl_build(const void* lengths, const void* documents, uint64_t count, uint64_t key, uint64_t block, uint64_t threads,
                 uint64_t* prefix) {
    if (block == 0 || block > kMaximumBlock || threads == 0) return kBadArgument;
    const Corpus corpus{lengths, documents, count};
    const Permutation order(count, key);
    const uint64_t blocks = (count + block - 1) / block;
    constexpr uint64_t kStride = 1024;  // blocks a thread takes at a time
    std::atomic<uint64_t> next{0};
    std::atomic<int64_t> failure{0};
    auto work = [&] {
        for (uint64_t start; failure == 0 && (start = next.fetch_add(kStride)) < blocks;) {
            for (uint64_t b = start; b < std::min(start + kStride, blocks); ++b) {
                const int64_t tokens = block_tokens(corpus, order, b * block, std::min((b + 1) * block, count));
                if (tokens < 0) failure = tokens;
                prefix[b + 1] = static_cast<uint64_t>(tokens);
            }
        }
    };
    std::vector<std::thread> pool;
    for (uint64_t t = 1; t < threads; ++t) pool.emplace_back(work);
    work();
    for (auto& thread : pool) thread.join();
    prefix[0] = 0;
    for (uint64_t b = 0; b < blocks; ++b) prefix[b + 1] += prefix[b];
    return failure;
}

// The pieces of documents that hold tokens [token, token + wanted) of an epoch, as far as the epoch reaches: piece i is
// lengths_out[i] tokens of document documents_out[i] from offset offsets_out[i]; the document begins at byte bytes_out[i] of .bin
// (`pointers`: i64 per sequence). Returns the number of pieces (at most `wanted`).
// A prefix that does not belong to these lengths is noticed when a block's sum differs: kIndexMismatch.
int64_t fl_pieces(const void* lengths, const void* documents, const void* pointers, uint64_t count, uint64_t key, uint64_t block,
                  const uint64_t* prefix, uint64_t token, uint64_t wanted, int64_t* documents_out, int64_t* offsets_out,
                  int64_t* lengths_out, int64_t* bytes_out) {
    if (block == 0 || block > kMaximumBlock) return kBadArgument;
    const Corpus corpus{lengths, documents, count};
    const Permutation order(count, key);
    const uint64_t blocks = (count + block - 1) / block;
    if (token >= prefix[blocks]) return kOutOfRange;
    uint64_t b = static_cast<uint64_t>(std::upper_bound(prefix, prefix + blocks + 1, token) - prefix) - 1;
    int64_t pieces = 0;
    uint64_t before = prefix[b];  // tokens before the document at hand
    for (; b < blocks && wanted > 0; ++b) {
        if (before != prefix[b]) return kIndexMismatch;
        for (uint64_t position = b * block; position < std::min((b + 1) * block, count); ++position) {
            const uint64_t document = order(position);
            const int64_t length = corpus.length(document);
            if (length < 0) return kNegativeLength;
            const uint64_t end = before + static_cast<uint64_t>(length);
            if (wanted > 0 && end > token) {
                const uint64_t taken = std::min(wanted, end - token);
                documents_out[pieces] = static_cast<int64_t>(document);
                offsets_out[pieces] = static_cast<int64_t>(token - before);
                lengths_out[pieces] = static_cast<int64_t>(taken);
                bytes_out[pieces] = load<int64_t>(pointers, documents ? load<int64_t>(documents, document) : document);
                ++pieces;
                token += taken;
                wanted -= taken;
            }
            before = end;
        }
        if (before != prefix[b + 1]) return kIndexMismatch;
    }
    return pieces;
}

// A blend of `members` sources with integer weights that sum to `period`: sources[k] for one period, such that after every n samples
// source i has been taken n * weights[i] / period times, off by less than one.
// The j-th taking of source i (j = 1, 2, ...) must fall in slots (floor((j-1) period / w), ceil(j period / w)]; taking the ready source
// with the earliest deadline meets every one of these windows (Baruah, Cohen, Plaxton, Varvel 1996, "Proportionate progress").
int64_t fl_blend(const uint64_t* weights, uint64_t members, uint64_t period, uint16_t* sources) {
    std::vector<uint64_t> taken(members, 0), release(members, 0), deadline(members);
    auto window_end = [&](uint64_t i) { return ((taken[i] + 1) * period + weights[i] - 1) / weights[i]; };
    for (uint64_t i = 0; i < members; ++i) {
        if (weights[i] == 0) return kBadArgument;
        deadline[i] = window_end(i);
    }
    for (uint64_t slot = 0; slot < period; ++slot) {
        uint64_t chosen = members;
        for (uint64_t i = 0; i < members; ++i)
            if (release[i] <= slot && (chosen == members || deadline[i] < deadline[chosen])) chosen = i;
        if (chosen == members || deadline[chosen] < slot + 1) return kInfeasible;
        sources[slot] = static_cast<uint16_t>(chosen);
        ++taken[chosen];
        release[chosen] = taken[chosen] * period / weights[chosen];
        deadline[chosen] = window_end(chosen);
    }
    return 0;
}

}  // extern "C"
#pragma GCC visibility pop

// Sample index of a token dataset: finds token p in a shuffled stream of documents.
//
// It has a plain C ABI and needs neither Python nor torch. frontier_llm/data/native.py loads it with ctypes. Compile:
//   g++ -O3 -std=c++17 -fPIC -shared -pthread -o frontier_llm/_native/libsample_index.so csrc/sample_index.cpp
//
// One epoch is the concatenation of all documents in the order of a keyed permutation. The permutation is computed, not
// stored: a Feistel network over the next power of two with cycle walking, in O(1) memory. Only the running token count
// at every `block`-th position of that order is stored (one u64 per 64 documents: 125 MB for a billion documents). A
// lookup is a binary search in the counts and a walk over at most one block. All functions return 0 or more on
// success, and a negative code on damaged input.
//
// Best-fit packing (fl_pack) works on pieces. A document that fits into a sequence of S + 1 tokens is one piece. A
// longer document is cut into pieces that overlap by one token, so that each token is a target once. The pieces of a
// corpus, in the order of one keyed permutation, are divided into windows. Each window is packed on its own, best-fit
// decreasing. Therefore only the number of sequences of each window is stored.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <set>
#include <thread>
#include <utility>
#include <vector>

namespace {

constexpr int kAbi = 2;
constexpr int kRounds = 6;
constexpr int kMinimumBits =
    10;  // smaller halves do not mix well; a walk over 2^10 positions takes microseconds
constexpr uint64_t kMaximumBlock = 4096;
constexpr uint64_t kMaximumWindow = 1 << 24;

enum Failure : int64_t {
  kNegativeLength = -1,
  kIndexMismatch = -2,
  kOutOfRange = -3,
  kBadArgument = -4,
  kInfeasible = -5
};

// The tables of a .idx start at byte 34 and are therefore not aligned. memcpy compiles to one plain load.
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
        while (position >= size_);  // fewer than 2 iterations on average, because the domain is smaller than 2 * size_
        return position;
    }

   private:
    uint64_t once(uint64_t x) const {
      // Alternating unbalanced Feistel network: even rounds change the left half by the right one, and odd rounds the
      // right half by the left one.
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
    const void*
        documents;  // i64 first sequence of each document, end of the last one; null: document d is sequence d
    uint64_t count;         // documents

    int64_t length(
        uint64_t document) const {  // negative if a sequence has a negative length or is outside of the table
      if (!documents) return load<int32_t>(lengths, document);
      const int64_t last = load<int64_t>(documents, document + 1);
      const int64_t first = load<int64_t>(documents, document),
                    end = load<int64_t>(documents, count);  // `end` was checked by the reader
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

// Returns the tokens of the documents at positions [first, last) of the epoch's order. The documents of a block are
// prefetched together, so that their cache misses overlap: 64 misses cost about as much as a few.
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

// Sets out[i] = value(i) for all i < count. Returns a negative value if there is one, else 0. A thread takes `stride`
// elements at a time.
template <class Value>
int64_t fill_in_parallel(uint64_t count, uint64_t stride, uint64_t threads, uint64_t* out, Value value) {
    std::atomic<uint64_t> next{0};
    std::atomic<int64_t> failure{0};
    auto work = [&] {
        for (uint64_t start; failure == 0 && (start = next.fetch_add(stride)) < count;) {
            for (uint64_t i = start; i < std::min(start + stride, count); ++i) {
                const int64_t found = value(i);
                if (found < 0) failure = found;
                out[i] = static_cast<uint64_t>(found);
            }
        }
    };
    std::vector<std::thread> pool;
    for (uint64_t t = 1; t < threads; ++t) pool.emplace_back(work);
    work();
    for (auto& thread : pool) thread.join();
    return failure;
}

// Returns the number of pieces of a document for sequences of S inputs. Piece j has the tokens [j S, j S + S + 1) or
// fewer at the document's end.
uint64_t pieces_of(uint64_t length, uint64_t S) { return length <= S + 1 ? length > 0 : (length - 1 + S - 1) / S; }

struct Piece {
    uint64_t document, offset, length;
};

class Pieces {
   public:
    Pieces(Corpus corpus, uint64_t S, uint64_t block, const uint64_t* prefix, uint64_t key)
        : corpus_(corpus),
          S_(S),
          block_(block),
          blocks_((corpus.count + block - 1) / block),
          prefix_(prefix),
          order_(prefix[blocks_], key) {}

    uint64_t count() const { return prefix_[blocks_]; }

    // Finds the piece at a position of the permutation. Returns false if the prefix belongs to other lengths.
    bool at(uint64_t position, Piece* piece) const {
        const uint64_t wanted = order_(position);
        const uint64_t b =
            static_cast<uint64_t>(std::upper_bound(prefix_, prefix_ + blocks_ + 1, wanted) - prefix_) - 1;
        if (b >= blocks_) return false;
        uint64_t before = prefix_[b];
        bool found = false;
        for (uint64_t document = b * block_; document < std::min((b + 1) * block_, corpus_.count); ++document) {
            const int64_t length = corpus_.length(document);
            if (length < 0) return false;
            const uint64_t pieces = pieces_of(static_cast<uint64_t>(length), S_);
            if (before <= wanted && wanted < before + pieces) {
                const uint64_t offset = (wanted - before) * S_;
                *piece = {document, offset, std::min(S_ + 1, static_cast<uint64_t>(length) - offset)};
                found = true;
            }
            before += pieces;
        }
        return found && before == prefix_[b + 1];
    }

    // Packs window `number` of `window` positions. Fills in its pieces in order, and the sequence of each piece.
    // Returns the number of sequences. Pieces are placed longest first. Each piece goes into the sequence in which it
    // leaves the least space. Among equally good sequences the first is used.
    int64_t pack(uint64_t window, uint64_t number, std::vector<Piece>* pieces, std::vector<uint32_t>* sequences) const {
        const uint64_t first = number * window;
        if (first >= count()) return kOutOfRange;
        pieces->resize(std::min(window, count() - first));
        for (uint64_t i = 0; i < pieces->size(); ++i)
            if (!at(first + i, &(*pieces)[i])) return kIndexMismatch;
        std::vector<uint32_t> longest(pieces->size());
        std::iota(longest.begin(), longest.end(), 0);
        std::stable_sort(longest.begin(), longest.end(),
                         [&](uint32_t a, uint32_t b) { return (*pieces)[a].length > (*pieces)[b].length; });
        sequences->resize(pieces->size());
        std::set<std::pair<uint64_t, uint32_t>> rooms;  // (tokens left, sequence)
        uint32_t made = 0;
        for (const uint32_t i : longest) {
            const uint64_t length = (*pieces)[i].length;
            std::pair<uint64_t, uint32_t> room{S_ + 1, made};
            const auto best = rooms.lower_bound({length, 0});
            if (best == rooms.end()) {
                ++made;
            } else {
                room = *best;
                rooms.erase(best);
            }
            (*sequences)[i] = room.second;
            if (room.first > length) rooms.emplace(room.first - length, room.second);
        }
        return made;
    }

   private:
    Corpus corpus_;
    uint64_t S_, block_, blocks_;
    const uint64_t* prefix_;
    Permutation order_;
};

}  // namespace

#pragma GCC visibility push(default)  // the build hides all other symbols
extern "C" {

int fl_abi() { return kAbi; }

// Sets out[i] to the image of positions[i] under the permutation of [0, size) with this key.
int64_t fl_permute(uint64_t size, uint64_t key, const uint64_t* positions, uint64_t count, uint64_t* out) {
    const Permutation order(size, key);
    for (uint64_t i = 0; i < count; ++i) {
        if (positions[i] >= size) return kOutOfRange;
        out[i] = order(positions[i]);
    }
    return 0;
}

// Sets prefix[b] to the number of tokens before position b * block of the epoch's order. prefix has
// ceil(count / block) + 1 entries. The last one is the total.
int64_t fl_build(const void* lengths, const void* documents, uint64_t count, uint64_t key, uint64_t block,
                 uint64_t threads, uint64_t* prefix) {
  if (block == 0 || block > kMaximumBlock || threads == 0) return kBadArgument;
  const Corpus corpus{lengths, documents, count};
  const Permutation order(count, key);
  const uint64_t blocks = (count + block - 1) / block;
  const int64_t failure = fill_in_parallel(blocks, 1024, threads, prefix + 1, [&](uint64_t b) {
    return block_tokens(corpus, order, b * block, std::min((b + 1) * block, count));
  });
  prefix[0] = 0;
  for (uint64_t b = 0; b < blocks; ++b) prefix[b + 1] += prefix[b];
  return failure;
}

// Finds the pieces of documents with the tokens [token, token + wanted) of an epoch, up to the epoch's end. Piece i has
// lengths_out[i] tokens of document documents_out[i] from offset offsets_out[i]. The document begins at byte
// bytes_out[i] of .bin (`pointers`: i64 per sequence). Returns the number of pieces, at most `wanted`.
// Returns kIndexMismatch if the sum of a block differs from the prefix, which then belongs to other lengths.
int64_t fl_pieces(const void* lengths, const void* documents, const void* pointers, uint64_t count, uint64_t key,
                  uint64_t block, const uint64_t* prefix, uint64_t token, uint64_t wanted, int64_t* documents_out,
                  int64_t* offsets_out, int64_t* lengths_out, int64_t* bytes_out) {
  if (block == 0 || block > kMaximumBlock) return kBadArgument;
  const Corpus corpus{lengths, documents, count};
  const Permutation order(count, key);
  const uint64_t blocks = (count + block - 1) / block;
  if (token >= prefix[blocks]) return kOutOfRange;
  uint64_t b = static_cast<uint64_t>(std::upper_bound(prefix, prefix + blocks + 1, token) - prefix) - 1;
  int64_t pieces = 0;
  uint64_t before = prefix[b];  // tokens before the current document
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

// Sets prefix[b] to the number of pieces of the documents before document b * block, for sequences of S inputs. prefix
// has ceil(count / block) + 1 entries.
int64_t fl_count_pieces(const void* lengths, const void* documents, uint64_t count, uint64_t S, uint64_t block,
                        uint64_t threads, uint64_t* prefix) {
  if (S == 0 || block == 0 || block > kMaximumBlock || threads == 0) return kBadArgument;
  const Corpus corpus{lengths, documents, count};
  const uint64_t blocks = (count + block - 1) / block;
  const int64_t failure = fill_in_parallel(blocks, 1024, threads, prefix + 1, [&](uint64_t b) -> int64_t {
    uint64_t pieces = 0;
    for (uint64_t document = b * block; document < std::min((b + 1) * block, count); ++document) {
      const int64_t length = corpus.length(document);
      if (length < 0) return kNegativeLength;
      pieces += pieces_of(static_cast<uint64_t>(length), S);
    }
    return static_cast<int64_t>(pieces);
  });
  prefix[0] = 0;
  for (uint64_t b = 0; b < blocks; ++b) prefix[b + 1] += prefix[b];
  return failure;
}

// Sets made[w] to the number of sequences into which window w of `window` pieces is packed.
int64_t fl_count_packed(const void* lengths, const void* documents, uint64_t count, uint64_t S, uint64_t block,
                        const uint64_t* prefix, uint64_t key, uint64_t window, uint64_t threads, uint64_t* made) {
  if (S == 0 || block == 0 || block > kMaximumBlock || window == 0 || window > kMaximumWindow || threads == 0)
    return kBadArgument;
  const Pieces all({lengths, documents, count}, S, block, prefix, key);
  return fill_in_parallel((all.count() + window - 1) / window, 1, threads, made, [&](uint64_t number) {
    std::vector<Piece> pieces;
    std::vector<uint32_t> sequences;
    return all.pack(window, number, &pieces, &sequences);
  });
}

// Packs window `number`. Sequence i of the window has the pieces starts_out[i] ... starts_out[i + 1] - 1 (`window` + 1
// entries). Each piece has lengths_out tokens of documents_out from offsets_out. The document begins at byte bytes_out
// of .bin. Returns the number of sequences.
int64_t fl_pack(const void* lengths, const void* documents, const void* pointers, uint64_t count, uint64_t S,
                uint64_t block, const uint64_t* prefix, uint64_t key, uint64_t window, uint64_t number,
                int64_t* starts_out, int64_t* documents_out, int64_t* offsets_out, int64_t* lengths_out,
                int64_t* bytes_out) {
  if (S == 0 || block == 0 || block > kMaximumBlock || window == 0 || window > kMaximumWindow) return kBadArgument;
  std::vector<Piece> pieces;
  std::vector<uint32_t> sequences;
  const int64_t made =
      Pieces({lengths, documents, count}, S, block, prefix, key).pack(window, number, &pieces, &sequences);
  if (made < 0) return made;
  std::vector<int64_t> place(static_cast<uint64_t>(made) + 1, 0);
  for (const uint32_t sequence : sequences) ++place[sequence + 1];
  std::partial_sum(place.begin(), place.end(), place.begin());
  std::copy(place.begin(), place.end(), starts_out);
  for (uint64_t i = 0; i < pieces.size(); ++i) {
    const Piece& piece = pieces[i];
    const int64_t at = place[sequences[i]]++;
    documents_out[at] = static_cast<int64_t>(piece.document);
    offsets_out[at] = static_cast<int64_t>(piece.offset);
    lengths_out[at] = static_cast<int64_t>(piece.length);
    bytes_out[at] = load<int64_t>(pointers, documents ? load<int64_t>(documents, piece.document) : piece.document);
  }
  return made;
}

// Fills in sources[k] for one period of a blend of `members` sources, whose integer weights sum to `period`. After n
// samples, source i has been taken n * weights[i] / period times, with an error below one. The j-th sample of source i
// (j = 1, 2, ...) must be in the slots (floor((j-1) period / w), ceil(j period / w)]. Taking the ready source with the
// earliest deadline satisfies all these bounds (Baruah, Cohen, Plaxton, Varvel 1996, "Proportionate progress").
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

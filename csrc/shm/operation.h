// A collective as a sequence of steps: the number of steps, the part of the tensor that each step processes, and the
// steps that must come before it.

#pragma once

#include <algorithm>
#include <cstdint>

#include "sum.h"

namespace {

enum Kind : int32_t { kAllReduce, kReduceScatter, kAllGather, kBroadcast, kAllToAll };
constexpr uint64_t kOnePhaseBytes =
    32768;  // up to this size, all-reduce has one phase: every rank reads all data, with one synchronisation less

struct Span {
    uint64_t start, elements;
};

struct Operation {
    Kind kind;
    Type type;
    bool take_max;
    int root;
    const char* in;
    char* out;
    uint64_t elements;  // elements of the tensor (all-reduce, broadcast), or of one rank's part (other kinds)
    uint64_t chunk;     // elements per step; per step and rank if each rank receives another part
    uint64_t chunks, steps;
    bool two_phases;    // true: an all-reduce is a reduce-scatter and an all-gather of each chunk
    uint64_t first;     // step number of its first step
    uint64_t id, signature;

    struct Place {
        int phase;
        uint64_t chunk;
    };
    // Phases of different chunks alternate: 1(0) 1(1) 2(0) 1(2) 2(1) … 2(last). A chunk is gathered while the next is
    // summed.
    Place place(uint64_t step) const {
        if (!two_phases) return {1, step};
        if (step == 0) return {1, 0};
        if (step == steps - 1) return {2, chunks - 1};
        return step % 2 ? Place{1, (step + 1) / 2} : Place{2, step / 2 - 1};
    }
    // Returns the number of steps that must be consumed before `step` can be published: phase 2 publishes the sums of
    // phase 1.
    uint64_t needs(uint64_t step) const {
        const Place here = place(step);
        if (here.phase == 1) return 0;
        return here.chunk == 0 ? 1 : 2 * here.chunk;
    }

    bool sends_parts() const { return kind == kReduceScatter || kind == kAllToAll; }

    // Returns the elements of chunk `number` in a tensor, or in one rank's part of it.
    Span range(uint64_t number) const {
        const uint64_t start = std::min(elements, number * chunk);
        return {start, std::min(chunk, elements - start)};
    }
    // Returns the elements of a chunk that rank `part` sums, for an operation with two phases.
    Span share(uint64_t number, int part, int size) const {
        const uint64_t start = std::min(elements, (number * size + part) * chunk);
        return {start, std::min(chunk, elements - start)};
    }
};

// Returns the position of `part` among the parts that `from` publishes. Rank `from` publishes all parts except its own.
inline uint64_t part_index(int from, int part) { return uint64_t(part < from ? part : part - 1); }

inline uint64_t mixed(uint64_t a, uint64_t b) {
    uint64_t x = a * 0x9e3779b97f4a7c15ULL ^ b;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
    return x ^ (x >> 27);
}

inline uint64_t divide_up(uint64_t a, uint64_t b) { return (a + b - 1) / b; }

// Splits a collective of `ranks` into steps that fit into a slot. Equal calls have equal signatures on all ranks.
inline Operation make_operation(Kind kind, Type type, bool take_max, int root, const void* in, void* out,
                                uint64_t elements, uint64_t ranks, uint64_t slot_bytes) {
  Operation op = {};
  op.kind = kind;
  op.type = type;
  op.take_max = take_max;
  op.root = root;
  op.in = static_cast<const char*>(in);
  op.out = static_cast<char*>(out);
  op.elements = elements;
  const uint64_t capacity = slot_bytes / kTypeBytes[type];
  // Two phases move 2(n-1)/n times the tensor instead of n-1 times, but need one more synchronisation of all ranks.
  op.two_phases = kind == kAllReduce && ranks > 2 && elements * kTypeBytes[type] > kOnePhaseBytes;
  op.chunk = op.sends_parts() || op.two_phases ? capacity / (ranks - 1) / 64 * 64 : capacity;
  op.chunks = std::max<uint64_t>(1, divide_up(elements, op.two_phases ? op.chunk * ranks : op.chunk));
  if (op.two_phases) op.chunk = std::min(op.chunk, divide_up(divide_up(elements, op.chunks * ranks), 64) * 64);
  op.steps = op.two_phases ? 2 * op.chunks : op.chunks;
  op.signature = mixed(mixed(uint64_t(kind) << 8 | uint64_t(type) << 1 | uint64_t(take_max), uint64_t(root)), elements);
  return op;
}

}  // namespace

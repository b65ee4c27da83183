// Collectives. In each step a rank *publishes* (copies the data that others need into its own slot) and *consumes*
// (reads the slots of all ranks).
//
// The start of a collective publishes as many steps as the ring of slots allows, and returns. The wait does the other
// steps. Peers therefore never wait for a rank that starts early, and there is no helper thread that needs a core. Sums
// are computed in rank order.

#pragma once

#include <deque>
#include <mutex>

#include "memory.h"
#include "operation.h"

namespace {

class Collectives {
   public:
    explicit Collectives(Memory& memory) : memory_(memory), rank_(memory.rank()), size_(memory.size()) {}

    // Returns the id for `finish`, or a negative status.
    int64_t start(Operation op) {
        std::lock_guard<std::mutex> guard(mutex_);
        op.first = next_step_;
        op.id = next_id_++;
        next_step_ += op.steps;
        queue_.push_back(op);
        const int64_t status = publish_ready();
        return status < 0 ? status : int64_t(op.id);
    }

    // Completes operations in order up to `id`. Returns kPending after `slice_ns`, so that the caller can check its
    // timeout and signals.
    int64_t finish(uint64_t id, int64_t slice_ns) {
        std::lock_guard<std::mutex> guard(mutex_);
        const int64_t deadline = now_ns() + slice_ns;
        while (!queue_.empty() && queue_.front().id <= id) {
            if (const int64_t status = publish_ready(); status < 0) return status;
            Operation& op = queue_.front();
            const uint64_t consumed = this->consumed();
            if (published_ == consumed) {  // this rank's own slot is still being read
                for (int peer = 0; peer < size_; ++peer)
                  if (const int64_t status =
                          memory_.await(memory_.state(peer).consumed, consumed + 1 - kRing, peer, deadline);
                      status)
                    return status;
                continue;
            }
            for (int peer = 0; peer < size_; ++peer) {
              if (const int64_t status = memory_.await(memory_.state(peer).published, consumed + 1, peer, deadline);
                  status)
                return status;
              if (memory_.state(peer).signature[consumed % kRing] != op.signature) return memory_.fail(kMismatch, peer);
            }
            consume(op, consumed - op.first);
            advance(memory_.state(rank_).consumed, consumed + 1);
            if (consumed + 1 == op.first + op.steps) queue_.pop_front();
        }
        return kDone;
    }

    uint64_t published_by(int rank) const {
      return memory_.state(rank).published.value.load(std::memory_order_acquire);
    }

    // Returns true if this rank's next step needs data that `rank` has not published.
    bool is_missing(int rank) const { return published_by(rank) <= consumed(); }

   private:
    uint64_t consumed() const { return memory_.state(rank_).consumed.value.load(std::memory_order_relaxed); }

    // Publishes every step whose slot has been read by all ranks. Never blocks.
    int64_t publish_ready() {
        for (const Operation& op : queue_) {
            while (published_ < op.first + op.steps) {
                const uint64_t step = published_ - op.first;
                if (op.needs(step) && consumed() < op.first + op.needs(step)) return kDone;
                for (int peer = 0; peer < size_; ++peer)
                  if (memory_.state(peer).consumed.value.load(std::memory_order_acquire) + kRing <= published_)
                    return kDone;
                if (committed_ < std::min(published_ + 1, kRing)) {
                    if (!memory_.commit_slot(published_)) return memory_.fail(kNoSpace, rank_);
                    ++committed_;
                }
                publish(op, step, memory_.slot(rank_, published_));
                memory_.state(rank_).signature[published_ % kRing] = op.signature;
                advance(memory_.state(rank_).published, ++published_);
            }
        }
        return kDone;
    }

    void publish(const Operation& op, uint64_t step, char* slot) const {
        const auto [phase, chunk] = op.place(step);
        const uint64_t width = kTypeBytes[op.type];
        auto put = [&](uint64_t at, uint64_t element, uint64_t count) {
            copy(slot + at * width, op.in + element * width, count * width);
        };
        if (op.sends_parts()) {
            const Span span = op.range(chunk);
            for (int part = 0; part < size_; ++part)
              if (part != rank_)
                put(part_index(rank_, part) * op.chunk, part * op.elements + span.start, span.elements);
        } else if (op.two_phases && phase == 1) {
            for (int part = 0; part < size_; ++part) {
                const Span span = op.share(chunk, part, size_);
                if (part != rank_) put(part_index(rank_, part) * op.chunk, span.start, span.elements);
            }
        } else if (op.two_phases) {
            const Span span = op.share(chunk, rank_, size_);
            copy(slot, op.out + span.start * width, span.elements * width);
        } else if (op.kind != kBroadcast || op.root == rank_) {
            const Span span = op.range(chunk);
            put(0, span.start, span.elements);
        }
    }

    // Returns the data that `peer` has published for this rank in a step.
    const char* from(int peer, const Operation& op, uint64_t step, bool parts) const {
        return memory_.slot(peer, step) + (parts ? part_index(peer, rank_) * op.chunk * kTypeBytes[op.type] : 0);
    }

    void reduce(const Operation& op, char* out, const char* own, uint64_t elements, uint64_t step, bool parts) const {
        const void* sources[kMaxRanks];
        for (int peer = 0; peer < size_; ++peer) sources[peer] = peer == rank_ ? own : from(peer, op, step, parts);
        (op.take_max ? maximum : sum)(op.type, out, sources, size_, elements);
    }

    // Copies one span from every rank to its place in the result.
    void collect(const Operation& op, char* out, const char* own, uint64_t elements, uint64_t step, bool parts) const {
        const uint64_t width = kTypeBytes[op.type];
        for (int peer = 0; peer < size_; ++peer) {
            char* target = out + peer * op.elements * width;
            const char* source = peer == rank_ ? own : from(peer, op, step, parts);
            if (target != source) copy(target, source, elements * width);
        }
    }

    void consume_two_phases(const Operation& op, uint64_t step, Operation::Place place) const {
        const uint64_t width = kTypeBytes[op.type];
        if (place.phase == 1) {
            const Span mine = op.share(place.chunk, rank_, size_);
            reduce(op, op.out + mine.start * width, op.in + mine.start * width, mine.elements, step, true);
            return;
        }
        for (int peer = 0; peer < size_; ++peer) {
            const Span span = op.share(place.chunk, peer, size_);
            if (peer != rank_) copy(op.out + span.start * width, memory_.slot(peer, step), span.elements * width);
        }
    }

    void consume(const Operation& op, uint64_t local) const {
        const uint64_t step = op.first + local, width = kTypeBytes[op.type];
        const Operation::Place place = op.place(local);
        if (op.two_phases) return consume_two_phases(op, step, place);
        const Span span = op.range(place.chunk);
        char* out = op.out + span.start * width;
        const char* own = op.in + (span.start + (op.sends_parts() ? rank_ * op.elements : 0)) * width;
        switch (op.kind) {
            case kAllReduce: return reduce(op, out, own, span.elements, step, false);
            case kReduceScatter: return reduce(op, out, own, span.elements, step, true);
            case kAllGather: return collect(op, out, own, span.elements, step, false);
            case kAllToAll: return collect(op, out, own, span.elements, step, true);
            case kBroadcast:
                if (op.root != rank_) copy(out, memory_.slot(op.root, step), span.elements * width);
        }
    }

    Memory& memory_;
    const int rank_, size_;
    std::mutex mutex_;
    std::deque<Operation> queue_;
    uint64_t next_step_ = 0, next_id_ = 0, published_ = 0, committed_ = 0;
};

}  // namespace

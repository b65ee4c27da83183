// Messages between two ranks. Each pair of sender and receiver has an arena, which the sender fills like a ring, and a
// mailbox with the offset and size of each message.

#pragma once

#include <algorithm>
#include <deque>
#include <mutex>
#include <vector>

#include "memory.h"

namespace {

class Mail {
   public:
    explicit Mail(Memory& memory)
        : memory_(memory), outstanding_(memory.size()), used_(memory.size(), 0), next_(memory.size(), 0) {}

    // Sends a message by copying it into the arena. Waits only if the arena is full or kMail messages are unread.
    int64_t send(int to, const void* data, uint64_t bytes, int64_t slice_ns) {
        std::lock_guard<std::mutex> guard(mutex_);
        Mailbox& box = memory_.mailbox(memory_.rank(), to);
        std::deque<Letter>& under_way = outstanding_[to];
        const uint64_t need = std::max<uint64_t>(64, (bytes + 63) / 64 * 64),
                       sent = box.sent.value.load(std::memory_order_relaxed);
        if (need > memory_.arena_bytes()) return memory_.fail(kBadArgument, to);
        const int64_t deadline = now_ns() + slice_ns;
        uint64_t offset;
        for (;;) {
            const uint64_t taken = box.taken.value.load(std::memory_order_acquire);
            while (under_way.size() > sent - taken) under_way.pop_front();
            if (under_way.size() < kMail && find_room(to, need, offset)) break;
            if (const int64_t status = memory_.await(box.taken, taken + 1, to, deadline); status) return status;
        }
        char* arena = memory_.arena(memory_.rank(), to);
        if (!arena) return memory_.fail(kNoSpace, memory_.rank());
        if (offset + need > used_[to]) {
          if (!memory_.commit_arena(memory_.rank(), to, used_[to], offset + need - used_[to]))
            return memory_.fail(kNoSpace, memory_.rank());
          used_[to] = offset + need;
        }
        copy(arena + offset, data, bytes);
        box.letters[sent % kMail] = {offset, bytes};
        under_way.push_back({offset, need});
        next_[to] = offset + need;
        advance(box.sent, sent + 1);
        return kDone;
    }

    // Receives the next message from a rank. Returns kPending after `slice_ns` without a message.
    int64_t receive(int from, void* data, uint64_t bytes, int64_t slice_ns) {
        std::lock_guard<std::mutex> guard(mutex_);
        Mailbox& box = memory_.mailbox(from, memory_.rank());
        const uint64_t taken = box.taken.value.load(std::memory_order_relaxed);
        if (const int64_t status = memory_.await(box.sent, taken + 1, from, now_ns() + slice_ns); status) return status;
        const Letter letter = box.letters[taken % kMail];
        if (letter.bytes != bytes) return memory_.fail(kMismatch, from);
        char* arena = memory_.arena(from, memory_.rank());
        if (!arena) return memory_.fail(kNoSpace, memory_.rank());
        copy(data, arena + letter.offset, bytes);
        advance(box.taken, taken + 1);
        return kDone;
    }

   private:
    // Finds the offset of free space for `need` bytes. An empty arena is used from 0 again, so that the messages of a
    // steady pipeline stay in the cache.
    bool find_room(int to, uint64_t need, uint64_t& offset) {
        const std::deque<Letter>& under_way = outstanding_[to];
        const uint64_t next = next_[to];
        if (under_way.empty()) {
            offset = 0;
            return true;
        }
        const uint64_t oldest = under_way.front().offset;
        const bool wrapped = next <= oldest;
        if (!wrapped && next + need <= memory_.arena_bytes()) {
            offset = next;
            return true;
        }
        offset = wrapped ? next : 0;
        return offset + need <= oldest;
    }

    Memory& memory_;
    std::mutex mutex_;
    std::vector<std::deque<Letter>> outstanding_;  // for each receiver: messages that it has not received yet
    std::vector<uint64_t> used_, next_;            // bytes committed, and offset of the next message
};

}  // namespace

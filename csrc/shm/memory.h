// The memory that the ranks of a host share: one file that every rank maps. The file contains counters on which ranks
// wait.
//
// The file has the counters, then a ring of slots for each rank (collectives.h), then an arena for each pair of sender
// and receiver (mail.h). It is sparse: its size is generous, and memory is committed before its first use. Missing
// memory is therefore an error and not a SIGBUS.

#pragma once

#include <fcntl.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

// memcpy that accepts a null pointer if nothing is copied: the data pointer of an empty tensor is null.
inline void copy(void* to, const void* from, uint64_t bytes) {
    if (bytes) std::memcpy(to, from, bytes);
}

constexpr uint64_t kRing = 4;             // steps that a rank can be ahead of its slowest reader
constexpr uint64_t kMail = 128;           // unread messages for each pair of sender and receiver
constexpr int64_t kSliceNs = 20'000'000;  // time to sleep before checking that the peer's process exists
constexpr uint64_t kPage = 4096;
constexpr int kMaxRanks = 512;

enum Status : int64_t { kDone = 0, kPending = 1, kDead = -1, kMismatch = -2, kNoSpace = -3, kBadArgument = -4 };

struct alignas(128) Counter {  // has its own cache lines, because peers poll it
    std::atomic<uint64_t> value;
    std::atomic<uint32_t> sleepers;
};

struct RankState {
    Counter published, consumed;  // steps
    uint64_t signature[kRing];    // operation of the published step; it must be equal on all ranks
    std::atomic<uint32_t> came;   // 1 after the rank has taken its lock; before that it is late, not dead
};

struct Letter {
    uint64_t offset, bytes;
};

struct Mailbox {
    Counter sent, taken;  // messages
    Letter letters[kMail];
};

inline int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1'000'000'000LL + t.tv_nsec;
}

inline void advance(Counter& counter, uint64_t value) {
    counter.value.store(value, std::memory_order_seq_cst);
    if (counter.sleepers.load(std::memory_order_seq_cst))
        syscall(SYS_futex, &counter.value, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

inline void pause_cpu() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

class Memory {
   public:
    Memory(int fd, int rank, int size, uint64_t slot_bytes, uint64_t arena_bytes, int64_t spin_ns)
        : fd_(fd), rank_(rank), size_(size), slot_bytes_(slot_bytes), arena_bytes_(arena_bytes), spin_ns_(spin_ns) {}

    ~Memory() {
        if (base_) munmap(base_, mapped_bytes());
        for (char* arena : arenas_)
            if (arena) munmap(arena, arena_bytes_);
        close(fd_);  // also releases this rank's lock, so that peers see that the rank has ended
    }

    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;

    int64_t open() {
        if (ftruncate(fd_, off_t(file_bytes())) || !commit(0, header_bytes())) return kNoSpace;
        void* base = mmap(nullptr, mapped_bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
        if (base == MAP_FAILED) return kNoSpace;
        base_ = static_cast<char*>(base);
        arenas_.assign(size_t(size_) * size_, nullptr);
        // A POSIX lock belongs to the process and is not inherited by fork. The kernel releases it when the process
        // dies, also if the process stays a zombie.
        struct flock lock = lock_of(rank_);
        if (fcntl(fd_, F_SETLK, &lock)) return kBadArgument;
        state(rank_).came.store(1, std::memory_order_release);
        return kDone;
    }

    int rank() const { return rank_; }
    int size() const { return size_; }
    uint64_t slot_bytes() const { return slot_bytes_; }
    uint64_t arena_bytes() const { return arena_bytes_; }

    RankState& state(int rank) const { return reinterpret_cast<RankState*>(base_)[rank]; }
    Mailbox& mailbox(int from, int to) const {
        return reinterpret_cast<Mailbox*>(base_ + size_ * sizeof(RankState))[uint64_t(from) * size_ + to];
    }
    char* slot(int rank, uint64_t step) const {
      return base_ + header_bytes() + (rank * kRing + step % kRing) * slot_bytes_;
    }

    // Allocates the memory of this rank's slot for `step`. Returns false if no memory is left.
    bool commit_slot(uint64_t step) { return commit(uint64_t(slot(rank_, step) - base_), slot_bytes_); }

    // Returns the arena of the messages from one rank to another, or null if no address space is left.
    char* arena(int from, int to) {
        char*& arena = arenas_[size_t(from) * size_ + to];
        if (!arena) {
          void* mapped =
              mmap(nullptr, arena_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, off_t(arena_start(from, to)));
          if (mapped != MAP_FAILED) arena = static_cast<char*>(mapped);
        }
        return arena;
    }
    bool commit_arena(int from, int to, uint64_t offset, uint64_t bytes) {
      return commit(arena_start(from, to) + offset, bytes);
    }

    // Waits until a counter that `peer` advances has reached `target`. Polls first, then sleeps. Returns kPending if
    // the deadline has passed.
    int64_t await(Counter& counter, uint64_t target, int peer, int64_t deadline) {
        auto reached = [&] { return int64_t(counter.value.load(std::memory_order_acquire) - target) >= 0; };
        if (reached()) return kDone;
        const int64_t spin_end = now_ns() + spin_ns_;
        do {
            for (int i = 0; i < 64; ++i) {
                if (reached()) return kDone;
                pause_cpu();
            }
            sched_yield();  // 0.3 us if the core is free; otherwise the peer may get the core
        } while (now_ns() < spin_end);
        for (;;) {
            counter.sleepers.fetch_add(1, std::memory_order_seq_cst);
            const uint64_t seen = counter.value.load(std::memory_order_seq_cst);
            if (int64_t(seen - target) < 0) {
                const timespec slice = {0, kSliceNs};
                syscall(SYS_futex, &counter.value, FUTEX_WAIT, uint32_t(seen), &slice, nullptr,
                        0);  // compares the low half of the counter (little endian)
            }
            counter.sleepers.fetch_sub(1, std::memory_order_seq_cst);
            if (reached()) return kDone;
            if (!lives(peer)) return reached() ? kDone : fail(kDead, peer);
            if (now_ns() >= deadline) return fail(kPending, peer);
        }
    }

    int64_t fail(int64_t status, int culprit) {
        culprit_.store(culprit, std::memory_order_relaxed);
        return status;
    }
    int culprit() const {
      return culprit_.load(std::memory_order_relaxed);
    }  // rank that the last failure or timeout waited for

   private:
    uint64_t header_bytes() const {
        const uint64_t bytes = size_ * sizeof(RankState) + uint64_t(size_) * size_ * sizeof(Mailbox);
        return (bytes + kPage - 1) / kPage * kPage;
    }
    uint64_t mapped_bytes() const { return header_bytes() + size_ * kRing * slot_bytes_; }
    uint64_t file_bytes() const { return mapped_bytes() + uint64_t(size_) * size_ * arena_bytes_; }
    uint64_t arena_start(int from, int to) const {
      return mapped_bytes() + (uint64_t(from) * size_ + to) * arena_bytes_;
    }
    bool commit(uint64_t offset, uint64_t bytes) { return fallocate(fd_, 0, off_t(offset), off_t(bytes)) == 0; }

    static struct flock lock_of(int rank) {
        struct flock lock = {};
        lock.l_type = F_WRLCK;
        lock.l_whence = SEEK_SET;
        lock.l_start = rank;
        lock.l_len = 1;
        return lock;
    }
    bool lives(int peer) const {
        struct flock lock = lock_of(peer);
        if (peer == rank_ || !state(peer).came.load(std::memory_order_acquire)) return true;
        return fcntl(fd_, F_GETLK, &lock) || lock.l_type != F_UNLCK;
    }

    int fd_, rank_, size_;
    uint64_t slot_bytes_, arena_bytes_;
    int64_t spin_ns_;
    char* base_ = nullptr;
    std::vector<char*> arenas_;
    std::atomic<int> culprit_{-1};
};

}  // namespace

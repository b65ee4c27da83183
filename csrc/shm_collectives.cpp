// Collectives and messages between processes of one host through shared memory; frontier_llm/comm/shm.py is its only user.
//
// Plain C ABI, loaded with ctypes; no Python, no torch. Compile:
//   g++ -O3 -std=c++20 -fPIC -shared -o frontier_llm/_native/libshm_collectives.so csrc/shm_collectives.cpp
//
// A region is one file that every rank maps: counters, then a ring of slots per rank, then an arena per (sender, receiver).
// A collective is a sequence of steps. In each, a rank *publishes* (copies what others need into its own slot) and *consumes*
// (reads the slots of all, sums in rank order). Starting a collective publishes as far as the ring allows and returns;
// waiting for it does the rest: a rank that starts early never makes its peers wait, and no helper thread takes a core away.
// Sums are made in rank order with an fp32 accumulator for 16-bit types: bitwise the same on every rank and in every run.

#include <fcntl.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdint>
#include <cstring>
#include <deque>
#include <mutex>
#include <vector>

#define FL_EXPORT extern "C" __attribute__((visibility("default")))

#include "shm_sum.h"

namespace {

constexpr int kAbi = 1;
constexpr uint64_t kRing = 4;             // steps that a rank may be ahead of its slowest reader
constexpr uint64_t kMail = 128;           // messages under way per (sender, receiver)
constexpr int64_t kSliceNs = 20'000'000;  // how long to sleep before asking whether the peer still lives
constexpr uint64_t kPage = 4096;

enum Status : int64_t { kDone = 0, kPending = 1, kDead = -1, kMismatch = -2, kNoSpace = -3, kBadArgument = -4 };
enum Kind : int32_t { kAllReduce, kReduceScatter, kAllGather, kBroadcast };

struct alignas(128) Counter {  // on cache lines of its own: peers poll it
    std::atomic<uint64_t> value;
    std::atomic<uint32_t> sleepers;
};

struct RankState {
    Counter published, consumed;  // steps
    uint64_t signature[kRing];    // what the published step belongs to; ranks that disagree must not exchange bytes
};

struct Letter {
    uint64_t offset, bytes;
};

struct Mailbox {
    Counter sent, taken;  // messages
    Letter letters[kMail];
};

int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1'000'000'000LL + t.tv_nsec;
}

void advance(Counter& counter, uint64_t value) {
    counter.value.store(value, std::memory_order_seq_cst);
    if (counter.sleepers.load(std::memory_order_seq_cst))
        syscall(SYS_futex, &counter.value, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void pause_cpu() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

// ---- a collective under way

struct Operation {
    Kind kind;
    Type type;
    bool take_max;
    int root;
    const char* in;
    char* out;
    uint64_t elements;   // of the tensor (all-reduce, broadcast) or of one rank's part (the other two)
    uint64_t chunk;      // elements per step; with two phases: per step and rank
    uint64_t chunks, steps;
    bool two_phases;     // all-reduce as reduce-scatter + all-gather, chunk by chunk
    uint64_t first;      // step number of its first step
    uint64_t id, signature;

    struct Place {
        int phase;
        uint64_t chunk;
    };
    // Phases of different chunks alternate, 1(0) 1(1) 2(0) 1(2) 2(1) … 2(last): a chunk is gathered while the next one is summed.
    Place place(uint64_t step) const {
        if (!two_phases) return {1, step};
        if (step == 0) return {1, 0};
        if (step == steps - 1) return {2, chunks - 1};
        return step % 2 ? Place{1, (step + 1) / 2} : Place{2, step / 2 - 1};
    }
    // How many of its steps must be consumed before `step` can be published: phase 2 shares what phase 1 has summed.
    uint64_t needs(uint64_t step) const {
        const Place here = place(step);
        if (here.phase == 1) return 0;
        return here.chunk == 0 ? 1 : 2 * here.chunk;
    }
};

class Region {
   public:
    Region(int fd, int rank, int size, uint64_t slot_bytes, uint64_t arena_bytes, int64_t spin_ns)
        : fd_(fd), rank_(rank), size_(size), slot_bytes_(slot_bytes), arena_bytes_(arena_bytes), spin_ns_(spin_ns) {}

    ~Region() {
        if (base_) munmap(base_, mapped_bytes());
        for (char* arena : arenas_)
            if (arena) munmap(arena, arena_bytes_);
        close(fd_);  // also drops this rank's lock: peers see that it has left
    }

    static uint64_t header_bytes(int size) {
        const uint64_t bytes = size * sizeof(RankState) + uint64_t(size) * size * sizeof(Mailbox);
        return (bytes + kPage - 1) / kPage * kPage;
    }
    uint64_t mapped_bytes() const { return header_bytes(size_) + size_ * kRing * slot_bytes_; }
    uint64_t file_bytes() const { return mapped_bytes() + uint64_t(size_) * size_ * arena_bytes_; }

    int64_t open() {
        // The file is sparse: virtual sizes are generous, memory is committed where it is first used (an error, not a SIGBUS).
        if (ftruncate(fd_, off_t(file_bytes())) || !commit(0, header_bytes(size_))) return kNoSpace;
        void* base = mmap(nullptr, mapped_bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
        if (base == MAP_FAILED) return kNoSpace;
        base_ = static_cast<char*>(base);
        arenas_.assign(size_t(size_) * size_, nullptr);
        arena_used_.assign(size_, 0);
        outstanding_.resize(size_);
        arena_next_.assign(size_, 0);
        // A POSIX lock belongs to the process, is not inherited by fork, and goes when the process dies, even as a zombie.
        struct flock lock = {};
        lock.l_type = F_WRLCK;
        lock.l_whence = SEEK_SET;
        lock.l_start = rank_;
        lock.l_len = 1;
        return fcntl(fd_, F_SETLK, &lock) ? kBadArgument : kDone;
    }

    int64_t start(Operation op) {
        std::lock_guard<std::mutex> guard(mutex_);
        op.first = next_step_;
        op.id = next_id_++;
        next_step_ += op.steps;
        queue_.push_back(op);
        const int64_t status = publish_ready();
        return status < 0 ? status : int64_t(op.id);
    }

    // Completes operations in order up to `id`; kPending after `slice_ns` so that the caller can look at its clock and signals.
    int64_t finish(uint64_t id, int64_t slice_ns) {
        std::lock_guard<std::mutex> guard(mutex_);
        const int64_t deadline = now_ns() + slice_ns;
        while (!queue_.empty() && queue_.front().id <= id) {
            if (const int64_t status = publish_ready(); status < 0) return status;
            Operation& op = queue_.front();
            const uint64_t consumed = state(rank_).consumed.value.load(std::memory_order_relaxed);
            if (published_ == consumed) {  // our own slot is still being read
                for (int peer = 0; peer < size_; ++peer)
                    if (const int64_t status = await(state(peer).consumed, consumed + 1 - kRing, peer, deadline); status) return status;
                continue;
            }
            for (int peer = 0; peer < size_; ++peer) {
                if (const int64_t status = await(state(peer).published, consumed + 1, peer, deadline); status) return status;
                if (state(peer).signature[consumed % kRing] != op.signature) return fail(kMismatch, peer);
            }
            consume(op, consumed - op.first);
            advance(state(rank_).consumed, consumed + 1);
            if (consumed + 1 == op.first + op.steps) queue_.pop_front();
        }
        return kDone;
    }

    int64_t send(int to, const void* data, uint64_t bytes, int64_t slice_ns) {
        std::lock_guard<std::mutex> guard(mutex_);
        Mailbox& box = mailbox(rank_, to);
        std::deque<Letter>& under_way = outstanding_[to];
        const uint64_t need = std::max<uint64_t>(64, (bytes + 63) / 64 * 64), sent = box.sent.value.load(std::memory_order_relaxed);
        if (need > arena_bytes_) return fail(kBadArgument, to);
        const int64_t deadline = now_ns() + slice_ns;
        uint64_t offset;
        for (;;) {
            const uint64_t taken = box.taken.value.load(std::memory_order_acquire);
            while (under_way.size() > sent - taken) under_way.pop_front();
            if (under_way.size() < kMail && place_letter(to, need, offset)) break;
            if (const int64_t status = await(box.taken, taken + 1, to, deadline); status) return status;
        }
        char* arena = map_arena(rank_, to);
        if (!arena) return fail(kNoSpace, rank_);
        if (offset + need > arena_used_[to]) {
            if (!commit(arena_start(rank_, to) + arena_used_[to], offset + need - arena_used_[to])) return fail(kNoSpace, rank_);
            arena_used_[to] = offset + need;
        }
        std::memcpy(arena + offset, data, bytes);
        box.letters[sent % kMail] = {offset, bytes};
        under_way.push_back({offset, need});
        arena_next_[to] = offset + need;
        advance(box.sent, sent + 1);
        return kDone;
    }

    int64_t receive(int from, void* data, uint64_t bytes, int64_t slice_ns) {
        std::lock_guard<std::mutex> guard(mutex_);
        Mailbox& box = mailbox(from, rank_);
        const uint64_t taken = box.taken.value.load(std::memory_order_relaxed);
        if (const int64_t status = await(box.sent, taken + 1, from, now_ns() + slice_ns); status) return status;
        const Letter letter = box.letters[taken % kMail];
        if (letter.bytes != bytes) return fail(kMismatch, from);
        char* arena = map_arena(from, rank_);
        if (!arena) return fail(kNoSpace, rank_);
        std::memcpy(data, arena + letter.offset, bytes);
        advance(box.taken, taken + 1);
        return kDone;
    }

    int culprit() const { return culprit_; }
    uint64_t steps_published(int rank) const { return state(rank).published.value.load(std::memory_order_acquire); }
    uint64_t slot_bytes() const { return slot_bytes_; }
    int rank() const { return rank_; }
    int size() const { return size_; }

   private:
    RankState& state(int rank) const { return reinterpret_cast<RankState*>(base_)[rank]; }
    Mailbox& mailbox(int from, int to) const {
        return reinterpret_cast<Mailbox*>(base_ + size_ * sizeof(RankState))[uint64_t(from) * size_ + to];
    }
    char* slot(int rank, uint64_t step) const {
        return base_ + header_bytes(size_) + (rank * kRing + step % kRing) * slot_bytes_;
    }
    uint64_t arena_start(int from, int to) const { return mapped_bytes() + (uint64_t(from) * size_ + to) * arena_bytes_; }

    char* map_arena(int from, int to) {
        char*& arena = arenas_[size_t(from) * size_ + to];
        if (!arena) {
            void* mapped = mmap(nullptr, arena_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, off_t(arena_start(from, to)));
            if (mapped != MAP_FAILED) arena = static_cast<char*>(mapped);
        }
        return arena;
    }

    bool commit(uint64_t offset, uint64_t bytes) { return fallocate(fd_, 0, off_t(offset), off_t(bytes)) == 0; }

    int64_t fail(int64_t status, int culprit) {
        culprit_ = culprit;
        return status;
    }

    // Where a message of `need` bytes can lie; an empty arena begins anew at 0, so that a steady pipeline stays in the cache.
    bool place_letter(int to, uint64_t need, uint64_t& offset) {
        const std::deque<Letter>& under_way = outstanding_[to];
        const uint64_t next = arena_next_[to];
        if (under_way.empty()) {
            offset = 0;
            return true;
        }
        const uint64_t oldest = under_way.front().offset;
        const bool wrapped = next <= oldest;
        if (!wrapped && next + need <= arena_bytes_) {
            offset = next;
            return true;
        }
        offset = wrapped ? next : 0;
        return offset + need <= oldest;
    }

    bool lives(int peer) const {
        struct flock lock = {};
        lock.l_type = F_WRLCK;
        lock.l_whence = SEEK_SET;
        lock.l_start = peer;
        lock.l_len = 1;
        return peer == rank_ || fcntl(fd_, F_GETLK, &lock) || lock.l_type != F_UNLCK;
    }

    int64_t await(Counter& counter, uint64_t target, int peer, int64_t deadline) {
        auto reached = [&] { return int64_t(counter.value.load(std::memory_order_acquire) - target) >= 0; };
        if (reached()) return kDone;
        const int64_t spin_end = now_ns() + spin_ns_;
        do {
            for (int i = 0; i < 64; ++i) {
                if (reached()) return kDone;
                pause_cpu();
            }
            sched_yield();  // 0.3 us when no one else wants the core, and the peer may be who does
        } while (now_ns() < spin_end);
        for (;;) {
            counter.sleepers.fetch_add(1, std::memory_order_seq_cst);
            const uint64_t seen = counter.value.load(std::memory_order_seq_cst);
            if (int64_t(seen - target) < 0) {
                const timespec slice = {0, kSliceNs};
                syscall(SYS_futex, &counter.value, FUTEX_WAIT, uint32_t(seen), &slice, nullptr, 0);  // the low half (little endian)
            }
            counter.sleepers.fetch_sub(1, std::memory_order_seq_cst);
            if (reached()) return kDone;
            if (!lives(peer)) return reached() ? kDone : fail(kDead, peer);
            if (now_ns() >= deadline) return fail(kPending, peer);
        }
    }

    // Publishes every step that no reader is in the way of; never blocks.
    int64_t publish_ready() {
        for (const Operation& op : queue_) {
            while (published_ < op.first + op.steps) {
                const uint64_t step = published_ - op.first;
                if (state(rank_).consumed.value.load(std::memory_order_relaxed) < op.first + op.needs(step) && op.needs(step)) return kDone;
                for (int peer = 0; peer < size_; ++peer)
                    if (state(peer).consumed.value.load(std::memory_order_acquire) + kRing <= published_) return kDone;
                if (committed_ < std::min(published_ + 1, kRing)) {
                    const uint64_t offset = uint64_t(slot(rank_, published_) - base_);
                    if (!commit(offset, slot_bytes_)) return fail(kNoSpace, rank_);
                    ++committed_;
                }
                publish(op, step, slot(rank_, published_));
                state(rank_).signature[published_ % kRing] = op.signature;
                advance(state(rank_).published, ++published_);
            }
        }
        return kDone;
    }

    struct Span {
        uint64_t start, elements;
    };
    // Elements [start, start + elements) of rank `part`'s share of chunk `chunk` in a tensor that two phases go over.
    static Span share(const Operation& op, uint64_t chunk, int part, int size) {
        const uint64_t start = std::min(op.elements, (chunk * size + part) * op.chunk);
        return {start, std::min(op.chunk, op.elements - start)};
    }
    static Span range(const Operation& op, uint64_t chunk) {
        const uint64_t start = std::min(op.elements, chunk * op.chunk);
        return {start, std::min(op.chunk, op.elements - start)};
    }
    // Position of `part` among the parts that `from` publishes: all but its own.
    static uint64_t index(int from, int part) { return uint64_t(part < from ? part : part - 1); }

    void publish(const Operation& op, uint64_t step, char* slot) {
        const auto [phase, chunk] = op.place(step);
        const uint64_t width = kTypeBytes[op.type];
        auto put = [&](uint64_t at, uint64_t element, uint64_t count) {
            std::memcpy(slot + at * width, op.in + element * width, count * width);
        };
        if (op.kind == kReduceScatter) {
            const Span span = range(op, chunk);
            for (int part = 0; part < size_; ++part)
                if (part != rank_) put(index(rank_, part) * op.chunk, part * op.elements + span.start, span.elements);
        } else if (op.two_phases && phase == 1) {
            for (int part = 0; part < size_; ++part) {
                const Span span = share(op, chunk, part, size_);
                if (part != rank_) put(index(rank_, part) * op.chunk, span.start, span.elements);
            }
        } else if (op.two_phases) {
            const Span span = share(op, chunk, rank_, size_);
            std::memcpy(slot, op.out + span.start * width, span.elements * width);
        } else if (op.kind != kBroadcast || op.root == rank_) {
            const Span span = range(op, chunk);
            put(0, span.start, span.elements);
        }
    }

    void reduce(const Operation& op, char* out, const char* own, uint64_t elements, uint64_t step, bool parts) const {
        const void* sources[kMaxRanks];
        for (int peer = 0; peer < size_; ++peer) {
            const uint64_t skip = parts && peer != rank_ ? index(peer, rank_) * op.chunk * kTypeBytes[op.type] : 0;
            sources[peer] = peer == rank_ ? own : slot(peer, step) + skip;
        }
        (op.take_max ? maximum : sum)(op.type, out, sources, size_, elements);
    }

    void consume(const Operation& op, uint64_t local) {
        const uint64_t step = op.first + local, width = kTypeBytes[op.type];
        const auto [phase, chunk] = op.place(local);
        if (op.two_phases) {
            if (phase == 1) {
                const Span mine = share(op, chunk, rank_, size_);
                reduce(op, op.out + mine.start * width, op.in + mine.start * width, mine.elements, step, true);
            } else {
                for (int peer = 0; peer < size_; ++peer) {
                    const Span span = share(op, chunk, peer, size_);
                    if (peer != rank_) std::memcpy(op.out + span.start * width, slot(peer, step), span.elements * width);
                }
            }
            return;
        }
        const Span span = range(op, chunk);
        char* out = op.out + span.start * width;
        if (op.kind == kAllReduce) {
            reduce(op, out, op.in + span.start * width, span.elements, step, false);
        } else if (op.kind == kReduceScatter) {
            reduce(op, out, op.in + (rank_ * op.elements + span.start) * width, span.elements, step, true);
        } else if (op.kind == kAllGather) {
            for (int peer = 0; peer < size_; ++peer) {
                char* target = out + peer * op.elements * width;
                const char* source = peer == rank_ ? op.in + span.start * width : slot(peer, step);
                if (target != source) std::memcpy(target, source, span.elements * width);
            }
        } else if (op.root != rank_) {
            std::memcpy(out, slot(op.root, step), span.elements * width);
        }
    }

   public:
    static constexpr int kMaxRanks = 512;

   private:
    int fd_, rank_, size_;
    uint64_t slot_bytes_, arena_bytes_;
    int64_t spin_ns_;
    char* base_ = nullptr;
    std::mutex mutex_;
    std::deque<Operation> queue_;
    uint64_t next_step_ = 0, next_id_ = 0, published_ = 0, committed_ = 0;
    int culprit_ = -1;
    std::vector<char*> arenas_;
    std::vector<uint64_t> arena_used_, arena_next_;
    std::vector<std::deque<Letter>> outstanding_;
};

uint64_t mixed(uint64_t a, uint64_t b) {
    uint64_t x = a * 0x9e3779b97f4a7c15ULL ^ b;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
    return x ^ (x >> 27);
}

uint64_t divide_up(uint64_t a, uint64_t b) { return (a + b - 1) / b; }

}  // namespace

FL_EXPORT int64_t fl_shm_abi() { return kAbi; }

// Maps the region in `fd` (owned from here on) and locks this rank's byte. Null with *status set when there is no room.
FL_EXPORT void* fl_shm_open(int fd, int rank, int size, uint64_t slot_bytes, uint64_t arena_bytes, int64_t spin_ns, int64_t* status) {
    if (size < 2 || size > Region::kMaxRanks || rank < 0 || rank >= size || slot_bytes % kPage || arena_bytes % kPage || slot_bytes < kPage * size) {
        *status = kBadArgument;
        return nullptr;
    }
    auto* region = new Region(fd, rank, size, slot_bytes, arena_bytes, spin_ns);
    *status = region->open();
    if (*status == kDone) return region;
    delete region;
    return nullptr;
}

FL_EXPORT void fl_shm_close(void* region) { delete static_cast<Region*>(region); }

// Begins a collective; `elements` is the tensor's (all-reduce, broadcast) or one rank's part (reduce-scatter, all-gather).
// The id for fl_shm_finish, or a negative status.
FL_EXPORT int64_t fl_shm_start(void* handle, int kind, int type, int take_max, int root, const void* in, void* out, uint64_t elements) {
    auto* region = static_cast<Region*>(handle);
    if (kind < 0 || kind > kBroadcast || type < 0 || type > kByte || root < 0 || root >= region->size()) return kBadArgument;
    Operation op = {};
    op.kind = Kind(kind);
    op.type = Type(type);
    op.take_max = take_max != 0;
    op.root = root;
    op.in = static_cast<const char*>(in);
    op.out = static_cast<char*>(out);
    op.elements = elements;
    const uint64_t size = uint64_t(region->size()), capacity = region->slot_bytes() / kTypeBytes[type];
    // Two phases move 2(n-1)/n of the tensor instead of n-1 times it, for one more meeting of all ranks.
    op.two_phases = op.kind == kAllReduce && size > 2 && elements * kTypeBytes[type] > 32768;
    const bool parts = op.kind == kReduceScatter || op.two_phases;
    op.chunk = parts ? capacity / (size - 1) / 64 * 64 : capacity;
    op.chunks = std::max<uint64_t>(1, divide_up(elements, op.two_phases ? op.chunk * size : op.chunk));
    if (op.two_phases) op.chunk = std::min(op.chunk, divide_up(divide_up(elements, op.chunks * size), 64) * 64);
    op.steps = op.two_phases ? 2 * op.chunks : op.chunks;
    op.signature = mixed(mixed(uint64_t(kind) << 8 | uint64_t(type) << 1 | op.take_max, uint64_t(root)), elements);
    return region->start(op);
}

FL_EXPORT int64_t fl_shm_finish(void* handle, int64_t id, int64_t slice_ns) {
    return static_cast<Region*>(handle)->finish(uint64_t(id), slice_ns);
}

FL_EXPORT int64_t fl_shm_send(void* handle, int to, const void* data, uint64_t bytes, int64_t slice_ns) {
    return static_cast<Region*>(handle)->send(to, data, bytes, slice_ns);
}

FL_EXPORT int64_t fl_shm_receive(void* handle, int from, void* data, uint64_t bytes, int64_t slice_ns) {
    return static_cast<Region*>(handle)->receive(from, data, bytes, slice_ns);
}

// The rank that the last failure or pause was about, and how many steps a rank has published.
FL_EXPORT int64_t fl_shm_culprit(void* handle) { return static_cast<Region*>(handle)->culprit(); }
FL_EXPORT uint64_t fl_shm_progress(void* handle, int rank) { return static_cast<Region*>(handle)->steps_published(rank); }

// Collectives and messages between processes of one host through shared memory. Only frontier_llm/comm/shm.py uses this
// library.
//
// It has a plain C ABI, is loaded with ctypes, and needs neither Python nor torch. memory.h maps the shared memory, and
// collectives.h and mail.h use it. operation.h splits collectives into steps. sum.h adds in rank order, with an fp32
// accumulator for 16-bit types. Sums are therefore bitwise the same on every rank and in every run. Compile:
//   g++ -O3 -std=c++20 -fPIC -shared -o frontier_llm/_native/libshm_collectives.so csrc/shm/shm_collectives.cpp

#include "collectives.h"
#include "mail.h"

#define FL_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kAbi = 2;

struct Region {
    Memory memory;
    Collectives collectives;
    Mail mail;

    Region(int fd, int rank, int size, uint64_t slot_bytes, uint64_t arena_bytes, int64_t spin_ns)
        : memory(fd, rank, size, slot_bytes, arena_bytes, spin_ns), collectives(memory), mail(memory) {}
};

Region& region(void* handle) { return *static_cast<Region*>(handle); }

bool is_rank(void* handle, int rank) { return rank >= 0 && rank < region(handle).memory.size(); }

}  // namespace

FL_EXPORT int64_t fl_shm_abi() { return kAbi; }

// Maps the region in `fd`, which it owns from then on, and locks this rank's byte. Returns null with *status set if
// there is not enough memory.
FL_EXPORT void* fl_shm_open(int fd, int rank, int size, uint64_t slot_bytes, uint64_t arena_bytes, int64_t spin_ns,
                            int64_t* status) {
  if (size < 2 || size > kMaxRanks || rank < 0 || rank >= size || slot_bytes % kPage || arena_bytes % kPage ||
      slot_bytes < kPage * size) {
    *status = kBadArgument;
    return nullptr;
  }
  auto* opened = new Region(fd, rank, size, slot_bytes, arena_bytes, spin_ns);
  *status = opened->memory.open();
  if (*status == kDone) return opened;
  delete opened;
  return nullptr;
}

FL_EXPORT void fl_shm_close(void* handle) { delete static_cast<Region*>(handle); }

// Starts a collective. `elements` is the size of the tensor (all-reduce, broadcast), or of one rank's part (other
// kinds). Returns the id for fl_shm_finish, or a negative status.
FL_EXPORT int64_t fl_shm_start(void* handle, int kind, int type, int take_max, int root, const void* in, void* out,
                               uint64_t elements) {
  const Memory& memory = region(handle).memory;
  if (kind < 0 || kind > kAllToAll || type < 0 || type > kByte || root < 0 || root >= memory.size())
    return kBadArgument;
  return region(handle).collectives.start(make_operation(Kind(kind), Type(type), take_max != 0, root, in, out, elements,
                                                         uint64_t(memory.size()), memory.slot_bytes()));
}

FL_EXPORT int64_t fl_shm_finish(void* handle, int64_t id, int64_t slice_ns) {
    return region(handle).collectives.finish(uint64_t(id), slice_ns);
}

FL_EXPORT int64_t fl_shm_send(void* handle, int to, const void* data, uint64_t bytes, int64_t slice_ns) {
    if (!is_rank(handle, to)) return kBadArgument;
    return region(handle).mail.send(to, data, bytes, slice_ns);
}

FL_EXPORT int64_t fl_shm_receive(void* handle, int from, void* data, uint64_t bytes, int64_t slice_ns) {
    if (!is_rank(handle, from)) return kBadArgument;
    return region(handle).mail.receive(from, data, bytes, slice_ns);
}

// Three diagnostics: the rank that the last failure or timeout waited for, the number of steps that a rank has
// published, and whether this rank's next step needs data of a rank.
FL_EXPORT int64_t fl_shm_culprit(void* handle) { return region(handle).memory.culprit(); }
FL_EXPORT uint64_t fl_shm_progress(void* handle, int rank) {
  return !is_rank(handle, rank) ? 0 : region(handle).collectives.published_by(rank);
}
FL_EXPORT int fl_shm_is_missing(void* handle, int rank) {
  return !is_rank(handle, rank) || region(handle).collectives.is_missing(rank);
}

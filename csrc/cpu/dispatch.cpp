// Selects the table of kernels for this CPU at the first use.
#include <string.h>

#include <atomic>

#include "kernels.h"

namespace frontier {

namespace generic {
extern const KernelSet set;
}
#if defined(__x86_64__)
namespace avx2 {
extern const KernelSet set;
}
namespace avx512 {
extern const KernelSet set;
}
namespace avx512_bf16 {
extern const KernelSet set;
}
#endif

namespace {

const KernelSet& best() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (has_avx512 && __builtin_cpu_supports("avx512bf16")) return avx512_bf16::set;
  if (has_avx512) return avx512::set;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return avx2::set;
#endif
  return generic::set;
}

std::atomic<const KernelSet*> chosen{nullptr};

}  // namespace

const KernelSet& kernels() {
  const KernelSet* set = chosen.load(std::memory_order_relaxed);
  if (!set) chosen.store(set = &best(), std::memory_order_relaxed);
  return *set;
}

const KernelSet* kernel_set_by_name(const char* isa) {
  const KernelSet* const sets[] = {
      &generic::set,
#if defined(__x86_64__)
      &avx2::set, &avx512::set, &avx512_bf16::set,
#endif
  };
  bool within_reach = true;  // sets are in ascending order; this CPU runs no set after its best one
  for (const KernelSet* set : sets) {
    if (within_reach && !strcmp(set->isa, isa)) return set;
    if (set == &best()) within_reach = false;
  }
  return nullptr;
}

void use_kernel_set(const KernelSet& set) { chosen.store(&set, std::memory_order_relaxed); }

template <>
const Kernels<float>& kernels_for<float>() {
  return kernels().f32;
}
template <>
const Kernels<bf16>& kernels_for<bf16>() {
  return kernels().b16;
}

}  // namespace frontier

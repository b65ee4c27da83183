// Part of the cross-entropy of one vocabulary shard, computed from the logits in their own type.
#pragma once

#include "vec.h"

namespace frontier::FRONTIER_ISA {

template <class T>
ALWAYS_INLINE float to_float(const T* p) {
  return load_part(p, 1)[0];
}

template <class T>
void cross_entropy_stats(const T* logits, int64_t row_stride, const int64_t* targets, int64_t first, float* stats,
                         int64_t stats_stride, int64_t rows, int64_t columns) {
  const float lowest = -__builtin_inff();
  for (int64_t row = 0; row < rows; ++row, logits += row_stride) {
    vf tops = splat(lowest);
    bool nan = false;
    vi unordered{};
    for_vectors(columns, [&](int64_t i, auto load, auto) {
      vf x = load(logits);
      unordered |= x != x;
      for (int64_t lane = columns - i; lane < kLanes; ++lane) x[lane] = lowest;
      tops = max(tops, x);
    });
    for (int lane = 0; lane < kLanes; ++lane) nan |= unordered[lane] != 0;
    const float top = max_lane(tops);
    vf sums{};
    for_vectors(columns, [&](int64_t i, auto load, auto) {
      vf e = exp(load(logits) - top);
      for (int64_t lane = columns - i; lane < kLanes; ++lane) e[lane] = 0;
      sums += e;
    });
    const int64_t column = targets[row] - first;
    stats[row] = nan ? __builtin_nanf("") : top;
    stats[row + stats_stride] = sum(sums);
    stats[row + 2 * stats_stride] = column >= 0 && column < columns ? to_float(logits + column) : 0.0f;
  }
}

template <class T>
void cross_entropy_backward(T* logits, int64_t row_stride, const int64_t* targets, int64_t first,
                            const float* logsumexp, const float* grad_loss, int64_t rows, int64_t columns) {
  for (int64_t row = 0; row < rows; ++row, logits += row_stride) {
    const int64_t column = targets[row] - first;
    const bool here = column >= 0 && column < columns;
    const float target = here ? to_float(logits + column) : 0.0f;
    for_vectors(columns, [&](int64_t, auto load, auto store) {
      store(logits, exp(load(logits) - logsumexp[row]) * grad_loss[row]);
    });
    if (here) store_part(logits + column, (exp(splat(target - logsumexp[row])) - 1.0f) * grad_loss[row], 1);
  }
}

}  // namespace frontier::FRONTIER_ISA

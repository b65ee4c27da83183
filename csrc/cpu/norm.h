// RMSNorm and LayerNorm, each after an optional addition of the residual. Statistics are in fp32, with two passes over
// a row that stays in L1.
#pragma once

#include "vec.h"

namespace frontier::FRONTIER_ISA {

template <class T>
void norm(const T* x, const T* residual, const T* weight, const T* bias, T* out, T* total, float* mean, float* scale,
          int64_t rows, int64_t columns, float eps) {
  for (int64_t row = 0; row < rows; ++row, x += columns, out += columns) {
    const T* source = x;
    if (residual) {
      for_vectors(columns, [&](int64_t, auto load, auto store) { store(total, load(x) + load(residual)); });
      source = total;
      residual += columns, total += columns;
    }
    float centre = 0;
    if (mean) {
      vf sums{};
      for_vectors(columns, [&](int64_t, auto load, auto) { sums += load(source); });
      mean[row] = centre = sum(sums) / columns;
    }
    vf squares{};
    for_vectors(columns, [&](int64_t i, auto load, auto) {
      vf centred = load(source) - centre;
      if (i + kLanes > columns)  // lanes past the end of the row were loaded as 0 and are now -centre
        for (int64_t lane = columns - i; lane < kLanes; ++lane) centred[lane] = 0;
      squares += centred * centred;
    });
    const float inverse = scale[row] = 1.0f / __builtin_sqrtf(sum(squares) / columns + eps);
    for_vectors(columns, [&](int64_t, auto load, auto store) {
      vf y = (load(source) - centre) * inverse * load(weight);
      if (bias) y += load(bias);
      store(out, y);
    });
  }
}

// With n = (x - mean) * scale and p = grad * weight: grad_x = scale * (p - mean(p) - n * mean(p n)). RMSNorm has no
// mean and no mean(p).
template <class T>
void norm_backward(const T* grad, const T* grad_total, const T* total, const T* weight, const float* mean,
                   const float* scale, T* grad_x, float* grad_weight, float* grad_bias, int64_t rows, int64_t columns) {
  for (int64_t row = 0; row < rows; ++row, grad += columns, total += columns, grad_x += columns) {
    const float centre = mean ? mean[row] : 0.0f, inverse = scale[row];
    vf dots{}, sums{};
    for_vectors(columns, [&](int64_t, auto load, auto store) {
      const vf g = load(grad), n = (load(total) - centre) * inverse, p = g * load(weight);
      dots += p * n;
      sums += p;
      store(grad_weight, load(grad_weight) + g * n);
      if (grad_bias) store(grad_bias, load(grad_bias) + g);
    });
    const float mean_dot = sum(dots) / columns, mean_p = mean ? sum(sums) / columns : 0.0f;
    for_vectors(columns, [&](int64_t, auto load, auto store) {
      const vf n = (load(total) - centre) * inverse, p = load(grad) * load(weight);
      vf dx = inverse * (p - mean_p - n * mean_dot);
      if (grad_total) dx += load(grad_total);
      store(grad_x, dx);
    });
    if (grad_total) grad_total += columns;
  }
}

}  // namespace frontier::FRONTIER_ISA

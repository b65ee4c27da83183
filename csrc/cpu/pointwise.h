// RoPE, SwiGLU, GELU with its bias, and sums of the rows that have given indices. SwiGLU and GELU can also multiply
// each row by a weight.
#pragma once

#include "vec.h"

namespace frontier::FRONTIER_ISA {

template <class T>
void rope(const T* x, int64_t x_head, T* out, const float* cos, const float* sin, float sign, int64_t heads,
          int64_t head_dim, int64_t half) {
  for (int64_t head = 0; head < heads; ++head, x += x_head, out += head_dim) {
    for_vectors(half, [&](int64_t, auto load, auto store) {
      const vf first = load(x), second = load(x + half), c = load(cos), s = load(sin) * sign;
      store(out, first * c - second * s);
      store(out + half, second * c + first * s);
    });
    memcpy(out + 2 * half, x + 2 * half, (head_dim - 2 * half) * sizeof(T));
  }
}

template <class T>
void swiglu(const T* x, const float* weights, T* out, int64_t rows, int64_t columns) {
  for (int64_t row = 0; row < rows; ++row, x += 2 * columns, out += columns) {
    const float weight = weights ? weights[row] : 1.0f;
    for_vectors(columns, [&](int64_t, auto load, auto store) {
      const vf gate = load(x);
      store(out, gate * sigmoid(gate) * load(x + columns) * weight);
    });
  }
}

template <class T>
void swiglu_backward(const T* grad, const T* x, const float* weights, T* grad_x, float* grad_weights, int64_t rows,
                     int64_t columns) {
  for (int64_t row = 0; row < rows; ++row, x += 2 * columns, grad_x += 2 * columns, grad += columns) {
    const float weight = weights ? weights[row] : 1.0f;
    vf dots{};
    for_vectors(columns, [&](int64_t, auto load, auto store) {
      const vf gate = load(x), up = load(x + columns), upstream = load(grad), g = upstream * weight;
      const vf slope = sigmoid(gate), silu = gate * slope;
      dots += upstream * silu * up;  // lanes past the end of the row were loaded as 0
      store(grad_x, g * up * (slope + silu * (1.0f - slope)));
      store(grad_x + columns, g * silu);
    });
    if (weights) grad_weights[row] = sum(dots);
  }
}

// GELU by tanh is x * sigmoid(2u) with u = sqrt(2/pi) (x + 0.044715 x^3).
ALWAYS_INLINE vf gelu_value(vf x, bool tanh) {
  if (tanh) return x * sigmoid(1.59576912160573f * (x + 0.044715f * x * x * x));
  return x * normal_cdf(x);
}

ALWAYS_INLINE vf gelu_slope(vf x, bool tanh) {
  if (tanh) {
    const vf s = sigmoid(1.59576912160573f * (x + 0.044715f * x * x * x));
    return s + x * s * (1.0f - s) * 1.59576912160573f * (1.0f + 0.134145f * x * x);
  }
  vf cdf, bell;
  normal_cdf(x, cdf, bell);
  return cdf + x * bell * 0.398942280401433f;
}

template <class T>
void gelu(const T* x, const T* bias, const float* weights, T* out, int64_t rows, GeluArgs args) {
  for (int64_t row = 0; row < rows; ++row, x += args.columns, out += args.columns) {
    const float weight = weights ? weights[row] : 1.0f;
    for_vectors(args.columns, [&](int64_t, auto load, auto store) {
      store(out, gelu_value(bias ? load(x) + load(bias) : load(x), args.tanh) * weight);
    });
  }
}

template <class T>
void gelu_backward(const T* grad, const T* x, const T* bias, const float* weights, T* grad_x, GeluGradSums sums,
                   int64_t rows, GeluArgs args) {
  for (int64_t row = 0; row < rows; ++row, x += args.columns, grad_x += args.columns, grad += args.columns) {
    const float weight = weights ? weights[row] : 1.0f;
    vf dots{};
    for_vectors(args.columns, [&](int64_t, auto load, auto store) {
      const vf value = bias ? load(x) + load(bias) : load(x), upstream = load(grad);
      if (weights) dots += upstream * gelu_value(value, args.tanh);  // lanes past the end of the row were loaded as 0
      const vf dx = upstream * weight * gelu_slope(value, args.tanh);
      store(grad_x, dx);
      if (bias) store(sums.bias, load(sums.bias) + dx);
    });
    if (weights) sums.weights[row] = sum(dots);
  }
}

template <class T>
void gather_rows(const T* x, const int64_t* places, T* out, int64_t rows, int64_t fan, int64_t columns) {
  for (int64_t row = 0; row < rows; ++row, places += fan, out += columns) {
    if (fan == 1 && places[0] >= 0) {
      memcpy(out, x + places[0] * columns, columns * sizeof(T));
      continue;
    }
    for_vectors(columns, [&](int64_t i, auto, auto store) {
      vf total{};
      for (int64_t f = 0; f < fan; ++f) {
        if (places[f] < 0) continue;
        const T* from = x + places[f] * columns + i;
        total += i + kLanes <= columns ? load(from) : load_part(from, columns - i);
      }
      store(out, total);
    });
  }
}

}  // namespace frontier::FRONTIER_ISA

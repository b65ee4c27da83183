// RoPE, SwiGLU and GELU with its bias.
#pragma once

#include "vec.h"

namespace frontier::FRONTIER_ISA {

template <class T>
void rope(const T* x, int64_t x_head, T* out, const float* cos, const float* sin, float sign, int64_t heads, int64_t head_dim, int64_t half) {
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
void swiglu(const T* x, T* out, int64_t rows, int64_t columns) {
  for (int64_t row = 0; row < rows; ++row, x += 2 * columns, out += columns)
    for_vectors(columns, [&](int64_t, auto load, auto store) {
      const vf gate = load(x);
      store(out, gate * sigmoid(gate) * load(x + columns));
    });
}

template <class T>
void swiglu_backward(const T* grad, const T* x, T* grad_x, int64_t rows, int64_t columns) {
  for (int64_t row = 0; row < rows; ++row, x += 2 * columns, grad_x += 2 * columns, grad += columns)
    for_vectors(columns, [&](int64_t, auto load, auto store) {
      const vf gate = load(x), up = load(x + columns), g = load(grad);
      const vf slope = sigmoid(gate), silu = gate * slope;
      store(grad_x, g * up * (slope + silu * (1.0f - slope)));
      store(grad_x + columns, g * silu);
    });
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
void gelu(const T* x, const T* bias, T* out, int64_t rows, GeluArgs args) {
  for (int64_t row = 0; row < rows; ++row, x += args.columns, out += args.columns)
    for_vectors(args.columns, [&](int64_t, auto load, auto store) {
      store(out, gelu_value(bias ? load(x) + load(bias) : load(x), args.tanh));
    });
}

template <class T>
void gelu_backward(const T* grad, const T* x, const T* bias, T* grad_x, float* grad_bias, int64_t rows, GeluArgs args) {
  for (int64_t row = 0; row < rows; ++row, x += args.columns, grad_x += args.columns, grad += args.columns)
    for_vectors(args.columns, [&](int64_t, auto load, auto store) {
      const vf dx = load(grad) * gelu_slope(bias ? load(x) + load(bias) : load(x), args.tanh);
      store(grad_x, dx);
      if (bias) store(grad_bias, load(grad_bias) + dx);
    });
}

}  // namespace frontier::FRONTIER_ISA

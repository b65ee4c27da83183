// Passes over the flat gradient and optimizer buffers. The passes are limited by memory bandwidth, so each pass reads
// and writes its buffers once.
#pragma once

#include "vec.h"

namespace frontier::FRONTIER_ISA {

// AdamW (decoupled weight decay): scales the gradient by grad_scale (loss scale and clipping), and updates both
// moments, the master weights and their rounded copy. Update and decay are added before the weight is rounded, because
// rounding 1 - lr * decay to fp32 would lose a decay below 6e-8.
template <class T>
void adamw(float* master, const float* grad, float* exp_avg, float* exp_avg_sq, T* weights, int64_t count,
           AdamWArgs args) {
  for_vectors(count, [&](int64_t, auto load, auto store) {
    const vf g = load(grad) * args.grad_scale;
    const vf m = load(exp_avg) * args.beta1 + g * (1.0f - args.beta1);
    const vf v = load(exp_avg_sq) * args.beta2 + g * g * (1.0f - args.beta2);
    const vf old = load(master);
    const vf p = old - (args.step_size * m / (sqrt(v) * args.root + args.eps) + args.decay * old);
    store(exp_avg, m);
    store(exp_avg_sq, v);
    store(master, p);
    if (weights) store(weights, p);
  });
}

// The square of an fp32 number is exact in fp64, so each vector is widened before it is squared and added.
template <class T>
double sum_of_squares(const T* x, int64_t count) {
  typedef float half_float __attribute__((vector_size(kVectorBytes / 2)));
  typedef double wide __attribute__((vector_size(kVectorBytes)));
  wide low{}, high{};
  for_vectors(count, [&](int64_t, auto load, auto) {
    const vf values = load(x);
    half_float halves[2];
    memcpy(halves, &values, sizeof values);
    const wide a = __builtin_convertvector(halves[0], wide), b = __builtin_convertvector(halves[1], wide);
    low += a * a;
    high += b * b;
  });
  low += high;
  double total = 0;
  for (int lane = 0; lane < kLanes / 2; ++lane) total += low[lane];
  return total;
}

template <class T>
void accumulate(float* main_grad, const T* grad, int64_t count) {
  for_vectors(count, [&](int64_t, auto load, auto store) { store(main_grad, load(main_grad) + load(grad)); });
}

}  // namespace frontier::FRONTIER_ISA

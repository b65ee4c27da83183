// Choice of experts by a router: scores over all experts, the top_k best experts, and their weights. Computes in fp32
// for every working type.
#pragma once

#include "vec.h"

namespace frontier::FRONTIER_ISA {

inline void router_scores(const float* logits, float* scores, const RouteArgs& args) {
  if (args.sigmoid) {
    for_vectors(args.experts, [&](int64_t, auto load, auto store) { store(scores, sigmoid(load(logits))); });
    return;
  }
  float top = logits[0];
  for (int64_t e = 1; e < args.experts; ++e) top = logits[e] > top ? logits[e] : top;
  for_vectors(args.experts, [&](int64_t, auto load, auto store) { store(scores, exp(load(logits) - top)); });
  vf sums{};
  for_vectors(args.experts,
              [&](int64_t, auto load, auto) { sums += load(scores); });  // lanes past the last expert are 0
  const float inverse = 1.0f / sum(sums);
  for_vectors(args.experts, [&](int64_t, auto load, auto store) { store(scores, load(scores) * inverse); });
}

// `preferred` has space for one number per expert. Among equal scores the expert with the lowest index is chosen. NaN
// counts as the lowest score.
inline void route(const float* logits, const float* bias, float* scores, float* weights, int64_t* experts,
                  float* preferred, int64_t rows, RouteArgs args) {
  const float taken = __builtin_nanf("");
  for (int64_t row = 0; row < rows;
       ++row, logits += args.experts, scores += args.experts, weights += args.top_k, experts += args.top_k) {
    router_scores(logits, scores, args);
    for (int64_t e = 0; e < args.experts; ++e) {
      const float value = bias ? scores[e] + bias[e] : logits[e];
      preferred[e] = value == value ? value : -__builtin_inff();
    }
    float total = 0;
    for (int64_t j = 0; j < args.top_k; ++j) {
      int64_t best = -1;
      for (int64_t e = 0; e < args.experts; ++e)
        if (best < 0 ? preferred[e] == preferred[e] : preferred[e] > preferred[best]) best = e;
      experts[j] = best, weights[j] = scores[best], total += scores[best], preferred[best] = taken;
    }
    const float factor = args.normalise ? args.scale / (total + 1e-20f) : args.scale;
    for (int64_t j = 0; j < args.top_k; ++j) weights[j] *= factor;
  }
}

inline void route_backward(const float* grad_scores, const float* grad_weights, const float* scores,
                           const int64_t* experts, float* grad_logits, int64_t rows, RouteArgs args) {
  for (int64_t row = 0; row < rows; ++row, grad_scores += args.experts, scores += args.experts,
               grad_logits += args.experts, grad_weights += args.top_k, experts += args.top_k) {
    float total = 1.0f, mean = 0.0f;  // sum of the chosen scores, and the mean gradient of their weights
    if (args.normalise) {
      total = 1e-20f;
      for (int64_t j = 0; j < args.top_k; ++j)
        total += scores[experts[j]], mean += grad_weights[j] * scores[experts[j]];
      mean /= total;
    }
    memcpy(grad_logits, grad_scores, args.experts * sizeof(float));  // first the gradients of the scores
    for (int64_t j = 0; j < args.top_k; ++j) grad_logits[experts[j]] += args.scale * (grad_weights[j] - mean) / total;
    vf dots{};
    for_vectors(args.experts, [&](int64_t, auto load, auto) { dots += load(scores) * load(grad_logits); });
    const float dot = sum(dots);
    for_vectors(args.experts, [&](int64_t, auto load, auto store) {
      const vf score = load(scores), grad = load(grad_logits);
      store(grad_logits, score * (args.sigmoid ? grad * (1.0f - score) : grad - dot));
    });
  }
}

}  // namespace frontier::FRONTIER_ISA

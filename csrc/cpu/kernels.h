// The table of CPU kernels. Each instruction set fills one table (kernels.inc). dispatch.cpp selects the best one that
// this CPU can run. The functions take pointers, sizes and row strides and do not need torch, so they compile in
// seconds. Lengths and strides are in elements.
#pragma once

#include <stdint.h>

namespace frontier {

struct bf16 {
  uint16_t bits;
};

// Attention of the heads of one batch entry that share a key/value head. Row s of head h of q is q + s * q_row +
// h * q_head. Query i has the position offset + i, counted from the first key. It attends to the last `window` keys up
// to its own position (0: all of them).
template <class T>
struct AttentionArgs {
  const T *q, *k, *v;
  int64_t q_row, q_head, k_row, v_row;
  int64_t queries, keys, offset, window, group, head_dim;  // group: query heads on this key/value head
  float scale, softcap;          // x = scale * q·k; the score is softcap tanh(x / softcap), or x if softcap is 0
  const float* slopes;           // [group] ALiBi, or null
  const int32_t* documents;      // [queries], or null
  const int32_t* key_documents;  // [keys], or null
  T* o;                      // forward: written; backward: read
  int64_t o_row, o_head;
  float* logsumexp;  // [group][queries]; -inf if a query attends to no key
};

template <class T>
struct AttentionGradArgs {
  const T* grad_o;
  int64_t grad_o_row, grad_o_head;
  T *grad_q, *grad_k, *grad_v;
  int64_t grad_q_row, grad_q_head, grad_k_row, grad_v_row;
};

struct GeluArgs {
  int64_t columns;
  bool tanh;
};

struct GeluGradSums {
  float *bias, *weights;  // bias [columns]: the sums are added to it. weights [rows]: overwritten. Each can be null.
};

// Arguments of one token's dropout mask: Mask in frontier_llm/ops/dropout.py.
struct DropArgs {
  int64_t columns;
  uint64_t key, sample;
  uint32_t position;
  int32_t threshold;
  float scale;
};

// frontier_llm/ops/reference.py: AdamWUpdate
struct AdamWArgs {
  float step_size, beta1, beta2, eps, decay, root, grad_scale;
};

// frontier_llm/ops/routing.py: Routing
struct RouteArgs {
  int64_t experts, top_k;
  float scale;
  bool sigmoid, normalise;
};

// C[m, n] = (accumulate ? C : 0) + A[m, k] B[k, n]. Element (i, j) of A is a[i * a_row + j * a_column]. B is stored in
// the same way.
template <class T>
struct GemmArgs {
  const T *a, *b;
  float* c;
  int64_t m, n, k, a_row, a_column, b_row, b_column, c_row;
  bool accumulate;
};

template <class T>
struct Kernels {
  // Norms of a contiguous matrix of rows x columns. total = x + residual if residual is not null, else x. mean is null
  // for RMSNorm.
  void (*norm)(const T* x, const T* residual, const T* weight, const T* bias, T* out, T* total, float* mean,
               float* scale, int64_t rows, int64_t columns, float eps);
  // grad_x = gradient through the norm (+ grad_total if it is not null). The sums for weight and bias are added to
  // grad_weight and grad_bias (fp32).
  void (*norm_backward)(const T* grad, const T* grad_total, const T* total, const T* weight, const float* mean,
                        const float* scale, T* grad_x, float* grad_weight, float* grad_bias, int64_t rows,
                        int64_t columns);
  // Rotates the heads of one position; head h begins at x + h * x_head. The first 2 * half dims are rotated by the
  // angles cos/sin [half] (sign -1: by the negative angles). The other dims are copied.
  void (*rope)(const T* x, int64_t x_head, T* out, const float* cos, const float* sin, float sign, int64_t heads,
               int64_t head_dim, int64_t half);
  // Activation functions of x [rows][2][columns] or [rows][columns]. bias and weights (one for each row) can be null.
  void (*swiglu)(const T* x, const float* weights, T* out, int64_t rows, int64_t columns);
  void (*swiglu_backward)(const T* grad, const T* x, const float* weights, T* grad_x, float* grad_weights, int64_t rows,
                          int64_t columns);
  void (*gelu)(const T* x, const T* bias, const float* weights, T* out, int64_t rows, GeluArgs args);
  void (*gelu_backward)(const T* grad, const T* x, const T* bias, const float* weights, T* grad_x, GeluGradSums sums,
                        int64_t rows, GeluArgs args);
  // out[row] = sum of the rows of x with the indices places[row][0 ... fan - 1]. Negative indices are skipped.
  void (*gather_rows)(const T* x, const int64_t* places, T* out, int64_t rows, int64_t fan, int64_t columns);
  // Chooses experts: scores are [rows][experts], and chosen experts and weights [rows][top_k]. bias can be null.
  // `preferred` has space for one number per expert. Computes in fp32 for every T.
  void (*route)(const float* logits, const float* bias, float* scores, float* weights, int64_t* experts,
                float* preferred, int64_t rows, RouteArgs args);
  void (*route_backward)(const float* grad_scores, const float* grad_weights, const float* scores,
                         const int64_t* experts, float* grad_logits, int64_t rows, RouteArgs args);
  void (*drop)(const T* x, const T* residual, T* out, DropArgs args);  // residual can be null
  void (*cross_entropy_stats)(const T* logits, int64_t row_stride, const int64_t* targets, int64_t first, float* stats,
                              int64_t stats_stride, int64_t rows, int64_t columns);
  void (*cross_entropy_backward)(T* logits, int64_t row_stride, const int64_t* targets, int64_t first,
                                 const float* logsumexp, const float* grad_loss, int64_t rows, int64_t columns);
  void (*adamw)(float* master, const float* grad, float* exp_avg, float* exp_avg_sq, T* weights, int64_t count,
                AdamWArgs args);
  double (*sum_of_squares)(const T* x, int64_t count);
  void (*accumulate)(float* main_grad, const T* grad, int64_t count);
  void (*gemm)(const GemmArgs<T>& args);
  void (*gemm_rounded)(GemmArgs<T> args, T* out, int64_t out_row);  // writes to `out`, not to c
  void (*attention)(const AttentionArgs<T>& args);
  void (*attention_backward)(const AttentionArgs<T>& args, const AttentionGradArgs<T>& grads);
};

struct KernelSet {
  const char* isa;
  Kernels<float> f32;
  Kernels<bf16> b16;
};

// Returns the fastest set that this CPU can run, selected at the first call. Tests get other sets from
// kernel_set_by_name.
const KernelSet& kernels();
const KernelSet* kernel_set_by_name(const char* isa);  // null if this CPU cannot run it
void use_kernel_set(const KernelSet& set);

template <class T>
const Kernels<T>& kernels_for();

}  // namespace frontier

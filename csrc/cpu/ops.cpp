// The CPU kernels as torch operators (torch.ops.frontier_llm.*). They check arguments, allocate outputs, and split the
// work over torch's own threads. Autograd is in frontier_llm/ops/cpu.py, which calls these forwards and backwards.
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <string>
#include <tuple>
#include <vector>

#include "torch_glue.h"

namespace frontier {
namespace {

// Rows of one block: at most kRowsPerSum, and fewer if there are few rows, so that up to 16 threads have work. This
// number does not depend on the number of threads, and therefore the sum does not either.
int64_t rows_per_block(int64_t rows) {
  constexpr int64_t kBlocks = 16, kFewest = 64;
  return std::clamp((rows + kBlocks - 1) / kBlocks, kFewest, kRowsPerSum);
}

// Sums over rows in fp32: each block of rows has its own sums [columns], and the blocks' sums are added in order, in
// fp64. body(begin, end, sums) adds rows begin … end - 1 to its sums.
template <class Body>
void with_partial_sums(int64_t rows, int64_t columns, Tensor& total, Body body) {
  const int64_t block = rows_per_block(rows), blocks = std::max<int64_t>(1, (rows + block - 1) / block);
  const Tensor partial = at::zeros({blocks, columns}, total.options());
  at::parallel_for(0, blocks, std::max<int64_t>(1, grain(columns) / block), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      body(i * block, std::min((i + 1) * block, rows), data<float>(partial) + i * columns);
  });
  if (blocks == 1) {
    total = partial[0];
    return;
  }
  total = at::empty({columns}, total.options());
  at::parallel_for(0, columns, grain(blocks), [&](int64_t begin, int64_t end) {
    for (int64_t column = begin; column < end; ++column) {
      double sum = 0;
      for (int64_t i = 0; i < blocks; ++i) sum += data<float>(partial)[i * columns + column];
      data<float>(total)[column] = static_cast<float>(sum);
    }
  });
}

// ---- norms ----

std::tuple<Tensor, Tensor, Tensor, Tensor> norm(const Tensor& x_in, const std::optional<Tensor>& residual_in,
                                                const Tensor& weight_in, const std::optional<Tensor>& bias_in,
                                                double eps, bool centred) {
  const Tensor x = x_in.contiguous(), weight = weight_in.contiguous();
  const auto residual = contiguous(residual_in), bias = contiguous(bias_in);
  check_same(x, weight, "weight");
  if (residual) check_same(x, *residual, "residual");
  if (bias) check_same(x, *bias, "bias");
  const int64_t columns = x.size(-1), rows = columns ? x.numel() / columns : 0;
  TORCH_CHECK(weight.numel() == columns, "weight has ", weight.numel(), " elements, the last dim of x is ", columns);
  TORCH_CHECK(!residual || residual->sizes() == x.sizes(), "residual must have the shape of x, ",
              x.sizes(), ", not ", residual->sizes());
  const Tensor out = at::empty_like(x), total = residual ? at::empty_like(x) : x;
  const Tensor mean = fp32_like(x, {centred ? rows : 0}), scale = fp32_like(x, {rows});
  by_type(x, [&](auto type) {
    using T = decltype(type);
    at::parallel_for(0, rows, grain(columns), [&](int64_t begin, int64_t end) {
      const int64_t at = begin * columns;
      kernels_for<T>().norm(data<T>(x) + at, residual ? data<T>(*residual) + at : nullptr, data<T>(weight),
                            data<T>(bias), data<T>(out) + at, residual ? data<T>(total) + at : nullptr,
                            centred ? data<float>(mean) + begin : nullptr, data<float>(scale) + begin, end - begin,
                            columns, static_cast<float>(eps));
    });
  });
  return {out, total, mean, scale};
}

std::tuple<Tensor, Tensor, Tensor> norm_backward(const Tensor& grad_in, const std::optional<Tensor>& grad_total_in,
                                                 const Tensor& total, const Tensor& weight_in, const Tensor& mean,
                                                 const Tensor& scale, bool has_bias) {
  const Tensor grad = grad_in.contiguous(), weight = weight_in.contiguous();
  const auto grad_total = contiguous(grad_total_in);
  check_same(total, grad, "grad");
  const int64_t columns = total.size(-1), rows = scale.numel();
  const Tensor grad_x = at::empty_like(total);
  const bool centred = mean.numel() > 0;
  Tensor sums = fp32_like(total, {0});
  by_type(total, [&](auto type) {
    using T = decltype(type);
    with_partial_sums(rows, 2 * columns, sums, [&](int64_t begin, int64_t end, float* partial) {
      const int64_t at = begin * columns;
      kernels_for<T>().norm_backward(
          data<T>(grad) + at, grad_total ? data<T>(*grad_total) + at : nullptr, data<T>(total) + at, data<T>(weight),
          centred ? data<float>(mean) + begin : nullptr, data<float>(scale) + begin, data<T>(grad_x) + at, partial,
          has_bias ? partial + columns : nullptr, end - begin, columns);
    });
  });
  return {grad_x, sums.narrow(0, 0, columns), sums.narrow(0, columns, columns)};
}

// ---- pointwise ----

Tensor rope(const Tensor& x_in, const Tensor& cos_in, const Tensor& sin_in, double sign) {
  const Tensor x = x_in.stride(-1) == 1 ? x_in : x_in.contiguous();
  const Tensor cos = cos_in.to(at::kFloat).contiguous(), sin = sin_in.to(at::kFloat).contiguous();
  TORCH_CHECK(x.dim() == 4 && cos.sizes() == sin.sizes() && cos.size(0) == x.size(0),
              "rope expects x [S, B, a, D] and cos, sin [S, R] or [S, B, R], not ", x.sizes(), ", ", cos.sizes(), ", ",
              sin.sizes());
  const int64_t batch = x.size(1), heads = x.size(2), head_dim = x.size(3), half = cos.size(-1);
  const bool per_sample = cos.dim() == 3;
  TORCH_CHECK(2 * half <= head_dim && (!per_sample || cos.size(1) == batch), "rope: cos and sin of shape ", cos.sizes(),
              " do not fit x [S, B, a, D] of shape ", x.sizes(), " (B must be equal, and 2 R at most D)");
  const Tensor out = at::empty(x.sizes(), x.options());
  by_type(x, [&](auto type) {
    using T = decltype(type);
    at::parallel_for(0, x.size(0) * batch, grain(heads * head_dim), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const int64_t s = row / batch, b = row % batch, angle = (per_sample ? row : s) * half;
        kernels_for<T>().rope(data<T>(x) + s * x.stride(0) + b * x.stride(1), x.stride(2),
                              data<T>(out) + row * heads * head_dim, data<float>(cos) + angle, data<float>(sin) + angle,
                              static_cast<float>(sign), heads, head_dim, half);
      }
    });
  });
  return out;
}

std::optional<Tensor> row_weights(const std::optional<Tensor>& weights, int64_t rows) {
  TORCH_CHECK(!weights || (weights->scalar_type() == at::kFloat && weights->numel() == rows),
              "weights must be fp32, one for each of ", rows, " rows, not ", weights->numel(), " of ",
              weights->scalar_type());
  return contiguous(weights);
}

Tensor swiglu(const Tensor& x_in, const std::optional<Tensor>& weights_in) {
  const Tensor x = x_in.contiguous();
  TORCH_CHECK(x.dim() >= 2 && x.size(-2) == 2, "swiglu expects x [..., 2, f], not ", x.sizes());
  auto shape = x.sizes().vec();
  shape.erase(shape.end() - 2);
  const Tensor out = at::empty(shape, x.options());
  const int64_t columns = x.size(-1), rows = columns ? out.numel() / columns : 0;
  const auto weights = row_weights(weights_in, rows);
  by_type(x, [&](auto type) {
    using T = decltype(type);
    at::parallel_for(0, rows, grain(2 * columns), [&](int64_t begin, int64_t end) {
      kernels_for<T>().swiglu(data<T>(x) + 2 * begin * columns, weights ? data<float>(*weights) + begin : nullptr,
                              data<T>(out) + begin * columns, end - begin, columns);
    });
  });
  return out;
}

std::tuple<Tensor, Tensor> swiglu_backward(const Tensor& grad_in, const Tensor& x_in,
                                           const std::optional<Tensor>& weights_in) {
  const Tensor grad = grad_in.contiguous(), x = x_in.contiguous(), grad_x = at::empty_like(x);
  check_same(x, grad, "grad");
  const int64_t columns = x.size(-1), rows = columns ? grad.numel() / columns : 0;
  const auto weights = row_weights(weights_in, rows);
  const Tensor grad_weights = fp32_like(x, {weights ? rows : 0});
  by_type(x, [&](auto type) {
    using T = decltype(type);
    at::parallel_for(0, rows, grain(4 * columns), [&](int64_t begin, int64_t end) {
      kernels_for<T>().swiglu_backward(data<T>(grad) + begin * columns, data<T>(x) + 2 * begin * columns,
                                       weights ? data<float>(*weights) + begin : nullptr,
                                       data<T>(grad_x) + 2 * begin * columns,
                                       weights ? data<float>(grad_weights) + begin : nullptr, end - begin, columns);
    });
  });
  return {grad_x, grad_weights};
}

Tensor gelu(const Tensor& x_in, const std::optional<Tensor>& bias_in, bool tanh,
            const std::optional<Tensor>& weights_in) {
  const Tensor x = x_in.contiguous(), out = at::empty_like(x);
  const auto bias = contiguous(bias_in);
  if (bias) check_same(x, *bias, "bias");
  const int64_t columns = x.dim() ? x.size(-1) : 1, rows = columns ? x.numel() / columns : 0;
  TORCH_CHECK(!bias || bias->numel() == columns, "bias has ", bias->numel(), " elements, the last dim of x is ",
              columns);
  const auto weights = row_weights(weights_in, rows);
  by_type(x, [&](auto type) {
    using T = decltype(type);
    at::parallel_for(0, rows, grain(columns), [&](int64_t begin, int64_t end) {
      kernels_for<T>().gelu(data<T>(x) + begin * columns, data<T>(bias),
                            weights ? data<float>(*weights) + begin : nullptr, data<T>(out) + begin * columns,
                            end - begin, {columns, tanh});
    });
  });
  return out;
}

std::tuple<Tensor, Tensor, Tensor> gelu_backward(const Tensor& grad_in, const Tensor& x_in,
                                                 const std::optional<Tensor>& bias_in, bool tanh,
                                                 const std::optional<Tensor>& weights_in) {
  const Tensor grad = grad_in.contiguous(), x = x_in.contiguous(), grad_x = at::empty_like(x);
  const auto bias = contiguous(bias_in);
  check_same(x, grad, "grad");
  const int64_t columns = x.dim() ? x.size(-1) : 1, rows = columns ? x.numel() / columns : 0;
  Tensor grad_bias = fp32_like(x, {0});
  const auto weights = row_weights(weights_in, rows);
  const Tensor grad_weights = fp32_like(x, {weights ? rows : 0});
  by_type(x, [&](auto type) {
    using T = decltype(type);
    with_partial_sums(rows, columns, grad_bias, [&](int64_t begin, int64_t end, float* partial) {
      const int64_t at = begin * columns;
      kernels_for<T>().gelu_backward(data<T>(grad) + at, data<T>(x) + at, data<T>(bias),
                                     weights ? data<float>(*weights) + begin : nullptr, data<T>(grad_x) + at,
                                     {partial, weights ? data<float>(grad_weights) + begin : nullptr}, end - begin,
                                     {columns, tanh});
    });
  });
  return {grad_x, grad_bias, grad_weights};
}

Tensor gather_rows(const Tensor& x_in, const Tensor& places_in) {
  const Tensor x = x_in.contiguous(), places = places_in.contiguous();
  TORCH_CHECK(x.dim() == 2 && places.dim() == 2 && places.scalar_type() == at::kLong,
              "gather_rows expects x [N, H] and int64 places [M, f], not ", x.sizes(), " and ", places.sizes(), " ",
              places.scalar_type());
  const int64_t rows = places.size(0), fan = places.size(1), columns = x.size(1), last = x.size(0) - 1;
  for (int64_t index = 0; index < places.numel(); ++index)
    TORCH_CHECK(data<int64_t>(places)[index] <= last, "gather_rows: row ", data<int64_t>(places)[index],
                " does not exist, because x has ", last + 1, " rows");
  const Tensor out = at::empty({rows, columns}, x.options());
  by_type(x, [&](auto type) {
    using T = decltype(type);
    at::parallel_for(0, rows, grain((fan + 1) * columns), [&](int64_t begin, int64_t end) {
      kernels_for<T>().gather_rows(data<T>(x), data<int64_t>(places) + begin * fan, data<T>(out) + begin * columns,
                                   end - begin, fan, columns);
    });
  });
  return out;
}

RouteArgs route_args(const Tensor& scores, int64_t top_k, bool sigmoid, bool normalise, double scale) {
  check_fp32(scores, "logits");
  TORCH_CHECK(scores.dim() == 2 && top_k >= 1 && top_k <= scores.size(1),
              "route expects logits [N, E] and from 1 to E experts per token, not ", scores.sizes(), " and ", top_k);
  return {scores.size(1), top_k, static_cast<float>(scale), sigmoid, normalise};
}

std::tuple<Tensor, Tensor, Tensor> route(const Tensor& logits_in, const std::optional<Tensor>& bias_in, int64_t top_k,
                                         bool sigmoid, bool normalise, double scale) {
  const Tensor logits = logits_in.contiguous();
  const auto bias = contiguous(bias_in);
  const RouteArgs args = route_args(logits, top_k, sigmoid, normalise, scale);
  if (bias) check_fp32(*bias, "bias");
  TORCH_CHECK(!bias || bias->numel() == args.experts, "bias has ", bias->numel(), " elements, there are ", args.experts,
              " experts");
  const int64_t rows = logits.size(0);
  const Tensor scores = at::empty_like(logits), weights = fp32_like(logits, {rows, top_k});
  const Tensor experts = at::empty({rows, top_k}, logits.options().dtype(at::kLong));
  at::parallel_for(0, rows, grain(args.experts * (top_k + 8)), [&](int64_t begin, int64_t end) {
    std::vector<float> preferred(args.experts);
    kernels_for<float>().route(data<float>(logits) + begin * args.experts, data<float>(bias),
                               data<float>(scores) + begin * args.experts, data<float>(weights) + begin * top_k,
                               data<int64_t>(experts) + begin * top_k, preferred.data(), end - begin, args);
  });
  return {scores, weights, experts};
}

Tensor route_backward(const Tensor& grad_scores, const Tensor& grad_weights, const Tensor& scores,
                      const Tensor& experts, bool sigmoid, bool normalise, double scale) {
  const RouteArgs args = route_args(scores, experts.size(1), sigmoid, normalise, scale);
  check_fp32(grad_scores, "grad_scores");
  check_fp32(grad_weights, "grad_weights");
  TORCH_CHECK(grad_scores.sizes() == scores.sizes() && grad_weights.sizes() == experts.sizes(),
              "route: gradients of shapes ", grad_scores.sizes(), " and ", grad_weights.sizes(),
              " do not fit scores and experts of shapes ", scores.sizes(), " and ", experts.sizes());
  const Tensor grad_logits = at::empty_like(scores);
  at::parallel_for(0, scores.size(0), grain(8 * args.experts), [&](int64_t begin, int64_t end) {
    kernels_for<float>().route_backward(
        data<float>(grad_scores) + begin * args.experts, data<float>(grad_weights) + begin * args.top_k,
        data<float>(scores) + begin * args.experts, data<int64_t>(experts) + begin * args.top_k,
        data<float>(grad_logits) + begin * args.experts, end - begin, args);
  });
  return grad_logits;
}

Tensor drop(const Tensor& x_in, const std::optional<Tensor>& residual_in, int64_t key, int64_t threshold, double scale,
            const Tensor& samples_in, const Tensor& positions_in) {
  const Tensor x = x_in.contiguous(), samples = samples_in.contiguous(), positions = positions_in.contiguous();
  const auto residual = contiguous(residual_in);
  TORCH_CHECK(x.dim() == 3 && samples.scalar_type() == at::kLong && positions.scalar_type() == at::kLong &&
                  samples.numel() == x.size(1) && positions.numel() == x.size(0),
              "drop expects x [S, B, H], and samples [B] and positions [S] of int64, not ", x.sizes(), ", ",
              samples.sizes(), " and ", positions.sizes());
  if (residual) check_same(x, *residual, "residual");
  TORCH_CHECK(!residual || residual->sizes() == x.sizes(), "residual must have the shape of x, ",
              x.sizes(), ", not ", residual->sizes());
  const int64_t batch = x.size(1), columns = x.size(2);
  const Tensor out = at::empty_like(x);
  by_type(x, [&](auto type) {
    using T = decltype(type);
    at::parallel_for(0, x.size(0) * batch, grain(columns), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const int64_t at = row * columns, sample = data<int64_t>(samples)[row % batch],
                      position = data<int64_t>(positions)[row / batch];
        kernels_for<T>().drop(
            data<T>(x) + at, residual ? data<T>(*residual) + at : nullptr, data<T>(out) + at,
            {columns, static_cast<uint64_t>(key), static_cast<uint64_t>(sample), static_cast<uint32_t>(position),
             static_cast<int32_t>(threshold), static_cast<float>(scale)});
      }
    });
  });
  return out;
}

// ---- cross-entropy ----

void check_logits(const Tensor& logits, const Tensor& targets) {
  TORCH_CHECK(logits.dim() == 2 && (logits.size(1) <= 1 || logits.stride(1) == 1),
              "logits must be of shape [N, v] with contiguous rows, not ", logits.sizes(), " with strides ",
              logits.strides());
  TORCH_CHECK(targets.scalar_type() == at::kLong && targets.is_contiguous() && targets.numel() == logits.size(0),
              "targets must be contiguous int64, one for each of ", logits.size(0), " tokens, not ", targets.numel());
}

Tensor cross_entropy_stats(const Tensor& logits, const Tensor& targets, int64_t first_vocab) {
  check_logits(logits, targets);
  const int64_t rows = logits.size(0), columns = logits.size(1);
  const Tensor stats = fp32_like(logits, {3, rows});
  by_type(logits, [&](auto type) {
    using T = decltype(type);
    at::parallel_for(0, rows, grain(columns), [&](int64_t begin, int64_t end) {
      kernels_for<T>().cross_entropy_stats(data<T>(logits) + begin * logits.stride(0), logits.stride(0),
                                           data<int64_t>(targets) + begin, first_vocab, data<float>(stats) + begin,
                                           rows, end - begin, columns);
    });
  });
  return stats;
}

Tensor cross_entropy_backward_(Tensor logits, const Tensor& targets, int64_t first_vocab, const Tensor& logsumexp,
                               const Tensor& grad_loss) {
  check_logits(logits, targets);
  check_fp32(logsumexp, "logsumexp");
  check_fp32(grad_loss, "grad_loss");
  const int64_t rows = logits.size(0), columns = logits.size(1);
  TORCH_CHECK(logsumexp.numel() == rows && grad_loss.numel() == rows, "logsumexp and grad_loss must have ", rows,
              " elements, one per token, not ", logsumexp.numel(), " and ", grad_loss.numel());
  by_type(logits, [&](auto type) {
    using T = decltype(type);
    at::parallel_for(0, rows, grain(columns), [&](int64_t begin, int64_t end) {
      kernels_for<T>().cross_entropy_backward(
          data<T>(logits) + begin * logits.stride(0), logits.stride(0), data<int64_t>(targets) + begin, first_vocab,
          data<float>(logsumexp) + begin, data<float>(grad_loss) + begin, end - begin, columns);
    });
  });
  return logits;
}

// ---- the build ----

// torch.__version__ of the build, from setup.py. A library that loads into another version of torch could read its
// tensors incorrectly.
std::string built_for() { return FRONTIER_TORCH_VERSION; }

std::string built_from() { return FRONTIER_SOURCES; }  // frontier_llm/libraries.py: torch_ops_sources

std::string instruction_set() { return kernels().isa; }

void use_instruction_set(const std::string& name) {
  const KernelSet* set = kernel_set_by_name(name.c_str());
  TORCH_CHECK(set, "this CPU cannot run the kernels for ", name, ", or there are none");
  use_kernel_set(*set);
}

}  // namespace

TORCH_LIBRARY(frontier_llm, m) {
  m.def(
      "norm(Tensor x, Tensor? residual, Tensor weight, Tensor? bias, float eps, bool centred) -> (Tensor, Tensor, "
      "Tensor, Tensor)");
  m.def(
      "norm_backward(Tensor grad, Tensor? grad_total, Tensor total, Tensor weight, Tensor mean, Tensor scale, bool "
      "has_bias) -> (Tensor, Tensor, Tensor)");
  m.def("rope(Tensor x, Tensor cos, Tensor sin, float sign) -> Tensor");
  m.def("swiglu(Tensor x, Tensor? weights) -> Tensor");
  m.def("swiglu_backward(Tensor grad, Tensor x, Tensor? weights) -> (Tensor, Tensor)");
  m.def("gelu(Tensor x, Tensor? bias, bool tanh, Tensor? weights) -> Tensor");
  m.def("gelu_backward(Tensor grad, Tensor x, Tensor? bias, bool tanh, Tensor? weights) -> (Tensor, Tensor, Tensor)");
  m.def("gather_rows(Tensor x, Tensor places) -> Tensor");
  m.def(
      "route(Tensor logits, Tensor? bias, int top_k, bool sigmoid, bool normalise, float scale) -> (Tensor, Tensor, "
      "Tensor)");
  m.def(
      "route_backward(Tensor grad_scores, Tensor grad_weights, Tensor scores, Tensor experts, bool sigmoid, bool "
      "normalise, float scale) -> Tensor");
  m.def(
      "drop(Tensor x, Tensor? residual, int key, int threshold, float scale, Tensor samples, Tensor positions) -> "
      "Tensor");
  m.def("cross_entropy_stats(Tensor logits, Tensor targets, int first_vocab) -> Tensor");
  m.def(
      "cross_entropy_backward_(Tensor(a!) logits, Tensor targets, int first_vocab, Tensor logsumexp, Tensor grad_loss) "
      "-> Tensor(a!)");
  m.def("built_for() -> str", &built_for);
  m.def("built_from() -> str", &built_from);
  m.def("instruction_set() -> str", &instruction_set);
  m.def("use_instruction_set(str name) -> ()", &use_instruction_set);
}

TORCH_LIBRARY_IMPL(frontier_llm, CPU, m) {
  m.impl("norm", &norm);
  m.impl("norm_backward", &norm_backward);
  m.impl("rope", &rope);
  m.impl("swiglu", &swiglu);
  m.impl("swiglu_backward", &swiglu_backward);
  m.impl("gelu", &gelu);
  m.impl("gelu_backward", &gelu_backward);
  m.impl("gather_rows", &gather_rows);
  m.impl("route", &route);
  m.impl("route_backward", &route_backward);
  m.impl("drop", &drop);
  m.impl("cross_entropy_stats", &cross_entropy_stats);
  m.impl("cross_entropy_backward_", &cross_entropy_backward_);
}

}  // namespace frontier

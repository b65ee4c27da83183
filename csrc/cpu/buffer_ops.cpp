// Passes over the flat gradient and optimizer buffers as torch operators, and the gradient of the embedding.
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <vector>

#include "torch_glue.h"

namespace frontier {
namespace {

void adamw_(const Tensor& master, const Tensor& grad, const Tensor& exp_avg, const Tensor& exp_avg_sq,
            const Tensor& weights, double step_size, double beta1, double beta2, double eps, double decay, double root,
            double grad_scale) {
  check_fp32(master, "master");
  check_fp32(grad, "grad");
  check_fp32(exp_avg, "exp_avg");
  check_fp32(exp_avg_sq, "exp_avg_sq");
  TORCH_CHECK(weights.is_contiguous(), "weights must be contiguous");
  const int64_t count = master.numel();
  for (const Tensor* other : {&grad, &exp_avg, &exp_avg_sq, &weights})
    TORCH_CHECK(other->numel() == count, "all slices must have the ", count, " elements of master, not ",
                other->numel());
  const auto narrow = [](double x) { return static_cast<float>(x); };
  const AdamWArgs args{narrow(step_size), narrow(beta1), narrow(beta2),     narrow(eps),
                       narrow(decay),     narrow(root),  narrow(grad_scale)};
  by_type(weights, [&](auto type) {
    using T = decltype(type);
    const bool alias = weights.data_ptr() == master.data_ptr();
    at::parallel_for(0, count, kElementsPerTask, [&](int64_t begin, int64_t end) {
      kernels_for<T>().adamw(data<float>(master) + begin, data<float>(grad) + begin, data<float>(exp_avg) + begin,
                             data<float>(exp_avg_sq) + begin, alias ? nullptr : data<T>(weights) + begin, end - begin,
                             args);
    });
  });
}

Tensor sum_of_squares(const Tensor& x_in) {
  const Tensor x = x_in.contiguous();
  const int64_t parts =
      // the parts are fixed, so that the sum does not depend on the number of threads
      (x.numel() + kElementsPerTask - 1) / kElementsPerTask;
  std::vector<double> partial(parts);
  by_type(x, [&](auto type) {
    using T = decltype(type);
    at::parallel_for(0, parts, 1, [&](int64_t begin, int64_t end) {
      for (int64_t part = begin; part < end; ++part) {
        const int64_t at = part * kElementsPerTask;
        partial[part] = kernels_for<T>().sum_of_squares(data<T>(x) + at, std::min(kElementsPerTask, x.numel() - at));
      }
    });
  });
  const Tensor total = at::zeros({}, x.options().dtype(at::kDouble));
  for (const double part : partial) *data<double>(total) += part;
  return total;
}

void accumulate_(const Tensor& main_grad, const Tensor& grad_in) {
  check_fp32(main_grad, "main_grad");
  const Tensor grad = grad_in.contiguous();
  TORCH_CHECK(grad.numel() == main_grad.numel(), "main_grad has ", main_grad.numel(),
              " elements, and grad ", grad.numel());
  by_type(grad, [&](auto type) {
    using T = decltype(type);
    at::parallel_for(0, grad.numel(), kElementsPerTask, [&](int64_t begin, int64_t end) {
      kernels_for<T>().accumulate(data<float>(main_grad) + begin, data<T>(grad) + begin, end - begin);
    });
  });
}

void embedding_backward_(const Tensor& main_grad, const Tensor& ids_in, const Tensor& grad_in, int64_t first_vocab) {
  check_fp32(main_grad, "main_grad");
  const Tensor ids = ids_in.to(at::kLong).contiguous(), grad = grad_in.contiguous();
  const int64_t rows = main_grad.size(0), columns = main_grad.size(1);
  TORCH_CHECK(grad.numel() == ids.numel() * columns, "grad must have one row of ", columns,
              " elements for each of ", ids.numel(), " tokens, not ", grad.numel(), " elements");
  const auto row_of = [&](int64_t token) { return data<int64_t>(ids)[token] - first_vocab; };
  std::vector<int64_t> order;  // tokens of this shard, sorted by row and then by their order in the batch
  for (int64_t token = 0; token < ids.numel(); ++token)
    if (row_of(token) >= 0 && row_of(token) < rows) order.push_back(token);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return row_of(a) < row_of(b); });
  by_type(grad, [&](auto type) {
    using T = decltype(type);
    // Threads split the columns, so two tokens of one row never race and the order of the sums is fixed.
    at::parallel_for(0, columns, grain(ids.numel()), [&](int64_t begin, int64_t end) {
      const int64_t width = end - begin;
      std::vector<float> block_sum(width), row_sum(width);
      for (size_t first = 0, after; first < order.size(); first = after) {
        const int64_t row = row_of(order[first]);
        std::fill(row_sum.begin(), row_sum.end(), 0.0f);
        for (after = first; after < order.size() && row_of(order[after]) == row;) {
          std::fill(block_sum.begin(), block_sum.end(), 0.0f);
          const size_t block_end = std::min(order.size(), after + kRowsPerSum);
          for (; after < block_end && row_of(order[after]) == row; ++after)
            kernels_for<T>().accumulate(block_sum.data(), data<T>(grad) + order[after] * columns + begin, width);
          kernels_for<float>().accumulate(row_sum.data(), block_sum.data(), width);
        }
        kernels_for<float>().accumulate(data<float>(main_grad) + row * columns + begin, row_sum.data(), width);
      }
    });
  });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(frontier_llm, m) {
  m.def(
      "adamw_(Tensor(a!) master, Tensor grad, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor(d!) weights, float "
      "step_size, float beta1, "
      "float beta2, float eps, float decay, float root, float grad_scale) -> ()");
  m.def("sum_of_squares(Tensor x) -> Tensor");
  m.def("accumulate_(Tensor(a!) main_grad, Tensor grad) -> ()");
  m.def("embedding_backward_(Tensor(a!) main_grad, Tensor ids, Tensor grad, int first_vocab) -> ()");
}

TORCH_LIBRARY_IMPL(frontier_llm, CPU, m) {
  m.impl("adamw_", &adamw_);
  m.impl("sum_of_squares", &sum_of_squares);
  m.impl("accumulate_", &accumulate_);
  m.impl("embedding_backward_", &embedding_backward_);
}

}  // namespace frontier

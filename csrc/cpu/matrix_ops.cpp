// The operators that multiply matrices: gemm, products over groups of rows, and attention.
#include <algorithm>
#include <tuple>
#include <vector>

#include "torch_glue.h"

namespace frontier {
namespace {

// c = a @ b, or c += a @ b, with fp32 sums. a [m, k] and b [k, n] can be transposed views.
void gemm(const Tensor& a_in, const Tensor& b_in, const Tensor& c, bool accumulate) {
  const auto unit_stride = [](const Tensor& x) { return x.stride(0) == 1 || x.stride(1) == 1 ? x : x.contiguous(); };
  TORCH_CHECK(a_in.dim() == 2 && b_in.dim() == 2 && c.dim() == 2,
              "gemm: a, b and c must be matrices, not of shapes ", a_in.sizes(), ", ", b_in.sizes(), ", ", c.sizes());
  const Tensor a = unit_stride(a_in), b = unit_stride(b_in);
  check_same(a, b, "b");
  const int64_t m = c.size(0), n = c.size(1), k = a.size(1);
  TORCH_CHECK(a.size(0) == m && b.size(0) == k && b.size(1) == n && c.scalar_type() == at::kFloat &&
                  (n <= 1 || c.stride(1) == 1),
              "gemm expects a [m, k], b [k, n] and c [m, n] (fp32 with contiguous rows), not ", a.sizes(), ", ",
              b.sizes(), ", ", c.sizes(), " ", c.scalar_type());
  by_type(a, [&](auto type) {
    using T = decltype(type);
    const int64_t flops_per_row = std::max<int64_t>(1, 2 * n * k);
    at::parallel_for(0, m, std::max<int64_t>(64, 2'000'000 / flops_per_row), [&](int64_t begin, int64_t end) {
      kernels_for<T>().gemm({data<T>(a) + begin * a.stride(0), data<T>(b), data<float>(c) + begin * c.stride(0),
                             end - begin, n, k, a.stride(0), a.stride(1), b.stride(0), b.stride(1), c.stride(0),
                             accumulate});
    });
  });
}

// ---- products over groups of rows ----

struct Part {
  int64_t group, begin, end;  // rows
};

// Divides the rows of all groups into parts of at most `most` rows. ends[e] is the row after the last row of group e.
// Rows after the last group belong to no group.
std::vector<Part> parts_of(const Tensor& ends, int64_t groups, int64_t rows, int64_t most) {
  TORCH_CHECK(ends.scalar_type() == at::kInt && ends.is_contiguous() && ends.numel() == groups,
              "ends must be contiguous, with one int32 per group: ", groups, " elements, not ", ends.numel());
  std::vector<Part> parts;
  int64_t begin = 0;
  for (int64_t group = 0; group < groups; ++group) {
    const int64_t end = data<int32_t>(ends)[group];
    TORCH_CHECK(begin <= end && end <= rows, "ends of groups must not fall and must not exceed the ", rows,
                " rows: group ", group, " has the rows from ", begin, " to ", end);
    for (; begin < end; begin = std::min(begin + most, end))
      parts.push_back({group, begin, std::min(begin + most, end)});
  }
  return parts;
}

template <class Body>
void for_parts(int64_t count, Body body) {
  at::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index) body(index);
  });
}

// Multiplies the rows x [M, k] of each group by its matrix of b [groups, k, n]. The matrices can be transposed views.
// Results are rounded once.
Tensor grouped_product(const Tensor& x_in, const Tensor& b, const Tensor& ends) {
  const Tensor x = x_in.contiguous();
  check_same(x, b, "b");
  TORCH_CHECK(x.dim() == 2 && b.dim() == 3 && b.size(1) == x.size(1) && (b.stride(1) == 1 || b.stride(2) == 1),
              "grouped_product expects x [M, k] and b [groups, k, n], not ", x.sizes(), " and ", b.sizes());
  const int64_t k = b.size(1), n = b.size(2);
  const Tensor out = at::empty({x.size(0), n}, x.options());
  // With parts of 512 rows, packing the weights takes a hundredth of a part's time, and a part's fp32 sums need only
  // 512 x n elements of memory.
  const std::vector<Part> parts = parts_of(ends, b.size(0), x.size(0), 512);
  by_type(x, [&](auto type) {
    using T = decltype(type);
    for_parts(parts.size(), [&](int64_t index) {
      const auto [group, begin, end] = parts[index];
      kernels_for<T>().gemm_rounded({data<T>(x) + begin * k, data<T>(b) + group * b.stride(0), nullptr, end - begin, n,
                                     k, k, 1, b.stride(1), b.stride(2), 0, false},
                                    data<T>(out) + begin * n, n);
    });
  });
  return out;
}

// main_grad[group] += grad^T x, over the group's rows.
void accumulate_grouped_gradient_(const Tensor& main_grad, const Tensor& grad_in, const Tensor& x_in,
                                  const Tensor& ends) {
  const Tensor grad = grad_in.contiguous(), x = x_in.contiguous();
  check_fp32(main_grad, "main_grad");
  check_same(x, grad, "grad");
  const int64_t rows = x.size(0), o = grad.size(1), k = x.size(1);
  TORCH_CHECK(main_grad.dim() == 3 && grad.size(0) == rows && main_grad.size(1) == o && main_grad.size(2) == k,
              "the gradient of a grouped product expects main_grad [groups, o, k], grad [M, o] and x [M, k], not ",
              main_grad.sizes(), ", ", grad.sizes(), " and ", x.sizes());
  const std::vector<Part> groups = parts_of(ends, main_grad.size(0), rows, std::max<int64_t>(1, rows));
  // a group's outputs are divided among tasks if there are enough threads; each task packs x again
  const int64_t outputs = at::get_num_threads() == 1 ? o : std::min<int64_t>(o, 256),
                tasks = (o + outputs - 1) / outputs;
  by_type(x, [&](auto type) {
    using T = decltype(type);
    for_parts(groups.size() * tasks, [&](int64_t index) {
      const auto [group, begin, end] = groups[index / tasks];
      const int64_t first = index % tasks * outputs;
      kernels_for<T>().gemm({data<T>(grad) + begin * o + first, data<T>(x) + begin * k,
                             data<float>(main_grad) + (group * o + first) * k, std::min(outputs, o - first), k,
                             end - begin, 1, o, k, 1, k, true});
    });
  });
}

// ---- attention ----

Tensor last_dim_contiguous(const Tensor& x) { return x.stride(-1) == 1 ? x : x.contiguous(); }

// Bias and masks of the scores. `key_documents` are the documents of the keys, and are given if `documents` are given.
struct Mask {
  std::optional<Tensor> slopes, documents, key_documents;
  double scale, softcap;
  int64_t offset, window;
};

void check_documents(const std::optional<Tensor>& documents, int64_t batch, int64_t sequence) {
  TORCH_CHECK(!documents || (documents->scalar_type() == at::kInt && documents->is_contiguous() &&
                             documents->dim() == 2 && documents->size(0) == batch && documents->size(1) == sequence),
              "document ids must be contiguous int32 of shape [batch, sequence] = [", batch, ", ", sequence, "], not ",
              documents->sizes(), " ", documents->scalar_type());
}

void check_attention(const Tensor& q, const Tensor& k, const Tensor& v, const Mask& mask) {
  const auto& slopes = mask.slopes;
  TORCH_CHECK(
      q.dim() == 4 && k.dim() == 4 && k.sizes() == v.sizes() && q.size(1) == k.size(1) && q.size(3) == k.size(3),
      "attention expects q [S, B, a, D] and k, v [K, B, g, D], not ", q.sizes(), ", ", k.sizes(), ", ", v.sizes());
  TORCH_CHECK(k.size(2) > 0 && q.size(2) % k.size(2) == 0, q.size(2), " query heads are not a multiple of ", k.size(2),
              " key/value heads");
  TORCH_CHECK(q.size(0) > 0 && k.size(0) > 0, "attention needs at least one query and one key, not ",
              q.size(0), " and ", k.size(0));
  TORCH_CHECK(mask.documents.has_value() == mask.key_documents.has_value(),
              "attention needs the document ids of both queries and keys, or of neither");
  check_same(q, k, "k");
  check_same(q, v, "v");
  TORCH_CHECK(
      !slopes || (slopes->scalar_type() == at::kFloat && slopes->is_contiguous() && slopes->numel() == q.size(2)),
      "alibi_slopes must be contiguous, with one fp32 per query head: ", q.size(2), " elements");
  check_documents(mask.documents, q.size(1), q.size(0));
  check_documents(mask.key_documents, k.size(1), k.size(0));
}

template <class T>
AttentionArgs<T> head_args(const Tensor& q, const Tensor& k, const Tensor& v, const Mask& mask, const Tensor& o,
                           const Tensor& logsumexp, int64_t index) {
  const int64_t kv_heads = k.size(2), group = q.size(2) / kv_heads, b = index / kv_heads, g = index % kv_heads,
                queries = q.size(0);
  return {data<T>(q) + b * q.stride(1) + g * group * q.stride(2),
          data<T>(k) + b * k.stride(1) + g * k.stride(2),
          data<T>(v) + b * v.stride(1) + g * v.stride(2),
          q.stride(0),
          q.stride(2),
          k.stride(0),
          v.stride(0),
          queries,
          k.size(0),
          mask.offset,
          mask.window,
          group,
          q.size(3),
          static_cast<float>(mask.scale),
          static_cast<float>(mask.softcap),
          mask.slopes ? data<float>(*mask.slopes) + g * group : nullptr,
          mask.documents ? data<int32_t>(*mask.documents) + b * queries : nullptr,
          mask.key_documents ? data<int32_t>(*mask.key_documents) + b * k.size(0) : nullptr,
          data<T>(o) + b * o.stride(1) + g * group * o.stride(2),
          o.stride(0),
          o.stride(2),
          data<float>(logsumexp) + (b * q.size(2) + g * group) * queries};
}

std::tuple<Tensor, Tensor> attention(const Tensor& q_in, const Tensor& k_in, const Tensor& v_in,
                                     const std::optional<Tensor>& slopes, const std::optional<Tensor>& documents,
                                     const std::optional<Tensor>& key_documents, double scale, double softcap,
                                     int64_t offset, int64_t window) {
  const Tensor q = last_dim_contiguous(q_in), k = last_dim_contiguous(k_in), v = last_dim_contiguous(v_in);
  const Mask mask{slopes, documents, key_documents, scale, softcap, offset, window};
  check_attention(q, k, v, mask);
  const Tensor o = at::empty(q.sizes(), q.options()), logsumexp = fp32_like(q, {q.size(1), q.size(2), q.size(0)});
  by_type(q, [&](auto type) {
    using T = decltype(type);
    at::parallel_for(0, q.size(1) * k.size(2), 1, [&](int64_t begin, int64_t end) {
      for (int64_t index = begin; index < end; ++index)
        kernels_for<T>().attention(head_args<T>(q, k, v, mask, o, logsumexp, index));
    });
  });
  return {o, logsumexp};
}

std::tuple<Tensor, Tensor, Tensor> attention_backward(const Tensor& grad_in, const Tensor& q_in, const Tensor& k_in,
                                                      const Tensor& v_in, const Tensor& o, const Tensor& logsumexp,
                                                      const std::optional<Tensor>& slopes,
                                                      const std::optional<Tensor>& documents,
                                                      const std::optional<Tensor>& key_documents, double scale,
                                                      double softcap, int64_t offset, int64_t window) {
  const Tensor grad = last_dim_contiguous(grad_in), q = last_dim_contiguous(q_in), k = last_dim_contiguous(k_in),
               v = last_dim_contiguous(v_in);
  const Mask mask{slopes, documents, key_documents, scale, softcap, offset, window};
  check_attention(q, k, v, mask);
  check_same(q, grad, "grad");
  const Tensor grad_q = at::empty(q.sizes(), q.options()), grad_k = at::empty(k.sizes(), k.options()),
               grad_v = at::empty(v.sizes(), v.options());
  by_type(q, [&](auto type) {
    using T = decltype(type);
    const int64_t kv_heads = k.size(2), group = q.size(2) / kv_heads;
    at::parallel_for(0, q.size(1) * kv_heads, 1, [&](int64_t begin, int64_t end) {
      for (int64_t index = begin; index < end; ++index) {
        const int64_t b = index / kv_heads, g = index % kv_heads;
        const AttentionGradArgs<T> grads{data<T>(grad) + b * grad.stride(1) + g * group * grad.stride(2),
                                         grad.stride(0),
                                         grad.stride(2),
                                         data<T>(grad_q) + b * grad_q.stride(1) + g * group * grad_q.stride(2),
                                         data<T>(grad_k) + b * grad_k.stride(1) + g * grad_k.stride(2),
                                         data<T>(grad_v) + b * grad_v.stride(1) + g * grad_v.stride(2),
                                         grad_q.stride(0),
                                         grad_q.stride(2),
                                         grad_k.stride(0),
                                         grad_v.stride(0)};
        kernels_for<T>().attention_backward(head_args<T>(q, k, v, mask, o, logsumexp, index), grads);
      }
    });
  });
  return {grad_q, grad_k, grad_v};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(frontier_llm, m) {
  m.def("gemm(Tensor a, Tensor b, Tensor(a!) c, bool accumulate) -> ()");
  m.def("grouped_product(Tensor x, Tensor b, Tensor ends) -> Tensor");
  m.def("accumulate_grouped_gradient_(Tensor(a!) main_grad, Tensor grad, Tensor x, Tensor ends) -> ()");
  m.def(
      "attention(Tensor q, Tensor k, Tensor v, Tensor? slopes, Tensor? documents, Tensor? key_documents, float scale, "
      "float softcap, "
      "int offset, int window) -> (Tensor, Tensor)");
  m.def(
      "attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor o, Tensor logsumexp, Tensor? slopes, "
      "Tensor? documents, "
      "Tensor? key_documents, float scale, float softcap, int offset, int window) -> (Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(frontier_llm, CPU, m) {
  m.impl("gemm", &gemm);
  m.impl("grouped_product", &grouped_product);
  m.impl("accumulate_grouped_gradient_", &accumulate_grouped_gradient_);
  m.impl("attention", &attention);
  m.impl("attention_backward", &attention_backward);
}

}  // namespace frontier

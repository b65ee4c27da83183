// Functions for the operators in ops.cpp and matrix_ops.cpp: argument checks, and the dispatch by a tensor's element
// type.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <optional>

#include "kernels.h"

namespace frontier {

using at::Tensor;

// Minimum number of elements per task (about 10 us of work). With fewer elements a second thread costs more time than
// it saves.
constexpr int64_t kElementsPerTask = 32768;

inline int64_t grain(int64_t row_elements) {
  return std::max<int64_t>(1, kElementsPerTask / std::max<int64_t>(1, row_elements));
}

// Maximum number of rows that are added to one fp32 sum. A sum of a million equal rows without blocks is 0.95 % too
// small.
constexpr int64_t kRowsPerSum = 1024;

inline void check_same(const Tensor& x, const Tensor& y, const char* name) {
  TORCH_CHECK(y.scalar_type() == x.scalar_type(), name, " is ", y.scalar_type(), ", expected ", x.scalar_type());
}

inline void check_fp32(const Tensor& x, const char* name) {
  TORCH_CHECK(x.scalar_type() == at::kFloat && x.is_contiguous(), name, " must be contiguous fp32, not ",
              x.is_contiguous() ? "contiguous " : "strided ", x.scalar_type());
}

template <class T>
T* data(const Tensor& x) {
  return static_cast<T*>(x.data_ptr());
}
template <class T>
T* data(const std::optional<Tensor>& x) {
  return x ? data<T>(*x) : nullptr;
}

// Calls body(T{}) with the element type of x.
template <class Body>
void by_type(const Tensor& x, Body body) {
  if (x.scalar_type() == at::kFloat)
    body(float{});
  else if (x.scalar_type() == at::kBFloat16)
    body(bf16{});
  else
    TORCH_CHECK(false, "the C++ ops support fp32 and bf16, not ", x.scalar_type());
}

inline std::optional<Tensor> contiguous(const std::optional<Tensor>& x) {
  return x ? std::optional<Tensor>(x->contiguous()) : x;
}

inline Tensor fp32_like(const Tensor& x, at::IntArrayRef shape) {
  return at::empty(shape, x.options().dtype(at::kFloat));
}

}  // namespace frontier

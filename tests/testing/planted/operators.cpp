// operators.cpp: eight faulty operators that are registered in C++.

#include <ATen/ATen.h>
#include <torch/library.h>

#include <cstdlib>
#include <cstring>

namespace faulty {

at::Tensor strides(const at::Tensor& x) {
  auto result = at::empty(x.sizes(), x.options());
  std::memcpy(result.mutable_data_ptr(), x.const_data_ptr(), result.nbytes());
  return result;
}

at::Tensor fake_strides(const at::Tensor& x) { return (x + 1).contiguous(); }

at::Tensor write(const at::Tensor& x) {
  auto values = x.to(at::kFloat);
  return values.clamp_(-0.5, 0.5).contiguous().to(x.scalar_type(), false, true);
}

at::Tensor alias(const at::Tensor& x) { return x.contiguous().to(at::kDouble); }

at::Tensor narrow(const at::Tensor& x) {
  auto small = x.to(at::kInt);
  return (small + small).contiguous().to(at::kLong);
}

at::Tensor tail(const at::Tensor& x) {
  auto result = at::empty(x.sizes(), x.options());
  auto count = x.numel() > 1024 ? x.numel() / 1024 * 1024 : x.numel();
  result.view({-1}).narrow(0, 0, count).copy_(x.reshape({-1}).narrow(0, 0, count));
  return result;
}

at::Tensor gradient(const at::Tensor& x, const at::Tensor& weight) { return x * weight; }

at::Tensor crash(const at::Tensor& x) {
  if (x.numel() == 0) std::abort();
  return x.clone(at::MemoryFormat::Contiguous);
}

}  // namespace faulty

TORCH_LIBRARY(planted_cpp, m) {
  m.def("strides(Tensor x) -> Tensor");
  m.def("fake_strides(Tensor x) -> Tensor");
  m.def("write(Tensor x) -> Tensor");
  m.def("alias(Tensor x) -> Tensor");
  m.def("narrow(Tensor x) -> Tensor");
  m.def("tail(Tensor x) -> Tensor");
  m.def("gradient(Tensor x, Tensor weight) -> Tensor");
  m.def("crash(Tensor x) -> Tensor");
}

TORCH_LIBRARY_IMPL(planted_cpp, CPU, m) {
  m.impl("strides", faulty::strides);
  m.impl("fake_strides", faulty::fake_strides);
  m.impl("write", faulty::write);
  m.impl("alias", faulty::alias);
  m.impl("narrow", faulty::narrow);
  m.impl("tail", faulty::tail);
  m.impl("gradient", faulty::gradient);
  m.impl("crash", faulty::crash);
}

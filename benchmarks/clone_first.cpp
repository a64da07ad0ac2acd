// clone_first.cpp: C++ versions of operators in _cases.py. They run no Python code, so they show
// how long a call to a C++ operator through torch.ops takes.

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

namespace {

template <typename... Others>
at::Tensor clone_first(const at::Tensor& first, const Others&... /* others */) {
  return first.clone();
}

template <typename... Others>
at::Tensor zero_and_clone_first(at::Tensor first, const Others&... /* others */) {
  return first.zero_().clone();
}

// The gradient formula. It uses PyTorch's C++ API for autograd functions.
template <typename... Others>
struct CloneFirst : torch::autograd::Function<CloneFirst<Others...>> {
  static at::Tensor forward(
      torch::autograd::AutogradContext* /* ctx */,
      const at::Tensor& first,
      const Others&... /* others */) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    return first.clone();
  }

  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* /* ctx */, const torch::autograd::variable_list& grads) {
    torch::autograd::variable_list result(1 + sizeof...(Others));
    result[0] = grads[0];
    return result;
  }
};

template <typename... Others>
at::Tensor record_clone_first(const at::Tensor& first, const Others&... others) {
  return CloneFirst<Others...>::apply(first, others...);
}

using T = at::Tensor; // a short name, because fourteen parameters must fit on a line

} // namespace

TORCH_LIBRARY(bench_cpp, library) {
  library.def("one(Tensor x1) -> Tensor");
  library.def("four(Tensor x1, Tensor x2, Tensor x3, Tensor x4) -> Tensor");
  library.def(
      "fourteen(Tensor x1, Tensor x2, Tensor x3, Tensor x4, Tensor x5, Tensor x6, Tensor x7, "
      "Tensor x8, Tensor x9, Tensor x10, Tensor x11, Tensor x12, Tensor x13, Tensor x14) "
      "-> Tensor");
  library.def(
      "grad(Tensor x1, Tensor x2, Tensor x3, Tensor x4, Tensor x5, Tensor x6, Tensor x7, "
      "Tensor x8, Tensor x9, Tensor x10, Tensor x11, Tensor x12, Tensor x13, Tensor x14) "
      "-> Tensor");
  library.def(
      "mutation(Tensor(a!) x1, Tensor x2, Tensor x3, Tensor x4, Tensor x5, Tensor x6, Tensor x7, "
      "Tensor x8, Tensor x9, Tensor x10, Tensor x11, Tensor x12, Tensor x13, Tensor x14) "
      "-> Tensor");
}

TORCH_LIBRARY_IMPL(bench_cpp, CPU, library) {
  library.impl("one", &clone_first<>);
  library.impl("four", &clone_first<T, T, T>);
  library.impl("fourteen", &clone_first<T, T, T, T, T, T, T, T, T, T, T, T, T>);
  library.impl("grad", &clone_first<T, T, T, T, T, T, T, T, T, T, T, T, T>);
  library.impl("mutation", &zero_and_clone_first<T, T, T, T, T, T, T, T, T, T, T, T, T>);
}

// The operators without a formula get a fallthrough kernel at Autograd. Otherwise, PyTorch would
// run its autograd fallback for them, which takes longer.
TORCH_LIBRARY_IMPL(bench_cpp, Autograd, library) {
  library.impl("grad", &record_clone_first<T, T, T, T, T, T, T, T, T, T, T, T, T>);
  for (const char* name : {"one", "four", "fourteen", "mutation"}) {
    library.impl(name, torch::CppFunction::makeFallthrough());
  }
}

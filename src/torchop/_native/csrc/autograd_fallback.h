// autograd_fallback.h: run native calls (calls without the dispatcher) to operators that have no
// kernel at the Autograd keys. For these operators, the dispatcher runs PyTorch's autograd
// fallback, so native calls must run it too.
#pragma once

#include <Python.h>

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/FunctionRef.h>

#include "arguments.h"
#include "members.h"

namespace torchop {

// A private copy of an operator, for calls to PyTorch's autograd fallback.
//
// If an input requires grad, the fallback (basicAutogradNotImplementedFallback in
// torch/csrc/autograd/autograd_not_implemented_fallback.cpp) attaches hooks or nodes to the
// results, which warn or raise an error in the backward pass. The details differ between releases,
// so we call the fallback instead of reimplementing it. The fallback redispatches to the operator
// that we pass to it. Passing the real operator would require converting all arguments. Instead, we
// pass a copy with the same name and returns that takes only a list of the input tensors and whose
// kernel runs the native call. The copy is not registered with the dispatcher.
class FallbackOperator {
 public:
  explicit FallbackOperator(const c10::OperatorHandle& op);

  // Calls PyTorch's autograd fallback, which runs the kernel by calling `compute`. Returns the
  // result of the kernel as a new reference. If the kernel raises a Python exception, either
  // returns nullptr or throws python_error.
  __attribute__((noinline)) PyObject* call(
      const Values& values, c10::function_ref<PyObject*()> compute) const;

 private:
  using Definition = std::remove_pointer_t<std::remove_cvref_t<decltype(member_of(
      OperatorDefinition{}, std::declval<const c10::OperatorHandle&>()))>>;

  Definition definition_;
  c10::OperatorHandle handle_; // points to `definition_`
};

} // namespace torchop

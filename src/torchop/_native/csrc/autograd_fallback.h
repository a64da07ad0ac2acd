// autograd_fallback.h: native calls of operators without a kernel at Autograd.
#pragma once

#include <Python.h>

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/FunctionRef.h>

#include "arguments.h"
#include "members.h"

namespace torchop {

// A private copy of an operator, to call PyTorch's autograd fallback with.
//
// The fallback (basicAutogradNotImplementedFallback in
// torch/csrc/autograd/autograd_not_implemented_fallback.cpp) marks results of an operator without a
// gradient, so that backward warns or raises. The marks and messages change between releases, so
// this code calls the fallback and does not imitate it. With the real operator, the fallback would
// redispatch to the kernel, and convert all arguments for that. This copy has the same name and
// returns, which the fallback reads. It takes only a list of the input tensors, its kernel runs the
// native call, and it is not registered with the dispatcher.
class FallbackOperator {
 public:
  explicit FallbackOperator(const c10::OperatorHandle& op);

  // Runs `compute` inside the fallback and returns the result (new reference). If a Python
  // exception is raised, returns nullptr or throws python_error.
  __attribute__((noinline)) PyObject* call(
      const Values& values, c10::function_ref<PyObject*()> compute) const;

 private:
  using Definition = std::remove_pointer_t<std::remove_cvref_t<decltype(member_of(
      OperatorDefinition{}, std::declval<const c10::OperatorHandle&>()))>>;

  Definition definition_;
  c10::OperatorHandle handle_; // points to `definition_`
};

} // namespace torchop

// autograd_fallback.h: native calls to operators without a kernel at Autograd.
#pragma once

#include <Python.h>

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/FunctionRef.h>

#include "arguments.h"
#include "members.h"

namespace torchop {

// A private copy of an operator, for calls to PyTorch's autograd fallback.
//
// The fallback (basicAutogradNotImplementedFallback in
// torch/csrc/autograd/autograd_not_implemented_fallback.cpp) attaches hooks or nodes to the
// results, so backward warns or raises. Details change between releases, so this code calls the
// fallback instead of imitating it. It does not pass the real operator, because the fallback would
// convert all arguments and redispatch. The copy has the same name and returns, but it takes a list
// of the input tensors, and its kernel runs the native call. The dispatcher does not contain it.
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

// autograd_fallback.h: calls of operators that have nothing registered for autograd.
#pragma once

#include <Python.h>

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/FunctionRef.h>

#include "arguments.h"
#include "members.h"

namespace torchop {

// An operator outside the dispatcher, to call PyTorch's fallback for autograd with.
//
// The fallback notes in the graph that an operator has no gradient: where an input requires grad,
// results warn in backward, or raise. Which do, and in which words, is its own affair and changes
// with releases, so it is called and not imitated. It asks an operator for its name and for what it
// returns, and has the dispatcher run it. To spare the dispatcher's way to the kernel, and the
// conversion of all arguments, it gets this operator instead: with the same name and the same
// returns, a list of the tensors of the call for arguments, and a kernel that runs the native call.
class FallbackOperator {
 public:
  explicit FallbackOperator(const c10::OperatorHandle& op);

  // Runs `compute` inside the fallback. Returns what that returned, or nullptr with an exception.
  __attribute__((noinline)) PyObject* call(
      const Values& values, c10::function_ref<PyObject*()> compute) const;

 private:
  using Definition = std::remove_pointer_t<std::remove_cvref_t<decltype(member_of(
      OperatorDefinition{}, std::declval<const c10::OperatorHandle&>()))>>;

  Definition definition_;
  c10::OperatorHandle handle_; // of `definition_`
};

} // namespace torchop

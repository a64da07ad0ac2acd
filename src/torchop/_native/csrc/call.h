// call.h: decide whether a call is native, and run native calls.
#pragma once

#include <Python.h>

#include "plan.h"

namespace torchop {

// The decision about one call.
struct Decision {
  Reason reason = Reason::Native;
  const Plan::Kernel* kernel = nullptr;
  bool records_gradient = false;
  bool notes_gradient = false; // runs inside PyTorch's autograd fallback (no gradient formula)
  Route route;
};

// Decides about a call, and binds its arguments to `values`.
Decision decide(
    const Plan& plan, Values& values, PyObject* const* args, size_t nargsf, PyObject* keywords);

// Calls the operator natively. If it cannot, sets `reason` and returns nullptr without an
// exception, and no kernel has run. `enters_cpp` is true if the call would enter the dispatcher in
// C++ although the operator has Python dispatch.
PyObject* try_call(
    const Plan& plan,
    PyObject* const* args,
    size_t nargsf,
    PyObject* keywords,
    bool enters_cpp,
    Reason& reason);

} // namespace torchop

// call.h: decide whether a call can be native (run without the dispatcher), and run native calls.
#pragma once

#include <Python.h>

#include "plan.h"

namespace torchop {

// How to run one call.
struct Decision {
  Reason reason = Reason::Native;
  const Plan::Kernel* kernel = nullptr;
  bool records_gradient = false;
  bool runs_in_fallback = false; // inside PyTorch's autograd fallback, without a gradient formula
  Route route;
};

// Binds a call's arguments to the parameters in `values`, and decides whether the call can be
// native and which kernel it runs.
Decision decide(
    const Plan& plan, Values& values, PyObject* const* args, size_t nargsf, PyObject* keywords);

// Runs a call natively. If that is not possible, sets `reason` and returns nullptr without an
// exception, before any kernel has run. `enters_cpp` is true if PyTorch would run the call in the
// C++ dispatcher, even if OpOverload dispatches the operator in Python.
PyObject* try_call(
    const Plan& plan,
    PyObject* const* args,
    size_t nargsf,
    PyObject* keywords,
    bool enters_cpp,
    Reason& reason);

} // namespace torchop

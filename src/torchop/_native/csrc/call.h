// call.h: decide whether a call can be native, i.e. run without the dispatcher, and run it.
#pragma once

#include <Python.h>

#include "plan.h"

namespace torchop {

struct Decision {
  Reason reason = Reason::Native;
  const Plan::Kernel* kernel = nullptr;
  bool records_gradient = false;
  // True if a gradient should be recorded, but the operator has no formula. The call must then run
  // inside PyTorch's autograd fallback.
  bool runs_in_fallback = false;
  Route route;
};

Decision decide(
    const Plan& plan, Values& values, PyObject* const* args, size_t nargsf, PyObject* keywords);

// Runs a call natively and returns its result. If the call cannot be native, sets `reason` and
// returns nullptr without an exception and without having run a kernel. `enters_cpp` is true if
// PyTorch would run this call in the C++ dispatcher. This may be the case even for operators that
// OpOverload usually dispatches in Python.
PyObject* try_call(
    const Plan& plan,
    PyObject* const* args,
    size_t nargsf,
    PyObject* keywords,
    bool enters_cpp,
    Reason& reason);

} // namespace torchop

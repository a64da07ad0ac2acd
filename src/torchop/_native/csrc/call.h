// call.h: how a call goes.
#pragma once

#include <Python.h>

#include "plan.h"

namespace torchop {

// How one call would go.
struct Decision {
  Reason reason = Reason::Native;
  const Plan::Kernel* kernel = nullptr;
  bool records_gradient = false;
  bool notes_gradient = false; // that there is none, as PyTorch's fallback for autograd does
  Route route;
};

// Decides on a call whose arguments are in `values` afterwards.
Decision decide(
    const Plan& plan, Values& values, PyObject* const* args, size_t nargsf, PyObject* keywords);

// Calls the operator natively, or returns nullptr without an exception where `reason` is not Native
// and nothing has run. `enters_cpp` is whether the dispatcher would be entered in C++, where the
// operator is also dispatched in Python.
PyObject* try_call(
    const Plan& plan,
    PyObject* const* args,
    size_t nargsf,
    PyObject* keywords,
    bool enters_cpp,
    Reason& reason);

} // namespace torchop

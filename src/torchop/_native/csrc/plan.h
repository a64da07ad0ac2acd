// plan.h: the call plan of an operator in C++, compiled from its Python rules and read by every
// native call.
#pragma once

#include <Python.h>

#include <atomic>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>

#include "arguments.h"
#include "autograd.h"
#include "autograd_fallback.h"
#include "dispatch.h"
#include "lifetime.h"
#include "residuals.h"
#include "results.h"

namespace torchop {

// A snapshot of an operator's kernels and rules, immutable except for the caches marked `mutable`.
// A registration replaces the plan of the entry, and each call holds a reference to the plan that
// it started with. All `PyObject*` members are borrowed from `owned_objects`.
struct Plan {
  PyObject_HEAD

      Parameters parameters;
  Returns returns;
  Gradient gradient;
  std::vector<size_t> mutated;
  OwnKernels own;
  // Maps a kernel in the dispatcher's table to the function that a native call runs instead. The
  // dispatcher kernel is a wrapper of torchop or torch.library, whose checks native calls do in
  // C++.
  struct Kernel {
    PyObject* dispatcher_kernel;
    PyObject* function;
    // For operators with residuals: the author's function. It returns an object with the result and
    // the residuals. nullptr if the kernel must be called through `function`.
    PyObject* author = nullptr;
  };
  std::vector<Kernel> kernels;
  Residuals residuals;
  // A dict entry or set member that the plan was compiled from and that can change without
  // notification, for example the kernels that `torch.library.CustomOpDef` stores. A dict must have
  // `value` at `key`. A set must contain `key` if and only if `value` is True.
  struct Source {
    PyObject* container;
    PyObject* key;
    PyObject* value;
    // The version tag of the dict when it last had the value; 0 if unknown. Unused without the GIL.
    mutable uint64_t version = 0;
  };
  std::vector<Source> sources;
  bool is_foreign; // other packages may register kernels; see recompile_for_unknown_kernel
  // Empty if no operator of this name was registered when the plan was compiled. Its table may be
  // read only while `lifetime->exists`.
  std::optional<c10::OperatorHandle> op;
  LifetimePointer lifetime;
  // True if no call can be native: the operator was missing, has no known kernel, or has an unknown
  // type.
  bool always_dispatches;
  // Index of the first parameter of a type that only the dispatcher converts, or -1.
  Py_ssize_t unknown_parameter;
  PyObject* finish; // finish(args, kwargs, result) checks and converts other results
  // convert(result) applies the dispatcher's conversion to a result of `finish`. Set only for
  // operators that `OpOverload` dispatches in Python, where results are not converted. Calls that
  // enter the C++ dispatcher apply it. Otherwise nullptr.
  PyObject* convert;
  // Created by the first call that runs inside the autograd fallback; owned.
  mutable std::atomic<FallbackOperator*> fallback_operator;
  PyObject* owned_objects; // a tuple of all objects that the members above borrow
};

extern PyTypeObject* plan_type;

// Returns whether a `Plan::Source` has changed. Runs no Python code.
bool is_outdated(const Plan& plan);

bool add_plan_type(PyObject* module);

} // namespace torchop

// plan.h: an operator's call plan, with everything that a native call (a call without the
// dispatcher) needs, such as the kernels and the compiled gradient formula.
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
#include "residuals.h"
#include "results.h"

namespace torchop {

// The call plan of an operator. It is immutable except for caches (the `mutable` members). When
// something is registered for the operator, a new plan replaces this one, while running calls
// continue to use the old plan. All `PyObject*` members are borrowed from `owned_objects`.
struct Plan {
  Plan() = default;
  ~Plan();
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;

  Parameters parameters;
  Returns returns;
  Gradient gradient;
  // The mutated arguments, as indices into `parameters.all`.
  std::vector<size_t> mutated;
  OwnKernels own;
  // A parameter whose argument must be contiguous, or channels_last.
  struct Layout {
    size_t parameter;
    bool channels_last;
  };
  std::vector<Layout> layouts;
  // A kernel in the dispatch table, and the function that native calls run instead. The kernel in
  // the table is a wrapper (by torchop or torch.library) around the author's function. Native calls
  // skip the wrapper, because its checks are done in C++.
  struct Kernel {
    PyObject* dispatcher_kernel;
    PyObject* function;
    // The author's function of an operator with residuals (outputs that are only used in the
    // backward pass), which returns the residuals together with the result. If this is nullptr,
    // native calls must use `function`.
    PyObject* author = nullptr;
  };
  std::vector<Kernel> kernels;
  Residuals residuals;
  // A dict or set that the plan was compiled from, and that may change without a notification, such
  // as the dict of kernels in a CustomOpDef. The plan is up to date as long as a dict has `value`
  // at `key`, or a set contains `key` if and only if `value` is True.
  struct Source {
    PyObject* container;
    PyObject* key;
    PyObject* value;
    // The dict's version tag when we last found `value` in it, or 0 if unknown
    mutable uint64_t version = 0;
  };
  std::vector<Source> sources;
  // True if the operator was not defined with torchop. Other code may then register kernels for it
  // at any time (see `recompile_for_unknown_kernel` in entry.cpp).
  bool is_foreign = false;
  // Empty if the operator was not registered when the plan was compiled. Only valid while
  // `Entry::lifetime` is true.
  std::optional<c10::OperatorHandle> op;
  // True if no call to the operator can be native: it was not registered when the plan was
  // compiled, has no kernel that native calls can run, or has a parameter of an unsupported type.
  bool always_dispatches = false;
  // The index of the first parameter whose type native calls do not support, or -1
  Py_ssize_t unknown_parameter = -1;
  // finish(args, kwargs, result) checks and converts a result that `is_valid_result` did not
  // accept.
  PyObject* finish = nullptr;
  // convert(result) makes the same conversions as the C++ dispatcher. It runs after `finish`,
  // except if OpOverload would dispatch the call in Python, which converts nothing. nullptr if
  // OpOverload never dispatches the operator in Python.
  PyObject* convert = nullptr;
  // Created when the first call needs it. Owned. See autograd_fallback.h.
  mutable std::atomic<FallbackOperator*> fallback_operator = nullptr;
  // Owns all objects that the other members reference. Tuples have no tp_clear, so the garbage
  // collector cannot empty this one while a call uses the plan.
  PyObject* owned_objects = nullptr;
};

struct PlanObject {
  PyObject_HEAD

      Plan plan;
};

inline Plan& plan_of(PyObject* object) {
  return reinterpret_cast<PlanObject*>(object)->plan;
}

extern PyTypeObject* plan_type;

// Returns whether an entry in `plan.sources` has changed. Runs no Python code.
bool is_outdated(const Plan& plan);

bool add_plan_type(PyObject* module);

} // namespace torchop

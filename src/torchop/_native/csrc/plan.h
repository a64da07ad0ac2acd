// plan.h: an operator's call plan. It holds everything that a native call (a call without the
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

// The call plan of an operator. It is immutable except for caches (the `mutable` members). Each
// registration for the operator replaces the plan with a new one, but calls that are already
// running continue to use the old plan. All `PyObject*` members are borrowed from `owned_objects`.
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
  // A parameter with a declared layout. Its argument must be contiguous or channels_last.
  struct Layout {
    size_t parameter;
    bool channels_last;
  };
  std::vector<Layout> layouts;
  // A kernel in the dispatch table, and the function that native calls run instead of it. torchop
  // and torch.library wrap the author's function before they put it into the table. Native calls
  // skip this wrapper, because they make its checks in C++.
  struct Kernel {
    PyObject* dispatcher_kernel;
    PyObject* function;
    // For an operator with residuals (outputs that are only used in the backward pass): the
    // author's function, which returns the residuals together with the result. If this is nullptr,
    // native calls must use `function`.
    PyObject* author = nullptr;
  };
  std::vector<Kernel> kernels;
  Residuals residuals;
  // A dict or set that the plan was compiled from. It may change without notifying us, like the
  // dict of kernels in a CustomOpDef, so each call checks it again. The plan is up to date as long
  // as a dict has `value` at `key`, or a set contains `key` if and only if `value` is True.
  struct Source {
    PyObject* container;
    PyObject* key;
    PyObject* value;
    // The dict's version tag from the last time we found `value` in it, or 0 if unknown
    mutable uint64_t version = 0;
  };
  std::vector<Source> sources;
  // True for operators of other packages and of torchop's low level (`torchop.Library`). Other code
  // may register kernels for them at any time without notifying us (see
  // `recompile_for_unknown_kernel` in entry.cpp).
  bool is_foreign = false;
  // The operator in the dispatcher, or empty if it was not registered when the plan was compiled.
  // Only valid while `Entry::lifetime` is true.
  std::optional<c10::OperatorHandle> op;
  // True if no call to the operator can be native: it was not registered when the plan was
  // compiled, has no kernel that native calls can run, or has a parameter of an unsupported type.
  bool always_dispatches = false;
  // The index of the first parameter whose type native calls do not support, or -1
  Py_ssize_t unknown_parameter = -1;
  // finish(args, kwargs, result) is the slow path for results that `is_valid_result` does not
  // accept. It checks and converts them.
  PyObject* finish = nullptr;
  // convert(result) makes the same conversions as the C++ dispatcher. It runs after `finish`,
  // unless OpOverload would dispatch the call in Python, where no conversion takes place. nullptr
  // if OpOverload never dispatches the operator in Python.
  PyObject* convert = nullptr;
  // Owned, and created by the first call that needs it. See autograd_fallback.h.
  mutable std::atomic<FallbackOperator*> fallback_operator = nullptr;
  // A tuple that owns all objects that the other members reference. Tuples have no tp_clear, so the
  // garbage collector cannot empty it while a call uses the plan.
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

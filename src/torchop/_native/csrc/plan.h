// plan.h: an operator's call plan: its kernels and compiled rules, which each native call reads.
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

// The kernels and rules of an operator. Immutable, except for caches (`mutable` members). A
// registration replaces the plan, but running calls continue with the old plan. All `PyObject*`
// members are borrowed from `owned_objects`.
struct Plan {
  Plan() = default;
  ~Plan();
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;

  Parameters parameters;
  Returns returns;
  Gradient gradient;
  // Indices into `parameters.all`, including keyword-only arguments.
  std::vector<size_t> mutated;
  OwnKernels own;
  // A kernel in the dispatch table, and the function that a native call runs instead. The
  // dispatcher kernel is a wrapper from torchop or torch.library, and native calls do the wrapper's
  // checks in C++.
  struct Kernel {
    PyObject* dispatcher_kernel;
    PyObject* function;
    // For operators with residuals (outputs that only the backward uses): the author's function,
    // which returns them together with the result. nullptr if native calls must call `function`.
    PyObject* author = nullptr;
  };
  std::vector<Kernel> kernels;
  Residuals residuals;
  // A container that was read to compile the plan, and that may change without a notification, for
  // example the dict of kernels in a CustomOpDef. The plan is outdated unless a dict has `value` at
  // `key`. A set must contain `key` if and only if `value` is True.
  struct Source {
    PyObject* container;
    PyObject* key;
    PyObject* value;
    // The version tag of the dict when it last had `value`; 0 if unknown.
    mutable uint64_t version = 0;
  };
  std::vector<Source> sources;
  bool is_foreign = false; // other packages may register kernels; see recompile_for_unknown_kernel
  // The operator, or empty if it was not registered when the plan was compiled. Valid only while
  // `lifetime->exists`.
  std::optional<c10::OperatorHandle> op;
  LifetimePointer lifetime;
  // True if no call can be native, because the operator did not exist, or has no known kernel, or
  // has an argument of an unknown type.
  bool always_dispatches = false;
  // Index of the first parameter of an unknown type, or -1.
  Py_ssize_t unknown_parameter = -1;
  // finish(args, kwargs, result) checks and converts results that `is_valid_result` rejects.
  PyObject* finish = nullptr;
  // convert(result) converts a result of `finish` as the C++ dispatcher does. nullptr, except for
  // operators that OpOverload may dispatch in Python, where results are not converted.
  PyObject* convert = nullptr;
  // The copy of the operator that runs in PyTorch's autograd fallback. The first call that needs it
  // creates it. Owned.
  mutable std::atomic<FallbackOperator*> fallback_operator = nullptr;
  // All objects that the other members reference. A tuple, because tuples have no tp_clear, so the
  // garbage collector cannot clear it during a call.
  PyObject* owned_objects = nullptr;
};

// The Python object that contains a Plan.
struct PlanObject {
  PyObject_HEAD

      Plan plan;
};

inline Plan& plan_of(PyObject* object) {
  return reinterpret_cast<PlanObject*>(object)->plan;
}

extern PyTypeObject* plan_type;

// Returns whether a source of the plan has changed. Runs no Python code.
bool is_outdated(const Plan& plan);

bool add_plan_type(PyObject* module);

} // namespace torchop

// plan.h: a call plan compiled for native calls.
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

// What an operator does, as its rules were when the plan was compiled. It is never changed: a
// registration makes another one, and a call holds on to the plan it began with.
struct Plan {
  PyObject_HEAD

      Parameters parameters;
  Returns returns;
  Gradient gradient;
  std::vector<size_t> mutated;
  OwnKernels own;
  // Which function to call where the dispatcher would run which kernel of ours.
  struct Kernel {
    PyObject* dispatcher_kernel;
    PyObject* function;
    PyObject* author = nullptr; // the author's own, which may return residuals
  };
  std::vector<Kernel> kernels;
  Residuals residuals;
  // What the functions above were read from, where nobody tells of a change: what a dictionary
  // holds under a key, or whether a set has it.
  struct Source {
    PyObject* container;
    PyObject* key;
    PyObject* value;
    mutable uint64_t version = 0; // of a dictionary that was seen to hold the value; 0 is of none
  };
  std::vector<Source> sources;
  bool is_foreign; // somebody else registers kernels, and calls find out
  std::optional<c10::OperatorHandle> op;
  LifetimePointer lifetime; // of the operator
  bool always_dispatches;
  Py_ssize_t unknown_parameter; // the first of a type that only the dispatcher converts, or -1
  PyObject* finish;             // finish(args, kwargs, result): the rule for unusual results
  // convert(result): what calls that enter PyTorch's dispatcher in C++ make of these at last, where
  // others are dispatched in Python, and return what the kernel does; else nullptr.
  PyObject* convert;
  // For calls that need it; made by the first.
  mutable std::atomic<FallbackOperator*> fallback_operator;
  PyObject* owned_objects; // a tuple that keeps alive what is borrowed above
};

extern PyTypeObject* plan_type;

// Whether what a plan was compiled from has changed without anybody telling.
bool is_outdated(const Plan& plan);

bool add_plan_type(PyObject* module);

} // namespace torchop

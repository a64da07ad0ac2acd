// entry.h: the Entry object of an operator. It receives all calls to the operator, whether they
// come from the handle (the object that `torchop.custom_op` returns) or from torch.ops.
#pragma once

#include <Python.h>

#include "free_threads.h"
#include "lifetime.h"
#include "plan.h"
#include "reasons.h"

namespace torchop {

// The handle and the objects in torch.ops share one Entry. Each registration for the operator
// resets `plan` (see plan.h), so the next call compiles a new one.
struct Entry {
  PyObject_HEAD

      PyObject* name; // an OpName; owned
  PlanPointer plan;   // nullptr if a plan must be compiled
  // A Python function that compiles a plan and stores it in `plan`, or raises if the operator was
  // deregistered. Owned.
  PyObject* refresh;
  PyObject* dispatch; // a callable that calls the dispatcher; nullptr before the first plan; owned
  LifetimePointer lifetime; // records whether the operator that `dispatch` calls still exists
  Counters counters;        // number of native calls, and of calls that fell back for each reason
};

extern PyTypeObject* entry_type;
// True if the Python method `log_fallback` of `Entry::refresh` must be called before a call falls
// back to the dispatcher, once per operator and reason.
inline std::atomic<bool> logs_fallbacks = false;

// Runs a call natively if possible, and otherwise falls back to `dispatch`, or to `entry.dispatch`
// if `dispatch` is nullptr. In a call to an OpOverloadPacket, `entry` belongs to one overload, and
// `next` is the Operator of the following overload, or nullptr. If PyTorch would skip this overload
// because the arguments do not match its schema (see resolution.h), calls `next` instead.
PyObject* call_entry(
    Entry& entry,
    PyObject* dispatch,
    PyObject* next,
    PyObject* const* args,
    size_t nargsf,
    PyObject* keywords);

// Compiles a new plan. If the operator was deregistered, returns false with an exception set. Since
// this runs Python code, the new plan may already be outdated when the function returns.
__attribute__((noinline, cold)) bool refresh_plan(Entry& entry);

// Check this before reading the operator's dispatch table, because PyTorch frees the table if code
// other than torchop resets the library that defines the operator.
inline bool is_deregistered(const Entry& entry) {
  return entry.lifetime != nullptr && !entry.lifetime->load(std::memory_order_relaxed);
}

// Returns the class OperatorGoneError (new reference), or nullptr with an exception set.
PyObject* gone_error();

__attribute__((noinline, cold)) void raise_deregistered(Entry& entry);

// If the current exception is a RuntimeError, calls the Python method `_explain_refusal` of the
// handle `callee`, and replaces the exception with the one that the method returns, if any.
// `keywords` contains the names of the call's keyword arguments, or is nullptr.
__attribute__((noinline, cold)) void explain_refusal(PyObject* callee, PyObject* keywords);

bool add_entry_type(PyObject* module);

} // namespace torchop

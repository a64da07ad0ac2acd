// entry.h: the entry of an operator, which receives calls through its handle and torch.ops.
#pragma once

#include <Python.h>

#include "free_threads.h"
#include "plan.h"
#include "reasons.h"

namespace torchop {

// An operator's state for native calls, which its handle and its objects in torch.ops share. A
// registration clears `plan`, so the next call compiles a new plan.
struct Entry {
  PyObject_HEAD

      PyObject* name; // OpName, owned
  PlanPointer plan;   // nullptr after a registration
  // Compiles and installs a plan when called, or raises if the operator was deregistered. Owned.
  PyObject* refresh;
  PyObject* dispatch;       // calls the dispatcher; nullptr before the first plan; owned
  LifetimePointer lifetime; // whether the operator that `dispatch` calls is still registered
  Counters counters;        // number of calls by reason
};

extern PyTypeObject* entry_type;
// A Python function for logging. Called before the first call to an operator that falls back to the
// dispatcher for a given reason. nullptr if logging is disabled. Owned; guarded by
// `observer_mutex`.
extern std::atomic<PyObject*> observer;
// Sets or removes (nullptr) the observer. Adds a reference.
void exchange_observer(PyObject* given);

// Runs a call, natively if possible. To fall back to the dispatcher, calls `dispatch`, or
// `entry.dispatch` if `dispatch` is nullptr. In a call to a packet, `next` is the Operator of the
// next overload, or nullptr. `next` is called if PyTorch would skip this overload (see
// resolution.h).
PyObject* call_entry(
    Entry& entry,
    PyObject* dispatch,
    PyObject* next,
    PyObject* const* args,
    size_t nargsf,
    PyObject* keywords);

// Compiles a plan. Returns false with an exception set if the operator was deregistered. Runs
// Python code, so the new plan may already be outdated on return.
__attribute__((noinline, cold)) bool refresh_plan(Entry& entry);

// Returns whether the operator was deregistered. If so, its dispatch table has been freed.
inline bool is_deregistered(const Entry& entry) {
  return entry.lifetime != nullptr && !entry.lifetime->exists.load(std::memory_order_relaxed);
}

// Raises OperatorGoneError. If torchop deregistered the operator, the message gives the reason.
__attribute__((noinline, cold)) void raise_deregistered(Entry& entry);

// If the current exception is a RuntimeError, replaces it with `callee._explain_refusal(error)`,
// unless that returns None. The method of a handle returns an ArgumentError for a wrong argument.
// The method of a packet returns an OperatorGoneError if an overload was deregistered during the
// call.
__attribute__((noinline, cold)) void explain_refusal(PyObject* callee);

bool add_entry_type(PyObject* module);

} // namespace torchop

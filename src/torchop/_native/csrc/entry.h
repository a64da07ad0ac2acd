// entry.h: the entry point of all calls of an operator, made through its handle or through
// torch.ops.
#pragma once

#include <Python.h>

#include "free_threads.h"
#include "plan.h"
#include "reasons.h"

namespace torchop {

// The native call state of one operator. Handles and objects of torch.ops share it, so it outlives
// each plan: a registration clears `plan`, and the next call compiles a new one.
struct Entry {
  PyObject_HEAD

      PyObject* name; // OpName, owned
  PlanPointer plan;   // nullptr after a registration, until the next call
  // Compiles and installs a plan when called, or raises if the operator was deregistered. Owned.
  PyObject* refresh;
  PyObject* dispatch;       // calls the dispatcher; nullptr before the first plan; owned
  LifetimePointer lifetime; // of the operator that `dispatch` calls
  Counters counters;        // number of calls by reason
};

extern PyTypeObject* entry_type;
// Called before an operator's first call that falls back to the dispatcher for a given reason.
// nullptr if logging is disabled. Owned; read it only under the lock in entry.cpp.
extern std::atomic<PyObject*> observer;
// Replaces the observer, and adds a reference to the new one. nullptr removes the observer.
void exchange_observer(PyObject* given);

// Runs a call natively or through the dispatcher. Dispatcher calls go to `dispatch`, or to
// `entry.dispatch` if it is nullptr, with the caller's arguments. `next` is the Operator of the
// packet's next overload, or nullptr. It is called if the arguments do not match this overload's
// schema (see resolution.h).
PyObject* call_entry(
    Entry& entry,
    PyObject* dispatch,
    PyObject* next,
    PyObject* const* args,
    size_t nargsf,
    PyObject* keywords);

// Compiles a plan. Returns false with an exception set if the operator was deregistered. Runs
// Python, so `entry.plan` may be outdated again on return.
__attribute__((noinline, cold)) bool refresh_plan(Entry& entry);

// True if the operator was deregistered. Its table in the dispatcher is then freed memory.
inline bool is_deregistered(const Entry& entry) {
  return entry.lifetime != nullptr && !entry.lifetime->exists.load(std::memory_order_relaxed);
}

// Raises OperatorGoneError, with the reason if torchop deregistered the operator. Call this instead
// of the dispatcher, which would read freed memory.
__attribute__((noinline, cold)) void raise_deregistered(Entry& entry);

// If a RuntimeError is set, replaces it by the result of `callee._explain_refusal(error)`, unless
// that is None. A handle returns an ArgumentError that names the argument of the wrong type. A
// packet returns an OperatorGoneError if an overload was deregistered during the call.
__attribute__((noinline, cold)) void explain_refusal(PyObject* callee);

bool add_entry_type(PyObject* module);

} // namespace torchop

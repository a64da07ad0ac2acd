// entry.h: where calls of an operator come in, whichever object was called.
#pragma once

#include <Python.h>

#include "free_threads.h"
#include "plan.h"
#include "reasons.h"

namespace torchop {

// One per operator. Its plan is swapped by registrations, and a call in progress keeps the plan it
// began with alive.
struct Entry {
  PyObject_HEAD

      PyObject* name; // an OpName
  PlanPointer plan;   // nullptr after a registration, until the next call
  PyObject* refresh;  // refresh() compiles and installs a plan; raises if the operator is gone
  PyObject* dispatch; // what calls the dispatcher; nullptr before the first plan
  LifetimePointer lifetime; // of the operator of the first plan; its functions call that one
  Counters counters;        // of calls, by the reason for which they went to the dispatcher
};

extern PyTypeObject* entry_type;
// Called with the first call that the dispatcher gets for a reason; nullptr if nobody reads the
// log.
extern std::atomic<PyObject*> observer;
void exchange_observer(PyObject* given); // nullptr for none

// Calls an operator: natively, or by `dispatch` (the entry's, if it is nullptr) with unchanged
// arguments. If they cannot be bound to its parameters, `next`, an Operator, is called instead.
PyObject* call_entry(
    Entry& entry,
    PyObject* dispatch,
    PyObject* next,
    PyObject* const* args,
    size_t nargsf,
    PyObject* keywords);

// Has a plan compiled, which a registration outdated; false with an exception if there is none any
// more.
__attribute__((noinline, cold)) bool refresh_plan(Entry& entry);

inline bool is_deregistered(const Entry& entry) {
  return entry.lifetime != nullptr && !entry.lifetime->exists.load(std::memory_order_relaxed);
}

// Says that an operator went away without a word, with the library that somebody reset. What calls
// the dispatcher would call freed memory.
__attribute__((noinline, cold)) void raise_deregistered(Entry& entry);

// Asks what was called what to raise in place of PyTorch's RuntimeError. A handle names an argument
// of the wrong type, and a packet says that an overload ended meanwhile.
__attribute__((noinline, cold)) void explain_refusal(PyObject* callee);

bool add_entry_type(PyObject* module);

} // namespace torchop

// lifetime.h: keep calls in the dispatcher from reading freed memory.
//
// The dispatcher reads an operator's kernel table without a lock and without the GIL. At the same
// time, another thread may register or deregister a kernel, and so free memory that the call reads
// next. PyTorch does not synchronize these threads, so this file counts calls to the dispatcher. A
// change to a table waits until no call is inside the dispatcher, and new calls wait for the
// change.
#pragma once

#include <Python.h>

#include <atomic>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>

namespace torchop {

// The state of a registered operator. Outlives the operator.
struct Lifetime {
  explicit Lifetime(const c10::OperatorHandle& operator_) : op(operator_) {}

  const c10::OperatorHandle op;    // valid only while `exists`
  std::atomic<bool> exists = true; // never becomes true again
  std::atomic<size_t> inside = 0;  // number of calls in the dispatcher
  std::atomic<size_t> changes = 0; // table changes in progress, or waiting for calls
  // `awaited` counts the calls for which a change must wait: the calls inside the dispatcher,
  // except calls that wait for a lock. After a timeout, a new counter replaces it, so that later
  // changes do not wait for the same calls again. `numbers` owns all counters.
  std::deque<std::atomic<size_t>> numbers = std::deque<std::atomic<size_t>>(1);
  std::atomic<std::atomic<size_t>*> awaited = &numbers.front();
  // Keeps the operator's memory alive if it was deregistered while a call was in the dispatcher.
  std::optional<c10::RegistrationHandleRAII> registration;
};

using LifetimePointer = std::shared_ptr<Lifetime>;

// The number of operators that were deregistered in this process, by any package.
inline std::atomic<size_t> deregistered_operators = 0;

// Returns the lifetime of a registered operator. Creates it on first use.
LifetimePointer lifetime_of(const c10::OperatorHandle& op);

// Returns the lifetimes of the registered operators among `names`. If `all` is true, creates
// missing lifetimes. Otherwise, skips operators without a lifetime.
std::vector<LifetimePointer> lifetimes_of(PyObject* names, bool all);

// RAII guard that counts a call as inside the dispatcher, for all operators whose tables it may
// read. The constructor waits for changes of these tables, with the GIL released.
class DispatcherCall {
 public:
  explicit DispatcherCall(c10::ArrayRef<LifetimePointer> lifetimes);
  ~DispatcherCall();
  DispatcherCall(const DispatcherCall&) = delete;
  DispatcherCall& operator=(const DispatcherCall&) = delete;

 private:
  c10::SmallVector<LifetimePointer, 1> lifetimes_;
};

// RAII guard that keeps calls on other threads out of the dispatcher while operators' tables
// change. The constructor waits for calls in the dispatcher, with the GIL released. It has a
// timeout, because such a call may be waiting for this thread.
class Change {
 public:
  explicit Change(std::vector<LifetimePointer> lifetimes);
  ~Change();
  Change(const Change&) = delete;
  Change& operator=(const Change&) = delete;

 private:
  std::vector<LifetimePointer> lifetimes_;
  std::shared_ptr<std::atomic<size_t>> of_thread_; // number of changes by the creating thread
};

// make_lock_enter(lock) returns the registration lock's method `__enter__`. While a thread waits
// for the lock, its calls are not counted: they read no table, and the thread that holds the lock
// may be waiting for calls in the dispatcher.
PyObject* make_lock_enter(PyObject*, PyObject* lock);

// hold_calls(names) starts a change, which ends when the returned object is freed. Returns None if
// these operators were never called.
PyObject* hold_calls(PyObject*, PyObject* names);

// end_calls(names) makes new calls raise, and waits for calls in the dispatcher. If calls are still
// in the dispatcher after the timeout, the memory that they read later is not freed.
PyObject* end_calls(PyObject*, PyObject* names);

} // namespace torchop

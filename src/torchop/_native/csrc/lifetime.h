// lifetime.h: whether an operator is registered, and synchronization of dispatcher calls with
// changes of its table.
//
// The dispatcher reads an operator's table without a lock, and with the GIL released. A thread that
// registers or deregisters a kernel meanwhile may free the entry that the call reads next. PyTorch
// does not synchronize the two. So calls are counted on their way into the dispatcher: a change
// waits for the calls inside, and new calls wait for the change. Every registration on an operator
// that was called needs this, not only deregistration.
#pragma once

#include <Python.h>

#include <atomic>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>

namespace torchop {

struct Lifetime {
  explicit Lifetime(const c10::OperatorHandle& operator_) : op(operator_) {}

  const c10::OperatorHandle op;    // valid only while `exists`
  std::atomic<bool> exists = true; // never becomes true again
  std::atomic<size_t> inside = 0;  // calls in the dispatcher, including those waiting for a lock
  std::atomic<size_t> changes = 0; // changes in progress or waiting for calls
  // Counters of the calls that a change waits for; `awaited` is the current one. After a timeout,
  // `awaited` becomes a new counter, so that later changes do not wait for the same calls again.
  std::deque<std::atomic<size_t>> numbers = std::deque<std::atomic<size_t>>(1);
  std::atomic<std::atomic<size_t>*> awaited = &numbers.front();
  // Keeps the operator's memory in the dispatcher if it was deregistered while a call was inside.
  std::optional<c10::RegistrationHandleRAII> registration;
};

using LifetimePointer = std::shared_ptr<Lifetime>;

// The number of operators that were deregistered in this process, by anyone.
inline std::atomic<size_t> deregistered_operators = 0;

// Returns the lifetime of a registered operator, and creates it on first use.
LifetimePointer lifetime_of(const c10::OperatorHandle& op);

// Returns the lifetimes of operators by name, skipping unregistered names. Creates missing
// lifetimes only with `all`.
std::vector<LifetimePointer> lifetimes_of(PyObject* names, bool all);

// Counts a call as inside the dispatcher, where it reads the tables of these operators. The
// constructor waits for changes of the tables, with the GIL released.
class DispatcherCall {
 public:
  explicit DispatcherCall(c10::ArrayRef<LifetimePointer> lifetimes);
  ~DispatcherCall();
  DispatcherCall(const DispatcherCall&) = delete;
  DispatcherCall& operator=(const DispatcherCall&) = delete;

 private:
  c10::SmallVector<LifetimePointer, 1> lifetimes_;
};

// Keeps other threads' calls out of the dispatcher while the tables of operators change. The
// constructor waits for calls inside, with the GIL released and a timeout, because such a call may
// be waiting for this thread.
class Change {
 public:
  explicit Change(std::vector<LifetimePointer> lifetimes);
  ~Change();
  Change(const Change&) = delete;
  Change& operator=(const Change&) = delete;

 private:
  std::vector<LifetimePointer> lifetimes_;
  std::shared_ptr<std::atomic<size_t>> of_thread_; // the number of changes by this thread
};

// make_entering(lock) returns the `__enter__` of the registration lock. The holder of the lock may
// wait for calls in the dispatcher, so calls of a thread that waits for the lock are not counted:
// they read no table until it continues.
PyObject* make_entering(PyObject*, PyObject* lock);

// hold_calls(names) starts a change that lasts as long as the returned object. Returns None if no
// thread has called these operators.
PyObject* hold_calls(PyObject*, PyObject* names);

// end_calls(names) makes new calls raise and waits for calls in the dispatcher. After the timeout,
// it keeps the memory that remaining calls read when their kernel returns.
PyObject* end_calls(PyObject*, PyObject* names);

} // namespace torchop

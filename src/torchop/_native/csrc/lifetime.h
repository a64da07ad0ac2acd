// lifetime.h: whether an operator still exists, and how many calls are in the dispatcher with it.
//
// The dispatcher reads the table of an operator without any lock, and waits for that of Python
// inside of kernels. Whoever changes the table meanwhile may free what such a call reads next.
// PyTorch leaves it to programs to avoid that, and those cannot tell when a call has left. So calls
// are counted here on their way to the dispatcher: a change waits for those that are in it, and new
// ones wait for the change.
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

  const c10::OperatorHandle op;    // to be read while it exists
  std::atomic<bool> exists = true; // once it does not, never again
  std::atomic<size_t> inside = 0;  // calls in the dispatcher, also those that wait for a lock
  std::atomic<size_t> changes = 0; // of the table: they go on, or wait for calls
  // How many of the calls a change waits for. Another number takes its place where that took too
  // long, so that the next change need not wait for the same ones.
  std::deque<std::atomic<size_t>> numbers = std::deque<std::atomic<size_t>>(1);
  std::atomic<std::atomic<size_t>*> awaited = &numbers.front();
  // Keeps the dispatcher's memory of an operator that ended during a call which took too long.
  std::optional<c10::RegistrationHandleRAII> kept;
};

using LifetimePointer = std::shared_ptr<Lifetime>;

// How often the dispatcher lost an operator, whoever ended it.
inline std::atomic<size_t> ended_operators = 0;

// That of an operator which the dispatcher has; it is made if nobody asked before.
LifetimePointer lifetime_of(const c10::OperatorHandle& op);

// Those of operators given by name, which the dispatcher need not have. With `all`, they are made
// if nobody asked before.
std::vector<LifetimePointer> lifetimes_of(PyObject* names, bool all);

// For as long as a call is in the dispatcher, where it reads the tables of these operators. Before,
// it waits for changes of them, with the lock of Python released.
class DispatcherCall {
 public:
  explicit DispatcherCall(c10::ArrayRef<LifetimePointer> lifetimes);
  ~DispatcherCall();
  DispatcherCall(const DispatcherCall&) = delete;
  DispatcherCall& operator=(const DispatcherCall&) = delete;

 private:
  c10::SmallVector<LifetimePointer, 1> lifetimes_;
};

// For as long as the tables of operators change: calls of other threads are kept out of the
// dispatcher. It waits for those that are in it, with the lock of Python released, but not for
// long: they may wait for this thread.
class Change {
 public:
  explicit Change(std::vector<LifetimePointer> lifetimes);
  ~Change();
  Change(const Change&) = delete;
  Change& operator=(const Change&) = delete;

 private:
  std::vector<LifetimePointer> lifetimes_;
  std::shared_ptr<std::atomic<size_t>> of_thread_; // the changes that it makes
};

// make_entering(lock): what takes the lock of registrations. Whoever has that may wait for calls in
// the dispatcher; those of a thread that waits for the lock read nothing, so they do not count.
PyObject* make_entering(PyObject*, PyObject* lock);

// hold_calls(names): begins a change of operators, which lasts as long as the object that is
// returned; None if nobody calls these operators here.
PyObject* hold_calls(PyObject*, PyObject* names);

// end_calls(names): has new calls of operators raise, and waits for those in the dispatcher. If one
// stays there, what PyTorch reads when it returns is kept.
PyObject* end_calls(PyObject*, PyObject* names);

} // namespace torchop

// lifetime.h: prevent calls from reading a dispatch table while another thread changes or frees it.
//
// The dispatcher reads an operator's table without a lock, and without the GIL. Meanwhile, another
// thread may register or deregister a kernel, and so free memory that the call is about to read.
// PyTorch does not prevent this. We therefore count the calls that are in the dispatcher. Before a
// table is changed, the changing thread waits until no call is in the dispatcher. New calls wait
// until the change is complete.
#pragma once

#include <Python.h>

#include <atomic>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>

namespace torchop {

// The state of one operator's dispatch table: whether the operator is still registered, and how
// many calls and changes use the table. This object outlives the operator.
struct Lifetime {
  explicit Lifetime(const c10::OperatorHandle& operator_) : op(operator_) {}

  const c10::OperatorHandle op;    // valid only while `exists`
  std::atomic<bool> exists = true; // set to false when the operator is deregistered
  std::atomic<size_t> inside = 0;  // the number of calls that are in the dispatcher
  std::atomic<size_t> changes = 0; // the number of changes that are in progress or wait for calls
  // `awaited` points to the number of calls that a change must wait for: all calls in the
  // dispatcher, except calls that are waiting for a lock. If a change times out, it replaces this
  // counter with a new one, so that later changes do not wait for the same calls again. `numbers`
  // owns all counters.
  std::deque<std::atomic<size_t>> numbers = std::deque<std::atomic<size_t>>(1);
  std::atomic<std::atomic<size_t>*> awaited = &numbers.front();
  // An additional registration with the dispatcher. It keeps the operator's memory alive if the
  // operator is deregistered while a call is in the dispatcher.
  std::optional<c10::RegistrationHandleRAII> registration;
};

using LifetimePointer = std::shared_ptr<Lifetime>;

inline std::atomic<size_t> deregistered_operators = 0; // counts deregistrations by any package

LifetimePointer lifetime_of(const c10::OperatorHandle& op);

// Returns the Lifetime of each registered operator in `names`. If an operator has no Lifetime yet,
// creates one if `all` is true, and otherwise skips the operator.
std::vector<LifetimePointer> lifetimes_of(PyObject* names, bool all);

// RAII guard for a call to the dispatcher. While it exists, the call is counted for each operator
// whose table it may read. The constructor releases the GIL and waits until these tables are not
// being changed.
class DispatcherCall {
 public:
  explicit DispatcherCall(c10::ArrayRef<LifetimePointer> lifetimes);
  ~DispatcherCall();
  DispatcherCall(const DispatcherCall&) = delete;
  DispatcherCall& operator=(const DispatcherCall&) = delete;

 private:
  c10::SmallVector<LifetimePointer, 1> lifetimes_;
};

// RAII guard for a change to the tables of some operators. While it exists, calls by other threads
// do not enter the dispatcher. The constructor releases the GIL and waits until no call is in the
// dispatcher. This wait has a timeout, because such a call may itself be waiting for this thread.
class Change {
 public:
  explicit Change(std::vector<LifetimePointer> lifetimes);
  ~Change();
  Change(const Change&) = delete;
  Change& operator=(const Change&) = delete;

 private:
  std::vector<LifetimePointer> lifetimes_;
  std::shared_ptr<std::atomic<size_t>> of_thread_; // the creating thread's `changes_here`
};

// make_lock_enter(lock) returns the method `__enter__` for the registration lock, which torchop
// holds whenever it registers or deregisters something. While a thread waits for this lock, its
// calls do not count as being in the dispatcher. This is safe, because they read no table while
// they wait. Without it, they could deadlock with the thread that holds the lock, because this
// thread may be waiting until no call is in the dispatcher.
PyObject* make_lock_enter(PyObject*, PyObject* lock);

// hold_calls(names) keeps calls to these operators out of the dispatcher until the returned object
// is freed, so that the operators' tables can be changed safely. Returns None if none of these
// operators was ever called.
PyObject* hold_calls(PyObject*, PyObject* names);

// end_calls(names) makes new calls to the given operators raise, and waits until no call to them is
// in the dispatcher. If a call is still there after a timeout, the operator's memory is never
// freed, because the call may still read it.
PyObject* end_calls(PyObject*, PyObject* names);

} // namespace torchop

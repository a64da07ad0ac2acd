// current_plan.h: keep the operator's plan (its compiled kernels and rules) alive during a call.
#pragma once

#include "entry.h"
#include "thread.h"

namespace torchop {

// Returns whether a plan exists and is up to date.
inline bool is_usable(PyObject* plan) {
  return plan != nullptr && !is_outdated(plan_of(plan));
}

#ifdef Py_GIL_DISABLED

// RAII guard that publishes a call's plan in `thread.plans`, which keeps the plan alive, and marks
// the operator as running. Compiles a plan if necessary. Converts to false, with an exception set,
// if the operator was deregistered or compiling failed.
class CurrentPlan {
 public:
  CurrentPlan(Entry& entry, Thread& here) : entry_(entry), thread_(here) {
    if (C10_UNLIKELY(here.count == here.capacity && !reserve_call(here))) {
      PyErr_NoMemory();
      return;
    }
    while (C10_UNLIKELY(!is_usable(announce()))) {
      end();
      if (!refresh_plan(entry))
        return;
    }
    if (C10_UNLIKELY(is_deregistered(entry))) {
      end();
      raise_deregistered(entry);
    }
  }
  ~CurrentPlan() {
    PyObject* const plan = plan_;
    if (plan == nullptr)
      return;
    end();
    // Free replaced plans, but only if this call may have kept one alive. Otherwise all calls would
    // contend for the mutex while one long call uses a replaced plan.
    if (C10_UNLIKELY(plans_to_free.load(std::memory_order_relaxed) != 0) && may_touch_objects_ &&
        (announced_another_ || plan != entry_.plan.load()))
      free_plans();
  }
  CurrentPlan(const CurrentPlan&) = delete;
  CurrentPlan& operator=(const CurrentPlan&) = delete;

  // The thread is being terminated: the destructor must not touch Python objects.
  void abandon() {
    may_touch_objects_ = false;
  }

  explicit operator bool() const {
    return plan_ != nullptr;
  }
  const Plan& operator*() const {
    return plan_of(plan_);
  }

 private:
  // Publishes the current plan, and checks afterwards that it is still the current one. Otherwise,
  // the registration that replaced the plan may not have seen it in `thread.plans`.
  PyObject* announce() {
    const size_t call = thread_.count++;
    thread_.running[call] = reinterpret_cast<PyObject*>(&entry_);
    while (true) {
      plan_ = entry_.plan.load(std::memory_order_acquire);
      thread_.plans[call].store(plan_);
      if (C10_LIKELY(plan_ == entry_.plan.load()))
        return plan_;
      announced_another_ = true;
    }
  }

  void end() {
    const size_t last = thread_.count - 1;
    if (C10_LIKELY(
            thread_.count != 0 && thread_.running[last] == reinterpret_cast<PyObject*>(&entry_) &&
            thread_.plans[last].load(std::memory_order_relaxed) == plan_)) {
      thread_.plans[last].store(nullptr, std::memory_order_release);
      thread_.count = last;
    } else {
      end_earlier_call(thread_, reinterpret_cast<PyObject*>(&entry_), plan_);
    }
    plan_ = nullptr;
  }

  Entry& entry_;
  Thread& thread_;
  PyObject* plan_ = nullptr;
  bool may_touch_objects_ = true;
  bool announced_another_ = false; // a replaced plan was published for a moment
};

#else

// Owns a reference to the plan of a call. Compiles a plan if necessary. Converts to false, with an
// exception set, if the operator was deregistered or compiling failed.
class CurrentPlan {
 public:
  // No Python code may run between the last check and taking the reference. Python code might
  // release the GIL, so another thread might deregister the operator.
  CurrentPlan(Entry& entry, Thread&) {
    while (C10_UNLIKELY(!is_usable(entry.plan.load(std::memory_order_relaxed)))) {
      if (!refresh_plan(entry))
        return;
    }
    if (C10_UNLIKELY(is_deregistered(entry)))
      raise_deregistered(entry);
    else
      plan_ = new_reference(entry.plan);
  }
  // Cheaper than the destructor of THPObjectPtr, which calls Py_IsInitialized.
  ~CurrentPlan() {
    Py_XDECREF(plan_);
  }
  CurrentPlan(const CurrentPlan&) = delete;
  CurrentPlan& operator=(const CurrentPlan&) = delete;

  // The thread is being terminated: the destructor must not touch Python objects.
  void abandon() {
    plan_ = nullptr;
  }

  explicit operator bool() const {
    return plan_ != nullptr;
  }
  const Plan& operator*() const {
    return plan_of(plan_);
  }

 private:
  PyObject* plan_ = nullptr;
};

#endif

} // namespace torchop

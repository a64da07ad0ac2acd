// current_plan.h: get an operator's call plan (plan.h) for a call, and keep it alive during the
// call.
#pragma once

#include "entry.h"
#include "thread.h"

namespace torchop {

inline bool is_usable(PyObject* plan) {
  return plan != nullptr && !is_outdated(plan_of(plan));
}

#ifdef Py_GIL_DISABLED

// RAII guard that gets the plan for a call, and compiles one if necessary. Storing the plan in
// `thread.plans` keeps it alive. Also marks the operator as running. If the operator was
// deregistered or the plan could not be compiled, the guard converts to false, and an exception is
// set.
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
    // If this call may have prevented replaced plans from being freed, free them now. Other calls
    // must not try, because as long as some call uses a replaced plan, they would all contend for
    // the mutex.
    if (C10_UNLIKELY(plans_to_free.load(std::memory_order_relaxed) != 0) && may_touch_objects_ &&
        (announced_another_ || plan != entry_.plan.load()))
      free_plans();
  }
  CurrentPlan(const CurrentPlan&) = delete;
  CurrentPlan& operator=(const CurrentPlan&) = delete;

  // Call this if the thread is being terminated, so that the destructor touches no Python objects.
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
  // Stores the current plan in `thread.plans`, and then checks that it is still current. If it is
  // not, a registration has replaced it, and may have searched `thread.plans` before we stored the
  // plan there. The registration may then free the plan, so try again with the new one.
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
  bool announced_another_ = false; // true if `thread.plans` contained a replaced plan for a moment
};

#else

// The same RAII guard for builds with the GIL. It owns a reference to the plan.
class CurrentPlan {
 public:
  // No Python code may run between the last check and taking the reference, because it might
  // release the GIL and let another thread deregister the operator.
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
  // This is cheaper than the destructor of THPObjectPtr, which calls Py_IsInitialized.
  ~CurrentPlan() {
    Py_XDECREF(plan_);
  }
  CurrentPlan(const CurrentPlan&) = delete;
  CurrentPlan& operator=(const CurrentPlan&) = delete;

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

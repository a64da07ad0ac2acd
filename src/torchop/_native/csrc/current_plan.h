// current_plan.h: the plan that a call follows, for as long as the call lasts.
#pragma once

#include "entry.h"
#include "thread.h"

namespace torchop {

inline bool is_usable(PyObject* plan) {
  return plan != nullptr && !is_outdated(*reinterpret_cast<const Plan*>(plan));
}

#ifdef Py_GIL_DISABLED

// Holds on to the plan that a call follows, and marks the operator as being called; false with an
// exception if there is no plan any more.
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
    // Others would wait for one another, for as long as a long call follows a plan that waits.
    if (C10_UNLIKELY(plans_to_free.load(std::memory_order_relaxed) != 0) && may_touch_objects_ &&
        (announced_another_ || plan != entry_.plan.load()))
      free_plans();
  }
  CurrentPlan(const CurrentPlan&) = delete;
  CurrentPlan& operator=(const CurrentPlan&) = delete;

  void abandon() {
    may_touch_objects_ = false;
  }

  explicit operator bool() const {
    return plan_ != nullptr;
  }
  const Plan& operator*() const {
    return *reinterpret_cast<const Plan*>(plan_);
  }

 private:
  // Announces the plan, and looks whether it still was the plan then: whoever replaced it before
  // may not have seen this.
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
  bool announced_another_ = false; // which may wait for this call
};

#else

// Holds on to the plan that a call follows; false with an exception if there is none any more.
class CurrentPlan {
 public:
  // No Python runs between the look at the entry and the end: in another thread it might end the
  // operator, whose table the plan points to.
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
  // A THPObjectPtr would ask first, out of line, whether there still is an interpreter.
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
    return *reinterpret_cast<const Plan*>(plan_);
  }

 private:
  PyObject* plan_ = nullptr;
};

#endif

} // namespace torchop

// current_plan.h: the plan that a call uses, kept valid for the duration of the call.
#pragma once

#include "entry.h"
#include "thread.h"

namespace torchop {

// Returns whether calls may use a plan; false for nullptr.
inline bool is_usable(PyObject* plan) {
  return plan != nullptr && !is_outdated(*reinterpret_cast<const Plan*>(plan));
}

#ifdef Py_GIL_DISABLED

// Publishes the plan of a call in `thread.plans`, so that it is not freed, and marks the operator
// as running. Compiles a plan if needed. False with an exception set if the operator was
// deregistered or compiling failed.
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
    // Frees replaced plans that this call may have kept alive. Not after every call: while one long
    // call uses a replaced plan, all others would contend for the mutex.
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
    return *reinterpret_cast<const Plan*>(plan_);
  }

 private:
  // Publishes the current plan, then checks that it is still current. If a registration replaced it
  // in between, the registration may not have seen it in `thread.plans`, so try again.
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
  bool announced_another_ = false; // a replaced plan may wait for this call
};

#else

// Owns a reference to the plan of a call. Compiles a plan if needed. False with an exception set if
// the operator was deregistered or compiling failed.
class CurrentPlan {
 public:
  // No Python code runs between the last check and taking the reference. It could release the GIL,
  // and another thread could deregister the operator, whose table the plan uses.
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
  // Not a THPObjectPtr, whose destructor calls Py_IsInitialized out of line.
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
    return *reinterpret_cast<const Plan*>(plan_);
  }

 private:
  PyObject* plan_ = nullptr;
};

#endif

} // namespace torchop

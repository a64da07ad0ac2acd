// current_plan.h: get an operator's call plan (plan.h) for a call, and keep it alive during the
// call.
#pragma once

#include "entry.h"

namespace torchop {

inline bool is_usable(PyObject* plan) {
  return plan != nullptr && !is_outdated(plan_of(plan));
}

// RAII guard that gets the plan for a call, compiling it if necessary. With the GIL, it owns a
// reference to the plan. In free-threaded Python it needs none, because plans are never freed
// there. If the operator was deregistered or the plan could not be compiled, the guard converts to
// false and sets a Python exception.
class CurrentPlan {
 public:
  // No Python code may run between the last check and taking the reference. It could release the
  // GIL, so that another thread replaces the plan or deregisters the operator.
  explicit CurrentPlan(Entry& entry) {
    PyObject* plan;
    while (C10_UNLIKELY(!is_usable(plan = entry.plan.load(std::memory_order_acquire)))) {
      if (!refresh_plan(entry))
        return;
    }
    if (C10_UNLIKELY(is_deregistered(entry)))
      raise_deregistered(entry);
    else
      plan_ = has_gil ? Py_NewRef(plan) : plan;
  }
  // Cheaper than the destructor of THPObjectPtr, which calls Py_IsInitialized.
  ~CurrentPlan() {
    if constexpr (has_gil)
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

} // namespace torchop

// current_plan.h: get an operator's call plan (plan.h) for a call, and keep it alive during the
// call.
#pragma once

#include "entry.h"

namespace torchop {

inline bool is_usable(PyObject* plan) {
  return plan != nullptr && !is_outdated(plan_of(plan));
}

// RAII guard that gets the plan for a call, compiling it if necessary. With the GIL, it owns a
// reference to the plan, while in free-threaded Python plans are never freed. If the operator was
// deregistered or the plan could not be compiled, the guard converts to false, and an exception is
// set.
class CurrentPlan {
 public:
  // No Python code may run between the last check and taking the reference. It might release the
  // GIL, and another thread could then replace the plan or deregister the operator.
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

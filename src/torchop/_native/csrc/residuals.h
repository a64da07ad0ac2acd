// residuals.h: what kernels return for the backward alone, from the kernel to the node.
//
// A kernel that is called here is the author's own function: it returns an object with the result
// and the residuals. Where it is called, the thread is in `recording` exactly if a gradient is
// recorded. Calls for which that is not enough run the function that Python made of the kernel.
#pragma once

#include <Python.h>

#include <atomic>

#include <c10/util/SmallVector.h>

#include "arguments.h"
#include "python_node.h"

namespace torchop {

// What guards the residuals among saved tensors, which are at these places.
struct Guard {
  c10::SmallVector<Py_ssize_t, 8> places;
  THPObjectPtr guard;
};

// Those of an operator; the plan keeps the objects alive. See `handover` and `declared`.
struct Residuals {
  PyObject* type = nullptr;      // of what kernels return; nullptr for operators without residuals
  PyObject* recording = nullptr; // what is known of threads, by their numbers
  PyObject* recording_state;     // that of a thread whose kernel is to return residuals
  PyObject* residuals_class;     // the class of what setup_context gets, a tuple
  PyObject* make_request; // handed(saved): what the `save` of the formula gets in other calls
  Py_ssize_t count;       // of residuals that are tensors; 0 if others may be among them
  // setup_context(ctx, inputs, output, residuals=...), as the author wrote it; it takes what there
  // is for keyword-only arguments before the output, if the operator has such.
  PyObject* setup;
  PyObject* guard; // guard(places): what guards those of the tensors that `ctx` saves
  // That of the first call, because the others mostly save their residuals at the same places.
  mutable std::atomic<Guard*> first_guard{nullptr};
  PyObject* mark; // mark(ctx, saved): guards them too, whatever `ctx` has them for
};

// Whether a kernel is on the way, or runs, that a call of this thread wants residuals of.
inline bool thread_records(PyObject* recording) {
  if (recording == nullptr || C10_LIKELY(PyDict_GET_SIZE(recording) == 0))
    return false;
  THPObjectPtr thread = checked(PyLong_FromUnsignedLong(PyThread_get_thread_ident()));
  return PyDict_Contains(recording, thread.get()) == 1;
}

// The `recording` of all operators with residuals, for the calls of others; nullptr until there is
// one. It is owned, because those others may outlive every plan that has it.
inline std::atomic<PyObject*> all_recordings = nullptr;

// Leaves what is known of this thread as it was before, also if no kernel took what it was told.
class Recording {
 public:
  // `recording` may be nullptr: then there is nothing to be known.
  explicit Recording(PyObject* recording) : recording_(recording) {
    if (recording_ == nullptr)
      return;
    thread_ = checked(PyLong_FromUnsignedLong(PyThread_get_thread_ident()));
    if (C10_UNLIKELY(PyDict_GET_SIZE(recording_) != 0))
      before_ = THPObjectPtr(Py_XNewRef(PyDict_GetItemWithError(recording_, thread_.get())));
  }
  ~Recording() {
    if (recording_ == nullptr || !Py_IsInitialized())
      return; // or the thread is being ended, and may not run Python
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback); // the kernel's exception, if it raised one
    const int failed = before_ ? PyDict_SetItem(recording_, thread_.get(), before_.get())
                               : PyDict_DelItem(recording_, thread_.get());
    if (failed < 0)
      PyErr_Clear();
    PyErr_Restore(type, value, traceback);
  }
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;

  // Tells the kernel that runs meanwhile to return residuals.
  void start(const Residuals& residuals) {
    if (PyDict_SetItem(recording_, thread_.get(), residuals.recording_state) < 0)
      throw_python_error();
  }

  // Tells the kernel of another operator, which runs meanwhile, that its call records nothing.
  void stop() {
    THPObjectPtr none = checked(PyTuple_Pack(2, PyTuple_GET_ITEM(before_.get(), 0), Py_False));
    if (PyDict_SetItem(recording_, thread_.get(), none.get()) < 0)
      throw_python_error();
  }

 private:
  PyObject* recording_;
  THPObjectPtr thread_, before_;
};

// Where what kernels return has the result, and the residuals: slots of its type.
inline std::atomic<Py_ssize_t> output_slot, saved_slot;

inline PyObject*& slot_of(PyObject* object, Py_ssize_t slot) {
  return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + slot);
}

// Takes what a kernel returned apart, if it returned residuals: leaves the result in `made`.
inline THPObjectPtr take_residuals(const Residuals& residuals, PyObject*& made) {
  if (residuals.type == nullptr || Py_TYPE(made) != reinterpret_cast<PyTypeObject*>(residuals.type))
    return {};
  PyObject *output = slot_of(made, output_slot), *saved = slot_of(made, saved_slot);
  if (C10_UNLIKELY(output == nullptr || saved == nullptr))
    return {}; // whoever made it did not call `residuals`
  THPObjectPtr both(made), taken(Py_NewRef(saved));
  made = Py_NewRef(output);
  return taken;
}

// make_handover(type, recording): two functions that kernels call, as `handover` has them in
// Python: `records`, and `returned`, which makes an object of the type.
PyObject* make_handover(PyObject*, PyObject* args);

// Hands the residuals of a call to setup_context, with `result` as a caller gets it, where it is
// plain what they are: so many tensors in memory of their own. False where Python has to look.
bool setup_with_residuals(
    const Residuals& residuals,
    const Values& values,
    PyObject* ctx,
    PyObject* result,
    PyObject* saved);

// What tells the backward which of the tensors that setup_context saved are residuals. Where it did
// not save all, or has tensors elsewhere, Python looks and tells `ctx` itself: then it is nullptr.
THPObjectPtr guard(const Residuals& residuals, PyObject* ctx, PyObject* to_save, PyObject* saved);

} // namespace torchop

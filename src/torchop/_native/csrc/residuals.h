// residuals.h: residuals are kernel outputs that only the backward uses. This file passes them from
// the kernel to the autograd node.
//
// A native call runs the author's function, which returns an object of type `Residuals::type` with
// the result and the residuals. While the function runs, `torchop.records_gradient()` returns the
// value in the dict `recording`. In cases that this file does not support, the call runs the Python
// wrapper from handover.py instead.
#pragma once

#include <Python.h>

#include <atomic>

#include <c10/util/SmallVector.h>

#include "arguments.h"
#include "python_node.h"

namespace torchop {

// Residuals are constants for autograd, so a second derivative through them would be silently
// wrong. Therefore, if the backward is itself recorded, the Python function `guard` replaces the
// residuals among the saved tensors with tensors whose gradient raises. A guard depends only on the
// residuals' positions.
struct Guard {
  c10::SmallVector<Py_ssize_t, 8> places;
  THPObjectPtr guard;
};

// The residuals of an operator. The plan owns the objects; see `Declared.in_plan` in declared.py.
struct Residuals {
  // The class of objects that kernels return; nullptr for operators without residuals.
  PyObject* type = nullptr;
  PyObject* recording = nullptr; // recording state by thread id; see `_recording` in handover.py
  PyObject* recording_state;     // the state that requests residuals from a kernel: (None, True)
  PyObject* residuals_class;     // the NamedTuple class for the argument `residuals`
  // make_request(saved) wraps residuals for the Python function `save` of the formula.
  PyObject* make_request;
  Py_ssize_t count; // number of residuals if all are tensors, else 0
  // The author's setup_context(ctx, inputs, [keyword_only_inputs,] output, residuals=...). None if
  // only Python code may call it.
  PyObject* setup;
  PyObject* guard; // guard(places) creates a guard
  // A cache: most calls save the residuals at the same positions as the first call.
  mutable std::atomic<Guard*> first_guard{nullptr};
  PyObject* mark; // mark(ctx, saved) finds the residuals in `ctx` and guards them
};

// Returns whether a call on this thread requested residuals from a kernel, which may be running.
inline bool thread_records(PyObject* recording) {
  if (recording == nullptr || C10_LIKELY(PyDict_GET_SIZE(recording) == 0))
    return false;
  THPObjectPtr thread = checked(PyLong_FromUnsignedLong(PyThread_get_thread_ident()));
  return PyDict_Contains(recording, thread.get()) == 1;
}

// The dict `Residuals::recording`, which all operators share. Owned; nullptr until there is an
// operator with residuals. Calls to operators without residuals use it too.
inline std::atomic<PyObject*> all_recordings = nullptr;

// RAII guard that saves and restores the recording state of this thread. Requires the GIL.
class Recording {
 public:
  // Does nothing if `recording` is nullptr.
  explicit Recording(PyObject* recording) : recording_(recording) {
    if (recording_ == nullptr)
      return;
    thread_ = checked(PyLong_FromUnsignedLong(PyThread_get_thread_ident()));
    if (C10_UNLIKELY(PyDict_GET_SIZE(recording_) != 0))
      before_ = THPObjectPtr(Py_XNewRef(PyDict_GetItemWithError(recording_, thread_.get())));
  }
  ~Recording() {
    if (recording_ == nullptr || !Py_IsInitialized())
      return; // finalization: the thread is being terminated and must not run Python
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback); // the exception of the kernel, if it raised one
    const int failed = before_ ? PyDict_SetItem(recording_, thread_.get(), before_.get())
                               : PyDict_DelItem(recording_, thread_.get());
    if (failed < 0)
      PyErr_Clear();
    PyErr_Restore(type, value, traceback);
  }
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;

  // Requests residuals from the next kernel.
  void start(const Residuals& residuals) {
    if (PyDict_SetItem(recording_, thread_.get(), residuals.recording_state) < 0)
      throw_python_error();
  }

  // Makes `records_gradient()` return False, in the kernel of another operator. The saved state
  // must not be empty.
  void stop() {
    THPObjectPtr none = checked(PyTuple_Pack(2, PyTuple_GET_ITEM(before_.get(), 0), Py_False));
    if (PyDict_SetItem(recording_, thread_.get(), none.get()) < 0)
      throw_python_error();
  }

 private:
  PyObject* recording_;
  THPObjectPtr thread_, before_;
};

// The offsets of the slots `output` and `saved` in objects of type `Residuals::type`.
inline std::atomic<Py_ssize_t> output_slot, saved_slot;

inline PyObject*& slot_of(PyObject* object, Py_ssize_t slot) {
  return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + slot);
}

// If `made` is an object of type `Residuals::type`, replaces it with the result and returns the
// tuple of residuals. Otherwise returns nullptr. `made` is an owned reference before and after.
inline THPObjectPtr take_residuals(const Residuals& residuals, PyObject*& made) {
  if (residuals.type == nullptr || Py_TYPE(made) != reinterpret_cast<PyTypeObject*>(residuals.type))
    return {};
  PyObject *output = slot_of(made, output_slot), *saved = slot_of(made, saved_slot);
  if (C10_UNLIKELY(output == nullptr || saved == nullptr))
    return {}; // not made by `torchop.residuals`
  THPObjectPtr both(made), taken(Py_NewRef(saved));
  made = Py_NewRef(output);
  return taken;
}

// make_handover(type, recording) returns C++ versions of `_records` and `_returned` in handover.py,
// which implement `torchop.records_gradient` and `torchop.residuals`.
PyObject* make_handover(PyObject*, PyObject* args);

// Calls the author's setup_context with the residuals. Returns false without calling it if the
// residuals are not tensors with memory of their own, or are not as many as declared.
bool setup_with_residuals(
    const Residuals& residuals,
    const Values& values,
    PyObject* ctx,
    PyObject* result,
    PyObject* saved);

// Returns the guard for the residuals that setup_context saved. If setup_context has not saved all
// residuals, or has stored tensors as attributes of `ctx`, calls `Residuals::mark` and returns
// nullptr.
THPObjectPtr guard(const Residuals& residuals, PyObject* ctx, PyObject* to_save, PyObject* saved);

} // namespace torchop

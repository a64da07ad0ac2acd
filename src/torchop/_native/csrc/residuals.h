// residuals.h: pass residuals (kernel outputs that only the backward uses) from the kernel to the
// autograd node.
//
// A native call runs the author's function, which returns an object of type `Residuals::type` with
// the result and the residuals. Before that, `Recording` stores in the dict `recording` whether the
// call records a gradient, for `torchop.records_gradient()`. In cases that this file does not
// support, the call runs the wrapper from `handing_over` (handover.py) instead.
#pragma once

#include <Python.h>

#include <atomic>

#include <c10/util/SmallVector.h>

#include "arguments.h"
#include "python_node.h"

namespace torchop {

// A Python function that is applied to the saved tensors when a backward is itself recorded. It
// replaces the residuals by tensors whose gradient raises: they are constants for autograd, so a
// second derivative would be silently wrong. It depends only on the places of the residuals among
// the saved tensors.
struct Guard {
  c10::SmallVector<Py_ssize_t, 8> places;
  THPObjectPtr guard;
};

// How an operator handles residuals. The plan owns the objects; see `Declared.in_plan` in
// declared.py.
struct Residuals {
  // Class of the kernel's return value; nullptr for operators without residuals.
  PyObject* type = nullptr;
  PyObject* recording = nullptr; // recording state by thread id, see `_recording` in handover.py
  PyObject* recording_state;     // the state that requests residuals from the kernel: (None, True)
  PyObject* residuals_class;     // NamedTuple class of the argument `residuals` of setup_context
  // make_request(saved) wraps residuals for the formula's Python `save`, if setup_with_residuals
  // rejects them.
  PyObject* make_request;
  Py_ssize_t count; // number of residuals if all are tensors, else 0
  // The author's setup_context(ctx, inputs, [keyword_only_inputs,] output, residuals=...). None if
  // it must be called through Python.
  PyObject* setup;
  PyObject* guard; // guard(places) makes a guard
  // The guard of the first call. Later calls mostly save their residuals at the same places.
  mutable std::atomic<Guard*> first_guard{nullptr};
  PyObject* mark; // mark(ctx, saved) finds the residuals in `ctx` and guards them
};

// Returns whether this thread is inside a call that records a gradient with residuals: a kernel
// further up the stack, or the next one, was requested to return them.
inline bool thread_records(PyObject* recording) {
  if (recording == nullptr || C10_LIKELY(PyDict_GET_SIZE(recording) == 0))
    return false;
  THPObjectPtr thread = checked(PyLong_FromUnsignedLong(PyThread_get_thread_ident()));
  return PyDict_Contains(recording, thread.get()) == 1;
}

// The `recording` dict, which all operators share. Operators without residuals use it, and may
// outlive the plans that have it, so this reference is owned. nullptr until an operator has
// residuals.
inline std::atomic<PyObject*> all_recordings = nullptr;

// Saves the recording state of this thread, and restores it on destruction, even if the kernel
// raised or ignored the request. Requires the GIL.
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

  // Makes `records_gradient()` False in the kernel of another operator. Requires a saved state.
  void stop() {
    THPObjectPtr none = checked(PyTuple_Pack(2, PyTuple_GET_ITEM(before_.get(), 0), Py_False));
    if (PyDict_SetItem(recording_, thread_.get(), none.get()) < 0)
      throw_python_error();
  }

 private:
  PyObject* recording_;
  THPObjectPtr thread_, before_;
};

// Offsets of the slots `output` and `saved` in objects of `Residuals::type`.
inline std::atomic<Py_ssize_t> output_slot, saved_slot;

inline PyObject*& slot_of(PyObject* object, Py_ssize_t slot) {
  return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + slot);
}

// If `made` has residuals, replaces it by the result and returns the tuple of residuals. Otherwise
// returns nullptr and leaves `made` unchanged. Owns and replaces the reference in `made`.
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

// make_handover(type, recording) returns C++ versions of `_records` and `_returned` of handover.py,
// which kernels call through `torchop.records_gradient` and `torchop.residuals`.
PyObject* make_handover(PyObject*, PyObject* args);

// Calls the author's setup_context with the residuals, if they need no checks in Python: the
// declared number of tensors, in memory of their own. Otherwise returns false, and has called
// nothing. Throws if setup_context raises.
bool setup_with_residuals(
    const Residuals& residuals,
    const Values& values,
    PyObject* ctx,
    PyObject* result,
    PyObject* saved);

// Returns the guard for the residuals that setup_context saved. If it did not save all of them, or
// stored tensors as attributes of `ctx`, calls `Residuals::mark` and returns nullptr.
THPObjectPtr guard(const Residuals& residuals, PyObject* ctx, PyObject* to_save, PyObject* saved);

} // namespace torchop

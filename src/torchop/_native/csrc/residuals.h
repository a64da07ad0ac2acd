// residuals.h: pass residuals from the kernel to the autograd node. Residuals are outputs of a
// kernel that are only used in the backward pass.
//
// A native call (a call without the dispatcher) runs the author's function directly. The function
// calls `torchop.records_gradient()` to find out whether residuals are needed, and then returns
// them with the result in an object of the class `Residuals::type`. We store the answer for
// `records_gradient` in the dict `recording`, keyed by thread id. Calls that this file does not
// support fall back to the Python wrapper in handover.py.
#pragma once

#include <Python.h>

#include <atomic>

#include <c10/util/SmallVector.h>

#include "arguments.h"
#include "python_node.h"

namespace torchop {

// Prevents second derivatives through residuals. They would be silently wrong, because autograd
// treats residuals as constants. If the backward pass is itself recorded (`create_graph=True`), the
// Python function `guard` replaces the residuals among the saved tensors with tensors that raise an
// error when they are differentiated. `places` are the positions of the residuals among the saved
// tensors.
struct Guard {
  c10::SmallVector<Py_ssize_t, 8> places;
  THPObjectPtr guard;
};

// How an operator returns and saves residuals. `Declared.in_plan` in declared.py creates the
// objects. The call plan owns them, so all pointers here are borrowed.
struct Residuals {
  // The class of objects that contain a result and residuals, or nullptr if the operator has no
  // residuals.
  PyObject* type = nullptr;
  PyObject* recording = nullptr; // dict: thread id -> state; see `_recording` in handover.py
  PyObject* recording_state;     // (None, True), the state that requests residuals from a kernel
  PyObject* residuals_class;     // the NamedTuple class of setup_context's argument `residuals`
  // make_request(saved) wraps the residuals for the Python function `Gradient::setup_context`,
  // which runs if C++ cannot call the author's setup_context itself.
  PyObject* make_request;
  Py_ssize_t count; // the number of residuals; 0 if not all of them are tensors
  // The author's setup_context(ctx, inputs, [keyword_only_inputs,] output, residuals=...). None if
  // C++ must not call it directly.
  PyObject* setup;
  PyObject* guard; // guard(places) creates the Python function `Guard::guard`
  // The guard of the first call. Most calls save the residuals at the same positions, so they can
  // reuse it.
  mutable std::atomic<Guard*> first_guard{nullptr};
  PyObject* mark; // mark(ctx, saved) finds the residuals anywhere in `ctx`, and guards them
};

// Returns whether this thread is running a call that has requested residuals from its kernel. If
// so, the dict `recording` contains the thread's id.
inline bool thread_records(PyObject* recording) {
  if (recording == nullptr || C10_LIKELY(PyDict_GET_SIZE(recording) == 0))
    return false;
  THPObjectPtr thread = checked(PyLong_FromUnsignedLong(PyThread_get_thread_ident()));
  return PyDict_Contains(recording, thread.get()) == 1;
}

// An owned reference to the dict `Residuals::recording`, which all operators with residuals share.
// Calls to operators without residuals use this pointer to find it. It is nullptr until an operator
// with residuals is first called.
inline std::atomic<PyObject*> all_recordings = nullptr;

// RAII guard that restores this thread's item in the dict `recording` at the end of the scope. The
// GIL must be held.
class Recording {
 public:
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

  void start(const Residuals& residuals) {
    if (PyDict_SetItem(recording_, thread_.get(), residuals.recording_state) < 0)
      throw_python_error();
  }

  // Makes `records_gradient()` return False in this thread until the guard is destroyed. This is
  // for a kernel that must return residuals and calls an operator without residuals. The dict
  // `recording` must have contained an item for this thread when the guard was created.
  void stop() {
    THPObjectPtr none = checked(PyTuple_Pack(2, PyTuple_GET_ITEM(before_.get(), 0), Py_False));
    if (PyDict_SetItem(recording_, thread_.get(), none.get()) < 0)
      throw_python_error();
  }

 private:
  PyObject* recording_;
  THPObjectPtr thread_, before_;
};

inline std::atomic<Py_ssize_t> output_slot, saved_slot;

inline PyObject*& slot_of(PyObject* object, Py_ssize_t slot) {
  return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + slot);
}

// If `made` is an object of the class `Residuals::type`, unpacks it: sets `made` to the result and
// returns the tuple of residuals. Otherwise returns nullptr. `made` is an owned reference before
// and after the call.
inline THPObjectPtr take_residuals(const Residuals& residuals, PyObject*& made) {
  if (residuals.type == nullptr || Py_TYPE(made) != reinterpret_cast<PyTypeObject*>(residuals.type))
    return {};
  PyObject *output = slot_of(made, output_slot), *saved = slot_of(made, saved_slot);
  if (C10_UNLIKELY(output == nullptr || saved == nullptr))
    return {}; // a slot is empty, so the object was not created by `torchop.residuals`
  THPObjectPtr both(made), taken(Py_NewRef(saved));
  made = Py_NewRef(output);
  return taken;
}

// make_handover(type, recording) returns C++ implementations of `_records` and `_returned` in
// handover.py.
PyObject* make_handover(PyObject*, PyObject* args);

// Calls the author's setup_context with the residuals. If the number of residuals is wrong or one
// of them is not a tensor that owns its memory, returns false without calling setup_context.
bool setup_with_residuals(
    const Residuals& residuals,
    const Values& values,
    PyObject* ctx,
    PyObject* result,
    PyObject* saved);

// Returns the function `Guard::guard` for the residuals that setup_context saved. A guard only
// covers saved tensors, so if some residuals were not saved or attributes of `ctx` contain tensors,
// calls `Residuals::mark` instead and returns nullptr.
THPObjectPtr guard(const Residuals& residuals, PyObject* ctx, PyObject* to_save, PyObject* saved);

} // namespace torchop

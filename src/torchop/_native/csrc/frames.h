// frames.h: keeps Dynamo out of kernels.
//
// A kernel that runs below a compiled frame would otherwise be traced as if it were the user's
// program. The dispatcher kernels carry a mark in their code object; the user's function is not
// ours to mark, since it may be compiled by its own name.
#pragma once

#include <Python.h>

namespace torchop {

// torch._C._dynamo.eval_frame.set_eval_frame, found when the extension is loaded.
inline PyObject* set_eval_frame = nullptr;

// The only one that PyTorch runs in.
inline PyInterpreterState* interpreter = nullptr;

class WithoutDynamo {
 public:
  WithoutDynamo() {
    if (_PyInterpreterState_GetEvalFrameFunc(interpreter) != _PyEval_EvalFrameDefault)
      suspend();
  }
  ~WithoutDynamo() {
    if (previous_ != nullptr)
      resume();
  }
  WithoutDynamo(const WithoutDynamo&) = delete;
  WithoutDynamo& operator=(const WithoutDynamo&) = delete;

 private:
  __attribute__((noinline, cold)) void suspend() {
    previous_ = PyObject_CallOneArg(set_eval_frame, Py_None);
    PyErr_Clear();
  }

  __attribute__((noinline, cold)) void resume() {
    if (!Py_IsInitialized())
      return; // the thread is being ended, and may not run Python
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback); // the kernel's exception, if it raised one
    Py_XDECREF(PyObject_CallOneArg(set_eval_frame, previous_));
    PyErr_Restore(type, value, traceback); // also in place of what this may have raised
    Py_DECREF(previous_);
  }

  PyObject* previous_ = nullptr;
};

} // namespace torchop

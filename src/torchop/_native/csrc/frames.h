// frames.h: prevent Dynamo from tracing kernels, i.e. the Python functions that native calls run.
//
// Inside a frame that Dynamo has compiled, Dynamo's eval-frame callback is active, so Dynamo would
// also trace the kernels that native calls run. torchop marks its own functions so that Dynamo
// skips them. It cannot mark kernels, because their authors may want to compile the same functions
// themselves, so native calls disable the callback instead.
#pragma once

#include <Python.h>

namespace torchop {

// torch._C._dynamo.eval_frame.set_eval_frame. Owned. Set when the extension is loaded.
inline PyObject* set_eval_frame = nullptr;

// The main interpreter, which is the only one because PyTorch does not support subinterpreters.
inline PyInterpreterState* interpreter = nullptr;

// RAII guard that disables Dynamo's callback in this thread. It costs only one comparison if Dynamo
// was never used.
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
      return; // finalization: the thread is being terminated and must not run Python
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback); // the exception of the kernel, if it raised one
    Py_XDECREF(PyObject_CallOneArg(set_eval_frame, previous_));
    PyErr_Restore(type, value, traceback); // discards an exception from set_eval_frame
    Py_DECREF(previous_);
  }

  PyObject* previous_ = nullptr;
};

} // namespace torchop

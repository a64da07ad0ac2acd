// overloads.cpp: call objects in torch.ops without a Python frame for `OpOverload.__call__`.
//
// `OpOverload.__call__` only calls `self._op`, but its frame takes longer than a whole native call.
// We cannot use a subclass with a faster `__call__`, because PyTorch checks for the exact class in
// many places. So we replace the slot tp_call of the class and leave its attribute `__call__`
// unchanged. If other code later assigns to `__call__`, CPython sets tp_call again, so that code
// takes precedence over our function.
#include "overloads.h"

#include <array>
#include <atomic>

#include <torch/csrc/utils/object_ptr.h>

#include "dispatch.h"
#include "free_threads.h"
#include "operator.h"

namespace torchop {

namespace {

// The classes whose tp_call we have replaced (OpOverload and OpOverloadPacket), and the original
// functions. Once set, these never change.
std::array<PyTypeObject*, 2> patched_types;
std::array<ternaryfunc, 2> original_calls;

// Pairs with the release store in `replace`, so that a thread that calls one of the new functions
// also sees the variables that were set before the replacement.
void after_replacement() {
  if constexpr (!has_gil)
    std::atomic_thread_fence(std::memory_order_acquire);
}

// Returns `self._op` (new reference) if it is an Operator, and nullptr otherwise.
THPObjectPtr replaced_function(PyObject* self) {
  static PyObject* name = PyUnicode_InternFromString("_op");
  // `_op` is in the instance dict, so this lookup calls no descriptor.
  THPObjectPtr function(PyObject_GenericGetAttr(self, name));
  if (C10_LIKELY(function && Py_TYPE(function.get()) == operator_type))
    return function;
  PyErr_Clear();
  return {};
}

// Calls the Operator in `_op`, or else the original tp_call.
template <size_t Index>
__attribute__((noinline)) PyObject* call_replaced(
    PyObject* self, PyObject* args, PyObject* keywords) {
  THPObjectPtr function = replaced_function(self);
  // Three cases need the Python frame of the original `__call__`:
  //
  // 1. The Operator has no Entry. `OpOverloadPacket.__call__` then selects some overloads in
  // Python.
  // 2. torch.jit.trace is running. It runs a function twice and compares the frames of the operator
  //    calls. The second run must not differ because a call has become native.
  // 3. The next check for `__torch_function__` must be skipped. Since PyTorch 2.14,
  //    `OpOverload.__call__` then calls another C++ function.
  if (C10_UNLIKELY(
          !function || !has_entry(function.get()) || is_traced() || skips_torch_functions()))
    return original_calls[Index](self, args, keywords);
  note_call(self);
  note_call(function.get());
  return PyVectorcall_Call(function.get(), args, keywords);
}

// This is instantiated once per class. The function receives only the object, which may be an
// instance of a subclass, so it could not tell otherwise which tp_call it replaces. The first call
// below is a tail call, because another stack frame would double the overhead for operators whose
// `_op` we have not replaced.
template <size_t Index>
PyObject* call_overload(PyObject* self, PyObject* args, PyObject* keywords) {
  after_replacement();
  if (C10_LIKELY(!has_operator(self)))
    return original_calls[Index](self, args, keywords);
  return call_replaced<Index>(self, args, keywords);
}

ternaryfunc original_handle_call = nullptr;

constexpr std::array<ternaryfunc, 2> replacements{call_overload<0>, call_overload<1>};

PyObject* call_stock_handle(PyObject* self, PyObject* args, PyObject* keywords) {
  after_replacement();
  static PyObject* name = PyUnicode_InternFromString("_opoverload");
  THPObjectPtr overload(PyObject_GenericGetAttr(self, name));
  for (size_t index = 0; overload && index < patched_types.size(); ++index) {
    // If other code has assigned to `OpOverload.__call__`, our function is no longer in the slot.
    // So fall through to the original `CustomOpDef.__call__`, which calls the assigned function.
    if (Py_TYPE(overload.get()) == patched_types[index] &&
        patched_types[index]->tp_call == replacements[index])
      return replacements[index](overload.get(), args, keywords);
  }
  PyErr_Clear();
  return original_handle_call(self, args, keywords);
}

// The store is atomic, because other threads may read the slot concurrently. They get either the
// old or the new function, and both work.
void replace(ternaryfunc& slot, ternaryfunc function) {
  __atomic_store_n(&slot, function, __ATOMIC_RELEASE);
}

} // namespace

PyObject* patch_handle_calls(PyObject*, PyObject* args) {
  PyObject* object;
  if (!PyArg_ParseTuple(args, "O!", &PyType_Type, &object))
    return nullptr;
  auto* type = reinterpret_cast<PyTypeObject*>(object);
  if (type->tp_call != call_stock_handle) {
    original_handle_call = type->tp_call;
    replace(type->tp_call, call_stock_handle);
  }
  Py_RETURN_NONE;
}

PyObject* patch_calls(PyObject*, PyObject* object) {
  if (!PyType_Check(object)) {
    PyErr_SetString(PyExc_TypeError, "patch_calls expects a class");
    return nullptr;
  }
  auto* type = reinterpret_cast<PyTypeObject*>(object);
  for (size_t index = 0; index < patched_types.size(); ++index) {
    if (patched_types[index] == nullptr) {
      original_calls[index] = type->tp_call;
      patched_types[index] = reinterpret_cast<PyTypeObject*>(Py_NewRef(object));
      replace(type->tp_call, replacements[index]);
    }
    if (patched_types[index] == type)
      Py_RETURN_NONE;
  }
  PyErr_SetString(PyExc_RuntimeError, "tp_call of two classes was replaced before");
  return nullptr;
}

} // namespace torchop

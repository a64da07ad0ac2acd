// overloads.cpp: call objects of torch.ops without the Python frame of `OpOverload.__call__`.
//
// `OpOverload.__call__` only calls `self._op`, but takes longer than a whole native call. A
// subclass would not work, because PyTorch checks for the exact class in many places. So this file
// replaces the class's tp_call slot. It does not change the attribute `__call__`. If other code
// assigns to `__call__`, CPython sets the slot again, which undoes the replacement.
#include "overloads.h"

#include <array>
#include <atomic>

#include <c10/util/flat_hash_map.h>
#include <torch/csrc/utils/object_ptr.h>

#include "dispatch.h"
#include "frames.h"
#include "free_threads.h"
#include "lifetime.h"
#include "operator.h"

namespace torchop {

namespace {

// The patched types (OpOverload and OpOverloadPacket) and their original tp_call. Never reset.
std::array<PyTypeObject*, 2> patched_types;
std::array<ternaryfunc, 2> original_calls;

// Pairs with the release store in `replace`. A thread that calls the new function then also sees
// the variables that were set before.
void after_replacement() {
  if constexpr (!has_gil)
    std::atomic_thread_fence(std::memory_order_acquire);
}

// The callback passed to `patch_calls`. Owned, never freed.
PyObject* before_first_call = nullptr;

// The addresses of objects for which `before_first_call` ran. Cleared when any operator is
// deregistered, because afterwards an address may belong to a new object, or an object to a new
// operator.
struct PreparedObjects {
  ska::flat_hash_set<PyObject*> objects;
  size_t deregistered = 0;
};

#ifdef Py_GIL_DISABLED
thread_local PreparedObjects prepared; // needs no lock
#else
auto& prepared = *new PreparedObjects();
#endif

// Runs `before_first_call` if it has not run for this object. It may replace `_op` with an Operator
// that counts calls. Returns 1 if it ran, 0 if not, and -1 with an exception set if it failed.
int prepare_call(PyObject* self) {
  const size_t deregistered = deregistered_operators.load();
  if (prepared.deregistered != deregistered)
    prepared = {{}, deregistered};
  // The callback must not run during finalization, because its globals are cleared.
  if (C10_LIKELY(prepared.objects.count(self) != 0) || !Py_IsInitialized())
    return 0;
  WithoutDynamo frames;
  if (THPObjectPtr(PyObject_CallOneArg(before_first_call, self)).get() == nullptr)
    return -1;
  // Insert the object last, because a thread that finds it does not wait for the callback.
  if (prepared.deregistered == deregistered)
    prepared.objects.insert(self);
  return 1;
}

// Returns `self._op` if it is an Operator (new reference), otherwise nullptr.
THPObjectPtr replaced_function(PyObject* self) {
  if (!has_operator(self))
    return {};
  static PyObject* name = PyUnicode_InternFromString("_op");
  // PyTorch stores `_op` in the instance dict, so this lookup runs no descriptor.
  THPObjectPtr function(PyObject_GenericGetAttr(self, name));
  if (C10_LIKELY(function && Py_TYPE(function.get()) == operator_type))
    return function;
  PyErr_Clear();
  return {};
}

// Returns whether `_op` is certainly PyTorch's function, and `before_first_call` has run.
bool is_stock(PyObject* self) {
  return !has_operator(self) && prepared.deregistered == deregistered_operators.load() &&
      prepared.objects.count(self) != 0;
}

// Calls the Operator in `_op`, or the original tp_call. Runs `before_first_call` if necessary.
template <size_t Index>
__attribute__((noinline)) PyObject* call_replaced_or_first(
    PyObject* self, PyObject* args, PyObject* keywords) {
  THPObjectPtr function;
  while (C10_UNLIKELY(!(function = replaced_function(self)))) {
    const int was_first = prepare_call(self);
    if (was_first < 0)
      return nullptr;
    if (was_first == 0)
      break;
  }
  // Three cases need the Python frame of the original `__call__`:
  // 1. The Operator has no entry. torchop finds running calls without an entry by their frames.
  // 2. torch.jit.trace runs a function twice and compares the frames of operator calls. A call must
  //    not become native between the two runs.
  // 3. Since PyTorch 2.14, `OpOverload.__call__` calls another C++ function if
  //    `__torch_function__` is skipped.
  if (C10_UNLIKELY(
          !function || !has_entry(function.get()) || is_traced() || skips_torch_functions()))
    return original_calls[Index](self, args, keywords);
  note_call(self);
  note_call(function.get());
  return PyVectorcall_Call(function.get(), args, keywords);
}

// One instantiation per class, because tp_call receives only the object, which may be an instance
// of a subclass. The call to `original_calls` is a tail call, because one more frame would double
// the overhead for operators without native calls.
template <size_t Index>
PyObject* call_overload(PyObject* self, PyObject* args, PyObject* keywords) {
  after_replacement();
  if (C10_LIKELY(is_stock(self)))
    return original_calls[Index](self, args, keywords);
  return call_replaced_or_first<Index>(self, args, keywords);
}

// The original tp_call of CustomOpDef.
ternaryfunc original_handle_call = nullptr;

constexpr std::array<ternaryfunc, 2> replacements{call_overload<0>, call_overload<1>};

PyObject* call_stock_handle(PyObject* self, PyObject* args, PyObject* keywords) {
  after_replacement();
  static PyObject* name = PyUnicode_InternFromString("_opoverload");
  THPObjectPtr overload(PyObject_GenericGetAttr(self, name));
  for (size_t index = 0; overload && index < patched_types.size(); ++index) {
    // If other code assigned to `__call__` of the class, the slot has another function. The
    // original `__call__` of the handle, called below, uses it.
    if (Py_TYPE(overload.get()) == patched_types[index] &&
        patched_types[index]->tp_call == replacements[index])
      return replacements[index](overload.get(), args, keywords);
  }
  PyErr_Clear();
  return original_handle_call(self, args, keywords);
}

// Other threads may read the slot at the same time. Both functions are valid.
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

PyObject* patch_calls(PyObject*, PyObject* args) {
  PyObject *object, *callback;
  if (!PyArg_ParseTuple(args, "O!O", &PyType_Type, &object, &callback))
    return nullptr;
  auto* type = reinterpret_cast<PyTypeObject*>(object);
  if (before_first_call == nullptr)
    before_first_call = Py_NewRef(callback);
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

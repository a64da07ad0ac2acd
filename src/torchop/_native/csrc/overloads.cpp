// overloads.cpp: call objects of torch.ops without the Python frame of `OpOverload.__call__`.
//
// `OpOverload.__call__` only calls `self._op`, but takes longer than a whole native call. PyTorch
// checks for the exact class in many places, so a subclass would break it. This file therefore
// overwrites the tp_call slot of the class. The attribute `__call__` is unchanged. Assigning to it
// makes CPython refill the slot, which undoes the replacement.
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

// The types whose tp_call was replaced (OpOverload and OpOverloadPacket), and the original slots.
// Never reset.
std::array<PyTypeObject*, 2> patched_types;
std::array<ternaryfunc, 2> original_calls;

// Pairs with the release store in `replace`: a thread that calls the new slot also sees the globals
// that were written before it.
void after_replacement() {
  if constexpr (!has_gil)
    std::atomic_thread_fence(std::memory_order_acquire);
}

// See `shorten_calls`; owned, never freed.
PyObject* before_first_call = nullptr;

// The objects for which `before_first_call` ran, by address. Discarded when any operator is
// deregistered, because an address may then belong to another object, or the object to another
// operator.
struct PreparedObjects {
  ska::flat_hash_set<PyObject*> objects;
  size_t deregistered = 0;
};

#ifdef Py_GIL_DISABLED
thread_local PreparedObjects prepared; // per thread, so it needs no lock
#else
auto& prepared = *new PreparedObjects();
#endif

// Runs `before_first_call` unless it ran for this object. The callback makes PyTorch's function
// count its calls (see operator.cpp): deregistering waits only for counted calls. Returns 1 if it
// ran, 0 if not, -1 with an exception.
int prepare_call(PyObject* self) {
  const size_t deregistered = deregistered_operators.load();
  if (prepared.deregistered != deregistered)
    prepared = {{}, deregistered};
  // During finalization, the callback would find its modules cleared.
  if (C10_LIKELY(prepared.objects.count(self) != 0) || !Py_IsInitialized())
    return 0;
  WithoutDynamo frames;
  if (THPObjectPtr(PyObject_CallOneArg(before_first_call, self)).get() == nullptr)
    return -1;
  // Inserted after the callback, because another thread that finds the object calls it without
  // waiting for the callback.
  if (prepared.deregistered == deregistered)
    prepared.objects.insert(self);
  return 1;
}

// Returns the Operator in `self._op` (new reference), or nullptr if another function is there.
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

// Returns whether the object certainly calls PyTorch's function and `before_first_call` has run for
// it.
bool is_stock(PyObject* self) {
  return !has_operator(self) && prepared.deregistered == deregistered_operators.load() &&
      prepared.objects.count(self) != 0;
}

// Calls the object's Operator directly, or the original tp_call.
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
  // The original `__call__` is needed in three cases. (1) The call is only counted: torchop finds
  // running calls without an entry by their Python frame. (2) TorchScript traces a function twice
  // and compares the Python frames, so a call must not become native between the two runs. (3)
  // Since PyTorch 2.14, `OpOverload.__call__` may call another C++ function if torch functions are
  // skipped.
  if (C10_UNLIKELY(
          !function || !has_entry(function.get()) || is_traced() || skips_torch_functions()))
    return original_calls[Index](self, args, keywords);
  note_call(self);
  note_call(function.get());
  return PyVectorcall_Call(function.get(), args, keywords);
}

// One instantiation per class, because tp_call receives only the object, whose type may be a
// subclass. The call of `original_calls` is a tail call: another frame on the return path would
// double the overhead for operators without native calls.
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
    // If `__call__` of the class was assigned after shorten_calls, the slot has another function.
    // Then fall through to the original `__call__`, which uses the assigned one.
    if (Py_TYPE(overload.get()) == patched_types[index] &&
        patched_types[index]->tp_call == replacements[index])
      return replacements[index](overload.get(), args, keywords);
  }
  PyErr_Clear();
  return original_handle_call(self, args, keywords);
}

// Other threads may read the slot at the same time. Both values are valid for them.
void replace(ternaryfunc& slot, ternaryfunc function) {
  __atomic_store_n(&slot, function, __ATOMIC_RELEASE);
}

} // namespace

PyObject* shorten_handle_calls(PyObject*, PyObject* args) {
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

PyObject* shorten_calls(PyObject*, PyObject* args) {
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
  PyErr_SetString(PyExc_RuntimeError, "calls of two classes were shortened before");
  return nullptr;
}

} // namespace torchop

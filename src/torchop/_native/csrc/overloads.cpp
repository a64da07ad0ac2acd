// overloads.cpp: calls of the objects of torch.ops, without a Python frame.
//
// `OpOverload.__call__` does nothing but call `self._op`, and takes longer for it than all of a
// native call. A subclass would not do: PyTorch asks for exactly that class. So the slot for calls
// of the class itself is ours, and hands over whatever is not an operator of ours. `__call__` stays
// what it is. If anybody assigns to it, the interpreter fills the slot anew, and we are out.
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

// OpOverload and OpOverloadPacket, and what their slots held.
std::array<PyTypeObject*, 2> patched_types;
std::array<ternaryfunc, 2> original_calls;

// Whoever comes through a slot sees what was written before it was.
void after_replacement() {
  if constexpr (!has_gil)
    std::atomic_thread_fence(std::memory_order_acquire);
}

// What is called with an object of torch.ops before it is called for the first time.
PyObject* before_first_call = nullptr;

// The objects for which that was done, and how many operators had ended by then.
struct PreparedObjects {
  ska::flat_hash_set<PyObject*> objects;
  size_t deregistered = 0;
};

#ifdef Py_GIL_DISABLED
thread_local PreparedObjects prepared; // no other thread may read it
#else
auto& prepared = *new PreparedObjects();
#endif

// PyTorch's own function does not count the calls of an operator of ours, so another thread that
// ends the operator would not wait for those. Whether this was the first call of the object; -1
// with an exception.
int prepare_call(PyObject* self) {
  const size_t deregistered = deregistered_operators.load();
  // An object may be that of another operator now, and another one may be where it was.
  if (prepared.deregistered != deregistered)
    prepared = {{}, deregistered};
  // While Python ends, its modules are empty.
  if (C10_LIKELY(prepared.objects.count(self) != 0) || !Py_IsInitialized())
    return 0;
  WithoutDynamo frames;
  if (THPObjectPtr(PyObject_CallOneArg(before_first_call, self)).get() == nullptr)
    return -1;
  // Not before that: another thread may call the object meanwhile.
  if (prepared.deregistered == deregistered)
    prepared.objects.insert(self);
  return 1;
}

// The Operator that an object calls; nullptr if it calls something else.
THPObjectPtr replaced_function(PyObject* self) {
  if (!has_operator(self))
    return {};
  static PyObject* name = PyUnicode_InternFromString("_op");
  THPObjectPtr function(PyObject_GenericGetAttr(self, name)); // it is in the dictionary
  if (C10_LIKELY(function && Py_TYPE(function.get()) == operator_type))
    return function;
  PyErr_Clear();
  return {};
}

// Whether it is known that PyTorch's function is all there is to call.
bool is_stock(PyObject* self) {
  return !has_operator(self) && prepared.deregistered == deregistered_operators.load() &&
      prepared.objects.count(self) != 0;
}

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
  // By its frame, Python finds that a call runs which has no entry. TorchScript traces a function
  // twice, and compares the frames, while the first call may become native in between. And since
  // 2.14, `__call__` may have something else to call where torch functions are skipped.
  if (C10_UNLIKELY(
          !function || !has_entry(function.get()) || is_traced() || skips_torch_functions()))
    return original_calls[Index](self, args, keywords);
  note_call(self);
  note_call(function.get());
  return PyVectorcall_Call(function.get(), args, keywords);
}

// One function for each class: a slot gets no more than the object, which may be of a subclass. The
// calls of others are handed over by a jump: to return through a frame here costs as much again.
template <size_t Index>
PyObject* call_overload(PyObject* self, PyObject* args, PyObject* keywords) {
  after_replacement();
  if (C10_LIKELY(is_stock(self)))
    return original_calls[Index](self, args, keywords);
  return call_replaced_or_first<Index>(self, args, keywords);
}

// What the slot of CustomOpDef held.
ternaryfunc original_handle_call = nullptr;

constexpr std::array<ternaryfunc, 2> replacements{call_overload<0>, call_overload<1>};

PyObject* call_stock_handle(PyObject* self, PyObject* args, PyObject* keywords) {
  after_replacement();
  static PyObject* name = PyUnicode_InternFromString("_opoverload");
  THPObjectPtr overload(PyObject_GenericGetAttr(self, name));
  for (size_t index = 0; overload && index < patched_types.size(); ++index) {
    // Not if somebody gave the class of overloads another `__call__` since.
    if (Py_TYPE(overload.get()) == patched_types[index] &&
        patched_types[index]->tp_call == replacements[index])
      return replacements[index](overload.get(), args, keywords);
  }
  PyErr_Clear();
  return original_handle_call(self, args, keywords);
}

// Other threads may be calling objects of the class, by the old function or by the new one.
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

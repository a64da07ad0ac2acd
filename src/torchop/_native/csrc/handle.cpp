// handle.cpp: the class of operator handles whose calls run in C++, without a Python frame. See
// handle.h.
//
// When the extension is loaded, the user may already have handles of the Python class,
// torchop.CustomOp. To make their calls native, we assign to their `__class__`. CPython allows this
// only if instances of both classes have the same memory layout, so the Python class reserves two
// `__slots__` in which the native class stores the vectorcall function and the Entry. Once the
// extension is loaded, new handles are created as instances of the native class right away, because
// assigning to `__class__` would replace an instance's key-sharing dict with a larger one.
//
// The native class must be created in C. If a class is written in Python, or `__call__` is assigned
// to it later, CPython sets tp_call to `slot_tp_call`, which calls the Python method `__call__`.
#include "handle.h"

#include <structmember.h>
#include <torch/csrc/Exceptions.h>

#include "entry.h"

namespace torchop {

namespace {

PyTypeObject* base_type = nullptr; // torchop.CustomOp
PyTypeObject* handle_type = nullptr;
Py_ssize_t call_offset = 0;  // where instances store the vectorcall function
Py_ssize_t entry_offset = 0; // where instances store the Entry

PyObject*& slot(PyObject* handle, Py_ssize_t offset) {
  return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(handle) + offset);
}

PyObject* call_handle(PyObject* self, PyObject* const* args, size_t nargsf, PyObject* keywords) {
  note_call(self);
  auto& entry =
      *reinterpret_cast<Entry*>(__atomic_load_n(&slot(self, entry_offset), __ATOMIC_ACQUIRE));
  PyObject* result = call_entry(entry, nullptr, nullptr, args, nargsf, keywords);
  if (C10_UNLIKELY(result == nullptr))
    explain_refusal(self, keywords);
  return result;
}

// Deletes the descriptor of a class's `__slots__` entry, so that Python code cannot access the
// slot. This does not change the memory layout of instances. Returns the PyMemberDef of the slot
// (borrowed from the type), or nullptr with an exception set.
PyMemberDef* remove_descriptor(PyTypeObject* type, const char* name) {
  THPObjectPtr found(PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), name));
  if (!found || Py_TYPE(found.get()) != &PyMemberDescr_Type) {
    PyErr_Format(PyExc_TypeError, "%s has no slot %s", type->tp_name, name);
    return nullptr;
  }
  if (PyDict_DelItemString(type->tp_dict, name) < 0)
    return nullptr;
  PyType_Modified(type);
  return reinterpret_cast<PyMemberDescrObject*>(found.get())->d_member; // owned by the type
}

} // namespace

PyObject* make_handle_type(PyObject*, PyObject* args) {
  PyObject *base, *traceable;
  if (!PyArg_ParseTuple(args, "O!O!", &PyType_Type, &base, &PyDict_Type, &traceable))
    return nullptr;
  if (handle_type != nullptr) {
    PyErr_SetString(PyExc_RuntimeError, "the native type of handles exists already");
    return nullptr;
  }
  auto* python_class = reinterpret_cast<PyTypeObject*>(base);
  PyMemberDef* call = remove_descriptor(python_class, "_native_call");
  PyMemberDef* entry = call == nullptr ? nullptr : remove_descriptor(python_class, "_native_entry");
  if (entry == nullptr)
    return nullptr;
  // The slot `_native_call` contains a function pointer. Declare it as an integer, because
  // CPython's traverse, clear and dealloc functions would otherwise treat it as a pointer to a
  // Python object.
  call->type = T_PYSSIZET;
  call_offset = call->offset;
  entry_offset = entry->offset;
  static PyMemberDef members[] = {
      {"__vectorcalloffset__", T_PYSSIZET, 0, READONLY, nullptr},
      {nullptr, 0, 0, 0, nullptr},
  };
  members[0].offset = call_offset;
  static PyType_Slot slots[] = {
      {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
      {Py_tp_members, members},
      {0, nullptr},
  };
  // CPython allows assigning to `__class__` only if these flags are the same in both classes.
  unsigned long inherited_flags = 0;
#ifdef Py_TPFLAGS_MANAGED_DICT
  inherited_flags |= Py_TPFLAGS_MANAGED_DICT;
#endif
#ifdef Py_TPFLAGS_MANAGED_WEAKREF
  inherited_flags |= Py_TPFLAGS_MANAGED_WEAKREF;
#endif
  PyType_Spec spec = {
      "torchop.CustomOp",
      int(python_class->tp_basicsize),
      0,
      unsigned(
          Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL |
          (python_class->tp_flags & inherited_flags)),
      slots,
  };
  THPObjectPtr bases(PyTuple_Pack(1, base));
  THPObjectPtr type(bases ? PyType_FromSpecWithBases(&spec, bases.get()) : nullptr);
  if (!type)
    return nullptr;
  auto* made = reinterpret_cast<PyTypeObject*>(type.get());
  // Update the class's dict directly, because setting `__call__` with type.__setattr__ would reset
  // tp_call.
  if (PyDict_Update(made->tp_dict, traceable) < 0)
    return nullptr;
  PyType_Modified(made);
  base_type = reinterpret_cast<PyTypeObject*>(Py_NewRef(base));
  handle_type = reinterpret_cast<PyTypeObject*>(Py_NewRef(type.get()));
  return type.release();
}

PyObject* adopt(PyObject*, PyObject* args) {
  PyObject *handle, *entry;
  if (!PyArg_ParseTuple(args, "OO!", &handle, entry_type, &entry))
    return nullptr;
  if (handle_type == nullptr || (Py_TYPE(handle) != base_type && Py_TYPE(handle) != handle_type)) {
    PyErr_Format(PyExc_TypeError, "adopt expects a handle, got %s", Py_TYPE(handle)->tp_name);
    return nullptr;
  }
  if (Py_TYPE(handle) == base_type || slot(handle, call_offset) == nullptr) {
    THPObjectPtr before(
        __atomic_exchange_n(&slot(handle, entry_offset), Py_NewRef(entry), __ATOMIC_RELEASE));
    slot(handle, call_offset) = reinterpret_cast<PyObject*>(call_handle);
    auto* type = reinterpret_cast<PyObject*>(handle_type);
    if (Py_TYPE(handle) == base_type && PyObject_SetAttrString(handle, "__class__", type) < 0)
      return nullptr;
  }
  Py_RETURN_NONE;
}

} // namespace torchop

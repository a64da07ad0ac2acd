// handle.cpp: a type that handles change to, for calls without a Python frame.
//
// The type is a subclass, made here, of the Python class of handles. A subclass written in Python
// would take back the slot for calls, and so would an assignment to `__call__`. A handle exists,
// and is held by users, before the extension is built, so it must be able to change its type where
// it stands: the Python class reserves two `__slots__`, in which this type keeps a function pointer
// and the entry of the operator.
#include "handle.h"

#include <structmember.h>
#include <torch/csrc/Exceptions.h>

#include "entry.h"

namespace torchop {

namespace {

PyTypeObject* base_type = nullptr; // CustomOp
PyTypeObject* handle_type = nullptr;
Py_ssize_t call_offset = 0; // of the slot that holds the pointer
Py_ssize_t entry_offset = 0;

PyObject*& slot(PyObject* handle, Py_ssize_t offset) {
  return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(handle) + offset);
}

// Raises an ArgumentError in place of what the dispatcher raises for an argument of the wrong type.
__attribute__((noinline, cold)) void explain_refusal(PyObject* handle) {
  if (!PyErr_ExceptionMatches(PyExc_RuntimeError))
    return;
  PyObject *type, *error, *traceback;
  PyErr_Fetch(&type, &error, &traceback);
  PyErr_NormalizeException(&type, &error, &traceback);
  THPObjectPtr explained(PyObject_CallMethod(handle, "_explain_refusal", "O", error));
  if (explained && explained.get() != Py_None) {
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(explained.get())), explained.get());
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(traceback);
  } else {
    PyErr_Restore(type, error, traceback); // also in place of what the method may have raised
  }
}

PyObject* call_handle(PyObject* self, PyObject* const* args, size_t nargsf, PyObject* keywords) {
  auto& entry = *reinterpret_cast<Entry*>(slot(self, entry_offset));
  PyObject* result = call_entry(entry, nullptr, nullptr, args, nargsf, keywords);
  if (C10_UNLIKELY(result == nullptr))
    explain_refusal(self);
  return result;
}

// The interpreter would follow the function pointer as an object. Its own functions for the Python
// class do the work, on a handle that is of that class for the moment, with an empty slot.
class AsPythonObject {
 public:
  explicit AsPythonObject(PyObject* handle) : handle_(handle) {
    std::swap(pointer_, slot(handle, call_offset));
    Py_SET_TYPE(handle, base_type);
  }
  ~AsPythonObject() {
    std::swap(pointer_, slot(handle_, call_offset));
    Py_SET_TYPE(handle_, handle_type);
  }

 private:
  PyObject* handle_;
  PyObject* pointer_ = nullptr;
};

struct Visit {
  visitproc visit;
  void* arg;
};

// A handle holds a reference to its own type, and the base's function believes to be that.
int visit_own_type(PyObject* object, void* arg) {
  auto* outer = static_cast<Visit*>(arg);
  if (object == reinterpret_cast<PyObject*>(base_type))
    object = reinterpret_cast<PyObject*>(handle_type);
  return outer->visit(object, outer->arg);
}

int traverse_handle(PyObject* self, visitproc visit, void* arg) {
  AsPythonObject object(self);
  Visit outer{visit, arg};
  return base_type->tp_traverse(self, visit_own_type, &outer);
}

// A handle that is not native any more, and that nobody else has a reference to, or soon not. With
// this type, the base's functions would look for those of a base in turn, and find ours again.
void restore_type(PyObject* self) {
  slot(self, call_offset) = nullptr;
  Py_INCREF(base_type);
  Py_SET_TYPE(self, base_type);
  Py_DECREF(handle_type);
}

int clear_handle(PyObject* self) {
  restore_type(self);
  return base_type->tp_clear(self);
}

void dealloc_handle(PyObject* self) {
  restore_type(self);
  base_type->tp_dealloc(self);
}

Py_ssize_t offset_of_slot(PyTypeObject* type, const char* name) {
  THPObjectPtr found(PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), name));
  if (!found || Py_TYPE(found.get()) != &PyMemberDescr_Type) {
    PyErr_Format(PyExc_TypeError, "%s has no slot %s", type->tp_name, name);
    return -1;
  }
  return reinterpret_cast<PyMemberDescrObject*>(found.get())->d_member->offset;
}

} // namespace

PyObject* make_handle_type(PyObject*, PyObject* args) {
  PyObject *base, *traceable;
  if (!PyArg_ParseTuple(args, "O!O!", &PyType_Type, &base, &PyDict_Type, &traceable))
    return nullptr;
  if (handle_type != nullptr) {
    PyErr_SetString(PyExc_RuntimeError, "the type of handles was made before");
    return nullptr;
  }
  auto* python_class = reinterpret_cast<PyTypeObject*>(base);
  call_offset = offset_of_slot(python_class, "_native_call");
  entry_offset = offset_of_slot(python_class, "_native_entry");
  if (call_offset < 0 || entry_offset < 0)
    return nullptr;
  // Python must not read what the slots hold from now on: one is no object. The memory stays.
  if (PyDict_DelItemString(python_class->tp_dict, "_native_call") < 0 ||
      PyDict_DelItemString(python_class->tp_dict, "_native_entry") < 0)
    return nullptr;
  PyType_Modified(python_class);
  static PyMemberDef members[] = {
      {"__vectorcalloffset__", T_PYSSIZET, 0, READONLY, nullptr},
      {nullptr, 0, 0, 0, nullptr},
  };
  members[0].offset = call_offset;
  static PyType_Slot slots[] = {
      {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
      {Py_tp_members, members},
      {Py_tp_traverse, reinterpret_cast<void*>(traverse_handle)},
      {Py_tp_clear, reinterpret_cast<void*>(clear_handle)},
      {Py_tp_dealloc, reinterpret_cast<void*>(dealloc_handle)},
      {0, nullptr},
  };
  // How a handle keeps its dictionary must not change with its type.
  unsigned long kept = Py_TPFLAGS_HAVE_GC;
#ifdef Py_TPFLAGS_MANAGED_DICT
  kept |= Py_TPFLAGS_MANAGED_DICT;
#endif
#ifdef Py_TPFLAGS_MANAGED_WEAKREF
  kept |= Py_TPFLAGS_MANAGED_WEAKREF;
#endif
  PyType_Spec spec = {
      "torchop.CustomOp",
      int(python_class->tp_basicsize),
      0,
      unsigned(Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | (python_class->tp_flags & kept)),
      slots,
  };
  THPObjectPtr bases(PyTuple_Pack(1, base));
  THPObjectPtr type(bases ? PyType_FromSpecWithBases(&spec, bases.get()) : nullptr);
  if (!type)
    return nullptr;
  auto* made = reinterpret_cast<PyTypeObject*>(type.get());
  // Past the slot for calls, which an ordinary assignment of `__call__` would point elsewhere.
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
  Py_XSETREF(slot(handle, entry_offset), Py_NewRef(entry));
  if (Py_TYPE(handle) == base_type) {
    // A dictionary of its own: the old one's values may lie in the handle, as the old type lays
    // out.
    THPObjectPtr attributes(PyObject_GetAttrString(handle, "__dict__"));
    THPObjectPtr copy(attributes ? PyDict_Copy(attributes.get()) : nullptr);
    if (!copy || PyObject_SetAttrString(handle, "__dict__", copy.get()) < 0)
      return nullptr;
    slot(handle, call_offset) = reinterpret_cast<PyObject*>(call_handle);
    Py_INCREF(handle_type);
    Py_SET_TYPE(handle, handle_type);
    Py_DECREF(base_type);
  }
  Py_RETURN_NONE;
}

} // namespace torchop

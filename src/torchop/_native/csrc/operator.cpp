// operator.cpp: make calls through torch.ops native.
//
// In a call to an OpOverloadPacket, PyTorch tries the overloads in the order of their definition
// until the arguments match a schema. So we create one Operator per overload and link them through
// `next`. If PyTorch would certainly skip an overload (see resolution.h), the call goes to the next
// Operator. If we cannot tell, the call falls back to PyTorch's function and tries all overloads.
#include "operator.h"

#include <c10/util/flat_hash_map.h>
#include <structmember.h>

#include <mutex>

#include "entry.h"
#include "free_threads.h"
#include "types.h"

namespace torchop {

PyTypeObject* operator_type = nullptr;

namespace {

struct Operator {
  PyObject_HEAD

      vectorcallfunc call;
  PyObject* owner;    // the address of the OpOverload or OpOverloadPacket; not owned
  PyObject* entry;    // an Entry, or nullptr if this object only preserves the hash; owned
  PyObject* dispatch; // the C++ function that this object replaces; owned
  PyObject* next;     // the Operator of the packet's next overload, or nullptr; owned
  Py_hash_t hash;     // the owner's hash (PyTorch takes it from `_op`), must not change
};

Operator& operator_of(PyObject* self) {
  return *reinterpret_cast<Operator*>(self);
}

// The number of Operators for each owner, i.e. each OpOverload or OpOverloadPacket. Guarded by
// `owners_mutex`; only `has_operator` relies on the GIL instead. Never destroyed, because Operators
// may be freed after static destructors have run.
auto& owners = *new ska::flat_hash_map<PyObject*, size_t>();
auto& owners_mutex = *new std::mutex();

void add_owner(PyObject* owner) {
  const std::lock_guard<std::mutex> lock(owners_mutex);
  ++owners[owner];
}

void remove_owner(PyObject* owner) {
  const std::lock_guard<std::mutex> lock(owners_mutex);
  const auto found = owners.find(owner);
  if (--found->second == 0)
    owners.erase(found);
}

PyObject* call_operator(PyObject* self, PyObject* const* args, size_t nargsf, PyObject* keywords) {
  Operator& op = operator_of(self);
  if (op.entry == nullptr)
    return PyObject_Vectorcall(op.dispatch, args, nargsf, keywords);
  return call_entry(
      *reinterpret_cast<Entry*>(op.entry), op.dispatch, op.next, args, nargsf, keywords);
}

PyObject* make_operator(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *owner, *entry, *dispatch, *next = Py_None;
  if (!PyArg_ParseTuple(args, "OOO|O", &owner, &entry, &dispatch, &next))
    return nullptr;
  if ((entry != Py_None && Py_TYPE(entry) != entry_type) ||
      (next != Py_None && Py_TYPE(next) != operator_type)) {
    PyErr_SetString(PyExc_TypeError, "entry expects an Entry or None, and next an Operator");
    return nullptr;
  }
  const Py_hash_t hash = PyObject_Hash(owner);
  if (hash == -1)
    return nullptr;
  PyObject* self = type->tp_alloc(type, 0);
  if (self == nullptr)
    return nullptr;
  Operator& op = operator_of(self);
  add_owner(owner);
  op.owner = owner;
  op.call = call_operator;
  op.entry = entry == Py_None ? nullptr : Py_NewRef(entry);
  op.dispatch = Py_NewRef(dispatch);
  op.next = next == Py_None ? nullptr : Py_NewRef(next);
  op.hash = hash;
  return self;
}

int traverse_operator(PyObject* self, visitproc visit, void* arg) {
  Operator& op = operator_of(self);
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(op.entry);
  Py_VISIT(op.dispatch);
  Py_VISIT(op.next);
  return 0;
}

// The type has no tp_clear, because the garbage collector could otherwise clear these members while
// a call uses them. The collector can still break reference cycles, because the other objects in
// each cycle have one.
void dealloc_operator(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  remove_owner(operator_of(self).owner);
  Py_XDECREF(operator_of(self).entry);
  Py_XDECREF(operator_of(self).dispatch);
  Py_XDECREF(operator_of(self).next);
  type->tp_free(self);
  Py_DECREF(type);
}

Py_hash_t hash_operator(PyObject* self) {
  return operator_of(self).hash;
}

PyObject* operator_attribute(PyObject* self, PyObject* name) {
  // When torch/_ops.py refreshes a packet, it passes `_op.__module__` to `_get_packet`. The generic
  // lookup would find `__module__` of our type, so look it up in the replaced function instead.
  if (PyUnicode_CompareWithASCIIString(name, "__module__") == 0)
    return PyObject_GetAttr(operator_of(self).dispatch, name);
  PyObject* found = PyObject_GenericGetAttr(self, name);
  if (found != nullptr || !PyErr_ExceptionMatches(PyExc_AttributeError))
    return found;
  PyErr_Clear();
  return PyObject_GetAttr(operator_of(self).dispatch, name);
}

PyMemberDef operator_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Operator, call), READONLY, nullptr},
    {"dispatch", T_OBJECT_EX, offsetof(Operator, dispatch), READONLY, nullptr},
    {"entry", T_OBJECT, offsetof(Operator, entry), READONLY, nullptr},
    {"next", T_OBJECT, offsetof(Operator, next), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

} // namespace

bool has_operator(PyObject* owner) {
  // Without the GIL, all calls would contend for the mutex, so just return true.
  return !has_gil || owners.find(owner) != owners.end();
}

bool has_entry(PyObject* op) {
  return operator_of(op).entry != nullptr;
}

bool add_operator_type(PyObject* module) {
  static PyType_Slot slots[] = {
      {Py_tp_new, reinterpret_cast<void*>(make_operator)},
      {Py_tp_dealloc, reinterpret_cast<void*>(dealloc_operator)},
      {Py_tp_traverse, reinterpret_cast<void*>(traverse_operator)},
      {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
      {Py_tp_hash, reinterpret_cast<void*>(hash_operator)},
      {Py_tp_getattro, reinterpret_cast<void*>(operator_attribute)},
      {Py_tp_members, operator_members},
      {Py_tp_doc, const_cast<char*>("Replaces the C++ function in `_op` of objects in torch.ops.")},
      {0, nullptr},
  };
  return add_type(
      module,
      "torchop._native._call_path.Operator",
      sizeof(Operator),
      slots,
      operator_type,
      Py_TPFLAGS_HAVE_VECTORCALL);
}

} // namespace torchop

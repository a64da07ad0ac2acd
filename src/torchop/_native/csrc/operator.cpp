// operator.cpp: make calls through torch.ops native.
//
// In a call to an OpOverloadPacket, PyTorch tries the overloads in the order of their definition,
// until the arguments match a schema. We therefore create one Operator per overload and link them
// by `next`. If PyTorch would certainly skip an overload (see resolution.h), the call goes to the
// next Operator. If we cannot tell, the call falls back to PyTorch's function, which tries all
// overloads.
#include "operator.h"

#include <c10/util/flat_hash_map.h>
#include <structmember.h>

#include <algorithm>
#include <mutex>
#include <utility>
#include <vector>

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
  PyObject* entry;    // an Entry, or nullptr if this object only counts calls; owned
  PyObject* dispatch; // the C++ function that this object replaces; owned
  // If `entry` is set, the Operator of the packet's next overload, or nullptr. If `entry` is
  // nullptr, the function to call after one of `overloads` was deregistered. Owned.
  PyObject* next;
  // All overloads that PyTorch's function may try (owned; nullptr if `entry` is set). While the
  // dispatcher runs the call, it counts as a call to each of them, so that none is freed.
  std::vector<LifetimePointer>* overloads;
};

Operator& operator_of(PyObject* self) {
  return *reinterpret_cast<Operator*>(self);
}

// The number of Operators for each owner, i.e. each OpOverload or OpOverloadPacket. Guarded by
// `owners_mutex`, but `has_operator` reads it without the mutex, because it holds the GIL. Never
// destroyed, because Operators may be freed after static destructors have run.
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

bool all_exist(const std::vector<LifetimePointer>& overloads) {
  return std::ranges::all_of(overloads, [](const auto& each) { return each->exists.load(); });
}

// Calls PyTorch's function, and counts the call for all overloads, because PyTorch may read the
// schemas of all of them. If an overload was deregistered, calls `op.next` instead, a Python
// callable that looks up the operator that has the name now, or raises OperatorGoneError.
PyObject* call_counted(
    const Operator& op, PyObject* const* args, size_t nargsf, PyObject* keywords) {
  {
    const DispatcherCall call(*op.overloads);
    if (C10_LIKELY(all_exist(*op.overloads))) {
      PyObject* result = PyObject_Vectorcall(op.dispatch, args, nargsf, keywords);
      if (C10_UNLIKELY(result == nullptr) && !all_exist(*op.overloads))
        explain_refusal(op.next, keywords);
      return result;
    }
  }
  return PyObject_Vectorcall(op.next, args, nargsf, keywords);
}

PyObject* call_operator(PyObject* self, PyObject* const* args, size_t nargsf, PyObject* keywords) {
  Operator& op = operator_of(self);
  if (op.entry == nullptr)
    return call_counted(op, args, nargsf, keywords);
  return call_entry(
      *reinterpret_cast<Entry*>(op.entry), op.dispatch, op.next, args, nargsf, keywords);
}

PyObject* make_operator(PyTypeObject* type, PyObject* args, PyObject* keywords) {
  HANDLE_TH_ERRORS
  static const char* names[] = {"owner", "entry", "dispatch", "next", "overloads", nullptr};
  PyObject *owner, *entry, *dispatch, *next = nullptr, *overloads = nullptr;
  if (!PyArg_ParseTupleAndKeywords(
          args,
          keywords,
          "OOO|OO",
          const_cast<char**>(names),
          &owner,
          &entry,
          &dispatch,
          &next,
          &overloads))
    return nullptr;
  if (next == Py_None)
    next = nullptr;
  const bool counts = entry == Py_None && overloads != nullptr && next != nullptr;
  const bool calls =
      Py_TYPE(entry) == entry_type && (next == nullptr || Py_TYPE(next) == operator_type);
  if (!counts && !calls) {
    PyErr_SetString(PyExc_TypeError, "next expects an Operator or None, and entry an Entry");
    return nullptr;
  }
  std::vector<LifetimePointer> counted;
  if (counts)
    counted = lifetimes_of(overloads, true);
  add_owner(owner);
  PyObject* self = type->tp_alloc(type, 0);
  if (self == nullptr) {
    remove_owner(owner);
    return nullptr;
  }
  Operator& op = operator_of(self);
  op.owner = owner;
  op.call = call_operator;
  op.entry = counts ? nullptr : Py_NewRef(entry);
  op.overloads = counts ? new std::vector(std::move(counted)) : nullptr;
  op.dispatch = Py_NewRef(dispatch);
  op.next = Py_XNewRef(next);
  return self;
  END_HANDLE_TH_ERRORS
}

int traverse_operator(PyObject* self, visitproc visit, void* arg) {
  Operator& op = operator_of(self);
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(op.entry);
  Py_VISIT(op.dispatch);
  Py_VISIT(op.next);
  return 0;
}

// The type has no tp_clear, because the garbage collector must not clear these members while a call
// uses them. It can still break reference cycles, because other objects in each cycle have a
// tp_clear.
void dealloc_operator(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  remove_owner(operator_of(self).owner);
  Py_XDECREF(operator_of(self).entry);
  Py_XDECREF(operator_of(self).dispatch);
  Py_XDECREF(operator_of(self).next);
  delete operator_of(self).overloads;
  type->tp_free(self);
  Py_DECREF(type);
}

// Returns the hash of the function that this object replaces, because `OpOverload.__hash__` returns
// the hash of `_op` and must not change. Without an entry, `dispatch` may be a newer function than
// the one that was replaced, so `next` provides the original hash.
Py_hash_t hash_operator(PyObject* self) {
  const Operator& op = operator_of(self);
  return PyObject_Hash(op.entry == nullptr ? op.next : op.dispatch);
}

PyObject* operator_attribute(PyObject* self, PyObject* name) {
  // Return `__module__` of the replaced function, because torch/_ops.py passes it to `_get_packet`
  // when it refreshes a packet. The generic lookup would find `__module__` of our type.
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
  // In free-threaded Python, all calls would contend for the mutex, so just return true.
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
  static PyType_Spec spec = {
      "torchop._native._call_path.Operator",
      sizeof(Operator),
      0,
      Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
      slots,
  };
  return add_type(module, spec, operator_type);
}

} // namespace torchop

#include "residuals.h"

#include <structmember.h> // PyMemberDef, before Python 3.12

#include <memory>

#include "flat.h"
#include "results.h"

namespace torchop {

namespace {

// Returns whether the residuals are plain tensors that share no memory with each other, inputs or
// results. To keep this fast, requires each residual to be the only owner of its storage. Then two
// tensors can share memory only if they are the same object.
bool have_own_memory(
    const Residuals& residuals, const Values& values, PyObject* result, PyObject* saved) {
  if (residuals.count == 0 || !PyTuple_CheckExact(saved) ||
      PyTuple_GET_SIZE(saved) != residuals.count)
    return false;
  bool are_separate = true;
  for (Py_ssize_t index = 0; are_separate && index < residuals.count; ++index) {
    PyObject* tensor = PyTuple_GET_ITEM(saved, index);
    are_separate = Py_TYPE(tensor) == tensor_type && detail::has_own_storage(tensor);
    for (Py_ssize_t other = 0; other < index; ++other)
      are_separate &= PyTuple_GET_ITEM(saved, other) != tensor;
    for (size_t place = 0; place < output_count(result); ++place)
      are_separate &= output(result, place) != tensor && !PyList_Check(output(result, place));
    values.each_tensor([&](PyObject* input) { are_separate &= input != tensor; });
  }
  return are_separate;
}

bool has_tensor_attributes(PyObject* ctx) {
  PyObject** attributes = _PyObject_GetDictPtr(ctx); // creates no dict, unlike `ctx.__dict__`
  PyObject* value;
  bool found = false;
  for (Py_ssize_t next = 0; attributes != nullptr && *attributes != nullptr &&
       PyDict_Next(*attributes, &next, nullptr, &value) != 0;) {
    const bool is_sequence = PyTuple_Check(value) || PyList_Check(value);
    const Py_ssize_t size = is_sequence ? PySequence_Fast_GET_SIZE(value) : 1;
    for (Py_ssize_t item = 0; item < size; ++item)
      found |= is_tensor(is_sequence ? PySequence_Fast_GET_ITEM(value, item) : value);
  }
  return found;
}

__attribute__((noinline, cold)) THPObjectPtr make_guard(const Residuals& residuals, Guard found) {
  THPObjectPtr places = checked(PyTuple_New(Py_ssize_t(found.places.size())));
  Py_ssize_t index = 0;
  for (Py_ssize_t place : found.places)
    PyTuple_SET_ITEM(places.get(), index++, checked(PyLong_FromSsize_t(place)).release());
  THPObjectPtr made = checked(PyObject_CallOneArg(residuals.guard, places.get()));
  found.guard = THPObjectPtr(Py_NewRef(made.get()));
  auto first = std::make_unique<Guard>(std::move(found));
  Guard* none = nullptr;
  if (residuals.first_guard.compare_exchange_strong(none, first.get()))
    first.release();
  return made;
}

Py_ssize_t find_slot(PyObject* type, const char* name) {
  THPObjectPtr slot = checked(PyObject_GetAttrString(type, name));
  TORCH_CHECK(Py_IS_TYPE(slot.get(), &PyMemberDescr_Type), name, " is no slot");
  return reinterpret_cast<PyMemberDescrObject*>(slot.get())->d_member->offset;
}

PyObject* records(PyObject* recording, PyObject*) {
  THPObjectPtr thread(PyLong_FromUnsignedLong(PyThread_get_thread_ident()));
  PyObject* state = thread ? PyDict_GetItemWithError(recording, thread.get()) : nullptr;
  if (state == nullptr && PyErr_Occurred() != nullptr)
    return nullptr;
  return Py_NewRef(state == nullptr ? Py_False : PyTuple_GET_ITEM(state, 1));
}

PyObject* returned(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  if (count != 2) {
    PyErr_SetString(PyExc_TypeError, "returned expects a result, and a tuple of residuals");
    return nullptr;
  }
  auto* type = reinterpret_cast<PyTypeObject*>(self);
  PyObject* made = type->tp_alloc(type, 0);
  if (made != nullptr) {
    slot_of(made, output_slot) = Py_NewRef(args[0]);
    slot_of(made, saved_slot) = Py_NewRef(args[1]);
  }
  return made;
}

PyMethodDef functions_of_kernels[] = {
    {"records", records, METH_NOARGS, "Return whether the current call records a gradient."},
    {"returned",
     reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(returned)),
     METH_FASTCALL,
     "Return a result together with residuals."},
};

} // namespace

bool setup_with_residuals(
    const Residuals& residuals,
    const Values& values,
    PyObject* ctx,
    PyObject* result,
    PyObject* saved) {
  static PyObject* const name = PyUnicode_InternFromString("residuals");
  static PyObject* const names = PyTuple_Pack(1, name);
  if (saved == nullptr || !have_own_memory(residuals, values, result, saved))
    return false;
  // Allocate the NamedTuple of residuals directly, because its `__new__` is a slow Python function.
  auto* type = reinterpret_cast<PyTypeObject*>(residuals.residuals_class);
  THPObjectPtr named = checked(type->tp_alloc(type, residuals.count));
  for (Py_ssize_t index = 0; index < residuals.count; ++index)
    PyTuple_SET_ITEM(named.get(), index, Py_NewRef(PyTuple_GET_ITEM(saved, index)));
  THPObjectPtr inputs = checked(values.positional().release());
  THPObjectPtr keyword_only;
  PyObject* arguments[6] = {nullptr, ctx, inputs.get()};
  size_t count = 2;
  if (values.parameters().all.size() > values.parameters().positional) {
    keyword_only = checked(values.keyword_only().release());
    arguments[++count] = keyword_only.get();
  }
  arguments[++count] = result;
  arguments[count + 1] = named.get();
  checked(PyObject_Vectorcall(
      residuals.setup, arguments + 1, count | PY_VECTORCALL_ARGUMENTS_OFFSET, names));
  return true;
}

THPObjectPtr guard(const Residuals& residuals, PyObject* ctx, PyObject* to_save, PyObject* saved) {
  const bool are_saved = to_save != nullptr && PyTuple_Check(to_save);
  Guard found;
  bool all_are_saved = true;
  for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(saved); ++index) {
    const size_t before = found.places.size();
    for (Py_ssize_t place = 0; are_saved && place < PyTuple_GET_SIZE(to_save); ++place) {
      if (PyTuple_GET_ITEM(saved, index) == PyTuple_GET_ITEM(to_save, place))
        found.places.push_back(place);
    }
    all_are_saved &= found.places.size() > before;
  }
  // A guard only covers tensors that were saved with save_for_backward, but an attribute of `ctx`
  // could also hold a residual or a view of a residual.
  if (!all_are_saved || has_tensor_attributes(ctx)) {
    PyObject* arguments[] = {ctx, saved};
    checked(PyObject_Vectorcall(residuals.mark, arguments, 2, nullptr));
    return {};
  }
  Guard* usual = residuals.first_guard.load(std::memory_order_acquire);
  if (C10_LIKELY(usual != nullptr && usual->places == found.places))
    return THPObjectPtr(Py_NewRef(usual->guard.get()));
  return make_guard(residuals, std::move(found));
}

PyObject* make_handover(PyObject*, PyObject* type_and_recording) {
  HANDLE_TH_ERRORS
  PyObject *type, *recording;
  if (!PyArg_ParseTuple(type_and_recording, "O!O!", &PyType_Type, &type, &PyDict_Type, &recording))
    return nullptr;
  output_slot = find_slot(type, "output");
  saved_slot = find_slot(type, "saved");
  THPObjectPtr records = checked(PyCFunction_New(&functions_of_kernels[0], recording));
  THPObjectPtr returned = checked(PyCFunction_New(&functions_of_kernels[1], type));
  return PyTuple_Pack(2, records.get(), returned.get());
  END_HANDLE_TH_ERRORS
}

} // namespace torchop

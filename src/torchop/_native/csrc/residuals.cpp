// residuals.cpp: whether residuals are tensors in memory of their own.
#include "residuals.h"

#include <c10/util/SmallVector.h>

#include "flat.h"
#include "results.h"

namespace torchop {

namespace {

// Nobody else may have the memory of a residual, so no other tensor does unless it is the same.
bool are_apart(
    const Residuals& residuals, const Values& values, PyObject* result, PyObject* saved) {
  if (residuals.count == 0 || !PyTuple_CheckExact(saved) ||
      PyTuple_GET_SIZE(saved) != residuals.count)
    return false;
  bool apart = true;
  for (Py_ssize_t index = 0; apart && index < residuals.count; ++index) {
    PyObject* tensor = PyTuple_GET_ITEM(saved, index);
    apart = Py_TYPE(tensor) == tensor_type && detail::has_own_storage(tensor);
    for (Py_ssize_t other = 0; other < index; ++other)
      apart &= PyTuple_GET_ITEM(saved, other) != tensor;
    for (size_t place = 0; place < output_count(result); ++place)
      apart &= output(result, place) != tensor && !PyList_Check(output(result, place));
    values.each_tensor([&](PyObject* input) { apart &= input != tensor; });
  }
  return apart;
}

} // namespace

bool hand_over(
    const Residuals& residuals,
    const Values& values,
    PyObject* ctx,
    PyObject* result,
    PyObject* saved) {
  static PyObject* const name = PyUnicode_InternFromString("residuals");
  static PyObject* const names = PyTuple_Pack(1, name);
  if (saved == nullptr || !are_apart(residuals, values, result, saved))
    return false;
  // As the class would make it, whose own function is one of Python.
  THPObjectPtr argument = checked(PyTuple_Pack(1, saved));
  auto* type = reinterpret_cast<PyTypeObject*>(residuals.named);
  THPObjectPtr named = checked(PyTuple_Type.tp_new(type, argument.get(), nullptr));
  THPObjectPtr inputs = checked(values.positional().release());
  THPObjectPtr keyword_only = checked(values.keyword_only().release());
  PyObject* arguments[] = {nullptr, ctx, inputs.get(), keyword_only.get(), result, named.get()};
  checked(PyObject_Vectorcall(
      residuals.setup, arguments + 1, 4 | PY_VECTORCALL_ARGUMENTS_OFFSET, names));
  return true;
}

void guard(const Residuals& residuals, PyObject* ctx, PyObject* to_save, PyObject* saved) {
  static PyObject* const attribute = PyUnicode_InternFromString("_torchop_guard");
  const bool are_saved = to_save != nullptr && PyTuple_Check(to_save);
  c10::SmallVector<Py_ssize_t, 8> found;
  bool all_are_saved = true;
  for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(saved); ++index) {
    const size_t before = found.size(); // one may be saved twice
    for (Py_ssize_t place = 0; are_saved && place < PyTuple_GET_SIZE(to_save); ++place) {
      if (PyTuple_GET_ITEM(saved, index) == PyTuple_GET_ITEM(to_save, place))
        found.push_back(place);
    }
    all_are_saved &= found.size() > before;
  }
  // A tensor that is an attribute of `ctx` may be one too, or a view of one.
  THPObjectPtr attributes = checked(PyObject_GenericGetDict(ctx, nullptr));
  PyObject* kept;
  bool has_tensors = false;
  for (Py_ssize_t next = 0; PyDict_Next(attributes.get(), &next, nullptr, &kept) != 0;) {
    const bool is_sequence = PyTuple_Check(kept) || PyList_Check(kept);
    const Py_ssize_t size = is_sequence ? PySequence_Fast_GET_SIZE(kept) : 1;
    for (Py_ssize_t item = 0; item < size; ++item)
      has_tensors |= is_tensor(is_sequence ? PySequence_Fast_GET_ITEM(kept, item) : kept);
  }
  if (!all_are_saved || has_tensors) {
    PyObject* arguments[] = {ctx, saved};
    checked(PyObject_Vectorcall(residuals.mark, arguments, 2, nullptr));
    return;
  }
  THPObjectPtr places = checked(PyTuple_New(Py_ssize_t(found.size())));
  for (size_t index = 0; index < found.size(); ++index)
    PyTuple_SET_ITEM(places.get(), index, checked(PyLong_FromSsize_t(found[index])).release());
  THPObjectPtr made = checked(PyObject_CallOneArg(residuals.guard, places.get()));
  if (PyObject_SetAttr(ctx, attribute, made.get()) < 0)
    throw python_error();
}

} // namespace torchop

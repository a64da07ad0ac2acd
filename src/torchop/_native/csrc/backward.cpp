// backward.cpp: call a formula, and return the gradients directly if they are certainly valid.
// Otherwise, Python functions (see `make_backward` in _call_path.pyi) check and convert the
// gradients. They also explain errors.
#include "backward.h"

#include <algorithm>
#include <vector>

#include <c10/core/GradMode.h>

#include "ambient_state.h"
#include "frames.h"
#include "gradients.h"
#include "python_node.h"

namespace torchop {

namespace {

// The saved tensors of a node whose formula is running in this thread. We cache them, because with
// selective checkpointing (torch/utils/checkpoint.py), a saved tensor can be unpacked only once.
//
// The cache cannot be on the C stack, because a greenlet switch inside a formula replaces the
// stack. Items are removed in any order, since formulas in several greenlets may return in any
// order.
struct Unpacked {
  PyObject* ctx;
  THPObjectPtr tensors;
};
thread_local std::vector<Unpacked> unpacked;

// Finds the cached tensors of a node. If the formula is running more than once, finds the tensors
// of the innermost run.
auto find_unpacked(PyObject* ctx) {
  return std::find_if(
      unpacked.rbegin(), unpacked.rend(), [&](const Unpacked& each) { return each.ctx == ctx; });
}

// RAII guard that marks the formula of a node as running, which enables the cache for this node.
class Unpacking {
 public:
  explicit Unpacking(PyObject* ctx) : ctx_(ctx) {
    unpacked.push_back({ctx, {}});
  }
  ~Unpacking() {
    const auto found = find_unpacked(ctx_);
    // Destroying the tensors may run Python code, so update the cache before they are destroyed.
    const THPObjectPtr tensors = std::move(found->tensors);
    unpacked.erase(std::next(found).base());
  }
  Unpacking(const Unpacking&) = delete;
  Unpacking& operator=(const Unpacking&) = delete;

 private:
  PyObject* ctx_;
};

// The items of the tuple that is passed to `make_backward`, in order.
enum class Part {
  Definition,
  Rule,
  HoldTensors,
  Failed,
  Checked,
  Guarded,
  Raw,
  SavedTensors,
  Contiguous,
  InPython,
  Count
};

PyObject* part(PyObject* parts, Part which) {
  return PyTuple_GET_ITEM(parts, Py_ssize_t(which));
}

// Returns the formula in the operator's current plan, like `definition.compiled(rule)` in Python.
// Tries the attribute `_plan` first, because `plan` is a property and so needs a slow Python call.
THPObjectPtr formula_of(PyObject* parts) {
  static PyObject* const names[] = {
      PyUnicode_InternFromString("_plan"),
      PyUnicode_InternFromString("plan"),
      PyUnicode_InternFromString("_compiled"),
  };
  THPObjectPtr plan = checked(PyObject_GetAttr(part(parts, Part::Definition), names[0]));
  if (plan.get() == Py_None)
    plan = checked(PyObject_GetAttr(part(parts, Part::Definition), names[1]));
  THPObjectPtr compiled = checked(PyObject_GetAttr(plan.get(), names[2]));
  return checked(PyObject_GetItem(compiled.get(), part(parts, Part::Rule)));
}

// Replaces the current exception if the Python function `failed` raises a better one. Otherwise,
// the current exception stays set.
__attribute__((noinline, cold)) void explain_error(
    PyObject* parts, PyObject* const* args, Py_ssize_t count) {
  if (!PyErr_ExceptionMatches(PyExc_Exception))
    return;
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  PyErr_NormalizeException(&type, &value, &traceback);
  if (traceback != nullptr)
    PyException_SetTraceback(value, traceback);
  std::vector<PyObject*> arguments{value};
  arguments.insert(arguments.end(), args, args + count);
  THPObjectPtr returned(
      PyObject_Vectorcall(part(parts, Part::Failed), arguments.data(), arguments.size(), nullptr));
  if (returned)
    return PyErr_Restore(type, value, traceback);
  Py_XDECREF(type);
  Py_XDECREF(value);
  Py_XDECREF(traceback);
}

// Returns whether all gradients are certainly valid. The gradient of an argument without tensors
// must be None. Any other gradient must be None or a tensor that fits the input.
bool need_no_check(PyObject* gradients, PyObject* hold_tensors, PyObject* ctx) {
  const Py_ssize_t count = PyTuple_GET_SIZE(hold_tensors);
  if (!are_plain_gradients(gradients, count))
    return false;
  bool plain = true;
  for (Py_ssize_t index = 0; index < count; ++index)
    plain &= PyTuple_GET_ITEM(hold_tensors, index) == Py_True ||
        PyTuple_GET_ITEM(gradients, index) == Py_None;
  return plain && fit_inputs(gradients, ctx);
}

// Returns whether a gradient is already contiguous, so that `with_contiguous_grads` (see below)
// need not copy it.
bool is_contiguous(PyObject* gradient) {
  if (gradient == Py_None)
    return true;
  if (Py_TYPE(gradient) != tensor_type)
    return false;
  const at::Tensor& tensor = THPVariable_Unpack(gradient);
  return tensor.layout() == at::kStrided && tensor.is_contiguous() && !tensor.is_conj() &&
      !tensor.is_neg();
}

// `with_contiguous_grads` (contiguous_grads.py) wraps a backward function to make all gradients
// contiguous. If `backward` is such a wrapper (recognized by the code object) and all gradients are
// already contiguous, returns the wrapped function to save a Python call.
THPObjectPtr without_copies(
    THPObjectPtr backward, PyObject* code, PyObject* const* gradients, Py_ssize_t count) {
  static PyObject* const name = PyUnicode_InternFromString("__wrapped__");
  if (C10_LIKELY(
          !PyFunction_Check(backward.get()) || PyFunction_GET_CODE(backward.get()) != code) ||
      !std::all_of(gradients, gradients + count, is_contiguous))
    return backward;
  return checked(PyObject_GetAttr(backward.get(), name));
}

// Returns whether the autocast state may differ from the state in the forward pass.
bool may_need_other_autocast(PyObject* ctx) {
  static PyObject* const name = PyUnicode_InternFromString("_torchop_autocast");
  return autocast_is_enabled() || checked(PyObject_GetAttr(ctx, name)).get() != Py_None;
}

// apply(ctx, *grads) calls the formula of a node and returns the gradients of its inputs.
PyObject* apply(PyObject* parts, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  static PyObject* const name = PyUnicode_InternFromString("backward");
  if (count == 0) {
    PyErr_SetString(PyExc_TypeError, "apply expects the ctx of a node, and gradients");
    return nullptr;
  }
  WithoutDynamo frames; // Dynamo must not trace the formula as user code
  if (C10_UNLIKELY(may_need_other_autocast(args[0])))
    return PyObject_Vectorcall(part(parts, Part::InPython), args, size_t(count), nullptr);
  THPObjectPtr formula = formula_of(parts);
  THPObjectPtr backward = without_copies(
      checked(PyObject_GetAttr(formula.get(), name)),
      part(parts, Part::Contiguous),
      args + 1,
      count - 1);
  THPObjectPtr gradients;
  {
    Unpacking unpacking(args[0]);
    // If the operator has no formula, `backward` is None and this call raises a TypeError. Then
    // `explain_error` replaces it with a better error.
    gradients = THPObjectPtr(PyObject_Vectorcall(backward.get(), args, size_t(count), nullptr));
  }
  if (C10_UNLIKELY(!gradients)) {
    explain_error(parts, args, count);
    return nullptr;
  }
  if (Py_TYPE(gradients.get()) == tensor_type)
    gradients = checked(PyTuple_Pack(1, gradients.get()));
  if (C10_LIKELY(need_no_check(gradients.get(), part(parts, Part::HoldTensors), args[0])))
    return gradients.release();
  PyObject* arguments[] = {args[0], gradients.get()};
  return PyObject_Vectorcall(part(parts, Part::Checked), arguments, 2, nullptr);
  END_HANDLE_TH_ERRORS
}

// Implements `ctx.saved_tensors`. While the formula runs, the tensors are unpacked only once.
PyObject* read_saved_tensors(PyObject* parts, PyObject* ctx) {
  HANDLE_TH_ERRORS
  auto found = find_unpacked(ctx);
  if (found == unpacked.rend())
    return PyObject_CallOneArg(part(parts, Part::SavedTensors), ctx);
  if (!found->tensors) {
    PyObject* raw = part(parts, Part::Raw);
    // Unpacking may run saved-tensor hooks, and these may even run another backward pass. Either
    // may invalidate `found`, so look it up again.
    THPObjectPtr tensors = checked(
        c10::GradMode::is_enabled()
            ? PyObject_CallOneArg(part(parts, Part::Guarded), ctx)
            : Py_TYPE(raw)->tp_descr_get(raw, ctx, reinterpret_cast<PyObject*>(Py_TYPE(ctx))));
    found = find_unpacked(ctx);
    if (found == unpacked.rend())
      // A hook switched to another greenlet, and the formula has returned in the meantime.
      return tensors.release();
    found->tensors = std::move(tensors);
  }
  return Py_NewRef(found->tensors.get());
  END_HANDLE_TH_ERRORS
}

PyMethodDef functions_of_node[] = {
    {"apply",
     reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(apply)),
     METH_FASTCALL,
     "Run the formula of a node."},
    {"saved_tensors", read_saved_tensors, METH_O, "Return the saved tensors of a node."},
};

} // namespace

PyObject* make_backward(PyObject*, PyObject* parts) {
  if (PyTuple_GET_SIZE(parts) != Py_ssize_t(Part::Count) ||
      !PyTuple_CheckExact(part(parts, Part::HoldTensors))) {
    PyErr_SetString(PyExc_TypeError, "backward expects ten arguments, the third a tuple");
    return nullptr;
  }
  THPObjectPtr function(PyCFunction_New(&functions_of_node[0], parts));
  THPObjectPtr method(function ? PyInstanceMethod_New(function.get()) : nullptr);
  THPObjectPtr getter(PyCFunction_New(&functions_of_node[1], parts));
  return method && getter ? PyTuple_Pack(2, method.get(), getter.get()) : nullptr;
}

} // namespace torchop

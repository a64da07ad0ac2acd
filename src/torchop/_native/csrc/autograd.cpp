// autograd.cpp: create an autograd node by instantiating its Python class and filling in the C++
// fields in the same way as autograd.Function.apply.
#include "autograd.h"

#if TORCHOP_KNOWS_NODES

#include <unordered_set>

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/AutogradState.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>

#include "ambient_state.h"
#include "flat.h"
#include "python_node.h"

namespace torchop {

using torch::autograd::SavedVariable;
using torch::autograd::Variable;

using PythonNode = NewNode<THPFunction>;

namespace {

// Sets `ctx._pt_metadata`, the description of the list arguments. As in torch._library.autograd, it
// is set after setup_context, and it is an error if setup_context has already set it.
__attribute__((noinline)) void set_metadata(PyObject* ctx, PyObject* metadata) {
  static PyObject* name = PyUnicode_InternFromString("_pt_metadata");
  TORCH_CHECK(
      !PyObject_HasAttr(ctx, name),
      "Please don't set ctx._pt_metadata; PyTorch uses it to store info");
  if (PyObject_SetAttr(ctx, name, metadata) < 0)
    throw_python_error();
}

// Disables grad mode and forward grad mode, as autograd.Function does during `forward`. Combining
// AutoGradMode and AutoFwGradMode would read the thread-local state six times.
class WithoutGrad {
 public:
  WithoutGrad() {
    state_.set_grad_mode(false);
    state_.set_fw_grad_mode(false);
  }
  ~WithoutGrad() {
    state_.set_grad_mode(grad_);
    state_.set_fw_grad_mode(forward_);
  }
  WithoutGrad(const WithoutGrad&) = delete;
  WithoutGrad& operator=(const WithoutGrad&) = delete;

 private:
  c10::AutogradState& state_ = c10::AutogradState::get_tls_state();
  const bool grad_ = state_.get_grad_mode();
  const bool forward_ = state_.get_fw_grad_mode();
};

// Raises if the value that a method of `ctx` has stored, such as the argument of `ctx.mark_dirty`,
// is not a tuple. The methods do not check this themselves. The messages are the same as in
// torch/csrc/autograd/python_function.cpp.
__attribute__((noinline)) void check_tuple(PyObject* marks, const char* attribute) {
  TORCH_CHECK(
      PyTuple_Check(marks),
      "autograd internal error: ",
      attribute,
      " attribute is expected to be a tuple but is ",
      Py_TYPE(marks)->tp_name);
}

std::unordered_set<at::TensorImpl*> not_differentiable(const THPFunction& node) {
  std::unordered_set<at::TensorImpl*> tensors;
  if (node.non_differentiable == nullptr)
    return tensors;
  check_tuple(node.non_differentiable, "non_differentiable");
  for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(node.non_differentiable); ++index) {
    PyObject* item = PyTuple_GET_ITEM(node.non_differentiable, index);
    TORCH_CHECK(
        is_tensor(item),
        "mark_non_differentiable only accepts variable arguments, but got ",
        Py_TYPE(item)->tp_name);
    tensors.insert(impl_of(item));
  }
  return tensors;
}

// Returns the tensors that setup_context passed to `ctx.mark_dirty`. There are none for in-place
// and out= operators, because their native calls do not record gradients (see `gradient_of` in
// plan.py), but other operators may also mutate arguments.
std::unordered_set<at::TensorImpl*> dirty(const THPFunction& node) {
  std::unordered_set<at::TensorImpl*> tensors;
  if (node.dirty_tensors == nullptr)
    return tensors;
  check_tuple(node.dirty_tensors, "dirty_tensors");
  for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(node.dirty_tensors); ++index) {
    PyObject* item = PyTuple_GET_ITEM(node.dirty_tensors, index);
    TORCH_CHECK(
        is_tensor(item),
        "mark_dirty can only accept variables, but argument ",
        index,
        " is of type ",
        Py_TYPE(item)->tp_name);
    tensors.insert(impl_of(item));
    // As in PyTorch, mark_dirty counts as a write, which invalidates tensors saved for backward.
    impl_of(item)->bump_version();
  }
  return tensors;
}

// Returns whether we can attach a result to the node ourselves, without PyTorch's `_wrap_outputs`.
// The result must be a single new tensor of a differentiable dtype, and setup_context must not have
// called methods such as `ctx.mark_dirty`.
bool is_simple_output(
    PyObject* result, const THPFunction& node, const torch::autograd::variable_list& inputs) {
  if (!is_plain_tensor(result) || node.non_differentiable || node.dirty_tensors ||
      declares_dtypes(node))
    return false;
  for (const at::Tensor& input : inputs) {
    if (input.unsafeGetTensorImpl() == impl_of(result))
      return false;
  }
  const at::Tensor& tensor = THPVariable_Unpack(result);
  return autograd_meta_of(*tensor.unsafeGetTensorImpl()) == nullptr &&
      torch::autograd::isDifferentiableType(tensor.scalar_type());
}

std::vector<std::optional<Variable>> call_wrap_outputs(
    PythonNode& created,
    const torch::autograd::variable_list& inputs,
    const std::unordered_set<at::TensorImpl*>& without_gradient,
    const std::vector<std::optional<Variable>>& outputs,
    NodePtr& attached) {
  const THPFunction& fields = created.fields();
  // Converts C++ warnings from `_wrap_outputs` to Python warnings. If a warning filter turns a
  // warning into an error, the destructor throws, unless `set_in_exception` was called.
  torch::PyWarningHandler warnings;
  try {
    return wrap_outputs(
        attached,
        created.node(),
        inputs,
        without_gradient,
        dirty(fields),
        outputs,
        fields.pure_view);
  } catch (...) {
    warnings.set_in_exception();
    throw;
  }
}

// Attaches any kind of result to the node by calling `_wrap_outputs`. If a result is an input,
// `_wrap_outputs` returns a view of it, because the node must not become the input's grad_fn.
// `noinline`, because the attribute `flatten` of `record` would inline this function.
__attribute__((noinline)) THPObjectPtr connect_any_outputs(
    PythonNode& created,
    const torch::autograd::variable_list& inputs,
    PyObject* result,
    NodePtr& attached) {
  const NodePtr& node = created.node();
  THPFunction& fields = created.fields();
  const size_t count = output_count(result);
  std::vector<std::optional<Variable>> raw(count);
  for (size_t index = 0; index < count; ++index) {
    if (PyObject* item = output(result, index); is_tensor(item))
      raw[index] = THPVariable_Unpack(item);
  }
  const std::unordered_set<at::TensorImpl*> without_gradient = not_differentiable(fields);
  const std::vector<std::optional<Variable>> wrapped =
      call_wrap_outputs(created, inputs, without_gradient, raw, attached);
  apply_declared_dtypes(fields, *node, count, [&](size_t index) {
    const std::optional<Variable>& tensor = wrapped[index];
    return tensor.has_value() && without_gradient.count(tensor->unsafeGetTensorImpl()) == 0 &&
        torch::autograd::isDifferentiableType(tensor->scalar_type());
  });
  THPObjectPtr connected = checked(PyTuple_New(Py_ssize_t(count)));
  fields.output_info.reserve(count);
  for (size_t index = 0; index < count; ++index) {
    if (wrapped[index].has_value())
      fields.output_info.emplace_back(*wrapped[index]);
    else
      fields.output_info.emplace_back();
    PyObject* item = wrapped[index].has_value() ? THPVariable_Wrap(*wrapped[index])
                                                : Py_NewRef(output(result, index));
    PyTuple_SET_ITEM(connected.get(), index, checked(item).release());
  }
  if (PyTuple_Check(result))
    return connected;
  return THPObjectPtr(Py_NewRef(PyTuple_GET_ITEM(connected.get(), 0)));
}

// Attaches the results to the node. Sets `attached` to the node that they are actually attached to
// (see `wrap_outputs` in python_node.h).
THPObjectPtr connect_outputs(
    PythonNode& created,
    const torch::autograd::variable_list& inputs,
    THPObjectPtr result,
    NodePtr& attached) {
  const NodePtr& node = created.node();
  THPFunction& fields = created.fields();
  node->clear_input_metadata();
  fields.output_info.clear(); // used in backward to replace undefined gradients with zeros
  if (C10_UNLIKELY(!is_simple_output(result.get(), fields, inputs)))
    return connect_any_outputs(created, inputs, result.get(), attached);
  const at::Tensor& tensor = THPVariable_Unpack(result.get());
  const uint32_t number = node->add_input_metadata(tensor);
  torch::autograd::impl::set_gradient_edge(tensor, {node, number});
  fields.output_info.emplace_back(tensor);
  attached = node;
  return result;
}

[[noreturn]] __attribute__((noinline, cold)) void refuse_to_save(PyObject* item, Py_ssize_t index) {
  TORCH_CHECK_TYPE(
      false,
      "save_for_backward can only save variables, but argument ",
      index,
      " is of type ",
      Py_TYPE(item)->tp_name);
}

// Returns the tensors that were passed to `ctx.save_for_backward`, with an undefined tensor for
// each None. Clears the field, so that saved-tensor hooks cannot read it later.
torch::autograd::variable_list take_saved_tensors(THPFunction& node) {
  torch::autograd::variable_list result;
  THPObjectPtr given(std::exchange(node.to_save, nullptr));
  if (!given)
    return result;
  check_tuple(given.get(), "to_save");
  const Py_ssize_t count = PyTuple_GET_SIZE(given.get());
  result.reserve(count);
  for (Py_ssize_t index = 0; index < count; ++index) {
    PyObject* item = PyTuple_GET_ITEM(given.get(), index);
    if (C10_UNLIKELY(item != Py_None && !is_tensor(item)))
      refuse_to_save(item, index);
    result.push_back(item == Py_None ? at::Tensor() : THPVariable_Unpack(item));
  }
  return result;
}

// Saves tensors on the node. The grad_fn of an output is this node, so to avoid a reference cycle,
// outputs are saved without it.
void save_tensors(PythonNode& created, const torch::autograd::variable_list& tensors) {
  std::vector<SavedVariable>& saved = created.fields().saved_variables;
  saved.clear();
  saved.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) {
    if (tensor.defined())
      saved.emplace_back(tensor, tensor.grad_fn().get() == created.node().get());
    else
      saved.emplace_back();
  }
}

THPObjectPtr call_before_kernel(const Gradient& gradient, const Values& values) {
  if (C10_LIKELY(gradient.before_kernel == nullptr))
    return {};
  THPObjectPtr inputs = checked(values.positional().release());
  THPObjectPtr keyword_only = checked(values.keyword_only().release());
  PyObject* arguments[] = {nullptr, inputs.get(), keyword_only.get()};
  return checked(PyObject_Vectorcall(
      gradient.before_kernel, arguments + 1, 2 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr));
}

// Calls `Gradient::setup_context`. If `seen`, the result of `call_before_kernel`, is not nullptr,
// passes it as the last argument.
void call_setup_context(
    const Gradient& gradient,
    PyObject* ctx,
    const Values& values,
    PyObject* result,
    PyObject* seen) {
  if (gradient.setup_context == nullptr)
    return;
  THPObjectPtr inputs = checked(values.positional(gradient.stored_defaults).release());
  THPObjectPtr keyword_only = checked(values.keyword_only(gradient.stored_defaults).release());
  PyObject* arguments[] = {nullptr, ctx, inputs.get(), keyword_only.get(), result, seen};
  const size_t count = seen == nullptr ? 4 : 5;
  checked(PyObject_Vectorcall(
      gradient.setup_context, arguments + 1, count | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr));
}

THPObjectPtr compute_recorded(const Residuals& residuals, c10::function_ref<PyObject*()> compute) {
  Recording recording(residuals.recording);
  recording.start(residuals);
  return checked(compute());
}

// Saves residuals that `setup_with_residuals` did not accept by calling Python code, which converts
// them or raises an error.
__attribute__((noinline, cold)) void save_in_python(
    const Residuals& residuals,
    const Gradient& gradient,
    PyObject* ctx,
    const Values& values,
    PyObject* result,
    PyObject* saved) {
  THPObjectPtr seen =
      checked(PyObject_CallOneArg(residuals.make_request, saved == nullptr ? Py_None : saved));
  call_setup_context(gradient, ctx, values, result, seen.get());
}

} // namespace

PyObject* take_node(PyObject*, PyObject* ctx) {
  HANDLE_TH_ERRORS
  if (THPFunction_Check(ctx))
    return PythonNode::take_node(ctx);
  PyErr_SetString(PyExc_TypeError, "take_node expects the ctx of an autograd function");
  return nullptr;
  END_HANDLE_TH_ERRORS
}

bool nodes_come_from_apply() {
  return comes_from_apply<THPFunction>;
}

bool has_node_layout() {
  return THPFunctionType.tp_basicsize == Py_ssize_t(sizeof(THPFunction));
}

// Must agree with torch._C._any_requires_grad, which torch.library calls to decide whether to
// record a gradient.
bool wants_gradient(const Values& values) {
  const Parameters& parameters = values.parameters();
  bool wanted = false;
  for (size_t index = 0; index < parameters.positional; ++index) {
    if (!parameters.all[index].kind.holds_tensors())
      continue;
    bool needed = false, holds_none = false;
    values.each_tensor_of(
        index, [&](PyObject* tensor) { needed |= impl_of(tensor)->requires_grad(); });
    if (parameters.all[index].kind.is_list && values[index] != Py_None) {
      for (Py_ssize_t item = 0; item < PyList_GET_SIZE(values[index]); ++item)
        holds_none |= PyList_GET_ITEM(values[index], item) == Py_None;
    }
    wanted |= needed && !holds_none;
  }
  return wanted;
}

bool needs_dispatcher(const Gradient& gradient, const Values& values) {
  const Recording recording(gradient.recording);
  return call_before_kernel(gradient, values).get() == Py_NotImplemented;
}

__attribute__((noinline, __flatten__)) PyObject* record(
    const Gradient& gradient,
    const Values& values,
    const Residuals* residuals,
    THPObjectPtr& saved,
    c10::function_ref<PyObject*()> compute) {
  PythonNode created(gradient.node_maker);
  PyObject* ctx = created.ctx();
  THPFunction& fields = created.fields();
  THPObjectPtr metadata;
  torch::autograd::variable_list variables;
  {
    Inputs inputs(values, gradient);
    created.node()->set_next_edges(std::move(inputs.edges));
    fields.is_variable_input = std::move(inputs.are_tensors);
    fields.input_info = std::move(inputs.infos);
    variables = std::move(inputs.variables);
    // Set needs_input_grad now, because setup_context may read it.
    Py_XSETREF(fields.needs_input_grad, inputs.need_grad.release());
    if (inputs.layout && PyObject_SetAttrString(ctx, "_torchop_inputs", inputs.layout.get()) < 0)
      throw_python_error();
    metadata = std::move(inputs.metadata);
  }
  if (C10_UNLIKELY(autocast_is_enabled()) && !gradient.as_dispatched)
    checked(PyObject_CallMethod(ctx, "_torchop_save_autocast", nullptr));
  THPObjectPtr result, guard_of_saved;
  {
    // The formula computes the gradient of the kernel as a whole, so autograd must not record the
    // operators that the kernel calls.
    WithoutGrad mode;
    at::AutoDispatchBelowAutograd below;
    if (residuals == nullptr) {
      const Recording recording(gradient.recording);
      THPObjectPtr seen = call_before_kernel(gradient, values);
      if (C10_UNLIKELY(seen.get() == Py_NotImplemented))
        return nullptr;
      result = checked(compute());
      call_setup_context(gradient, ctx, values, result.get(), seen.get());
    } else {
      result = compute_recorded(*residuals, compute);
      if (C10_LIKELY(setup_with_residuals(*residuals, values, ctx, result.get(), saved.get())))
        guard_of_saved = guard(*residuals, ctx, fields.to_save, saved.get());
      else
        save_in_python(*residuals, gradient, ctx, values, result.get(), saved.get());
    }
    if (metadata) {
      THPObjectPtr of_result = checked(PyObject_CallOneArg(metadata.get(), result.get()));
      set_metadata(ctx, of_result.get());
    }
  }
  Outputs outputs(gradient, std::move(result));
  if (outputs.layout && !gradient.as_dispatched &&
      PyObject_SetAttrString(ctx, "_torchop_outputs", outputs.layout.get()) < 0)
    throw_python_error();
  // The order of these steps is the same as in THPFunction_apply: errors about saved tensors come
  // first, outputs are saved after they are attached, and hooks for new nodes run last.
  const torch::autograd::variable_list tensors = take_saved_tensors(fields);
  NodePtr attached;
  THPObjectPtr connected = connect_outputs(created, variables, std::move(outputs.flat), attached);
  // Store the guard of the residuals (see `Guard` in residuals.h) in the field
  // `non_differentiable`, which is not read from here on. An attribute of `ctx` would be slower,
  // because it needs a dict.
  Py_XSETREF(fields.non_differentiable, guard_of_saved.release());
  Py_CLEAR(fields.dirty_tensors);
  save_tensors(created, tensors);
  Py_CLEAR(fields.saved_for_forward); // not needed, because native calls have no tangents
  call_creation_hooks(attached);
  return outputs.restored(std::move(connected)).release();
}

} // namespace torchop

#else // TORCHOP_KNOWS_NODES

namespace torchop {

PyObject* take_node(PyObject*, PyObject*) {
  PyErr_SetString(PyExc_RuntimeError, "torchop does not know the autograd nodes of this PyTorch");
  return nullptr;
}

bool nodes_come_from_apply() {
  return false;
}

bool has_node_layout() {
  return true; // irrelevant, because we create no nodes
}

bool wants_gradient(const Values&) {
  return false;
}

bool needs_dispatcher(const Gradient&, const Values&) {
  return false;
}

PyObject* record(
    const Gradient&,
    const Values&,
    const Residuals*,
    THPObjectPtr&,
    c10::function_ref<PyObject*()>) {
  TORCH_INTERNAL_ASSERT(false, "torchop does not know the autograd nodes of this PyTorch");
}

} // namespace torchop

#endif

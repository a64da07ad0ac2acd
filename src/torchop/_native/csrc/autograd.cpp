// autograd.cpp: making the node of a call by hand.
#include "autograd.h"

#if TORCHOP_KNOWS_NODES

#include <unordered_set>

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/AutogradState.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable_info.h>

#include "python_node.h"

namespace torchop {

using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::Variable;

namespace {

// Releases differ in who owns the node that belongs to a `ctx`.
template <typename N>
std::shared_ptr<N> node_of(const std::weak_ptr<N>& node) {
  return node.lock();
}
template <typename Pointer>
const Pointer& node_of(const Pointer& node) {
  return node;
}

bool fits(const at::Tensor& gradient, const torch::autograd::InputMetadata& input) {
  if (input.is_tensor_subclass() || input.is_nested_tensor() || gradient.is_nested())
    return true; // only PyTorch can tell
  return gradient.sym_sizes().equals(input.shape_as_dim_vector()) &&
      gradient.device() == input.device() &&
      gradient.is_complex() == c10::isComplexType(c10::typeMetaToScalarType(input.dtype()));
}

} // namespace

bool fit_inputs(PyObject* gradients, PyObject* ctx) {
  if (!PyType_IsSubtype(Py_TYPE(ctx), &THPFunctionType))
    return true;
  const auto& function = *reinterpret_cast<THPFunction*>(ctx);
  const auto& node = node_of(function.cdata);
  if (node == nullptr)
    return true;
  const size_t count = PyTuple_GET_SIZE(gradients);
  const size_t edges = node->num_outputs();
  size_t number = 0; // of the edge: only tensors have one
  for (size_t index = 0; index < count && index < function.is_variable_input.size(); ++index) {
    if (!function.is_variable_input[index])
      continue;
    if (number == edges)
      break;
    const torch::autograd::Edge& edge = node->next_edge(number++);
    PyObject* gradient = PyTuple_GET_ITEM(gradients, index);
    if (gradient == Py_None || !edge.is_valid())
      continue;
    if (!fits(THPVariable_Unpack(gradient), edge.function->input_metadata(edge.input_nr)))
      return false;
  }
  return true;
}

using PythonNode = NewNode<THPFunction>;

namespace {

PyObject* as_bool(bool value) {
  return Py_NewRef(value ? Py_True : Py_False);
}

// Where the gradient of a tensor goes. PyTorch's function asks, out of line, three times over
// whether the tensor is a view, which has to look at what it is a view of.
torch::autograd::Edge edge_of(const at::Tensor& tensor) {
  const torch::autograd::AutogradMeta* meta = autograd_meta_of(*tensor.unsafeGetTensorImpl());
  if (meta == nullptr)
    return {};
  if (C10_UNLIKELY(meta->is_view_))
    return torch::autograd::impl::gradient_edge(tensor);
  if (meta->grad_fn_)
    return {meta->grad_fn_, meta->output_nr_};
  if (!meta->requires_grad_)
    return {};
  return {torch::autograd::impl::grad_accumulator(tensor), 0};
}

// Where gradients go, and which inputs want one: flat for autograd, as the arguments are for `ctx`.
struct Inputs {
  torch::autograd::edge_list edges;
  std::vector<bool> are_tensors;
  THPObjectPtr need_grad;
  std::vector<torch::autograd::VariableInfo> infos; // compiled autograd reads them
  torch::autograd::variable_list variables;         // where a kernel may return one
  // What `ctx` keeps of lists: of ours, the length of each; of PyTorch's, what a function makes of
  // the result. nullptr without lists.
  THPObjectPtr layout, metadata;

  Inputs(const Values& values, const Gradient& gradient)
      : keeps_variables_(gradient.may_return_inputs) {
    if (gradient.inputs != nullptr)
      add_spread_out(values, gradient.inputs);
    else if (gradient.as_dispatched)
      add_as_dispatched(values.count_passed(), [&](size_t index) { return values[index]; });
    else
      add_all(values);
  }

 private:
  void reserve(size_t size) {
    edges.reserve(size);
    infos.reserve(size);
    are_tensors.reserve(size);
    need_grad = checked(PyTuple_New(Py_ssize_t(size)));
  }

  // As our own functions take them. The layout is the length of each list, None for no list.
  void add_all(const Values& values) {
    const Parameters& parameters = values.parameters();
    bool has_tensor_lists = false;
    reserve(parameters.positional);
    for (size_t index = 0; index < parameters.positional; ++index) {
      const Kind& kind = parameters.all[index].kind;
      PyObject* value = values[index];
      const bool holds_tensors = kind.holds_tensors() && value != Py_None;
      const bool is_tensor_list = holds_tensors && kind.is_list;
      has_tensor_lists |= is_tensor_list;
      PyObject* needed = is_tensor_list ? add_list(value) : add(value, holds_tensors);
      PyTuple_SET_ITEM(need_grad.get(), index, needed);
    }
    if (has_tensor_lists)
      layout = layout_of(values);
  }

  // As PyTorch's functions take them, and one object more.
  template <class Item>
  void add_as_dispatched(size_t count, Item&& item) {
    reserve(count + 1);
    for (size_t index = 0; index < count; ++index)
      PyTuple_SET_ITEM(need_grad.get(), index, add(item(index), THPVariable_Check(item(index))));
    PyTuple_SET_ITEM(need_grad.get(), count, add(Py_None, false));
  }

  // The same, where `Gradient::inputs` has to tell what they are.
  void add_spread_out(const Values& values, PyObject* spread_out) {
    THPObjectPtr args = checked(values.positional().release());
    THPObjectPtr found = checked(PyObject_CallOneArg(spread_out, args.get()));
    PyObject *list, *metadata_of;
    if (!PyArg_ParseTuple(found.get(), "O!O", &PyList_Type, &list, &metadata_of))
      throw python_error();
    add_as_dispatched(
        size_t(PyList_GET_SIZE(list)), [&](size_t index) { return PyList_GET_ITEM(list, index); });
    metadata = THPObjectPtr(Py_NewRef(metadata_of));
  }

  PyObject* add(PyObject* value, bool is_tensor) {
    are_tensors.push_back(is_tensor);
    if (!is_tensor)
      return Py_NewRef(Py_False);
    const at::Tensor& tensor = THPVariable_Unpack(value);
    const torch::autograd::Edge& edge = edges.emplace_back(edge_of(tensor));
    infos.emplace_back(tensor);
    if (keeps_variables_)
      variables.push_back(tensor);
    // A view that was made without grad requires it if its base does, and has nowhere to send one.
    return as_bool(edge.is_valid() || impl_of(value)->requires_grad());
  }

  PyObject* add_list(PyObject* list) {
    const Py_ssize_t size = PyList_GET_SIZE(list);
    THPObjectPtr needed = checked(PyList_New(size));
    for (Py_ssize_t item = 0; item < size; ++item) {
      PyObject* tensor = PyList_GET_ITEM(list, item);
      PyList_SET_ITEM(needed.get(), item, add(tensor, tensor != Py_None));
    }
    return needed.release();
  }

  static THPObjectPtr layout_of(const Values& values) {
    const Parameters& parameters = values.parameters();
    THPObjectPtr result = checked(PyTuple_New(Py_ssize_t(parameters.positional)));
    for (size_t index = 0; index < parameters.positional; ++index) {
      const Kind& kind = parameters.all[index].kind;
      PyObject* value = values[index];
      const bool is_list = kind.holds_tensors() && kind.is_list && value != Py_None;
      PyObject* length = is_list ? PyLong_FromSsize_t(PyList_GET_SIZE(value)) : Py_NewRef(Py_None);
      PyTuple_SET_ITEM(result.get(), index, length);
    }
    return result;
  }

  bool keeps_variables_;
};

// As PyTorch's functions keep what they know of lists: when the formula has looked at the call.
void keep_metadata(PyObject* ctx, PyObject* metadata) {
  static PyObject* name = PyUnicode_InternFromString("_pt_metadata");
  TORCH_CHECK(
      !PyObject_HasAttr(ctx, name),
      "Please don't set ctx._pt_metadata; PyTorch uses it to store info");
  if (PyObject_SetAttr(ctx, name, metadata) < 0)
    throw python_error();
}

// As during `autograd.Function.forward`: this operator is differentiated by its formula.
struct WithoutGrad {
  c10::AutoGradMode reverse{false};
  c10::AutoFwGradMode forward{false};
};

size_t output_count(PyObject* result) {
  return PyTuple_Check(result) ? size_t(PyTuple_GET_SIZE(result)) : 1;
}

PyObject* output(PyObject* result, size_t index) {
  return PyTuple_Check(result) ? PyTuple_GET_ITEM(result, index) : result;
}

// The results of a call as autograd takes them: each tensor of a list is one.
struct Outputs {
  THPObjectPtr flat;
  // The length of each list, None for no list; nullptr without lists, where `flat` is the result.
  THPObjectPtr layout;
  bool are_tuple = false;

  Outputs(const Gradient& gradient, THPObjectPtr result) : are_tuple(PyTuple_Check(result.get())) {
    bool has_lists = false;
    for (size_t index = 0; index < output_count(result.get()); ++index)
      has_lists |= is_spread_out(gradient, output(result.get(), index));
    if (C10_UNLIKELY(has_lists))
      spread_out(gradient, result.get());
    else
      flat = std::move(result);
  }

  // The same structure of outputs that are connected.
  THPObjectPtr gathered(THPObjectPtr connected) const {
    if (!layout)
      return connected;
    const Py_ssize_t count = PyTuple_GET_SIZE(layout.get());
    THPObjectPtr values = checked(PyTuple_New(count));
    Py_ssize_t start = 0;
    for (Py_ssize_t index = 0; index < count; ++index) {
      PyObject* length = PyTuple_GET_ITEM(layout.get(), index);
      const Py_ssize_t end = start + (length == Py_None ? 1 : PyLong_AsSsize_t(length));
      THPObjectPtr value;
      if (length == Py_None) {
        value = THPObjectPtr(Py_NewRef(PyTuple_GET_ITEM(connected.get(), start)));
      } else {
        THPObjectPtr items = checked(PyTuple_GetSlice(connected.get(), start, end));
        value = checked(PySequence_List(items.get()));
      }
      PyTuple_SET_ITEM(values.get(), index, value.release());
      start = end;
    }
    return are_tuple ? std::move(values)
                     : THPObjectPtr(Py_NewRef(PyTuple_GET_ITEM(values.get(), 0)));
  }

 private:
  // Our functions spread out all lists. PyTorch's do it where they know of lists at all, and not to
  // one with anything but tensors.
  static bool is_spread_out(const Gradient& gradient, PyObject* value) {
    if (!PyList_Check(value))
      return false;
    if (!gradient.as_dispatched)
      return true;
    bool are_tensors = gradient.inputs != nullptr;
    for (Py_ssize_t item = 0; item < PyList_GET_SIZE(value); ++item)
      are_tensors &= THPVariable_Check(PyList_GET_ITEM(value, item));
    return are_tensors;
  }

  void spread_out(const Gradient& gradient, PyObject* result) {
    const size_t count = output_count(result);
    THPObjectPtr items = checked(PyList_New(0));
    layout = checked(PyTuple_New(Py_ssize_t(count)));
    for (size_t index = 0; index < count; ++index) {
      PyObject* value = output(result, index);
      const bool is_list = is_spread_out(gradient, value);
      const Py_ssize_t end = PyList_GET_SIZE(items.get());
      PyObject* length = is_list ? PyLong_FromSsize_t(PyList_GET_SIZE(value)) : Py_NewRef(Py_None);
      PyTuple_SET_ITEM(layout.get(), index, checked(length).release());
      const int failed = is_list ? PyList_SetSlice(items.get(), end, end, value)
                                 : PyList_Append(items.get(), value);
      if (failed != 0)
        throw python_error();
    }
    flat = checked(PyList_AsTuple(items.get()));
  }
};

// What a method of `ctx` left there; PyTorch checks it when it is used, in these words.
void check_tuple(PyObject* marks, const char* attribute) {
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
        THPVariable_Check(item),
        "mark_non_differentiable only accepts variable arguments, but got ",
        Py_TYPE(item)->tp_name);
    tensors.insert(impl_of(item));
  }
  return tensors;
}

// Operators that rewrite history are not recorded here, but a `setup_context` may mark anything.
std::unordered_set<at::TensorImpl*> dirty(const THPFunction& node) {
  std::unordered_set<at::TensorImpl*> tensors;
  if (node.dirty_tensors == nullptr)
    return tensors;
  check_tuple(node.dirty_tensors, "dirty_tensors");
  for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(node.dirty_tensors); ++index) {
    PyObject* item = PyTuple_GET_ITEM(node.dirty_tensors, index);
    TORCH_CHECK(
        THPVariable_Check(item),
        "mark_dirty can only accept variables, but argument ",
        index,
        " is of type ",
        Py_TYPE(item)->tp_name);
    tensors.insert(impl_of(item));
    impl_of(item)->bump_version();
  }
  return tensors;
}

// A new tensor that nothing is known of yet becomes an output in one step; anything else (inputs,
// views, integers, several outputs, marks of `ctx`) is for PyTorch's own function.
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

std::vector<std::optional<Variable>> outputs_of(
    PythonNode& created,
    const torch::autograd::variable_list& inputs,
    const std::unordered_set<at::TensorImpl*>& without_gradient,
    const std::vector<std::optional<Variable>>& outputs,
    NodePtr& attached) {
  const THPFunction& fields = created.fields();
  // It warns of marks that make no sense: as Python warnings, not as lines on stderr. They may be
  // errors, which the handler throws when it goes, but not while another exception is on its way.
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

// Makes the results outputs of the node; `attached` becomes the node that they got. An output that
// is one of the inputs becomes a view of it. Else the input itself would get a history.
THPObjectPtr connect_outputs(
    PythonNode& created,
    const torch::autograd::variable_list& inputs,
    THPObjectPtr result,
    NodePtr& attached) {
  const NodePtr& node = created.node();
  THPFunction& fields = created.fields();
  node->clear_input_metadata();
  fields.output_info.clear();
  if (is_simple_output(result.get(), fields, inputs)) {
    const at::Tensor& tensor = THPVariable_Unpack(result.get());
    const uint32_t number = node->add_input_metadata(tensor);
    torch::autograd::impl::set_gradient_edge(tensor, {node, number});
    fields.output_info.emplace_back(tensor);
    attached = node;
    return result;
  }
  const size_t count = output_count(result.get());
  std::vector<std::optional<Variable>> raw(count);
  for (size_t index = 0; index < count; ++index) {
    if (PyObject* item = output(result.get(), index); THPVariable_Check(item))
      raw[index] = THPVariable_Unpack(item);
  }
  const std::unordered_set<at::TensorImpl*> without_gradient = not_differentiable(fields);
  const std::vector<std::optional<Variable>> wrapped =
      outputs_of(created, inputs, without_gradient, raw, attached);
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
    // What is no tensor passes through.
    PyObject* item = wrapped[index].has_value() ? THPVariable_Wrap(*wrapped[index])
                                                : Py_NewRef(output(result.get(), index));
    PyTuple_SET_ITEM(connected.get(), index, checked(item).release());
  }
  if (PyTuple_Check(result.get()))
    return connected;
  return THPObjectPtr(Py_NewRef(PyTuple_GET_ITEM(connected.get(), 0)));
}

// What `ctx.save_for_backward` was given; undefined for None. It is gone from the node then: hooks
// that pack a tensor may look there.
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
    TORCH_CHECK_TYPE(
        item == Py_None || THPVariable_Check(item),
        "save_for_backward can only save variables, but argument ",
        index,
        " is of type ",
        Py_TYPE(item)->tp_name);
    result.push_back(item == Py_None ? at::Tensor() : THPVariable_Unpack(item));
  }
  return result;
}

// An output is saved without its node, which it would keep alive in a cycle.
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

// What `Gradient::look` finds before the kernel runs; nullptr if there is nothing to be looked at.
THPObjectPtr look(const Gradient& gradient, const Values& values) {
  if (C10_LIKELY(gradient.look == nullptr))
    return {};
  THPObjectPtr inputs = checked(values.positional().release());
  THPObjectPtr keyword_only = checked(values.keyword_only().release());
  PyObject* arguments[] = {nullptr, inputs.get(), keyword_only.get()};
  return checked(PyObject_Vectorcall(
      gradient.look, arguments + 1, 2 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr));
}

// `seen` is what `look` returned.
void call_setup_context(
    const Gradient& gradient,
    PyObject* ctx,
    const Values& values,
    PyObject* result,
    PyObject* seen) {
  if (gradient.setup_context == nullptr)
    return;
  THPObjectPtr inputs = checked(values.positional().release());
  THPObjectPtr keyword_only = checked(values.keyword_only().release());
  PyObject* arguments[] = {nullptr, ctx, inputs.get(), keyword_only.get(), result, seen};
  const size_t count = seen == nullptr ? 4 : 5;
  checked(PyObject_Vectorcall(
      gradient.setup_context, arguments + 1, count | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr));
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

PyObject* record(
    const Gradient& gradient, const Values& values, c10::function_ref<PyObject*()> compute) {
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
    Py_XSETREF(fields.needs_input_grad, inputs.need_grad.release());
    if (inputs.layout && PyObject_SetAttrString(ctx, "_torchop_inputs", inputs.layout.get()) < 0)
      throw python_error();
    metadata = std::move(inputs.metadata);
  }
  THPObjectPtr result;
  {
    WithoutGrad mode;
    at::AutoDispatchBelowAutograd below;
    THPObjectPtr seen = look(gradient, values);
    result = checked(compute());
    call_setup_context(gradient, ctx, values, result.get(), seen.get());
    if (metadata) {
      THPObjectPtr of_result = checked(PyObject_CallOneArg(metadata.get(), result.get()));
      keep_metadata(ctx, of_result.get());
    }
  }
  Outputs outputs(gradient, std::move(result));
  if (outputs.layout && !gradient.as_dispatched &&
      PyObject_SetAttrString(ctx, "_torchop_outputs", outputs.layout.get()) < 0)
    throw python_error();
  // The order is PyTorch's: what is wrong with the tensors to save is said first, an output is
  // saved when it has its node, and hooks for new nodes see one that has everything.
  const torch::autograd::variable_list tensors = take_saved_tensors(fields);
  NodePtr attached;
  THPObjectPtr connected = connect_outputs(created, variables, std::move(outputs.flat), attached);
  Py_CLEAR(fields.non_differentiable);
  Py_CLEAR(fields.dirty_tensors);
  save_tensors(created, tensors);
  Py_CLEAR(fields.saved_for_forward);
  tell_creation_hooks(attached);
  return outputs.gathered(std::move(connected)).release();
}

} // namespace torchop

#else // TORCHOP_KNOWS_NODES

namespace torchop {

PyObject* take_node(PyObject*, PyObject*) {
  PyErr_SetString(PyExc_RuntimeError, "the nodes of this PyTorch are not known");
  return nullptr;
}

bool nodes_come_from_apply() {
  return false;
}

bool wants_gradient(const Values&) {
  return false;
}

PyObject* record(const Gradient&, const Values&, c10::function_ref<PyObject*()>) {
  TORCH_INTERNAL_ASSERT(false, "the nodes of this PyTorch are not known");
}

} // namespace torchop

#endif

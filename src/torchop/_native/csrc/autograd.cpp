// autograd.cpp: making the node of a call by hand.
#include "autograd.h"

#include <unordered_set>

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/AutogradState.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_function.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable_info.h>

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

// Only for a release whose struct is known, and everything that has to be done with it. Before, a
// node was made by `apply`, and not with the object that is `ctx`; afterwards, there are hooks for
// new nodes, and formulas may declare the dtypes of gradients.
bool can_make_nodes() {
  return TORCHOP_TORCH_VERSION == 213;
}

#if TORCHOP_TORCH_VERSION == 213

namespace {

[[noreturn]] void raise_python_error() {
  throw python_error();
}

THPObjectPtr checked(PyObject* object) {
  if (object == nullptr)
    raise_python_error();
  return THPObjectPtr(object);
}

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
  // What `ctx` keeps of lists, ours or PyTorch's; nullptr without lists.
  THPObjectPtr layout, metadata;

  Inputs(const Values& values, const Gradient& gradient) {
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
    PyObject *list, *noted;
    if (!PyArg_ParseTuple(found.get(), "O!O", &PyList_Type, &list, &noted))
      raise_python_error();
    add_as_dispatched(
        size_t(PyList_GET_SIZE(list)), [&](size_t index) { return PyList_GET_ITEM(list, index); });
    if (noted != Py_None)
      metadata = THPObjectPtr(Py_NewRef(noted));
  }

  PyObject* add(PyObject* value, bool is_tensor) {
    are_tensors.push_back(is_tensor);
    if (!is_tensor)
      return Py_NewRef(Py_False);
    const torch::autograd::Edge& edge = edges.emplace_back(edge_of(THPVariable_Unpack(value)));
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
};

// As PyTorch's functions keep what they know of lists: when the formula has looked at the call.
void keep_metadata(PyObject* ctx, PyObject* metadata) {
  static PyObject* name = PyUnicode_InternFromString("_pt_metadata");
  TORCH_CHECK(
      !PyObject_HasAttr(ctx, name),
      "Please don't set ctx._pt_metadata; PyTorch uses it to store info");
  if (PyObject_SetAttr(ctx, name, metadata) < 0)
    raise_python_error();
}

// As during `autograd.Function.forward`: this operator is differentiated by its formula.
struct WithoutGrad {
  c10::AutoGradMode reverse{false};
  c10::AutoFwGradMode forward{false};
};

size_t output_count(PyObject* result) {
  return PyTuple_CheckExact(result) ? size_t(PyTuple_GET_SIZE(result)) : 1;
}

PyObject* output(PyObject* result, size_t index) {
  return PyTuple_CheckExact(result) ? PyTuple_GET_ITEM(result, index) : result;
}

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
  if (!is_plain_tensor(result) || node.non_differentiable || node.dirty_tensors)
    return false;
  for (const at::Tensor& input : inputs) {
    if (input.unsafeGetTensorImpl() == impl_of(result))
      return false;
  }
  const at::Tensor& tensor = THPVariable_Unpack(result);
  return autograd_meta_of(*tensor.unsafeGetTensorImpl()) == nullptr &&
      torch::autograd::isDifferentiableType(tensor.scalar_type());
}

// PyTorch's own way of making outputs of tensors.
std::vector<std::optional<Variable>> wrap_outputs(
    THPFunction& node,
    const torch::autograd::variable_list& inputs,
    const std::vector<std::optional<Variable>>& outputs) {
  auto jvp = [](const auto&, const auto&) -> torch::autograd::variable_list {
    TORCH_INTERNAL_ASSERT(false, "no tangent comes this far");
  };
  auto view_as_self = [](const at::Tensor& tensor) { return tensor.view_as(tensor); };
  // It warns of marks that make no sense: as Python warnings, not as lines on stderr. They may be
  // errors, which the handler throws when it goes, but not while another exception is on its way.
  torch::PyWarningHandler warnings;
  try {
    return torch::autograd::_wrap_outputs(
        inputs,
        not_differentiable(node),
        dirty(node),
        outputs,
        node.cdata,
        jvp,
        {},
        view_as_self,
        node.pure_view);
  } catch (...) {
    warnings.set_in_exception();
    throw;
  }
}

THPObjectPtr connect_outputs(
    const Gradient& gradient, THPFunction& node, const Values& values, THPObjectPtr result) {
  node.cdata->clear_input_metadata();
  node.output_info.clear();
  // An output that is one of these becomes a view of it. Else the input itself would get a history.
  torch::autograd::variable_list inputs;
  if (gradient.may_return_inputs)
    values.each_tensor([&](PyObject* tensor) { inputs.push_back(THPVariable_Unpack(tensor)); });
  if (is_simple_output(result.get(), node, inputs)) {
    const at::Tensor& tensor = THPVariable_Unpack(result.get());
    const uint32_t number = node.cdata->add_input_metadata(tensor);
    torch::autograd::impl::set_gradient_edge(tensor, {node.cdata, number});
    node.output_info.emplace_back(tensor);
    return result;
  }
  const size_t count = output_count(result.get());
  std::vector<std::optional<Variable>> raw(count);
  for (size_t index = 0; index < count; ++index) {
    if (PyObject* item = output(result.get(), index); item != Py_None)
      raw[index] = THPVariable_Unpack(item);
  }
  const std::vector<std::optional<Variable>> wrapped = wrap_outputs(node, inputs, raw);
  THPObjectPtr connected = checked(PyTuple_New(Py_ssize_t(count)));
  node.output_info.reserve(count);
  for (size_t index = 0; index < count; ++index) {
    if (wrapped[index].has_value())
      node.output_info.emplace_back(*wrapped[index]);
    else
      node.output_info.emplace_back();
    PyObject* item =
        wrapped[index].has_value() ? THPVariable_Wrap(*wrapped[index]) : Py_NewRef(Py_None);
    if (item == nullptr)
      raise_python_error();
    PyTuple_SET_ITEM(connected.get(), index, item);
  }
  if (PyTuple_CheckExact(result.get()))
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
void save_tensors(THPFunction& node, const torch::autograd::variable_list& tensors) {
  node.saved_variables.clear();
  node.saved_variables.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) {
    if (tensor.defined())
      node.saved_variables.emplace_back(tensor, tensor.grad_fn().get() == node.cdata.get());
    else
      node.saved_variables.emplace_back();
  }
}

void describe_inputs(THPFunction& node, const Values& values) {
  node.input_info.clear();
  node.input_info.reserve(values.parameters().positional);
  values.each_tensor(
      [&](PyObject* tensor) { node.input_info.emplace_back(THPVariable_Unpack(tensor)); });
}

void call_setup_context(
    const Gradient& gradient, PyObject* ctx, const Values& values, PyObject* result) {
  if (gradient.setup_context == nullptr)
    return;
  THPObjectPtr inputs = checked(values.positional().release());
  THPObjectPtr keyword_only = checked(values.keyword_only().release());
  PyObject* arguments[] = {nullptr, ctx, inputs.get(), keyword_only.get(), result};
  checked(PyObject_Vectorcall(
      gradient.setup_context, arguments + 1, 4 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr));
}

} // namespace

PyObject* record(
    const Gradient& gradient, const Values& values, c10::function_ref<PyObject*()> compute) {
  // As calling the class would, which looks for an __init__ that is not there.
  auto* node_class = reinterpret_cast<PyTypeObject*>(gradient.node_class);
  static PyObject* no_arguments = PyTuple_New(0);
  THPObjectPtr ctx = checked(node_class->tp_new(node_class, no_arguments, nullptr));
  auto& node = *reinterpret_cast<THPFunction*>(ctx.get());
  THPObjectPtr metadata;
  {
    Inputs inputs(values, gradient);
    node.cdata->set_next_edges(std::move(inputs.edges));
    node.is_variable_input = std::move(inputs.are_tensors);
    describe_inputs(node, values); // compiled autograd reads it
    Py_XSETREF(node.needs_input_grad, inputs.need_grad.release());
    if (inputs.layout &&
        PyObject_SetAttrString(ctx.get(), "_torchop_inputs", inputs.layout.get()) < 0)
      raise_python_error();
    metadata = std::move(inputs.metadata);
  }
  THPObjectPtr result;
  {
    WithoutGrad mode;
    at::AutoDispatchBelowAutograd below;
    result = checked(compute());
    call_setup_context(gradient, ctx.get(), values, result.get());
    if (metadata)
      keep_metadata(ctx.get(), metadata.get());
  }
  // The order is PyTorch's: what is wrong with the tensors to save is said first, and an output is
  // saved when it has its node.
  const torch::autograd::variable_list tensors = take_saved_tensors(node);
  result = connect_outputs(gradient, node, values, std::move(result));
  Py_CLEAR(node.non_differentiable);
  Py_CLEAR(node.dirty_tensors);
  save_tensors(node, tensors);
  Py_CLEAR(node.saved_for_forward);
  return result.release();
}

#else

PyObject* record(const Gradient&, const Values&, c10::function_ref<PyObject*()>) {
  TORCH_INTERNAL_ASSERT(false, "nodes cannot be made for this PyTorch");
}

#endif

} // namespace torchop

// trial.cpp: calls that are recorded here and by PyTorch, and compared in what can be seen of them.
//
// The names of a node's fields may stay, and their meaning change. So two functions run forward and
// backward both ways when the extension is loaded: without modes, hooks and transforms, whatever
// the first call is in, and without the engine, whose threads would keep the process from forking.
#include "trial.h"

#if TORCHOP_KNOWS_NODES

#include <sstream>
#include <thread>

#include <ATen/ThreadLocalState.h>
#include <ATen/core/Formatting.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/tensor.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/jit/frontend/tracer.h>
#include <torch/version.h>

#include "autograd.h"
#include "flat.h"
#include "frames.h"
#include "python_node.h"

namespace torchop {

namespace {

size_t ended = 0; // nodes, by what they carry

THPObjectPtr wrapped(const at::Tensor& tensor) {
  return checked(THPVariable_Wrap(tensor));
}

// compute(x): twice the tensor; where `self` is true, with integers beside it.
PyObject* compute(PyObject* self, PyObject* x) {
  HANDLE_TH_ERRORS
  const at::Tensor& tensor = THPVariable_Unpack(x);
  THPObjectPtr twice = wrapped(tensor * 2);
  if (self != Py_True)
    return twice.release();
  THPObjectPtr whole = wrapped(tensor.to(at::kLong));
  return checked(PyTuple_Pack(2, twice.get(), whole.get())).release();
  END_HANDLE_TH_ERRORS
}

// setup_context(ctx, inputs, keyword_only_inputs, output) saves the input and the first output.
PyObject* save(PyObject*, PyObject* args) {
  PyObject *ctx, *inputs, *keyword_only, *output;
  if (!PyArg_ParseTuple(args, "OO!OO", &ctx, &PyTuple_Type, &inputs, &keyword_only, &output))
    return nullptr;
  PyObject* first = PyTuple_Check(output) ? PyTuple_GET_ITEM(output, 0) : output;
  THPObjectPtr witness(PyCapsule_New(&ended, nullptr, [](PyObject*) { ++ended; }));
  if (!witness || PyObject_SetAttrString(ctx, "witness", witness.get()) < 0)
    return nullptr;
  return PyObject_CallMethod(ctx, "save_for_backward", "OO", PyTuple_GET_ITEM(inputs, 0), first);
}

PyObject* forward(PyObject* self, PyObject* args) {
  PyObject *ctx, *x;
  if (!PyArg_ParseTuple(args, "OO", &ctx, &x))
    return nullptr;
  THPObjectPtr output(compute(self, x));
  THPObjectPtr given(output ? Py_BuildValue("(O(O)OO)", ctx, x, Py_None, output.get()) : nullptr);
  THPObjectPtr saved(given ? save(nullptr, given.get()) : nullptr);
  return saved ? output.release() : nullptr;
}

// backward(ctx, *grads) uses all that it gets: zeros stand for what an output got no gradient for.
PyObject* backward(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  THPObjectPtr saved = checked(PyObject_GetAttrString(PyTuple_GET_ITEM(args, 0), "saved_tensors"));
  const at::Tensor& x = THPVariable_Unpack(PyTuple_GetItem(saved.get(), 0));
  at::Tensor sum = x + THPVariable_Unpack(PyTuple_GetItem(saved.get(), 1));
  for (Py_ssize_t index = 1; index < PyTuple_GET_SIZE(args); ++index) {
    PyObject* gradient = PyTuple_GET_ITEM(args, index);
    TORCH_CHECK(is_tensor(gradient), "no zeros for output ", index - 1);
    sum = sum + THPVariable_Unpack(gradient) * x;
  }
  return wrapped(sum).release();
  END_HANDLE_TH_ERRORS
}

PyMethodDef methods[] = {
    {"forward", forward, METH_VARARGS, nullptr},
    {"backward", backward, METH_VARARGS, nullptr},
    {"compute", compute, METH_O, nullptr},
    {"setup_context", save, METH_VARARGS, nullptr},
};

// One thing that was seen of a call, by name.
using Sight = std::vector<std::pair<const char*, std::string>>;

template <class... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream stream;
  (stream << ... << parts);
  return stream.str();
}

void look_at_node(Sight& seen, const at::Tensor& x, const at::Tensor& y, PyObject* node_class) {
  THPObjectPtr wrapper = wrapped(y);
  THPObjectPtr ctx = checked(PyObject_GetAttrString(wrapper.get(), "grad_fn"));
  seen.emplace_back(
      "its class is PyTorch's", text(Py_TYPE(ctx.get()) == (PyTypeObject*)node_class));
  if (!THPFunction_Check(ctx.get()))
    return;
  const auto& fields = *reinterpret_cast<THPFunction*>(ctx.get());
  const NodePtr node = y.grad_fn();
  for (const torch::autograd::Edge& edge : node->next_edges())
    seen.emplace_back(
        "an edge",
        text(edge.function == torch::autograd::impl::grad_accumulator(x), ' ', edge.input_nr));
  for (uint32_t output = 0; output < node->num_inputs(); ++output) {
    const auto& known = node->input_metadata(output);
    seen.emplace_back(
        "what is known of an output",
        text(known.shape_as_dim_vector(), ' ', known.dtype().name(), ' ', known.device()));
  }
  // Not the field, which is empty since 2.14 until somebody asks.
  THPObjectPtr needed = checked(PyObject_GetAttrString(ctx.get(), "needs_input_grad"));
  THPObjectPtr words = checked(PyObject_Repr(needed.get()));
  seen.emplace_back("needs_input_grad", PyUnicode_AsUTF8(words.get()));
  seen.emplace_back(
      "the numbers of inputs, of outputs and of saved tensors",
      text(
          fields.is_variable_input.size(),
          ' ',
          fields.input_info.size(),
          ' ',
          fields.output_info.size(),
          ' ',
          fields.saved_variables.size()));
  seen.emplace_back(
      "what is left for forward",
      text(
          fields.to_save != nullptr,
          ' ',
          fields.non_differentiable != nullptr,
          ' ',
          fields.dirty_tensors != nullptr,
          ' ',
          fields.saved_for_forward != nullptr));
}

void run_backward(Sight& seen, const at::Tensor& x, const at::Tensor& y, size_t outputs) {
  const NodePtr node = y.grad_fn();
  for (const char* name : {"the gradient", "a second backward"}) {
    torch::autograd::variable_list gradients(outputs);
    gradients[0] = at::full_like(x, 5);
    try {
      seen.emplace_back(name, text((*node)(std::move(gradients))[0]));
    } catch (const std::exception& error) {
      seen.emplace_back(name, std::string(error.what()).substr(0, 60));
    }
    node->release_variables(); // as after a backward that keeps no graph
  }
}

// What is seen of a call that PyTorch records, or that is recorded here.
Sight see(PyObject* functions, PyObject* make_function, PyObject* node_maker, bool is_ours) {
  auto function_at = [&](size_t index) { return PyTuple_GET_ITEM(functions, index); };
  THPObjectPtr function = checked(PyObject_CallFunction(
      make_function, "sOOO", "Trial", function_at(0), function_at(1), function_at(1)));
  THPObjectPtr node_class = checked(PyObject_GetAttrString(function.get(), "_backward_cls"));
  const at::Tensor x = at::tensor({3.0, 4.0}, at::kDouble).set_requires_grad(true);
  THPObjectPtr argument = wrapped(x), result;
  if (is_ours) {
    static PyMethodDef take{"take_node", take_node, METH_O, nullptr};
    THPObjectPtr taker(nodes_come_from_apply() ? PyCFunction_New(&take, nullptr) : nullptr);
    THPObjectPtr maker = checked(PyObject_CallFunctionObjArgs(
        node_maker, function.get(), taker ? taker.get() : Py_None, nullptr));
    Gradient gradient;
    gradient.node_maker = maker.get();
    gradient.setup_context = function_at(3);
    Parameters parameters;
    parameters.all.resize(1); // a tensor
    parameters.positional = parameters.as_given = 1;
    Values values(parameters);
    PyObject* passed = argument.get();
    values.bind(&passed, 1, nullptr);
    THPObjectPtr saved;
    result = checked(record(gradient, values, nullptr, saved, [&] {
      return PyObject_CallOneArg(function_at(2), passed);
    }));
  } else {
    result = checked(PyObject_CallMethod(function.get(), "apply", "O", argument.get()));
  }
  Sight seen;
  const size_t count = output_count(result.get());
  for (size_t index = 0; index < count; ++index) {
    const at::Tensor& y = THPVariable_Unpack(output(result.get(), index));
    seen.emplace_back("an output", text(y.detach(), ' ', y.requires_grad(), ' ', y.output_nr()));
  }
  const size_t before = ended;
  {
    const at::Tensor y = THPVariable_Unpack(output(result.get(), 0));
    look_at_node(seen, x, y, node_class.get());
    run_backward(seen, x, y, count);
  }
  result = nullptr;
  seen.emplace_back("whether it ends", text(ended == before + 1));
  return seen;
}

PyObject* difference(const char* what, const std::string& ours, const std::string& theirs) {
  return PyUnicode_FromFormat(
      "the autograd nodes of PyTorch %s are not those that torchop makes: %s is %s and not %s",
      TORCH_VERSION,
      what,
      ours.c_str(),
      theirs.c_str());
}

} // namespace

PyObject* try_nodes(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject *make_function, *node_maker;
  if (!PyArg_ParseTuple(args, "OO", &make_function, &node_maker))
    return nullptr;
  if (THPFunctionType.tp_basicsize != Py_ssize_t(sizeof(THPFunction)))
    return difference(
        "their size",
        std::to_string(THPFunctionType.tp_basicsize),
        std::to_string(sizeof(THPFunction)));
  std::optional<at::ThreadLocalState> of_new_thread;
  std::thread([&] { of_new_thread.emplace(); }).join();
  const at::ThreadLocalStateGuard state(*of_new_thread);
  const auto traced = torch::jit::tracer::getTracingState(); // which is no part of that state
  const auto restore = c10::make_scope_exit([&] { torch::jit::tracer::setTracingState(traced); });
  torch::jit::tracer::setTracingState(nullptr);
  const WithoutDynamo frames;
  for (PyObject* several : {Py_False, Py_True}) {
    THPObjectPtr functions = checked(PyTuple_New(4));
    for (size_t index = 0; index < 4; ++index)
      PyTuple_SET_ITEM(
          functions.get(), index, checked(PyCFunction_New(&methods[index], several)).release());
    const Sight ours = see(functions.get(), make_function, node_maker, true);
    const Sight theirs = see(functions.get(), make_function, node_maker, false);
    for (size_t index = 0; index < std::max(ours.size(), theirs.size()); ++index) {
      const auto nothing = std::make_pair("", std::string("nothing"));
      const auto& [what, mine] = index < ours.size() ? ours[index] : nothing;
      const auto& [expected_what, expected] = index < theirs.size() ? theirs[index] : nothing;
      if (mine != expected)
        return difference(*what ? what : expected_what, mine, expected);
    }
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

} // namespace torchop

#else // TORCHOP_KNOWS_NODES

namespace torchop {

PyObject* try_nodes(PyObject*, PyObject*) {
  Py_RETURN_NONE; // whoever compiled this knows what is wrong with them
}

} // namespace torchop

#endif

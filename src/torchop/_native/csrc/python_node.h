// python_node.h: the autograd nodes that are Python objects, where releases of PyTorch differ.
//
// What a release has is asked of its headers, member by member, so that one source serves all.
// `requires` looks at names only where they depend on a parameter: hence the templates.
#pragma once

#include <Python.h>

#include <memory>
#include <optional>
#include <unordered_set>
#include <utility>
#include <vector>

#include <torch/csrc/Dtype.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/python_function.h>

#include "errors.h"

namespace torchop {

// A shared_ptr until 2.12, an intrusive_ptr since.
using NodePtr = std::decay_t<decltype(torch::autograd::Edge::function)>;

// Until 2.12, an object made by calling its class has no node. Only `apply` ties one to it, and the
// class of nodes is no symbol that can be linked to.
template <class Fields>
inline constexpr bool comes_from_apply = requires(Fields& fields) { fields.cdata.lock(); };

// A new node without inputs or outputs, and the object that is its `ctx`.
template <class Fields, bool = comes_from_apply<Fields>>
class NewNode {
 public:
  // `maker` is the class. Calling it would look for an __init__ that is not there.
  explicit NewNode(PyObject* maker) {
    auto* type = reinterpret_cast<PyTypeObject*>(maker);
    static PyObject* no_arguments = PyTuple_New(0);
    ctx_ = checked(type->tp_new(type, no_arguments, nullptr));
  }

  PyObject* ctx() {
    return ctx_.get();
  }
  Fields& fields() {
    return *reinterpret_cast<Fields*>(ctx_.get());
  }
  const NodePtr& node() {
    return fields().cdata;
  }

  static PyObject* take_node(PyObject*) {
    PyErr_SetString(PyExc_RuntimeError, "calling their class makes the nodes of this PyTorch");
    return nullptr;
  }

 private:
  THPObjectPtr ctx_;
};

inline constexpr const char* node_capsule = "torchop._native._call_path.node";

template <class Fields>
class NewNode<Fields, true> {
 public:
  // `maker` is the `apply` of a function that returns what `take_node` makes of its `ctx`.
  explicit NewNode(PyObject* maker) {
    THPObjectPtr capsule = checked(PyObject_CallNoArgs(maker));
    auto* node = static_cast<Owner*>(PyCapsule_GetPointer(capsule.get(), node_capsule));
    if (node == nullptr)
      throw_python_error();
    ctx_ = (*node)->obj;
    node_ = std::move(*node);
  }

  // For the `forward` of that function: while `apply` runs, it alone owns the node.
  static PyObject* take_node(PyObject* ctx) {
    auto node = std::make_unique<Owner>(reinterpret_cast<Fields*>(ctx)->cdata.lock());
    PyObject* capsule = PyCapsule_New(node.get(), node_capsule, [](PyObject* self) {
      delete static_cast<Owner*>(PyCapsule_GetPointer(self, node_capsule));
    });
    if (capsule != nullptr)
      node.release();
    return capsule;
  }

  PyObject* ctx() {
    return ctx_;
  }
  Fields& fields() {
    return *reinterpret_cast<Fields*>(ctx_);
  }
  const NodePtr& node() {
    return node_;
  }

 private:
  using Owner = decltype(std::declval<Fields&>().cdata.lock());
  NodePtr node_;
  PyObject* ctx_; // which the node keeps alive
};

// PyTorch's own way of making outputs of tensors. `attached` becomes the node that they got: where
// an input that is a view was marked as written, one around `node`. Until 2.13 nobody asks for it.
template <class Ptr>
__attribute__((noinline)) std::vector<std::optional<at::Tensor>> wrap_outputs(
    Ptr& attached,
    const Ptr& node,
    const torch::autograd::variable_list& inputs,
    const std::unordered_set<at::TensorImpl*>& without_gradient,
    const std::unordered_set<at::TensorImpl*>& dirty,
    const std::vector<std::optional<at::Tensor>>& outputs,
    bool pure_view) {
  using torch::autograd::_wrap_outputs;
  const torch::autograd::_jvp_fn_t jvp = [](const auto&,
                                            const auto&) -> torch::autograd::variable_list {
    TORCH_INTERNAL_ASSERT(false, "no tangent comes this far");
  };
  const torch::autograd::_view_as_self_fn_t view_as_self = [](const at::Tensor& tensor) {
    return tensor.view_as(tensor);
  };
  const std::unordered_set<at::TensorImpl*> saved_early; // by a function that has no setup_context
  auto wrap = [&](auto&... more) {
    return _wrap_outputs(
        inputs,
        without_gradient,
        dirty,
        outputs,
        node,
        jvp,
        saved_early,
        view_as_self,
        pure_view,
        more...);
  };
  if constexpr (requires(Ptr& created) { fire_node_creation_hooks(created); })
    return wrap(attached);
  else
    return wrap();
}

// Runs the hooks for new nodes, which exist since 2.14. The node must be complete.
template <class Ptr>
void call_creation_hooks(const Ptr& node) {
  if constexpr (requires { fire_node_creation_hooks(node); }) {
    if (node)
      fire_node_creation_hooks(node);
  }
}

// Whether `ctx` says which dtypes gradients are to have, since 2.14.
template <class Fields>
bool declares_dtypes(const Fields& fields) {
  if constexpr (requires { fields.output_grad_dtypes; })
    return fields.output_grad_dtypes != nullptr;
  else
    return false;
}

// Does what `ctx` says of them; mistakes are told in PyTorch's words. `has_gradient(index)` is
// whether an output has one.
template <class Fields, class HasGradient>
void apply_declared_dtypes(
    Fields& fields, torch::autograd::Node& node, size_t count, HasGradient&& has_gradient) {
  if constexpr (requires { fields.output_grad_dtypes; }) {
    THPObjectPtr dtypes(std::exchange(fields.output_grad_dtypes, nullptr));
    if (!dtypes)
      return;
    TORCH_CHECK(
        PyTuple_Check(dtypes.get()),
        "set_output_grad_dtype expects the declarations to be a tuple, but got: ",
        Py_TYPE(dtypes.get())->tp_name);
    TORCH_CHECK(
        size_t(PyTuple_GET_SIZE(dtypes.get())) == count,
        "set_output_grad_dtype expected the number of declarations to match the number of outputs: "
        "the Function returned ",
        count,
        " values but ",
        PyTuple_GET_SIZE(dtypes.get()),
        " declarations were provided");
    for (size_t index = 0; index < count; ++index) {
      PyObject* dtype = PyTuple_GET_ITEM(dtypes.get(), index);
      TORCH_CHECK(
          dtype == Py_None || THPDtype_Check(dtype),
          "set_output_grad_dtype expects each declaration to be a torch.dtype or None, but got ",
          Py_TYPE(dtype)->tp_name);
      if (has_gradient(index)) {
        std::optional<c10::ScalarType> declared;
        if (dtype != Py_None)
          declared = reinterpret_cast<THPDtype*>(dtype)->scalar_type;
        node.mutable_input_metadata(uint32_t(index)).set_grad_dtype(declared);
        continue;
      }
      TORCH_CHECK(
          dtype == Py_None,
          "set_output_grad_dtype: got a concrete dtype for output ",
          index,
          ", but that output is not a differentiable tensor (it is a non-tensor, was marked "
          "non-differentiable, or has a non-differentiable dtype). Pass None for output ",
          index,
          " instead.");
    }
  }
}

} // namespace torchop

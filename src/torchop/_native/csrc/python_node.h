// python_node.h: handle differences between PyTorch releases in the autograd nodes of Python
// functions (`THPFunction`).
//
// The functions here use `requires` expressions to test whether PyTorch's headers declare a member.
// They are templates, because outside of a template, naming a missing member is a compile error.
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

// A pointer to an autograd node, which is a std::shared_ptr in PyTorch 2.11 and 2.12, and a
// c10::intrusive_ptr in later releases.
using NodePtr = std::decay_t<decltype(torch::autograd::Edge::function)>;

// True in PyTorch 2.11 and 2.12, where instantiating an autograd.Function class creates a `ctx`
// without a node. We cannot create the node ourselves, because PyTorch does not export its C++
// class PyNode, so we must call `apply`.
template <class Fields>
inline constexpr bool comes_from_apply = requires(Fields& fields) { fields.cdata.lock(); };

template <class Fields, bool = comes_from_apply<Fields>>
class NewNode {
 public:
  // `maker` is the autograd.Function class. Calling tp_new is enough, because it has no `__init__`.
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
    PyErr_SetString(PyExc_RuntimeError, "take_node is not needed for this release of PyTorch");
    return nullptr;
  }

 private:
  THPObjectPtr ctx_;
};

inline constexpr const char* node_capsule = "torchop._native._call_path.node";

template <class Fields>
class NewNode<Fields, true> {
 public:
  // `maker` is the method `apply` of an autograd.Function whose forward returns take_node(ctx).
  // Calling it creates a node and returns it in a capsule.
  explicit NewNode(PyObject* maker) {
    THPObjectPtr capsule = checked(PyObject_CallNoArgs(maker));
    auto* node = static_cast<Owner*>(PyCapsule_GetPointer(capsule.get(), node_capsule));
    if (node == nullptr)
      throw_python_error();
    ctx_ = (*node)->obj;
    node_ = std::move(*node);
  }

  // Returns a capsule that owns the node of `ctx`. The forward of the autograd.Function must call
  // this, because nothing else keeps the node alive after `apply` has returned.
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
  PyObject* ctx_; // owned by the node
};

// Attaches tensors to a node by calling PyTorch's `_wrap_outputs`. Since PyTorch 2.14, this may
// attach them to another node if a view was marked dirty, so it also stores the actual node in
// `attached`.
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
    TORCH_INTERNAL_ASSERT(false, "native calls have no tangents");
  };
  const torch::autograd::_view_as_self_fn_t view_as_self = [](const at::Tensor& tensor) {
    return tensor.view_as(tensor);
  };
  // `_wrap_outputs` expects the tensors that forward saved. There are none, because we save all
  // tensors in setup_context.
  const std::unordered_set<at::TensorImpl*> saved_in_forward;
  auto wrap = [&](auto&... more) {
    return _wrap_outputs(
        inputs,
        without_gradient,
        dirty,
        outputs,
        node,
        jvp,
        saved_in_forward,
        view_as_self,
        pure_view,
        more...);
  };
  if constexpr (requires(Ptr& created) { fire_node_creation_hooks(created); })
    return wrap(attached);
  else
    return wrap();
}

// Calls the node creation hooks, which PyTorch 2.14 added. The node must be complete by then.
template <class Ptr>
void call_creation_hooks(const Ptr& node) {
  if constexpr (requires { fire_node_creation_hooks(node); }) {
    if (node)
      fire_node_creation_hooks(node);
  }
}

// Returns whether setup_context called `ctx.set_output_grad_dtype` (since PyTorch 2.14).
template <class Fields>
bool declares_dtypes(const Fields& fields) {
  if constexpr (requires { fields.output_grad_dtypes; })
    return fields.output_grad_dtypes != nullptr;
  else
    return false;
}

// Applies the dtypes that were passed to `ctx.set_output_grad_dtype`, with the same checks and
// messages as in PyTorch's python_function.cpp. `has_gradient(index)` returns whether an output is
// differentiable.
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

// autograd.h: record a native call for backward, without autograd.Function.apply.
#pragma once

#include <Python.h>

#include <c10/util/FunctionRef.h>

#include "arguments.h"
#include "residuals.h"

namespace torchop {

// How an operator is differentiated. The plan owns the referenced objects.
struct Gradient {
  // Returns a new node with its `ctx` when called. If it is nullptr, calls that record a gradient
  // fall back to the dispatcher.
  PyObject* node_maker = nullptr;
  // True if lists may contain None, so that a call records only if `wants_gradient` says so.
  bool skips_optional_lists = false;
  PyObject* setup_context = nullptr; // setup_context(ctx, inputs, keyword_only_inputs, output)
  // look(inputs, keyword_only_inputs) runs before the kernel, and its result is the last argument
  // of `setup_context`. If it returns NotImplemented, the call falls back to the dispatcher.
  // Optional.
  PyObject* look = nullptr;
  PyObject* recording = nullptr; // `Residuals::recording`; `look` may add a request to it
  // True if the node's inputs are the arguments that the dispatcher passes (without trailing
  // arguments equal to their default) and one object more, as in torch._library.autograd.
  bool as_dispatched = false;
  // True if the result may be one of the arguments. Otherwise `is_valid_result` has rejected that.
  bool may_return_inputs = false;
  // For operators with tensor lists: inputs(args) returns the flat list of inputs and a function
  // metadata(result) that computes `ctx._pt_metadata`. nullptr without lists.
  PyObject* inputs = nullptr;
};

// Returns whether nodes are made by applying a function that calls take_node(ctx), as PyTorch 2.11
// and 2.12 need, and not by calling the node's class.
bool nodes_come_from_apply();

// Returns whether the running PyTorch's nodes have the size of the struct that was compiled in.
bool has_node_layout();

PyObject* take_node(PyObject*, PyObject* ctx);

// Returns whether torch.library would record a call in which some tensor requires grad. Tensors in
// a list that contains None do not count there.
bool wants_gradient(const Values& values);

// Returns whether `Gradient::look` rejects the call for native recording.
bool is_for_dispatcher(const Gradient& gradient, const Values& values);

// Runs `compute` and makes its results outputs of a new node. Returns nullptr without an error if
// the call must fall back to the dispatcher (`is_for_dispatcher`). With `residuals`, `compute`
// calls the author's kernel and stores its residuals in `saved`.
//
// The node has the class and layout of a node from `autograd.Function.apply`, so hooks, double
// backward, checkpointing, anomaly mode and compiled autograd support it. A private C++ node would
// cost the same and fail compiled autograd.
PyObject* record(
    const Gradient& gradient,
    const Values& values,
    const Residuals* residuals,
    THPObjectPtr& saved,
    c10::function_ref<PyObject*()> compute);

} // namespace torchop

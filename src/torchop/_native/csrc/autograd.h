// autograd.h: record native calls in the autograd graph, without autograd.Function.apply.
#pragma once

#include <Python.h>

#include <c10/util/FunctionRef.h>

#include "arguments.h"
#include "residuals.h"

namespace torchop {

// How native calls to an operator record gradients. The call plan owns the referenced objects.
struct Gradient {
  // Creates a node (see NewNode in python_node.h). If nullptr, calls that record a gradient fall
  // back to the dispatcher.
  PyObject* node_maker = nullptr;
  // True if lists may contain None. If so, `wants_gradient` decides whether to record a call.
  bool skips_optional_lists = false;
  PyObject* setup_context = nullptr; // setup_context(ctx, inputs, keyword_only_inputs, output)
  // before_kernel(inputs, keyword_only_inputs) runs before the kernel. Its result becomes the last
  // argument of setup_context. If the result is NotImplemented, the call falls back to the
  // dispatcher. nullptr for formulas that need no such function.
  PyObject* before_kernel = nullptr;
  PyObject* recording = nullptr; // `Residuals::recording`; `before_kernel` may modify it
  // True for torch.library's formulas. Their node inputs are the arguments that the dispatcher
  // passes (without trailing defaults), and one more object, as in torch._library.autograd.
  bool as_dispatched = false;
  // True if the result may be one of the arguments. If false, `is_valid_result` rejects that.
  bool may_return_inputs = false;
  // For torch.library's formulas with tensor lists: inputs(args) returns the flat list of inputs,
  // and a function metadata(result) that computes `ctx._pt_metadata`. Otherwise nullptr.
  PyObject* inputs = nullptr;
};

// Returns whether creating a node requires autograd.Function.apply, as in PyTorch 2.11 and 2.12.
// Since 2.13, calling the node's class is enough.
bool nodes_come_from_apply();

// Returns whether nodes of the running PyTorch have the same size as in the headers.
bool has_node_layout();

// take_node(ctx) returns a capsule that owns the autograd node of `ctx`. See NewNode in
// python_node.h.
PyObject* take_node(PyObject*, PyObject* ctx);

// Returns whether torch.library would record a call. If a list contains None, torch.library ignores
// all tensors in that list.
bool wants_gradient(const Values& values);

// Calls `Gradient::before_kernel`, and returns whether it rejects native recording.
bool needs_dispatcher(const Gradient& gradient, const Values& values);

// Runs `compute`, and attaches its results to a new node. Returns nullptr without an exception if
// the call must fall back to the dispatcher (see `needs_dispatcher`). With `residuals`, `compute`
// calls the author's kernel and stores the residuals in `saved`.
//
// The node has the same class as a node from autograd.Function.apply, so hooks, double backward,
// checkpointing, anomaly mode and compiled autograd support it. A C++ node would not be faster, and
// compiled autograd would not support it.
PyObject* record(
    const Gradient& gradient,
    const Values& values,
    const Residuals* residuals,
    THPObjectPtr& saved,
    c10::function_ref<PyObject*()> compute);

} // namespace torchop

// autograd.h: create autograd nodes for native calls, i.e. calls that bypass the dispatcher. We
// create the nodes directly instead of calling autograd.Function.apply.
#pragma once

#include <Python.h>

#include <c10/util/FunctionRef.h>

#include "arguments.h"
#include "residuals.h"

namespace torchop {

// How native calls to an operator record gradients. All pointers are borrowed from the call plan.
//
// Gradient formulas are registered either with torchop or with torch.library. The comments below
// call the second kind "torch.library's formulas".
struct Gradient {
  // Creates a node (see NewNode in python_node.h). If this is nullptr, calls that record a gradient
  // fall back to the dispatcher.
  PyObject* node_maker = nullptr;
  // True for torch.library's formulas if the operator has tensor lists that may contain None. In
  // this case, call `wants_gradient` to find out whether a call records a gradient.
  bool skips_optional_lists = false;
  PyObject* setup_context = nullptr; // setup_context(ctx, inputs, keyword_only_inputs, output)
  // before_kernel(inputs, keyword_only_inputs) is called before the kernel runs, and its result is
  // the last argument of setup_context. If it returns NotImplemented, the call falls back to the
  // dispatcher. nullptr for most formulas.
  PyObject* before_kernel = nullptr;
  PyObject* recording = nullptr; // `Residuals::recording`; `before_kernel` may modify it
  // True for torch.library's formulas. A node then has the same inputs as in
  // torch/_library/autograd.py: the arguments as the dispatcher passes them (without trailing
  // defaults), and an additional input for `ctx._pt_metadata`.
  bool as_dispatched = false;
  // The defaults as the schema stores them, for torch.library's formulas (see `Values::positional`)
  PyObject* stored_defaults = nullptr;
  // False if `is_valid_result` rejects results that are arguments.
  bool may_return_inputs = false;
  // inputs(args) returns the inputs as a flat list, and a function that computes `ctx._pt_metadata`
  // from the result. Only torch.library's formulas of operators with tensor lists need this, and it
  // is nullptr for all others.
  PyObject* inputs = nullptr;
};

// Returns whether creating a node requires autograd.Function.apply, as in PyTorch 2.11 and 2.12. In
// later releases, we can instantiate the node's class instead.
bool nodes_come_from_apply();

// Returns whether autograd nodes have the same size in the running PyTorch as in the headers that
// the extension was compiled with.
bool has_node_layout();

// take_node(ctx) returns a capsule that owns the autograd node of `ctx`. See NewNode in
// python_node.h.
PyObject* take_node(PyObject*, PyObject* ctx);

// Returns whether torch.library would record a gradient for a call. torch.library ignores all
// tensors in a list that contains None.
bool wants_gradient(const Values& values);

bool needs_dispatcher(const Gradient& gradient, const Values& values);

// Runs the kernel by calling `compute`, and attaches the results to a new autograd node. If
// `residuals` is not nullptr, `compute` calls the author's kernel and stores the residuals in
// `saved`. If the call must fall back to the dispatcher (see `needs_dispatcher`), returns nullptr
// without an exception.
//
// The node has the same class as a node from autograd.Function.apply, so it supports hooks, double
// backward, checkpointing, anomaly mode and compiled autograd. A C++ node would be no faster, and
// would not work with compiled autograd.
PyObject* record(
    const Gradient& gradient,
    const Values& values,
    const Residuals* residuals,
    THPObjectPtr& saved,
    c10::function_ref<PyObject*()> compute);

} // namespace torchop

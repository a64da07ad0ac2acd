// autograd.h: recording a call for backward, without autograd.Function.apply.
#pragma once

#include <Python.h>

#include <c10/util/FunctionRef.h>

#include "arguments.h"
#include "residuals.h"

namespace torchop {

// The gradient of an operator; the plan keeps the objects alive.
struct Gradient {
  // Makes a node of the graph, and the object that is its `ctx`. Without it, calls that record a
  // gradient go to the dispatcher.
  PyObject* node_maker = nullptr;
  // Whether tensors in lists may have no gradient, so that `wants_gradient` has to be asked.
  bool passes_lists_by = false;
  PyObject* setup_context = nullptr; // setup_context(ctx, inputs, keyword_only_inputs, output)
  // look(inputs, keyword_only_inputs), before the kernel runs; what it returns is the last argument
  // of `setup_context` then. If that is NotImplemented, the call goes to the dispatcher. nullptr if
  // nothing is to be looked at.
  PyObject* look = nullptr;
  PyObject* recording = nullptr; // `Residuals::recording`, in which `look` may leave a request
  // Whether the function takes the arguments as the dispatcher hands them over, without those at
  // the end that equal their default, and one object more. PyTorch's functions of operators do.
  bool as_dispatched = false;
  // Whether a kernel may return what it was passed, because nothing checks that it does not.
  bool may_return_inputs = false;
  // Tells what those are where there are lists: inputs(args) returns a list, in which they are
  // spread out, and metadata(result), which returns what `ctx._pt_metadata` is to be. nullptr
  // elsewhere.
  PyObject* inputs = nullptr;
};

// Whether a node comes from applying a function, as until 2.12, and not from calling a class; and
// what the function applies: take_node(ctx).
bool nodes_come_from_apply();

// Returns whether the running PyTorch's nodes have the size of the struct that was compiled in.
bool has_node_layout();

PyObject* take_node(PyObject*, PyObject* ctx);

// Whether PyTorch's function for an operator would be applied to a call in which a tensor requires
// grad: it does not look into a list with None in it.
bool wants_gradient(const Values& values);

// Whether `Gradient::look` says that the dispatcher has to make the call.
bool is_for_dispatcher(const Gradient& gradient, const Values& values);

// Runs `compute`, and makes its results the outputs of a new node of the graph. Returns nullptr,
// without an error, if the call `is_for_dispatcher`. With `residuals`, `compute` calls the kernel
// that the author wrote, and leaves what that returns for them in `saved`.
//
// The node is the one that `autograd.Function.apply` would make, an object of the same class and
// layout, so whatever follows a graph treats it alike: hooks, double backward, checkpointing,
// anomaly mode, compiled autograd. A private C++ node costs the same, and the last of these fails.
PyObject* record(
    const Gradient& gradient,
    const Values& values,
    const Residuals* residuals,
    THPObjectPtr& saved,
    c10::function_ref<PyObject*()> compute);

} // namespace torchop

// module.cpp: the Python module `_call_path`. _call_path.pyi describes the functions.
#include <Python.h>

#include <cstring>

#include <torch/csrc/Exceptions.h>

#include "ambient_state.h"
#include "autograd.h"
#include "backward.h"
#include "bypass.h"
#include "choice.h"
#include "disabled.h"
#include "dispatch.h"
#include "entry.h"
#include "errors.h"
#include "frames.h"
#include "gradients.h"
#include "handle.h"
#include "lifetime.h"
#include "operator.h"
#include "overloads.h"
#include "plan.h"
#include "residuals.h"
#include "results.h"

namespace torchop {

namespace {

PyObject* probe_kernels(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  const char *plain, *with_keys;
  PyObject* function;
  if (!PyArg_ParseTuple(args, "ssO", &plain, &with_keys, &function))
    return nullptr;
  auto& dispatcher = c10::Dispatcher::singleton();
  auto without = dispatcher.findSchema({plain, ""}), with = dispatcher.findSchema({with_keys, ""});
  return PyBool_FromLong(
      without.has_value() && with.has_value() && torchop::probe_kernels(*without, *with, function));
  END_HANDLE_TH_ERRORS
}

// Parses the name of a dispatch key. c10::parseDispatchKey does not support all keys, for example
// AutogradMTIA, so this tries the names of all keys first.
DispatchKey key_of(const char* name) {
  const auto end = static_cast<uint16_t>(DispatchKey::EndOfRuntimeBackendKeys);
  for (uint16_t number = 0; number <= end; ++number) {
    const auto key = static_cast<DispatchKey>(number);
    if (std::strcmp(c10::toString(key), name) == 0)
      return key;
  }
  return c10::parseDispatchKey(name);
}

// Returns the kernel for `args`, a tuple (operator name, overload name, key), or nullptr if there
// is none.
const c10::KernelFunction* kernel_at(PyObject* args) {
  const char *name, *overload, *key;
  if (!PyArg_ParseTuple(args, "sss", &name, &overload, &key))
    throw_python_error();
  auto op = c10::Dispatcher::singleton().findSchema({name, overload});
  const DispatchKey parsed = key_of(key);
  if (!op.has_value() || !op->hasComputedKernelForDispatchKey(parsed))
    return nullptr;
  return &table_of(*op).lookup(DispatchKeySet(parsed));
}

PyObject* python_kernel(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  const c10::KernelFunction* kernel = kernel_at(args);
  PyObject* function = kernel == nullptr ? nullptr : python_function(*kernel);
  return Py_NewRef(function ? function : Py_None);
  END_HANDLE_TH_ERRORS
}

PyObject* is_plain_kernel(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  const c10::KernelFunction* kernel = kernel_at(args);
  return PyBool_FromLong(kernel != nullptr && takes_just_arguments(*kernel));
  END_HANDLE_TH_ERRORS
}

PyObject* is_evidently_fresh(PyObject*, PyObject* const* args, Py_ssize_t given) {
  HANDLE_TH_ERRORS
  if (given < 3 || given > 4 || !PyTuple_Check(args[0]) || !PyDict_Check(args[1])) {
    PyErr_SetString(PyExc_TypeError, "is_evidently_fresh expects arguments and a result");
    return nullptr;
  }
  return PyBool_FromLong(
      torchop::is_evidently_fresh(args[0], args[1], args[2]) &&
      (given == 3 || have_same_metadata(args[2], args[3])));
  END_HANDLE_TH_ERRORS
}

PyObject* are_plain(PyObject*, PyObject* const* args, Py_ssize_t given) {
  HANDLE_TH_ERRORS
  if (given != 3 || !PyLong_CheckExact(args[1])) {
    PyErr_SetString(PyExc_TypeError, "are_plain expects gradients, their number and the node");
    return nullptr;
  }
  return PyBool_FromLong(
      are_plain_gradients(args[0], PyLong_AsSsize_t(args[1])) && fit_inputs(args[0], args[2]));
  END_HANDLE_TH_ERRORS
}

PyObject* switch_off(PyObject*, PyObject* blocks) {
  change_blocks(PyLong_AsLong(blocks));
  Py_RETURN_NONE;
}

PyObject* log_fallbacks(PyObject*, PyObject* enabled) {
  logs_fallbacks = enabled == Py_True;
  Py_RETURN_NONE;
}

PyMethodDef functions[] = {
    {"probe_kernels",
     probe_kernels,
     METH_VARARGS,
     "Find out the memory layout of Python kernels in the dispatcher."},
    {"make_handle_type", make_handle_type, METH_VARARGS, "Create the native type of handles."},
    {"patch_calls", patch_calls, METH_O, "Replace tp_call of OpOverload or OpOverloadPacket."},
    {"adopt", adopt, METH_VARARGS, "Make calls to a handle native."},
    {"patch_handle_calls", patch_handle_calls, METH_VARARGS, "Replace tp_call of CustomOpDef."},
    {"is_plain_kernel",
     is_plain_kernel,
     METH_VARARGS,
     "Return whether the kernel at a key is a Python function of the arguments only."},
    {"python_kernel", python_kernel, METH_VARARGS, "Return the Python kernel at a key, or None."},
    {"is_evidently_fresh",
     reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(is_evidently_fresh)),
     METH_FASTCALL,
     "Return whether a result certainly shares no memory with the arguments."},
    {"are_plain",
     reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(are_plain)),
     METH_FASTCALL,
     "Return whether gradients are valid and need no conversion."},
    {"bypass", bypass, METH_VARARGS, "Override a Python kernel with a C++ kernel."},
    {"pack_plain",
     reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(pack_plain)),
     METH_FASTCALL,
     "Pack the state that a derived formula replays, or return None."},
    {"make_backward",
     make_backward,
     METH_VARARGS,
     "Create the function that the autograd engine calls."},
    {"make_handover",
     make_handover,
     METH_VARARGS,
     "Create the functions that kernels with residuals call."},
    {"take_node", take_node, METH_O, "Return a capsule that owns the node of a ctx."},
    {"switch_off", switch_off, METH_O, "Open or close blocks that disable native calls."},
    {"log_fallbacks", log_fallbacks, METH_O, "Log calls that fall back, or stop logging them."},
    {"keep_memory",
     keep_memory,
     METH_VARARGS,
     "Keep the memory that running calls read, before operators are deregistered."},
    {nullptr, nullptr, 0, nullptr},
};

// Checks that autograd nodes have the size that the extension was compiled for. The key in the
// extension's file name detects most differences between builds of PyTorch, but not a rebuild of
// the same version and commit with other headers.
bool check_node_layout() {
  if (has_node_layout())
    return true;
  PyErr_SetString(
      PyExc_ImportError,
      "the autograd nodes of the running PyTorch differ in size from those in the headers that the "
      "extension was compiled with");
  return false;
}

bool find_interpreter() {
  interpreter = PyInterpreterState_Get();
  THPObjectPtr module(PyImport_ImportModule("torch._C._dynamo.eval_frame"));
  if (module)
    set_eval_frame = PyObject_GetAttrString(module.get(), "set_eval_frame");
  return set_eval_frame != nullptr;
}

bool add_backends(PyObject* module) {
  THPObjectPtr names(PyList_New(0));
  for (const DispatchKey key : plain_backend_keys()) {
    THPObjectPtr name(names ? PyUnicode_FromString(c10::toString(key)) : nullptr);
    if (!name || PyList_Append(names.get(), name.get()) < 0)
      return false;
  }
  THPObjectPtr backends(PyList_AsTuple(names.get()));
  return backends && PyModule_AddObjectRef(module, "backends", backends.get()) == 0;
}

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    "torchop._native._call_path",
    "The native call path.",
    -1,
    functions,
    nullptr,
    nullptr,
    nullptr,
    nullptr,
};

} // namespace

} // namespace torchop

PyMODINIT_FUNC PyInit__call_path() {
  PyObject* module = PyModule_Create(&torchop::definition);
  if (module != nullptr &&
      (!torchop::check_node_layout() || !torchop::find_interpreter() ||
       !torchop::add_plan_type(module) || !torchop::add_entry_type(module) ||
       !torchop::add_operator_type(module) || !torchop::add_choice_type(module) ||
       PyModule_AddIntConstant(module, "nodes_come_from_apply", torchop::nodes_come_from_apply()) <
           0 ||
       !torchop::add_backends(module)))
    Py_CLEAR(module);
#if defined(Py_GIL_DISABLED) && !TORCHOP_NEEDS_GIL
  if (module != nullptr)
    PyUnstable_Module_SetGIL(module, Py_MOD_GIL_NOT_USED);
#endif
  return module;
}

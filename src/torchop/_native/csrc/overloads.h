// overloads.h: calls of the objects of torch.ops.
#pragma once

#include <Python.h>

namespace torchop {

// shorten_calls(type, before_first_call): a call of an object of this class goes to the object's
// `_op` without the Python frame of `__call__`, if an operator of ours is there. The function is
// called with the object before that is called for the first time, to put one there.
PyObject* shorten_calls(PyObject*, PyObject* args);

// shorten_handle_calls(cls): the same for PyTorch's class of handles, whose `__call__` just calls
// their overload.
PyObject* shorten_handle_calls(PyObject*, PyObject* args);

} // namespace torchop

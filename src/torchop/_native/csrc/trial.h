// trial.h: trying the nodes of this PyTorch, before a call depends on them.
#pragma once

#include <Python.h>

namespace torchop {

// try_nodes(make_function, node_maker), of _compat/autograd.py: what tells nodes that are made here
// from those of PyTorch, as a str; None if nothing does.
PyObject* try_nodes(PyObject*, PyObject* args);

} // namespace torchop

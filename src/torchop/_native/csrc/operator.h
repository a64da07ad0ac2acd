// operator.h: the type Operator, which replaces the C++ function in `OpOverload._op` and
// `OpOverloadPacket._op`.
#pragma once

#include <Python.h>

namespace torchop {

extern PyTypeObject* operator_type;

// Returns false only if `owner._op` is certainly no Operator. `owner` is an object of torch.ops. A
// hash lookup by address is cheaper than reading the attribute. Always returns true without the
// GIL.
bool has_operator(PyObject* owner);

// Returns whether an Operator has native calls. Without an entry, it only counts calls of PyTorch's
// function.
bool has_entry(PyObject* op);

// Registers the type Operator with the module.
bool add_operator_type(PyObject* module);

} // namespace torchop

// operator.h: the type Operator. An Operator object replaces the function in the attribute `_op` of
// an OpOverload or OpOverloadPacket. It receives the calls made through torch.ops, and runs them
// natively, i.e. without the dispatcher.
#pragma once

#include <Python.h>

namespace torchop {

extern PyTypeObject* operator_type;

// Returns whether `owner._op` may be an Operator, where `owner` is an OpOverload or
// OpOverloadPacket. Looks up the owner in a hash table, which is cheaper than reading the
// attribute. In free-threaded Python, always returns true.
bool has_operator(PyObject* owner);

// Returns whether an Operator has an Entry and can therefore run calls natively. An Operator
// without an Entry passes all calls to PyTorch's function, and only preserves the hash.
bool has_entry(PyObject* op);

bool add_operator_type(PyObject* module);

} // namespace torchop

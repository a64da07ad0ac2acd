// operator.h: the type Operator. An Operator object replaces the function in the attribute `_op` of
// an OpOverload or OpOverloadPacket. It receives the calls made through torch.ops, and runs them
// natively (without the dispatcher) if possible.
#pragma once

#include <Python.h>

namespace torchop {

extern PyTypeObject* operator_type;

// Returns whether `owner._op` may be an Operator, where `owner` is an OpOverload or
// OpOverloadPacket. This is a hash table lookup, which is cheaper than reading the attribute.
// Always returns true in free-threaded Python.
bool has_operator(PyObject* owner);

// Returns whether an Operator has an Entry, and so can run calls natively. An Operator without an
// Entry only preserves the hash, and forwards all calls to PyTorch's function.
bool has_entry(PyObject* op);

bool add_operator_type(PyObject* module);

} // namespace torchop

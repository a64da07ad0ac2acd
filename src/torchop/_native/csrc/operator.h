// operator.h: the type Operator. An Operator object replaces the function in the attribute `_op` of
// an OpOverload or OpOverloadPacket. It receives all calls through torch.ops and runs them natively
// (without the dispatcher) if possible.
#pragma once

#include <Python.h>

namespace torchop {

extern PyTypeObject* operator_type;

// Returns whether `owner._op` may be an Operator, where `owner` is an OpOverload or
// OpOverloadPacket. This looks up `owner` in a hash table, which is cheaper than reading the
// attribute. In free-threaded Python, always returns true.
bool has_operator(PyObject* owner);

// Returns whether an Operator has an Entry (entry.h), and so can run calls natively. An Operator
// without an Entry forwards all calls to PyTorch's function, and only exists to preserve the hash
// of `_op`.
bool has_entry(PyObject* op);

bool add_operator_type(PyObject* module);

} // namespace torchop

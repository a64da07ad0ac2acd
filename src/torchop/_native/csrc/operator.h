// operator.h: what torch.ops calls.
#pragma once

#include <Python.h>

namespace torchop {

extern PyTypeObject* operator_type;

// Whether an Operator was made for an object of torch.ops. To ask its dictionary takes longer.
bool has_operator(PyObject* owner);

// Whether an Operator calls natively, and not PyTorch's function alone.
bool has_entry(PyObject* op);

// Operator, which stands where an object of torch.ops keeps its C++ function.
bool add_operator_type(PyObject* module);

} // namespace torchop

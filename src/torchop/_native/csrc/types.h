// types.h: a helper that creates the Python types of this extension.
#pragma once

#include <Python.h>

namespace torchop {

// Creates a Python type from `spec` and adds it to `module`. Stores an owned reference to the type
// in `made`. Returns false with an exception set on failure.
inline bool add_type(PyObject* module, PyType_Spec& spec, PyTypeObject*& made) {
  made = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  return made != nullptr && PyModule_AddType(module, made) == 0;
}

} // namespace torchop

// types.h: create Python types.
#pragma once

#include <Python.h>

namespace torchop {

// Creates a heap type and adds it to the module. `made` is an owned reference. Returns false with
// an exception set on failure.
inline bool add_type(PyObject* module, PyType_Spec& spec, PyTypeObject*& made) {
  made = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  return made != nullptr && PyModule_AddType(module, made) == 0;
}

} // namespace torchop

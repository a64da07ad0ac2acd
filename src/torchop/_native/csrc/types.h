#pragma once

#include <Python.h>

namespace torchop {

inline bool add_type(PyObject* module, PyType_Spec& spec, PyTypeObject*& made) {
  made = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  return made != nullptr && PyModule_AddType(module, made) == 0;
}

} // namespace torchop

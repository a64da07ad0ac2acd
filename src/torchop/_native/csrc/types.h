// types.h: adds the types of the extension to its module.
#pragma once

#include <Python.h>

namespace torchop {

// Makes a type, which lives as long as the process. False with an exception if that fails.
inline bool add_type(PyObject* module, PyType_Spec& spec, PyTypeObject*& made) {
  made = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  return made != nullptr && PyModule_AddType(module, made) == 0;
}

} // namespace torchop

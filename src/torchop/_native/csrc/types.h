// types.h: create Python types.
#pragma once

#include <Python.h>

namespace torchop {

// Creates a type and adds it to the module. `made` receives an owned reference. If this fails,
// returns false with an exception set.
inline bool add_type(PyObject* module, PyType_Spec& spec, PyTypeObject*& made) {
  made = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  return made != nullptr && PyModule_AddType(module, made) == 0;
}

} // namespace torchop

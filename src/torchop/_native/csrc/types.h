#pragma once

#include <Python.h>

namespace torchop {

// Creates a type whose objects the garbage collector tracks, and adds it to the module. Stores a
// new reference in `made`.
inline bool add_type(
    PyObject* module,
    const char* name,
    size_t size,
    PyType_Slot* slots,
    PyTypeObject*& made,
    unsigned long more_flags = 0) {
  const auto flags = unsigned(Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | more_flags);
  PyType_Spec spec{name, int(size), 0, flags, slots};
  made = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  return made != nullptr && PyModule_AddType(module, made) == 0;
}

} // namespace torchop

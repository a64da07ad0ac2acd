// errors.h: propagate Python exceptions as C++ exceptions.
#pragma once

#include <Python.h>

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/object_ptr.h>

namespace torchop {

// Throws the current Python exception. Out of line, because a throw expression needs much code.
[[noreturn]] __attribute__((noinline, cold)) inline void throw_python_error() {
  throw python_error();
}

// Takes ownership of a new reference, or throws the current Python exception if it is nullptr.
inline THPObjectPtr checked(PyObject* object) {
  if (object == nullptr)
    throw_python_error();
  return THPObjectPtr(object);
}

} // namespace torchop

// errors.h: throw Python errors as C++ exceptions.
#pragma once

#include <Python.h>

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/object_ptr.h>

namespace torchop {

// Throws the Python error that is set. Out of line: an inlined throw takes more code and more
// compile time than most of its callers.
[[noreturn]] __attribute__((noinline, cold)) inline void throw_python_error() {
  throw python_error();
}

// Takes ownership of a new reference, and throws if it is nullptr.
inline THPObjectPtr checked(PyObject* object) {
  if (object == nullptr)
    throw_python_error();
  return THPObjectPtr(object);
}

} // namespace torchop

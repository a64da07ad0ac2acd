#pragma once

#include <Python.h>

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/object_ptr.h>

namespace torchop {

// Not inline, because a throw expression compiles to a lot of code.
[[noreturn]] __attribute__((noinline, cold)) inline void throw_python_error() {
  throw python_error();
}

// Wraps a new reference. If it is nullptr, throws the current Python exception.
inline THPObjectPtr checked(PyObject* object) {
  if (object == nullptr)
    throw_python_error();
  return THPObjectPtr(object);
}

} // namespace torchop

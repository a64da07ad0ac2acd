// Serves an AOTInductor package that calls operators written in Python.
// Usage: serve PACKAGE MODULE, where MODULE defines the operators.
#include <ATen/ATen.h>
#include <Python.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <iostream>

int main(int, char** argv) {
  Py_Initialize();
  if (!PyImport_ImportModule(argv[2])) return PyErr_Print(), 1;
  PyThreadState* state = PyEval_SaveThread();  // release the GIL, because the kernels acquire it
  {
    torch::inductor::AOTIModelPackageLoader model(argv[1]);
    std::cout << model.run({at::ones({3})})[0] << std::endl;
  }
  PyEval_RestoreThread(state);
  return Py_FinalizeEx();
}

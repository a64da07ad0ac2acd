// Serves an AOTInductor package in a process without Python. The operators are in a C++ library
// that is part of the package or is linked with this program.
// Usage: serve_alone PACKAGE
#include <ATen/ATen.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <iostream>

int main(int, char** argv) {
  torch::inductor::AOTIModelPackageLoader model(argv[1]);
  std::cout << model.run({at::ones({3})})[0] << std::endl;
}

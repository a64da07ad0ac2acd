// Serves a package of AOTInductor in a process without Python. It is linked with the definitions and
// the kernels of the operators that the package calls.
// Usage: serve_alone PACKAGE
#include <ATen/ATen.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <iostream>

int main(int, char** argv) {
  torch::inductor::AOTIModelPackageLoader model(argv[1]);
  std::cout << model.run({at::ones({3})})[0] << std::endl;
}

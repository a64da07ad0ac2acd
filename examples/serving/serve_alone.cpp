// Serves a package of AOTInductor in a process without Python. The package carries the definitions
// and the kernels of the operators that it calls, or the program is linked with them.
// Usage: serve_alone PACKAGE
#include <ATen/ATen.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <iostream>

int main(int, char** argv) {
  torch::inductor::AOTIModelPackageLoader model(argv[1]);
  std::cout << model.run({at::ones({3})})[0] << std::endl;
}

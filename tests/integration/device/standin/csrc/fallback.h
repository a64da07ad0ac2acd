// fallback.h: runs operators without a kernel for the device on the CPU.
#pragma once

namespace standin {

// Register the fallback for each operator of PyTorch that has a CPU kernel but none that the device
// can use. Custom operators then fail without a kernel for the device, as on a GPU.
void add_kernels();

// Add or remove the fallback for all operators, and return whether it was registered before.
// Without it, operators that lack a kernel for the device raise.
bool set_fallback(bool is_on);

} // namespace standin

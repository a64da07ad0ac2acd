// fallback.h: runs operators without a kernel for the device on the CPU.
#pragma once

namespace standin {

// Register the fallback for each operator of PyTorch that has a kernel for the CPU but none for the
// device. Custom operators get no fallback, so as on a GPU they raise without a kernel for the
// device.
void add_kernels();

// Add or remove the fallback for all operators, and return whether it was registered before.
// Without the fallback, operators that have no kernel for the device raise.
bool set_fallback(bool is_on);

} // namespace standin

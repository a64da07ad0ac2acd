// fallback.h: all other operators, which run on the CPU: a device may have that, or not.
#pragma once

namespace standin {

// Registers it as the kernel of each operator of PyTorch that has one for the CPU, and none that
// the device could use. So those of others are refused without a kernel for the device, as on a
// GPU.
void add_kernels();

// Registers it with the dispatcher, or takes it back; returns whether it was there. Without it, an
// operator that has no kernel for the device says so.
bool set_fallback(bool is_on);

} // namespace standin

// fallback.h: all other operators, which run on the CPU: a device may have that, or not.
#pragma once

namespace standin {

// Registers it with the dispatcher, or takes it back. Without it, an operator that has no kernel
// for the device says so.
void set_fallback(bool is_on);

} // namespace standin

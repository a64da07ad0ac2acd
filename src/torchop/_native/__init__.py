"""Native calls: call kernels from C++ without the dispatcher, if that has the same effect."""

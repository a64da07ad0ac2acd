"""Native calls: run kernels from C++ without the dispatcher, if the effect is the same."""

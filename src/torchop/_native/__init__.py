"""Native calls: run kernels from C++ without PyTorch's dispatcher, if the result is the same.

Each operator has an entry, a C++ object that receives the operator's calls. The entry holds a call
plan with the operator's parameters, kernels, result checks and gradient recording. For each call,
the entry checks whether the dispatcher would only run kernels that are in the plan. If so, the
entry runs them itself, which is faster. Otherwise the call falls back to the dispatcher.
"""

"""Native calls: run kernels from C++ without PyTorch's dispatcher, if the result is the same.

Each operator has an entry, a C++ object that receives the operator's calls. The entry has a call
plan, which contains the operator's parameters, kernels, result checks and gradient recording. For
each call, the entry checks whether the dispatcher would do nothing but run the kernels in the plan.
If so, the entry runs them itself, which is faster. Otherwise it passes the call to the dispatcher.
"""

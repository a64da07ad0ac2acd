"""Native calls to operators that `torchop.custom_op` did not create.

The kernels of these operators are found in the dispatcher's table of kernels.
"""

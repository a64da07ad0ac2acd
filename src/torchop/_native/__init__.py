"""Native calls: C++ calls that skip the dispatcher when it would only run torchop's kernels."""

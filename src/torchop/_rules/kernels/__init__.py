"""The kernels of an operator, by device type."""

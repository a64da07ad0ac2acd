"""Checks of the kernels that providers register beside the reference of an operator."""

"""Fake kernels: what an operator does with fake tensors."""

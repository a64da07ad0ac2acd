"""Fake kernels: they compute the metadata of outputs, for FakeTensor and meta tensors."""

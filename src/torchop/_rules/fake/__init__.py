"""Fake kernels: output metadata for FakeTensor and meta tensors."""

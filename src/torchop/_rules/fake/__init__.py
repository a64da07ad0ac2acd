"""Fake kernels, which compute output metadata for FakeTensor and meta tensors."""

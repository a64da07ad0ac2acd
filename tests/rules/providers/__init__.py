"""Providers: an operator has several kernels, and each call chooses between them."""

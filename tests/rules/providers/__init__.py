"""Providers: several kernels of one operator, and the choice between them."""

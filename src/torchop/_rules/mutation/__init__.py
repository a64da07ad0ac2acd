"""Mutated arguments: checks before the kernel, and what autograd learns of them."""

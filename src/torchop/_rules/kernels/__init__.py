"""Kernels by device type."""

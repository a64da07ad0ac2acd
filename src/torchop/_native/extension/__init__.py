"""Compile and load the C++ extension that makes native calls."""

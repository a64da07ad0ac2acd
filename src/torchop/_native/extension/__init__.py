"""Compile and load the C++ extension, which implements native calls."""

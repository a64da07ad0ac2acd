"""Compile and load the C++ extension with the native call path."""

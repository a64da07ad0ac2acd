"""Functionalization: how compilers trace operators that mutate arguments."""

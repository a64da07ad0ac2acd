"""Operators that mutate arguments: checks, version counters, and conjugate or negative views."""

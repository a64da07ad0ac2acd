"""Inspect operators, single calls, and the calls of a program."""

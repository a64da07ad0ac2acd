"""Inspect operators, single calls, and all calls that a program makes."""

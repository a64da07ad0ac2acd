"""A package with 24 planted faults of eight kinds, in operators that do not use torchop.

`python -m tests.testing.planted` runs its test suite with `--torchop-check`, and prints the faults
that the checks find.
"""

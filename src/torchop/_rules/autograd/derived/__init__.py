"""Derived formulas, which differentiate the body of the operator (the kernel)."""

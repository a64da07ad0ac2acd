"""Derived formulas, which differentiate the operator's body: the code of its kernel."""

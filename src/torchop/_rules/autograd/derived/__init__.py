"""Derived backward formulas: differentiate the operator's body, i.e. the code of its kernel."""

"""Formulas derived from the body of an operator."""

"""The autograd rule: backward formulas, forward-mode formulas and derived formulas."""

"""Autograd rules: backward formulas, forward-mode formulas and formulas derived from the kernel."""

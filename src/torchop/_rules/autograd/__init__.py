"""The autograd rule: backward formulas, forward-mode formulas and formulas derived from kernels."""

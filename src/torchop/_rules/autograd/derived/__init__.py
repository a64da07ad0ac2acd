"""Backward formulas derived by differentiating the kernel, the body of the operator."""

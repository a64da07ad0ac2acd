"""Gradients: formulas by hand, for either mode, or derived."""

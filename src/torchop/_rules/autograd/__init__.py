"""Gradients: formulas by hand, for either mode, opaque or derived."""

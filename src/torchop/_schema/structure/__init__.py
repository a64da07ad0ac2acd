"""Signatures that people write: structured arguments and results over a flat operator."""

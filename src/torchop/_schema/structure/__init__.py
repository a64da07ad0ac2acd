"""Structured arguments and results, for an operator with a flat schema."""

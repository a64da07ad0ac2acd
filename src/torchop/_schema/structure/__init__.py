"""Structured arguments and results, such as dataclasses, for operators with a flat schema."""

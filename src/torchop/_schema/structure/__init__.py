"""Structured arguments and results, such as dataclasses, which are flattened in the schema."""

"""Operator schemas: infer them from annotations, parse them, and check functions against them."""

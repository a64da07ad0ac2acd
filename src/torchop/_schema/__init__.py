"""Operator schemas: inferring them from annotations, parsing them, and checking functions."""

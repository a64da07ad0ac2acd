"""Functionalization of operators that mutate arguments."""

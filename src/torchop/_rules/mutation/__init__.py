"""Mutated arguments: checks, version counters and views."""

"""Checks, version counters and view handling for mutated arguments."""

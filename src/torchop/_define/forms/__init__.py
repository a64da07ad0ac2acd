"""Families: the functional, the out= and the in-place form of one operator."""

"""Choices that are rare, and that the simplest example never makes."""

from __future__ import annotations

from hypothesis import strategies as st


def one_in(count: int) -> st.SearchStrategy[bool]:
    """True once in `count` times; Hypothesis takes the first of a list for the simplest."""
    return st.sampled_from((False,) * (count - 1) + (True,))

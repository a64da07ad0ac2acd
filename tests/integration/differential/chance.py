"""Rare choices, which the simplest example of Hypothesis does not make."""

from __future__ import annotations

from hypothesis import strategies as st


def one_in(count: int) -> st.SearchStrategy[bool]:
    """Generate True once in `count` times; Hypothesis shrinks to False, the first element."""
    return st.sampled_from((False,) * (count - 1) + (True,))

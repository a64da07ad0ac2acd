"""Rare choices. The simplest example, to which Hypothesis shrinks, does not make them."""

from __future__ import annotations

from hypothesis import strategies as st


def one_in(count: int) -> st.SearchStrategy[bool]:
    """Generate True once in `count` times. Hypothesis shrinks to the first element, False."""
    return st.sampled_from((False,) * (count - 1) + (True,))

"""`torchop.derived`: says in a class, where a backward would stand, that it is to be derived."""

from __future__ import annotations

from typing import Literal, get_args

Strategy = Literal["recompute", "save"]
STRATEGIES: tuple[str, ...] = get_args(Strategy)


class Derived:
    """A formula that is derived from the body, for places where a formula is expected.

    Attributes:
        strategy: `"recompute"` or `"save"`; see `CustomOp.derive_autograd`.
    """

    __slots__ = ("strategy",)

    def __init__(self, strategy: Strategy) -> None:
        if strategy not in STRATEGIES:
            raise ValueError(f'torchop.derived expects "recompute" or "save", got {strategy!r}.')
        self.strategy: Strategy = strategy

    def __call__(self, strategy: Strategy) -> Derived:
        """The same with another strategy: `torchop.derived("save")`."""
        return Derived(strategy)

    def __repr__(self) -> str:
        return f"torchop.derived({self.strategy!r})"


derived = Derived("recompute")

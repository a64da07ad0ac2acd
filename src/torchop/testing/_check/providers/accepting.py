"""Which calls a provider accepts, and blocks in which its kernel runs."""

from __future__ import annotations

from typing import Any

from torchop import priority
from torchop._rules.providers import every_argument
from torchop._rules.providers.provider import Provider
from torchop.extend import Operator, OpOverload


def accepts(
    operator: Operator, provider: Provider, args: Any, kwargs: Any, is_traced: bool = False
) -> bool:
    """What `supports` of a provider says of a call.

    Raises:
        ProviderError: it raises, reads data, or returns something else than a bool.
    """
    if provider.accepts is None:
        return True
    return provider.accepts(*every_argument(operator.schema, args, kwargs), is_traced)


def only(op: OpOverload, name: str) -> priority:
    """A block in which calls of an operator run the kernel of one provider, if it takes them."""
    return in_order({op.name(): [name]})


def in_order(orders: Any) -> priority:
    """A block with these orders, and whatever else there is around it."""
    return priority(orders, strict=False, batch_invariant_only=False, deterministic_only=False)

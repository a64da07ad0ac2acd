"""Checks for operators: opcheck, and those for calls on several devices."""

from typing import TYPE_CHECKING, Any

from torchop._errors import OpCheckError as OpCheckError
from torchop.testing._opcheck import opcheck as opcheck

if TYPE_CHECKING:
    from torchop.testing._communication import Collective as Collective
    from torchop.testing._communication import communication as communication
    from torchop.testing._sharding import ShardingReport as ShardingReport
    from torchop.testing._sharding import check_sharding as check_sharding

__all__ = [
    "Collective",
    "OpCheckError",
    "ShardingReport",
    "check_sharding",
    "communication",
    "opcheck",
]


def __getattr__(name: str) -> Any:
    """What is there for tests alone is imported for the first of them."""
    if name in ("Collective", "communication"):
        from torchop.testing import _communication  # for start-up time

        return getattr(_communication, name)
    if name in ("ShardingReport", "check_sharding"):
        from torchop.testing import _sharding  # for start-up time

        return getattr(_sharding, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Checks of operators: opcheck, check and check_sharding."""

from typing import TYPE_CHECKING, Any

from torchop._errors import OpCheckError as OpCheckError
from torchop.testing._check.api import check as check
from torchop.testing._opcheck import opcheck as opcheck

if TYPE_CHECKING:
    from torchop.testing._check.report import CheckReport as CheckReport
    from torchop.testing._check.report import Failure as Failure
    from torchop.testing._check.report import Result as Result
    from torchop.testing._communication import Collective as Collective
    from torchop.testing._communication import communication as communication
    from torchop.testing._sharding import ShardingReport as ShardingReport
    from torchop.testing._sharding import check_sharding as check_sharding

__all__ = [
    "CheckReport",
    "Collective",
    "Failure",
    "OpCheckError",
    "Result",
    "ShardingReport",
    "check",
    "check_sharding",
    "communication",
    "opcheck",
]


def __getattr__(name: str) -> Any:
    """Imports the modules for tests when they are first used."""
    if name in ("CheckReport", "Failure", "Result"):
        from torchop.testing._check import report  # late, for start-up time

        return getattr(report, name)
    if name in ("Collective", "communication"):
        from torchop.testing import _communication  # late, for start-up time

        return getattr(_communication, name)
    if name in ("ShardingReport", "check_sharding"):
        from torchop.testing import _sharding  # late, for start-up time

        return getattr(_sharding, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Checks of operators: opcheck, check and check_sharding."""

import importlib
from typing import TYPE_CHECKING, Any

from torchop._errors import OpCheckError as OpCheckError
from torchop.testing._opcheck import opcheck as opcheck

if TYPE_CHECKING:
    from torchop.testing._check.api import check as check
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
# What is imported when it is first used, for start-up time.
_MODULES = {
    "_check.api": ("check",),
    "_check.report": ("CheckReport", "Failure", "Result"),
    "_communication": ("Collective", "communication"),
    "_sharding": ("ShardingReport", "check_sharding"),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

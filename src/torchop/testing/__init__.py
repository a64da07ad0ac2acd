"""Checks of operators: opcheck, check and check_sharding."""

from torchop import OpCheckError
from torchop.testing._check.api import check
from torchop.testing._check.report import CheckReport, Failure, Result
from torchop.testing._communication import Collective, communication
from torchop.testing._opcheck import opcheck
from torchop.testing._sharding import ShardingReport, check_sharding

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

"""Checks of operators: opcheck, check and check_sharding."""

from torchop import OpCheckError
from torchop.testing._check.api import check
from torchop.testing._check.report import CheckReport
from torchop.testing._check.result import Result
from torchop.testing._copied import copied_bytes
from torchop.testing._opcheck import opcheck
from torchop.testing._saved import saved_bytes
from torchop.testing._sharding import ShardingReport, check_sharding

__all__ = [
    "CheckReport",
    "OpCheckError",
    "Result",
    "ShardingReport",
    "check",
    "check_sharding",
    "copied_bytes",
    "opcheck",
    "saved_bytes",
]

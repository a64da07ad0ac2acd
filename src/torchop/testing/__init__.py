"""Checks of operators: opcheck, check, mutate and check_sharding; and inputs for others."""

from torchop import OpCheckError
from torchop.testing._check.api import check
from torchop.testing._check.report import CheckReport, Result
from torchop.testing._communication import Collective, communication
from torchop.testing._inputs import inputs
from torchop.testing._mutate.api import mutate
from torchop.testing._mutate.report import MutationReport
from torchop.testing._opcheck import opcheck
from torchop.testing._saved import saved_bytes
from torchop.testing._sharding import ShardingReport, check_sharding

__all__ = [
    "CheckReport",
    "Collective",
    "MutationReport",
    "OpCheckError",
    "Result",
    "ShardingReport",
    "check",
    "check_sharding",
    "communication",
    "inputs",
    "mutate",
    "opcheck",
    "saved_bytes",
]

"""Checks for operators: opcheck, and those for calls on several devices."""

from torchop._errors import OpCheckError as OpCheckError
from torchop.testing._communication import Collective as Collective
from torchop.testing._communication import communication as communication
from torchop.testing._opcheck import opcheck as opcheck
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

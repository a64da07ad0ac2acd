"""Check that operators are correct, and measure their speed and memory."""

from torchop._inspect.call_record import CallRecord, TensorRecord, TypeRecord
from torchop.testing._check.api import check
from torchop.testing._check.findings import Result
from torchop.testing._check.report import CheckReport
from torchop.testing._checking import checking
from torchop.testing._copied import copied_bytes
from torchop.testing._errors import OpCheckError
from torchop.testing._opcheck import opcheck
from torchop.testing._saved import saved_bytes
from torchop.testing._sharding import ShardingReport, check_sharding
from torchop.testing._tune import Tuned, tune, tuning

__all__ = [
    "CallRecord",
    "CheckReport",
    "OpCheckError",
    "Result",
    "ShardingReport",
    "TensorRecord",
    "Tuned",
    "TypeRecord",
    "check",
    "check_sharding",
    "checking",
    "copied_bytes",
    "opcheck",
    "saved_bytes",
    "tune",
    "tuning",
]

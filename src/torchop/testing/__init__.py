"""Checks for operators: opcheck, and check, which finds what nobody thought of trying."""

from torchop._errors import OpCheckError as OpCheckError
from torchop.testing._check.api import check as check
from torchop.testing._check.report import CheckReport as CheckReport
from torchop.testing._check.report import Failure as Failure
from torchop.testing._check.report import Result as Result
from torchop.testing._opcheck import opcheck as opcheck

__all__ = ["CheckReport", "Failure", "OpCheckError", "Result", "check", "opcheck"]

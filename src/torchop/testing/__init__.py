"""Checks for operators: opcheck, and check, which finds what nobody thought of trying."""

from typing import TYPE_CHECKING, Any

from torchop._errors import OpCheckError as OpCheckError
from torchop.testing._check.api import check as check
from torchop.testing._opcheck import opcheck as opcheck

if TYPE_CHECKING:
    from torchop.testing._check.report import CheckReport as CheckReport
    from torchop.testing._check.report import Failure as Failure
    from torchop.testing._check.report import Result as Result

__all__ = ["CheckReport", "Failure", "OpCheckError", "Result", "check", "opcheck"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from torchop.testing._check import report  # late, for start-up time

        return getattr(report, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

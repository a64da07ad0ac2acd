"""Checks for operators: opcheck."""

from torchop._errors import OpCheckError as OpCheckError
from torchop.testing._opcheck import opcheck as opcheck

__all__ = ["OpCheckError", "opcheck"]

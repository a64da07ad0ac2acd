"""A package for the kernel hub with RMS normalization and related operators."""

from . import layers
from ._ops import NAMESPACE
from .activations import gate, negate
from .norm import rms_norm, use_float64

__all__ = ["NAMESPACE", "gate", "layers", "negate", "rms_norm", "use_float64"]

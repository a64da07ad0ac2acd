"""torchop.preconditions: words for what a caller of an operator may pass.

They are what `CustomOp.register_preconditions` takes, beside the constraints of
`torch.distributions.constraints` and functions.
"""

from torchop._rules.user.preconditions.relations import Indices, Lengths, Like, Offsets
from torchop._rules.user.preconditions.words import (
    Contiguous,
    Dtype,
    OneOf,
    Shape,
    Sorted,
    Unique,
)

__all__ = [
    "Contiguous",
    "Dtype",
    "Indices",
    "Lengths",
    "Like",
    "Offsets",
    "OneOf",
    "Shape",
    "Sorted",
    "Unique",
]

"""What TorchScript asks of an object that a function it compiles calls."""

from __future__ import annotations

import inspect
import sys


def reads_signature() -> bool:
    """Whether it is TorchScript that asks `inspect.signature`, which asks the caller of this."""
    frame = sys._getframe(2)
    while frame.f_globals.get("__name__") == inspect.__name__ and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_globals.get("__name__") == "torch.jit.annotations"

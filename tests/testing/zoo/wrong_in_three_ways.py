"""An operator with three independent faults, for which a report must have three findings."""

from __future__ import annotations

from torch import Tensor

from tests.testing.zoo.specimen import define, like, one, raw, save, wrong

_LAST: dict[str, Tensor] = {}


def three_faults(x: Tensor) -> Tensor:
    """Ignores strides, stores its argument, and has a gradient with the wrong sign."""
    if not x.is_floating_point():
        raise TypeError(f"three_faults takes floating-point tensors, got {x.dtype}")
    _LAST["x"] = x.detach()
    return raw(x)[: x.numel()].reshape(x.shape).exp()


_op = define("three_faults", three_faults, fake=like)
_op.register_autograd(lambda ctx, grad: -grad * ctx.saved_tensors[0].exp(), setup_context=save)
wrong(_op, "contracts.kept", one)

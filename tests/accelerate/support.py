"""Define operators with torch.library, and compare calls before and after acceleration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import torchop
from tests._support.common import outcome

T = torch.arange(4.0)

# Until 2.12, PyTorch increments the version of a mutated tensor twice, in a kernel that makes calls
# fall back to the dispatcher.
counts_versions_once = pytest.mark.needs_torch("2.13", "custom_op counts versions once")


def stock(namespace: str, function: Callable[..., Any], **options: Any) -> Any:
    options.setdefault("mutates_args", ())
    return torch.library.custom_op(f"{namespace}::{function.__name__}", function, **options)


def assert_same(accelerate: Callable[[], Any], op: Any, *calls: Callable[[], Any]) -> None:
    """Check that calls have the same outcome as before the acceleration, and are native."""
    before = [outcome(call) for call in calls]
    accelerate()
    after = [outcome(call) for call in calls]
    for old, new in zip(before, after, strict=True):
        torch.testing.assert_close(new, old, rtol=0, atol=0) if holds_tensors(old) else None
        assert holds_tensors(old) or (new == old and type(new) is type(old))
    assert torchop.native.counters(op) == {"native": len(calls)}


def holds_tensors(value: Any) -> bool:
    return isinstance(value, Tensor) or (
        isinstance(value, list | tuple) and any(map(holds_tensors, value))
    )


def with_formula(namespace: str, seen: list[Any]) -> Any:
    def op(x: Tensor, k: int, y: Tensor | None = None, z: float = 1.0) -> tuple[Tensor, Tensor]:
        return x * k, (x > 0).to(torch.int64)

    def setup_context(ctx, inputs, output):
        seen.append(("setup", ctx.needs_input_grad, list(map(type, inputs)), len(output)))
        ctx.save_for_backward(inputs[0], output[0])
        ctx.k = inputs[1]

    def backward(ctx, first, second):
        seen.append(("backward", ctx.needs_input_grad, ctx.name()))
        return first * ctx.k, None, None, None

    handle = stock(namespace, op)
    handle.register_autograd(backward, setup_context=setup_context)
    return handle

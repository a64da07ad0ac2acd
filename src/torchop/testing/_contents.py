"""Check that an operator does not read the previous contents of `out=` arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchop.extend import Form, OpOverload, Schema, named_inputs
from torchop.testing._snapshot import bytes_of
from torchop.testing.probes import mapped
from torchop.testing.process_state import seed_torch


def check_outputs(schema: Schema, overload: OpOverload, args: Any, kwargs: Any) -> None:
    """Check that the values written to outputs do not depend on the outputs' previous contents.

    If an operator has `torch.Tag.out`, Inductor passes uninitialized memory as the outputs.
    Operators with `out=` arguments but without this tag are checked too, because the author could
    add the tag later.
    """
    if schema.form is not Form.OUT and getattr(torch.Tag, "out", None) not in overload.tags:
        return
    zeros, ones, again = (
        _written(schema, overload, args, kwargs, byte) for byte in (0x00, 0xFF, 0xFF)
    )
    for (name, first), (_, second), (_, third) in zip(zeros, ones, again, strict=True):
        # The outputs are filled with 0x00 bytes before the first call, and with 0xFF bytes before
        # the other two. If the second and third calls differ, the operator is nondeterministic, so
        # a difference between the first two calls proves nothing.
        if _same_bits(second, third) and not _same_bits(first, second):
            raise RuntimeError(
                f"{name!r} of {schema} depends on its previous contents: the kernel reads it, or "
                "does not write every element. With torch.Tag.out, compilers pass uninitialized "
                "memory. Write every element without reading it; or mutate a plain argument, "
                "without the tag, and return None."
            )


def _written(
    schema: Schema, overload: OpOverload, args: Any, kwargs: Any, byte: int
) -> list[tuple[str, Tensor]]:
    """Call the operator on outputs filled with `byte`, and return the outputs with their names."""
    args, kwargs = mapped((args, kwargs), lambda tensor: tensor.detach().clone())
    tensors = list(named_inputs(schema, args, kwargs))
    outputs = [(name, tensor) for name, _, tensor in tensors if name in schema.mutated]
    for _, output in outputs:
        if output.layout is torch.strided:
            bytes_of(output.untyped_storage()).fill_(
                byte & 1 if output.dtype is torch.bool else byte
            )
    devices = {t.device for _, _, t in tensors if t.device.type not in ("cpu", "meta")}
    kind = next(iter(devices)).type if devices else "cuda"  # ignored if there are no devices
    with torch.random.fork_rng([device.index for device in devices], device_type=kind):
        seed_torch(0)
        overload(*args, **kwargs)
    return outputs


def _same_bits(left: Tensor, right: Tensor) -> bool:
    if left.shape != right.shape or left.layout is not torch.strided:
        return left.shape == right.shape
    as_bytes = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in (left, right)]
    return bool(torch.equal(*as_bytes))

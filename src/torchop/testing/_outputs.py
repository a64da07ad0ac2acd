"""Finds operators with `out=` that read their outputs, or do not write all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchop._compat import classes
from torchop._compat.classes import OpOverload
from torchop._core.call import named_inputs
from torchop._core.snapshot import bytes_of
from torchop._schema.forms import Form, form_of
from torchop._schema.schema import Schema
from torchop.testing._contents import same_bits


def check_outputs(
    schema: Schema, overload: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Runs an operator in the form of `torch.Tag.out` on outputs with different contents.

    The written values must not depend on these contents, because Inductor passes uninitialized
    memory to such an operator.
    """
    if Form.OUT not in (schema.form, form_of(overload.tags)):
        return
    zeros, ones, again = (
        _written(schema, overload, args, kwargs, byte) for byte in (0x00, 0xFF, 0xFF)
    )
    for (name, first), (_, second), (_, third) in zip(zeros, ones, again, strict=True):
        # Random results differ, too, but between the two equal calls as well.
        if same_bits(second, third) and not same_bits(first, second):
            raise RuntimeError(
                f"{name!r} of {schema} depends on what the output held before the call: the kernel "
                "reads it, or does not write all of it. With torch.Tag.out, compilers pass "
                "uninitialized memory. Write every element without reading it; or mutate a plain "
                "argument, without the tag, and return None."
            )


def _written(
    schema: Schema, overload: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], byte: int
) -> list[tuple[str, Tensor]]:
    """The outputs after a call before which every byte of them was `byte`."""
    copies = classes.tree_map_only(
        Tensor, lambda t: t.detach().clone(), (tuple(args), dict(kwargs))
    )
    tensors = list(named_inputs(schema, *copies))
    outputs = [(name, tensor) for name, _, tensor in tensors if name in schema.mutated]
    for _, output in outputs:
        if output.layout is torch.strided:
            bytes_of(output.untyped_storage()).fill_(
                byte & 1 if output.dtype is torch.bool else byte
            )
    devices = {t.device.index for _, _, t in tensors if t.device.type == "cuda"}
    with torch.random.fork_rng(devices):
        torch.manual_seed(0)
        overload(*copies[0], **copies[1])
    return outputs

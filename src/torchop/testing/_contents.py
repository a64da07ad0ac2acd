"""What calls do to memory: undeclared writes, results that share it, outputs that are read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchop import AliasError
from torchop._core.snapshot import Snapshot, bytes_of, overlap
from torchop.extend import Form, OpOverload, Schema, named_inputs, named_outputs
from torchop.testing.probes import copies, mapped
from torchop.testing.process_state import seed_torch


def check_inputs(schema: Schema, overload: OpOverload, args: Any, kwargs: Any) -> None:
    """Runs an operator on copies of its inputs; refuses writes that its schema does not declare."""
    args, kwargs = copies((args, kwargs))
    # A snapshot instead of `checking`, which sees only kernels that torchop registered.
    snapshot = Snapshot(schema, args, kwargs)
    overload(*args, **kwargs)
    snapshot.check(overload._name)


def check_memory(schema: Schema, overload: OpOverload, args: Any, kwargs: Any) -> None:
    """Runs an operator twice; refuses outputs in the memory of inputs or of the other call."""
    if not schema.is_functional:
        return
    args, kwargs = copies((args, kwargs))
    result = overload(*args, **kwargs)
    # NumPy and DLPack share memory by a second storage that wraps it.
    inputs = list(named_inputs(schema, args, kwargs))
    for output, tensor in named_outputs(result):
        for argument, where, other in inputs:
            if _overlap(tensor, other):
                raise AliasError(
                    f"{output} of {schema} is in the memory of {where}: Argument {argument} is "
                    "not defined to alias output but was aliasing, through NumPy or DLPack. Return "
                    "a copy."
                )
    # A kernel that returns the same tensor each time gives one caller the result of another.
    later = dict(named_outputs(overload(*args, **kwargs)))
    for where, tensor in named_outputs(result):
        if where in later and _overlap(tensor, later[where]):
            raise AliasError(
                f"{where} of {schema} is the same memory in two calls: the kernel returned a "
                "tensor that it keeps. Return a fresh one, such as a clone."
            )


def _overlap(left: Tensor, right: Tensor) -> bool:
    if left.layout is not torch.strided or right.layout is not torch.strided:
        return False
    return overlap(left.untyped_storage(), right.untyped_storage())


def check_outputs(schema: Schema, overload: OpOverload, args: Any, kwargs: Any) -> None:
    """Runs an operator in the form of `torch.Tag.out` on outputs with different contents.

    The written values must not depend on these contents, because Inductor passes uninitialized
    memory to such an operator.
    """
    if schema.form is not Form.OUT and getattr(torch.Tag, "out", None) not in overload.tags:
        return
    zeros, ones, again = (
        _written(schema, overload, args, kwargs, byte) for byte in (0x00, 0xFF, 0xFF)
    )
    for (name, first), (_, second), (_, third) in zip(zeros, ones, again, strict=True):
        # Random results differ, too, but between the two equal calls as well.
        if _same_bits(second, third) and not _same_bits(first, second):
            raise RuntimeError(
                f"{name!r} of {schema} depends on what the output held before the call: the kernel "
                "reads it, or does not write all of it. With torch.Tag.out, compilers pass "
                "uninitialized memory. Write every element without reading it; or mutate a plain "
                "argument, without the tag, and return None."
            )


def _written(
    schema: Schema, overload: OpOverload, args: Any, kwargs: Any, byte: int
) -> list[tuple[str, Tensor]]:
    """The outputs after a call before which every byte of them was `byte`."""
    args, kwargs = mapped((args, kwargs), lambda tensor: tensor.detach().clone())
    tensors = list(named_inputs(schema, args, kwargs))
    outputs = [(name, tensor) for name, _, tensor in tensors if name in schema.mutated]
    for _, output in outputs:
        if output.layout is torch.strided:
            bytes_of(output.untyped_storage()).fill_(
                byte & 1 if output.dtype is torch.bool else byte
            )
    devices = {t.device for _, _, t in tensors if t.device.type not in ("cpu", "meta")}
    kind = next(iter(devices)).type if devices else "cuda"  # which it does not ask without devices
    with torch.random.fork_rng([device.index for device in devices], device_type=kind):
        seed_torch(0)
        overload(*args, **kwargs)
    return outputs


def _same_bits(left: Tensor, right: Tensor) -> bool:
    if left.shape != right.shape or left.layout is not torch.strided:
        return left.shape == right.shape
    as_bytes = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in (left, right)]
    return bool(torch.equal(*as_bytes))

"""The random number generators that a call can use."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchop._compat import dispatch
from torchop._core.call import tensors_in


class Generator(NamedTuple):
    """A random number generator, of PyTorch or passed by the caller."""

    get: Callable[[], Tensor]
    set: Callable[[Tensor], object]
    size: Callable[[], int]


def generators_of(values: Sequence[Any], count: int = 0) -> Iterator[Generator]:
    """The generators of a call with these arguments: of the CPU, of other devices, and passed.

    Those of the first `count` devices of the accelerator are among them, whatever the arguments.
    """
    # Not torch.get_rng_state and torch.set_rng_state, which modes would trace.
    yield _of_generator(torch.default_generator)
    for device in sorted({*devices_of(values), *dispatch.accelerators(count)}, key=str):
        if device.type not in ("cpu", "meta"):
            module = torch.get_device_module(device.type)
            if hasattr(module, "get_rng_state"):
                yield _of_device(module, device)
    for value in values:
        if isinstance(value, torch.Generator):
            yield _of_generator(value)


def devices_of(values: Sequence[Any]) -> Iterator[torch.device]:
    """The devices among the arguments of a call, and those of its tensors."""
    yield from (tensor.device for tensor in tensors_in(values))
    yield from (value for value in values if isinstance(value, torch.device))


def _of_generator(generator: torch.Generator) -> Generator:
    return Generator(
        generator.get_state, generator.set_state, lambda: generator.get_state().numel()
    )


def _of_device(module: Any, device: torch.device) -> Generator:
    return Generator(
        lambda: module.get_rng_state(device),
        lambda state: module.set_rng_state(state, device),
        lambda: _size_of_state(device),
    )


@functools.cache  # it cannot be asked for while a graph is captured
def _size_of_state(device: torch.device) -> int:
    if device.type == "cuda":  # a program may be traced for CUDA without such a device
        return 16  # the seed and the offset
    size: int = torch.get_device_module(device.type).get_rng_state(device).numel()
    return size

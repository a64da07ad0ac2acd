"""The random number generators that a call can use."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchop._compat import devices
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
    found = {*devices_of(values), *devices.accelerators(count)}
    # By number, as the native `pack_plain` has them: the text "cuda:10" would come before "cuda:2".
    for device in sorted(found, key=lambda device: (len(str(device)), str(device))):
        if device.type not in ("cpu", "meta"):
            traits = devices.traits(device.type)
            if traits.get_rng_state is not None:
                yield _of_device(traits, device)
    for value in values:
        if isinstance(value, torch.Generator):
            yield _of_generator(value)


def devices_of(values: Sequence[Any]) -> Iterator[torch.device]:
    """The devices among the arguments of a call, and those of its tensors."""
    yield from (tensor.device for tensor in tensors_in(values))
    yield from (value for value in values if isinstance(value, torch.device))


def _of_generator(generator: torch.Generator) -> Generator:
    get = generator.get_state
    return Generator(get, generator.set_state, lambda: get().numel())


def _of_device(traits: devices.DeviceTraits, device: torch.device) -> Generator:
    get, set_state = traits.get_rng_state, traits.set_rng_state
    assert get is not None
    assert set_state is not None  # PyTorch asks for both or neither
    return Generator(
        functools.partial(get, device),
        lambda state: set_state(state, device),
        functools.partial(traits.size_of_state, device),
    )

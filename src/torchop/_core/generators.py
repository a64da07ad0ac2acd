"""Find the random number generators that a call may use."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchop._compat import devices
from torchop._core.call import tensors_in


class Generator(NamedTuple):
    get: Callable[[], Tensor]
    set: Callable[[Tensor], object]
    size: Callable[[], int]


def generators_of(values: Sequence[Any], count: int = 0) -> Iterator[Generator]:
    """Yield the random number generators that a call with these arguments may use.

    A call may use any generator among its arguments, and the default generators of the CPU, of
    every device in the arguments, and of the first `count` accelerators.
    """
    # Call the methods of the generator instead of torch.get_rng_state and torch.set_rng_state,
    # because active modes would intercept and trace these two functions.
    yield _of_generator(torch.default_generator)
    found = {*devices_of(values), *devices.accelerators(count)}
    # Sort by length first, so that "cuda:2" comes before "cuda:10". The C++ function `pack_plain`
    # relies on the same order.
    for device in sorted(found, key=lambda device: (len(str(device)), str(device))):
        if device.type not in ("cpu", "meta"):
            traits = devices.traits(device.type)
            if traits.get_rng_state is not None:
                yield _of_device(traits, device)
    for value in values:
        if isinstance(value, torch.Generator):
            yield _of_generator(value)


def devices_of(values: Sequence[Any]) -> Iterator[torch.device]:
    yield from (tensor.device for tensor in tensors_in(values))
    yield from (value for value in values if isinstance(value, torch.device))


def _of_generator(generator: torch.Generator) -> Generator:
    get = generator.get_state
    return Generator(get, generator.set_state, lambda: get().numel())


def _of_device(traits: devices.DeviceTraits, device: torch.device) -> Generator:
    get, set_state = traits.get_rng_state, traits.set_rng_state
    assert get is not None
    assert set_state is not None  # a device type has both functions or neither
    return Generator(
        functools.partial(get, device),
        lambda state: set_state(state, device),
        functools.partial(traits.size_of_state, device),
    )

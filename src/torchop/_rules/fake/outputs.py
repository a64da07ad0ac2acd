"""Check the outputs of fake kernels, and replace outputs that are inputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from torchop._compat import fake_tensors
from torchop._core.call import tensors_in
from torchop._core.definition import Definition
from torchop._errors import FakeKernelError


def outputs(result: Any) -> Iterator[torch.Tensor]:
    return tensors_in(result if isinstance(result, tuple) else (result,))


def check_outputs(definition: Definition, result: Any) -> None:
    if fake_tensors.active_fake_mode() is None:
        return
    for index, tensor in enumerate(outputs(result)):
        if not fake_tensors.is_fake(tensor):
            raise FakeKernelError(
                f"{definition}: output {index} of the fake kernel is a real tensor, made outside "
                "it. Make the output inside the fake kernel, from the shapes of the inputs."
            )


def fresh(result: Any, taken: set[int]) -> Any:
    """Replace each output that is also an input, or that occurs twice, with a new tensor.

    As a shorthand, a fake kernel may return an input to say that the output has the same metadata.
    Without the replacement, a compiler would treat the output as an alias of the input.

    `taken` contains the ids of the inputs, and the ids of the outputs are added to it.
    """
    if isinstance(result, torch.Tensor):
        if id(result) in taken:
            return torch.empty_like(result)
        taken.add(id(result))
        return result
    if isinstance(result, (list, tuple)):
        items = [fresh(item, taken) for item in result]
        return tuple(items) if isinstance(result, tuple) else items
    return result

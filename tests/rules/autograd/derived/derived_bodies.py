from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor
from torch.nn import functional

import torchop


class Body(NamedTuple):
    function: Callable[..., Any]
    inputs: Callable[[], tuple[Any, ...]]


def random(*shape: int, **options: Any) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, **options)


def polynomial(x: Tensor) -> Tensor:
    return x**3 - 2 * x


def sine_or_cosine(x: Tensor) -> Tensor:
    return x.sin() if x.mean() > 0 else x.cos()


def repeated(x: Tensor, times: int) -> Tensor:
    for _ in range(times):
        x = torch.tanh(x) * 2
    return x


def until_small(x: Tensor) -> Tensor:
    while x.abs().max() > 0.5:
        x = x / 2
    return x.exp()


def linear(x: Tensor, weight: Tensor, bias: Optional[Tensor]) -> Tensor:
    return functional.linear(x, weight, bias)


def two_outputs(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x * y.exp(), (x + y).sum()


def with_indices(x: Tensor) -> tuple[Tensor, Tensor]:
    values, indices = x.sort(-1)
    return values * 2, indices


def dead_input(x: Tensor, y: Tensor) -> Tensor:
    return x * 3


def sum_of_list(tensors: Sequence[Tensor], scale: float) -> Tensor:
    return scale * torch.stack([t.sin() for t in tensors]).sum(0)


def list_of_results(x: Tensor, parts: int) -> list[Tensor]:
    return [(piece * piece).clone() for piece in x.chunk(parts)]


def list_with_none(tensors: list[Optional[Tensor]]) -> Tensor:
    present = [tensor for tensor in tensors if tensor is not None]
    return torch.stack(present).prod(0)


def layer_norm(x: Tensor, weight: Tensor) -> Tensor:
    centered = x - x.mean(-1, keepdim=True)
    return weight * centered / (centered.var(-1, keepdim=True) + 1e-3).sqrt()


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1) @ v


def written_in_place(x: Tensor) -> Tensor:
    result = torch.zeros_like(x)
    result[1:] = x[:-1] * 3
    result.add_(x).mul_(x)
    return result


def gathered(x: Tensor, index: Tensor) -> Tensor:
    return x.index_select(0, index).cumsum(0)


def views(x: Tensor) -> Tensor:
    return x.t().reshape(-1).unfold(0, 2, 1).prod(-1)


def reduced_and_expanded(x: Tensor) -> Tensor:
    return x.sum(0).expand(3, -1).clone()


def identity(x: Tensor) -> Tensor:
    return x.clone()


def complex_magnitude(x: Tensor) -> Tensor:
    return (torch.fft.fft(x) + 0.5).abs() ** 2


def solved(a: Tensor, b: Tensor) -> Tensor:
    return torch.linalg.solve(a @ a.mT + 3 * torch.eye(3, dtype=a.dtype), b)


def convolution(x: Tensor, weight: Tensor, stride: int = 1) -> Tensor:
    return functional.conv1d(x, weight, stride=stride)


def keyword_only(x: Tensor, *, power: float = 3.0) -> Tensor:
    return x.abs() ** power


def integers_beside(x: Tensor, counts: Tensor) -> Tensor:
    return x.sigmoid() * counts


def constant(x: Tensor) -> Tensor:
    return torch.ones_like(x)


BODIES = {
    body.function.__name__: body
    for body in (
        Body(polynomial, lambda: (random(3),)),
        Body(sine_or_cosine, lambda: (random(3).abs(),)),
        Body(repeated, lambda: (random(3), 3)),
        Body(until_small, lambda: (random(3),)),
        Body(linear, lambda: (random(2, 3), random(4, 3), random(4))),
        Body(two_outputs, lambda: (random(3), random(3))),
        Body(with_indices, lambda: (random(2, 3),)),
        Body(dead_input, lambda: (random(3), random(2))),
        Body(sum_of_list, lambda: ([random(2), random(2), random(2)], 0.5)),
        Body(list_of_results, lambda: (random(4), 2)),
        Body(list_with_none, lambda: ([random(2), None, random(2)],)),
        Body(layer_norm, lambda: (random(2, 4), random(4))),
        Body(attention, lambda: (random(3, 2), random(3, 2), random(3, 2))),
        Body(written_in_place, lambda: (random(3),)),
        Body(gathered, lambda: (random(3, 2), torch.tensor([2, 0, 2]))),
        Body(views, lambda: (random(2, 3),)),
        Body(reduced_and_expanded, lambda: (random(2, 2),)),
        Body(identity, lambda: (random(3),)),
        Body(complex_magnitude, lambda: (random(4),)),
        Body(solved, lambda: (random(3, 3), random(3, 2))),
        Body(convolution, lambda: (random(1, 2, 5), random(3, 2, 2), 2)),
        Body(keyword_only, lambda: (random(3),)),
        Body(integers_beside, lambda: (random(3), torch.tensor([1, 2, 3]))),
        Body(constant, lambda: (random(3),)),
    )
}


def operator(name: str, body: Callable[..., Any]) -> Any:
    op = torchop.custom_op(name, body, mutates_args=())
    # A fake kernel cannot read values, so a body that branches on values cannot be its own fake
    # kernel.
    op.register_fake(_FAKE.get(body.__name__, body))
    op.derive_autograd()
    return op


_FAKE: dict[str, Callable[..., Any]] = {
    "sine_or_cosine": torch.empty_like,
    "until_small": torch.empty_like,
}


def spread(inputs: Sequence[Any]) -> tuple[list[Tensor], Callable[..., tuple[Any, ...]]]:
    """Return the differentiable tensors among the inputs, and a function that replaces them."""
    tensors: list[Tensor] = []

    def take(value: Any) -> Any:
        if isinstance(value, list):
            return [take(item) for item in value]
        if isinstance(value, Tensor) and value.is_floating_point():
            tensors.append(value.requires_grad_())
            return len(tensors) - 1, tensors
        return value

    places = [take(value) for value in inputs]

    def put(place: Any, values: Sequence[Tensor]) -> Any:
        if isinstance(place, list):
            return [put(item, values) for item in place]
        return values[place[0]] if isinstance(place, tuple) else place

    return tensors, lambda *values: tuple(put(place, values) for place in places)


def differentiable_outputs(result: Any) -> list[Tensor]:
    values = result if isinstance(result, (tuple, list)) else [result]
    return [value for value in values if value.is_floating_point()]

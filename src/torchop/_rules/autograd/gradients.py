from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, zip_longest
from typing import Any

import torch
from torch import Tensor

from torchop import _hooks
from torchop._compat import autograd
from torchop._core.call import tensors_in
from torchop._core.contract import share_memory
from torchop._core.definition import Definition
from torchop._errors import GradientError
from torchop._schema.schema import Argument


def is_differentiable(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


_PLAIN = frozenset({Tensor, type(None)})


def are_plain_in_python(gradients: Any, count: int, ctx: Any) -> bool:
    """Return whether `gradients` is a tuple of `count` items, each a plain Tensor or None.

    The C++ function `are_plain` also checks the shapes of the gradients against the inputs of the
    autograd node `ctx`. While tracing, `ctx` is not a node, so this function is used instead.
    """
    return (
        type(gradients) is tuple
        and len(gradients) == count
        and _PLAIN.issuperset(map(type, gradients))
    )


def check_fit(
    definition: Definition, gradients: Sequence[Any], layout: Layout | None, ctx: Any
) -> None:
    """Raise GradientError if the autograd engine would reject a gradient.

    The engine's own error does not say which operator returned the gradient.
    """
    for index, gradient, expected in _mismatches(gradients, ctx):
        if not sums_to(expected.shape, gradient.shape):
            problem = (
                f"the shape {tuple(expected.shape)}, got {tuple(gradient.shape)}. Sum over "
                "broadcast dimensions, and expand reduced dimensions"
            )
        elif gradient.device != expected.device and expected.shape:  # autograd moves 0-dim tensors
            problem = (
                f"a tensor on {expected.device}, got one on {gradient.device}. Move it with "
                f".to({str(expected.device)!r})"
            )
        elif gradient.is_complex() and not expected.dtype.is_complex:
            problem = f"real numbers, got {gradient.dtype}. Return the real part, .real"
        else:
            continue  # the autograd engine will convert the gradient
        name = flatten(_names_of_entries(definition, layout), layout)[index]
        raise GradientError(
            f"{definition}: backward returned the wrong gradient for input {name!r}: expected "
            f"{problem}."
        )


def _names_of_entries(definition: Definition, layout: Layout | None) -> list[Any]:
    names = [argument.name for argument in definition.schema.positional]
    names = [definition.schema.places.get(name, name) for name in names]
    return [
        name if length is None else [f"{name}[{n}]" for n in range(length)]
        for name, length in zip(names, layout or (None,) * len(names), strict=True)
    ]


def _mismatches(gradients: Sequence[Any], ctx: Any) -> Iterator[tuple[int, Tensor, Any]]:
    for index, expected in autograd.described_inputs(ctx):
        gradient = gradients[index]
        if type(gradient) is Tensor and (
            list(gradient.shape) != expected.shape
            or gradient.device != expected.device
            or gradient.is_complex() is not expected.dtype.is_complex
        ):
            yield index, gradient, expected


def sums_to(shape: Sequence[int], of: Sequence[int]) -> bool:
    """Return whether a gradient of shape `of` can be summed to `shape`, as after broadcasting."""
    return len(shape) <= len(of) and all(
        size in (1, other) for size, other in zip(reversed(shape), reversed(of), strict=False)
    )


def flat_gradients(
    definition: Definition, result: Any, layout: Layout | None, needed: Sequence[Any]
) -> list[Any]:
    arguments = definition.schema.positional
    gradients = result if isinstance(result, tuple) else (result,)
    while len(gradients) > len(arguments) and gradients[-1] is None:
        gradients = gradients[:-1]  # like `autograd.Function`, allow additional None at the end
    required = _required_gradients(arguments, needed)
    if not required <= len(gradients) <= len(arguments):
        allowed = f"{required} to {len(arguments)}" if required < len(arguments) else str(required)
        missing = " Is a return statement missing?" if result is None else ""
        raise GradientError(
            f"{definition}: backward returned an incorrect number of gradients (expected "
            f"{allowed}, got {len(gradients)}). It must return one for each input: "
            f"{', '.join(a.name for a in arguments)}.{missing}"
        )
    flat: list[Any] = []
    lengths = layout or (None,) * len(arguments)
    for argument, length, gradient in zip_longest(arguments, lengths, gradients):
        name = argument.name
        if length is None:
            if gradient is not None and not isinstance(gradient, Tensor):
                raise _wrong_gradient(definition, name, "a Tensor or None", gradient)
            if gradient is not None and not argument.holds_tensors:
                raise _wrong_gradient(
                    definition, name, "None, because it is not a tensor", gradient
                )
            flat.append(gradient)
        elif gradient is None:
            flat.extend([None] * length)
        elif isinstance(gradient, (list, tuple)) and len(gradient) == length:
            for item in gradient:
                if item is not None and not isinstance(item, Tensor):
                    raise _wrong_gradient(definition, name, "a list of Tensor or None", gradient)
            flat.extend(gradient)
        else:
            expected = f"None or a list of {length}, the same structure as the inputs"
            raise _wrong_gradient(definition, name, expected, gradient)
    return flat


def _required_gradients(arguments: Sequence[Argument], needed: Sequence[Any]) -> int:
    """Return the minimum number of gradients that a backward formula must return.

    Formulas written for torch.library return no gradients for trailing arguments that a call omits,
    so a trailing gradient may be left out if its argument has a default and needs no gradient.
    """
    count = len(arguments)
    while count and arguments[count - 1].has_default:
        needs = needed[count - 1]
        if any(needs) if isinstance(needs, list) else needs:
            break
        count -= 1
    return count


def _wrong_gradient(definition: Definition, name: str, expected: str, got: Any) -> GradientError:
    name = definition.schema.places.get(name, name)
    kind = type(got).__name__
    if isinstance(got, (list, tuple)):
        kind += f" of {len(got)} ({', '.join(type(item).__name__ for item in got[:8])})"
    return GradientError(
        f"{definition}: backward returned the wrong gradient for input {name!r}: expected "
        f"{expected}, got {kind}."
    )


def in_fresh_memory(
    gradients: Iterable[Tensor], likes: Iterable[Tensor], inputs: Iterable[Any]
) -> list[Tensor]:
    """Copy the gradients that do not match the fake kernel's results, and return all gradients.

    The fake kernel returns `torch.empty_like(like)` for each gradient, where `like` is an item of
    `likes`, and compiled code relies on this. But a backward formula may return an expanded tensor,
    or one of the incoming gradients. So copy each gradient that has different strides, or that
    shares memory with `inputs` or with another gradient.
    """
    taken = list(tensors_in(inputs))
    count = len(taken)
    for gradient, like in zip(gradients, likes, strict=True):
        strided = gradient.layout is torch.strided and like.layout is torch.strided
        is_like = strided and like.is_contiguous() and gradient.stride() == like.stride()
        if strided and not is_like:
            is_like = gradient.stride() == torch.empty_like(like, device="meta").stride()
        # `is_evidently_fresh` is fast but may return False for a fresh tensor, so compare the
        # memory in this case.
        if (strided and not is_like) or not (
            _hooks.extension.is_evidently_fresh(tuple(taken), {}, gradient)
            or not any(share_memory(gradient, other) for other in taken)
        ):
            gradient = torch.empty_like(like).copy_(gradient) if strided else gradient.clone()
        taken.append(gradient)
    return taken[count:]


# A layout marks the lists in a sequence of values: it contains the length of each value that is a
# list, and None for every other value. If there are no lists, the layout itself may be None.
Layout = tuple["int | None", ...]


def input_layout(definition: Definition, args: Sequence[Any]) -> Layout | None:
    schema = definition.schema
    if not schema.has_tensor_lists:
        return None
    return tuple(
        len(value) if argument.is_tensor_list and value is not None else None
        for argument, value in zip(schema.positional, args, strict=False)
    )


def layout_of(values: Sequence[Any]) -> Layout | None:
    layout = tuple(len(value) if isinstance(value, (list, tuple)) else None for value in values)
    return layout if any(length is not None for length in layout) else None


def flatten(values: Sequence[Any], layout: Layout | None) -> Sequence[Any]:
    if layout is None:
        return values
    flat: list[Any] = []
    for value, length in zip(values, layout, strict=True):
        if length is None:
            flat.append(value)
        else:
            flat.extend(value)
    return flat


def unflatten(flat: Iterable[Any], layout: Sequence[int | None] | None) -> tuple[Any, ...]:
    if layout is None:
        return tuple(flat)
    rest = iter(flat)
    return tuple(next(rest) if n is None else list(islice(rest, n)) for n in layout)


def placed(gradients: Iterable[Any], needed: Sequence[Any]) -> tuple[Any, ...]:
    """Return one gradient for each input, with None for the inputs that need no gradient.

    `gradients` contains one gradient for each input that needs one, in order. `needed` is
    `ctx.needs_input_grad`.
    """
    layout = layout_of(needed)
    rest = iter(gradients)
    return unflatten([next(rest) if need else None for need in flatten(needed, layout)], layout)

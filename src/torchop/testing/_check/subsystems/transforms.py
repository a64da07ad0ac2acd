"""Checks of transforms: vmap against a loop, and the functions of `torch.func`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from torchop.testing._check.kinds import CheckKind, Details
from torchop.testing._check.subject import CannotCheck, Case, Example, Subject, reason
from torchop.testing._check.subsystems.gradients import needs_formula
from torchop.testing.probes import (
    as_function,
    assert_same,
    leaves,
    tensors_of,
    weighted_sum,
    with_tensors,
    written,
    written_places,
)

# --------------------------------------------------------------------------------------------------
# Probes


def maps_like_a_loop(
    op: Any, args: Any, kwargs: Any, in_dims: Any, out_dim: int = 0, **options: Any
) -> None:
    """`vmap` does the same as a loop over the batch; a dimension of None is not mapped over."""
    batch = 3
    originals = tensors_of((args, kwargs))
    mapped = [
        original
        if dim is None
        else torch.stack(
            [original.flatten().roll(n).view(original.shape) for n in range(batch)], dim
        )
        for original, dim in zip(originals, in_dims, strict=True)
    ]

    def function(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        call_args, call_kwargs = with_tensors((args, kwargs), [t.clone() for t in tensors])
        results = leaves(op(*call_args, **call_kwargs)) + written(
            written_places(op), call_args, call_kwargs
        )
        return tuple(result for result in results if isinstance(result, torch.Tensor))

    each = [
        function(
            *(t if d is None else t.select(d, n) for t, d in zip(mapped, in_dims, strict=True))
        )
        for n in range(batch)
    ]
    expected = [torch.stack(results, out_dim) for results in zip(*each, strict=True)]
    actual = torch.vmap(function, tuple(in_dims), out_dim, **options)(*mapped)
    assert_same(actual, expected, f"vmap with in_dims={tuple(in_dims)}, out_dims={out_dim}")


def draws_for_each(op: Any, args: Any, kwargs: Any) -> None:
    """Under `vmap`, random numbers are refused, drawn once, or drawn for each element."""
    originals = tensors_of((args, kwargs))
    mapped = [torch.stack([original, original, original]) for original in originals]

    def function(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        call_args, call_kwargs = with_tensors((args, kwargs), list(tensors))
        return tuple(leaves(op(*call_args, **call_kwargs)))

    torch.manual_seed(0)
    for index, result in enumerate(torch.vmap(function, randomness="same")(*mapped)):
        if not torch.equal(result[0], result[1]):
            raise AssertionError(f"randomness='same': result {index} differs within the batch.")
    different = torch.vmap(function, randomness="different")(*mapped)
    if all(torch.equal(result[0], result[1]) for result in different):
        raise AssertionError("randomness='different': the results of the batch are all the same.")
    try:
        torch.vmap(function, randomness="error")(*mapped)
    except RuntimeError:
        return
    raise AssertionError("randomness='error' was not refused.")


def differentiates_in_func(op: Any, args: Any, kwargs: Any) -> None:
    """`torch.func.vjp` and `grad`, once and nested, agree with autograd."""
    function, inputs = as_function(op, args, kwargs)
    plain = tuple(tensor.detach() for tensor in inputs)

    def total(*tensors: torch.Tensor) -> torch.Tensor:
        return weighted_sum(function(*tensors))

    places = tuple(range(len(inputs)))
    expected = torch.autograd.grad(total(*inputs), inputs, allow_unused=True)
    assert_same(torch.func.grad(total, places)(*plain), expected, "torch.func.grad")
    pull_back = torch.func.vjp(total, *plain)[1]
    assert_same(pull_back(torch.ones((), dtype=torch.double)), expected, "torch.func.vjp")


def maps_gradients_like_a_loop(op: Any, args: Any, kwargs: Any) -> None:
    """`vmap` of `grad`, which gives gradients for each sample, does the same as a loop."""
    function, inputs = as_function(op, args, kwargs)
    plain = [tensor.detach() for tensor in inputs]
    batched = [torch.stack([t, t.flatten().roll(1).view(t.shape)]) for t in plain]

    def total(*tensors: torch.Tensor) -> torch.Tensor:
        return weighted_sum(function(*tensors))

    gradient = torch.func.grad(total, tuple(range(len(inputs))))
    expected = [gradient(*(tensor[n] for tensor in batched)) for n in range(2)]
    actual = torch.vmap(gradient)(*batched)
    together = [torch.stack(pair) for pair in zip(*expected, strict=True)]
    assert_same(actual, together, "vmap of torch.func.grad")


def functionalizes_the_same(op: Any, args: Any, kwargs: Any) -> None:
    """`torch.func.functionalize` changes nothing."""
    originals = tensors_of((args, kwargs))

    def function(*tensors: torch.Tensor) -> list[Any]:
        call_args, call_kwargs = with_tensors((args, kwargs), [t.clone() for t in tensors])
        results = leaves(op(*call_args, **call_kwargs)) + written(
            written_places(op), call_args, call_kwargs
        )
        return [result for result in results if isinstance(result, torch.Tensor)]

    with torch.no_grad():
        torch.manual_seed(0)
        expected = function(*originals)
        torch.manual_seed(0)
        actual = torch.func.functionalize(function)(*originals)
    assert_same(actual, expected, "torch.func.functionalize")


# --------------------------------------------------------------------------------------------------
# Cases


def needs_vmap(subject: Subject) -> None:
    """Raises CannotCheck without a rule for vmap."""
    if not subject.has_kernel("FuncTorchBatched"):
        raise CannotCheck("no vmap rule")


def _vmap(subject: Subject, details: Details) -> Iterator[Case]:
    """Each choice of mapped tensors, at the first and the last dimension."""
    needs_vmap(subject)
    if subject.is_random:
        raise CannotCheck("its results are random: see subsystems.vmap_random")
    for example in subject.accepted(most=2):
        tensors = example.tensors
        if not tensors:
            continue
        choices: list[list[int | None]] = [[0] * len(tensors)]
        choices.append([tensor.dim() for tensor in tensors])
        if len(tensors) > 1:
            choices += [
                [0 if n == place else None for n in range(len(tensors))]
                for place in range(len(tensors))
            ]
            choices.append([0, *(t.dim() for t in tensors[1:])])
        written_places = subject.written_places(example)
        for in_dims in choices[:8]:
            if any(in_dims[place] is None for place in written_places):
                continue  # refused by every operator: a batch does not fit into one tensor
            yield _mapped(example, in_dims=in_dims)
        yield _mapped(example, in_dims=choices[0], chunk_size=2)
        if all(tensor.dim() for tensor in tensors):
            yield _mapped(example, in_dims=choices[0], out_dim=-1)
    raise CannotCheck("no argument is a tensor")


def _mapped(example: Example, **options: Any) -> Case:
    words = ", ".join(f"{name}={value}" for name, value in options.items())
    return Case(f"vmap with {words}", maps_like_a_loop, example, options=options)


def _random(subject: Subject, details: Details) -> Iterator[Case]:
    if not subject.is_random:
        raise CannotCheck("its results are not random: it has no tag nondeterministic_seeded")
    needs_vmap(subject)
    for example in subject.accepted(most=1):
        if example.tensors:
            yield Case("each kind of randomness", draws_for_each, example)


def _func(subject: Subject, details: Details) -> Iterator[Case]:
    needs_formula(subject)
    function, inputs = as_function(subject.op, *subject.double_examples[0].copy())
    try:
        torch.func.vjp(function, *(tensor.detach() for tensor in inputs))
    except RuntimeError as error:
        if "functorch transforms" in str(error):  # what PyTorch says of formulas of its custom_op
            raise CannotCheck(f"the formula does not take part: {reason(error)}") from None
    for example in subject.double_examples[:2]:
        yield Case("the example in double", differentiates_in_func, example)
    if subject.has_kernel("FuncTorchBatched") and not subject.is_random:
        details["vmap of grad"] = "tried"
        for example in subject.double_examples[:1]:
            yield Case("gradients for each sample", maps_gradients_like_a_loop, example)
    else:
        details["vmap of grad"] = "not tried: no vmap rule, or random results"


def _functionalize(subject: Subject, details: Details) -> Iterator[Case]:
    if not subject.schema.is_functional:
        raise CannotCheck("PyTorch's functionalize takes no custom operator that writes or aliases")
    for example in subject.accepted(most=2):
        if example.tensors:
            yield Case("torch.func.functionalize", functionalizes_the_same, example)


CHECKS = (
    CheckKind("subsystems.vmap", "Does vmap do what a loop does?", _vmap),
    CheckKind("subsystems.vmap_random", "Does vmap draw random numbers as asked for?", _random),
    CheckKind("subsystems.func", "Do the gradients of torch.func agree with autograd?", _func),
    CheckKind(
        "subsystems.functionalize", "Does torch.func.functionalize change nothing?", _functionalize
    ),
)

"""Checks of transforms: vmap against a loop, and the functions of `torch.func`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from torchop import MissingFormulaError
from torchop.testing import probes
from torchop.testing._check.compilable import with_programs
from torchop.testing._check.kinds import Details, family
from torchop.testing._check.subject import CannotCheck, Case, Example, Subject, reason
from torchop.testing._check.subsystems.gradients import needs_formula
from torchop.testing.process_state import seed_torch

# --------------------------------------------------------------------------------------------------
# Probes


def maps_like_a_loop(
    op: Any, args: Any, kwargs: Any, in_dims: Any, out_dim: int = 0, **options: Any
) -> None:
    """`vmap` does the same as a loop over the batch; a dimension of None is not mapped over."""
    batch = 3
    call, originals = probes.on_tensors(op, args, kwargs)

    def function(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(probes.tensors_of(call(*tensors)))

    def batched(tensor: torch.Tensor, dim: int) -> torch.Tensor:
        each = [probes.rolled_elements(tensor, n) for n in range(batch)]
        return torch.stack(each, dim)

    def element(tensor: torch.Tensor, dim: int | None, n: int) -> torch.Tensor:
        return tensor if dim is None else tensor.select(dim, n)

    pairs = list(zip(originals, in_dims, strict=True))
    mapped = [tensor if dim is None else batched(tensor, dim) for tensor, dim in pairs]
    pairs = list(zip(mapped, in_dims, strict=True))
    loop = [function(*(element(*pair, n) for pair in pairs)) for n in range(batch)]
    expected = [torch.stack(results, out_dim) for results in zip(*loop, strict=True)]
    actual = torch.vmap(function, tuple(in_dims), out_dim, **options)(*mapped)
    what = f"vmap with in_dims={tuple(in_dims)}, out_dims={out_dim}"
    probes.assert_same(actual, expected, what)


def draws_for_each(op: Any, args: Any, kwargs: Any) -> None:
    """Under `vmap`, random numbers are refused, drawn once, or drawn for each element."""
    call, originals = probes.on_tensors(op, args, kwargs)
    mapped = [torch.stack([original, original, original]) for original in originals]
    seed_torch(0)
    for index, result in enumerate(torch.vmap(call, randomness="same")(*mapped)):
        if not torch.equal(result[0], result[1]):
            raise AssertionError(f"randomness='same': result {index} differs within the batch.")
    different = torch.vmap(call, randomness="different")(*mapped)
    if all(torch.equal(result[0], result[1]) for result in different):
        raise AssertionError("randomness='different': the results of the batch are all the same.")
    try:
        torch.vmap(call, randomness="error")(*mapped)
    except RuntimeError:
        return
    raise AssertionError("randomness='error' was not refused.")


def compiles_in_vmap(op: Any, args: Any, kwargs: Any) -> None:
    """Compiled with dynamic sizes, `vmap` does the same as in eager mode."""
    call, originals = probes.on_tensors(op, args, kwargs)

    def function(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(probes.tensors_of(call(*tensors)))

    mapped = [torch.stack([t, probes.rolled_elements(t, 1)]) for t in originals]
    expected = torch.vmap(function)(*mapped)
    torch.compiler.reset()
    try:
        compiled = torch.compile(
            torch.vmap(function), backend="aot_eager", dynamic=True, fullgraph=True
        )
        probes.assert_same(compiled(*mapped), expected, "vmap compiled with dynamic sizes")
    finally:
        torch.compiler.reset()


def differentiates_in_func(op: Any, args: Any, kwargs: Any) -> None:
    """`torch.func.vjp` and `grad`, once and nested, agree with autograd."""
    function, inputs = probes.as_function(op, args, kwargs)
    plain = tuple(tensor.detach() for tensor in inputs)

    def total(*tensors: torch.Tensor) -> torch.Tensor:
        return probes.weighted_sum(function(*tensors))

    places = tuple(range(len(inputs)))
    expected = probes.gradients(function, inputs)
    probes.assert_same(torch.func.grad(total, places)(*plain), expected, "torch.func.grad")
    pull_back = torch.func.vjp(total, *plain)[1]
    pulled = pull_back(torch.ones((), dtype=torch.double))
    probes.assert_same(pulled, expected, "torch.func.vjp")


def maps_gradients_like_a_loop(op: Any, args: Any, kwargs: Any) -> None:
    """`vmap` of `grad`, which gives gradients for each sample, does the same as a loop."""
    function, inputs = probes.as_function(op, args, kwargs)
    plain = [tensor.detach() for tensor in inputs]
    batched = [torch.stack([t, t.flatten().roll(1).view(t.shape)]) for t in plain]

    def total(*tensors: torch.Tensor) -> torch.Tensor:
        return probes.weighted_sum(function(*tensors))

    gradient = torch.func.grad(total, tuple(range(len(inputs))))
    expected = [gradient(*(tensor[n] for tensor in batched)) for n in range(2)]
    actual = torch.vmap(gradient)(*batched)
    together = [torch.stack(pair) for pair in zip(*expected, strict=True)]
    probes.assert_same(actual, together, "vmap of torch.func.grad")


def functionalizes_the_same(op: Any, args: Any, kwargs: Any) -> None:
    """`torch.func.functionalize` changes nothing."""
    function, originals = probes.on_tensors(op, args, kwargs)

    def results(call: Any) -> list[torch.Tensor]:
        seed_torch(0)
        with torch.no_grad():
            return probes.tensors_of(call(*originals))

    actual = results(torch.func.functionalize(function))
    probes.assert_same(actual, results(function), "torch.func.functionalize")


# --------------------------------------------------------------------------------------------------
# Cases


def vmap(subject: Subject, details: Details) -> Iterator[Case]:
    """Does vmap do what a loop does?

    It is asked about each choice of mapped tensors, at the first, second and last dimension.
    """
    subject.needs_vmap()
    if subject.is_random:
        raise CannotCheck("its results are random: see subsystems.vmap_random")
    for example in subject.accepted(most=2):
        tensors = example.tensors
        if not tensors:
            continue
        choices: list[list[int | None]] = [[0] * len(tensors), [t.dim() for t in tensors]]
        if any(t.dim() > 1 for t in tensors):
            choices.append([min(t.dim(), 1) for t in tensors])
        if len(tensors) > 1:
            choices += [
                [0 if n == place else None for n in range(len(tensors))]
                for place in range(len(tensors))
            ]
            choices.append([0, *(t.dim() for t in tensors[1:])])
        written_places = subject.written_places(example)
        for in_dims in choices[:9]:
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


def vmap_random(subject: Subject, details: Details) -> Iterator[Case]:
    """Does vmap draw random numbers as asked for?"""
    if not subject.is_random:
        raise CannotCheck("its results are not random: it has no tag nondeterministic_seeded")
    subject.needs_vmap()
    for example in subject.accepted(most=1):
        if example.tensors:
            yield Case("each kind of randomness", draws_for_each, example)


def vmap_compiled(subject: Subject, details: Details) -> Iterator[Case]:
    """Does vmap do the same, compiled with dynamic sizes?"""
    subject.needs_vmap()
    subject.needs_fixed_results()
    subject = with_programs(subject, details)
    if subject.sizes_depend_on_data:
        raise CannotCheck("the sizes of its results depend on data, and may differ in a batch")
    for example in subject.accepted(most=2):
        if example.tensors:
            yield Case("vmap over every tensor", compiles_in_vmap, example)
    raise CannotCheck("no argument is a tensor")


def func(subject: Subject, details: Details) -> Iterator[Case]:
    """Do the gradients of torch.func agree with autograd?"""
    needs_formula(subject)
    function, inputs = probes.as_function(subject.op, *subject.double_examples[0].copy())
    try:
        torch.func.vjp(function, *(tensor.detach() for tensor in inputs))
    except RuntimeError as error:
        # What PyTorch says of formulas of its custom_op, and torchop of operators that write.
        if "functorch transforms" in str(error) or isinstance(error, MissingFormulaError):
            raise CannotCheck(f"the formula does not take part: {reason(error)}") from None
    for example in subject.double_examples[:2]:
        yield Case("the example in double", differentiates_in_func, example)
    if subject.has_kernel("FuncTorchBatched") and not subject.is_random:
        details["vmap of grad"] = "tried"
        example = subject.double_examples[0]
        yield Case("gradients for each sample", maps_gradients_like_a_loop, example)
    else:
        details["vmap of grad"] = "not tried: no vmap rule, or random results"


def functionalize(subject: Subject, details: Details) -> Iterator[Case]:
    """Does torch.func.functionalize change nothing?"""
    if not subject.schema.is_functional:
        raise CannotCheck("PyTorch's functionalize takes no custom operator that writes or aliases")
    for example in subject.accepted(most=2):
        if example.tensors:
            yield Case("torch.func.functionalize", functionalizes_the_same, example)


CHECKS = (
    *family("subsystems", vmap, vmap_random, func, functionalize),
    *family("subsystems", vmap_compiled, is_costly=True),
)

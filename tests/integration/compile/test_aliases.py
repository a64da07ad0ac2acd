"""Inductor must not remove a copy that an operator reads while it writes to the original."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.fx_passes import post_grad
from torch._inductor.utils import run_and_get_code

import torchop
from tests._support.common import on_both
from tests._support.releases import needs_tags
from tests.integration.compile import mutating

FORMS = ["plain", "inplace", "out"]


def reverse(target: Tensor, source: Tensor) -> Tensor:
    """Write one element at a time, so that the result is incorrect if the tensors share memory."""
    for i in range(len(source)):
        target[i] = source[len(source) - 1 - i]
    return target


def define(form: str, namespace: str, library: Any) -> Callable[[Tensor, Tensor], Any]:
    """Define an operator with the kernel `reverse`, and return it as `write(source, target)`."""
    write = mutating.define(form, namespace, library, reverse)
    return lambda source, target: write(target, source)


def copy_into(x: Tensor) -> Tensor:
    copy = torch.empty_like(x)
    copy.copy_(x)
    return copy


# Inductor 2.13 removes each of these copies, so that the operator gets the original twice.
COPIES: dict[str, Callable[[Tensor], Tensor]] = {
    "clone": lambda x: x.clone(),
    "clone of a view": lambda x: x.view(2, 2).clone().view(4),
    "a clone of a clone": lambda x: x.clone().clone(),
    "copy_": copy_into,
    "cat": lambda x: torch.cat([x]),
    "conversions": lambda x: x.double().float(),
    "repeat": lambda x: x.repeat(1),
    "pad": lambda x: torch.nn.functional.pad(x, (0, 0)),
    "pow": lambda x: x**1,
    "a slice": lambda x: x[:4].clone(),
    "all of it scattered": lambda x: torch.slice_scatter(torch.zeros_like(x), x),
}


@pytest.mark.parametrize("form", FORMS)
def test_copy_of_the_mutated_tensor_keeps_its_contents(namespace, form):
    write = define(form, namespace, torchop)

    def function(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        for name, copy in COPIES.items():
            write(copy(inputs[name]), inputs[name])
        return {name: x * 2 for name, x in inputs.items()}

    inputs = {name: torch.arange(4.0) for name in COPIES}
    results = torch.compile(function, fullgraph=True)(inputs)
    expected = [3.0, 2.0, 1.0, 0.0]
    assert {name: x.tolist() for name, x in inputs.items()} == dict.fromkeys(COPIES, expected)
    doubled = [2 * value for value in expected]
    assert {name: x.tolist() for name, x in results.items()} == dict.fromkeys(COPIES, doubled)


takes_copies_out = pytest.mark.needs_torch(
    "2.11", "Inductor takes copies out that operators write", before="2.15"
)


@takes_copies_out
@pytest.mark.parametrize("form", ["plain", pytest.param("inplace", marks=needs_tags)])
def test_inductor_itself_removes_the_copy(namespace, form):
    def scenario(library, namespace):
        write = define(form, namespace, library)

        def function(x: Tensor) -> Tensor:
            write(x.clone(), x)
            return x * 2

        return torch.compile(function, fullgraph=True)(torch.arange(4.0)).tolist()

    both = on_both(scenario, namespace)
    assert both.ours == [6.0, 4.0, 2.0, 0.0]
    # Inductor removed the clone, so the kernel overwrites elements before it reads them.
    assert both.stock == [6.0, 4.0, 4.0, 6.0]


def _written_by_an_operator(write: Callable[[Tensor, Tensor], Any], x: Tensor) -> Tensor:
    copy = x.clone()
    write(copy + 1, x)
    write(x + 10, copy)
    return copy


def _written_before(write: Callable[[Tensor, Tensor], Any], x: Tensor) -> Tensor:
    copy = x.clone()
    x.add_(5)
    write(x + 10, copy)
    return copy


def _written_later(write: Callable[[Tensor, Tensor], Any], x: Tensor) -> Tensor:
    copy = x.clone()
    write(x + 10, copy)
    x.zero_()
    return copy


def _partly_written(write: Callable[[Tensor, Tensor], Any], x: Tensor) -> Tensor:
    copy = x.clone()
    write(x[1:] + 10, copy[1:])
    x.zero_()
    return copy


WRITTEN_COPIES = [_written_by_an_operator, _written_before, _written_later, _partly_written]


def _eager_and_compiled(library: Any, namespace: str, form: str, program: Any) -> list[Any]:
    write = define(form, namespace, library)

    def function(x: Tensor) -> Tensor:
        return program(write, x)

    outcomes = []
    for run in (function, torch.compile(function, fullgraph=True)):
        x = torch.arange(4.0)
        outcomes.append((run(x).tolist(), x.tolist()))
    return outcomes


@pytest.mark.parametrize("program", WRITTEN_COPIES)
@pytest.mark.parametrize("form", FORMS)
def test_copy_that_is_written_is_separate_from_a_written_input(namespace, form, program):
    eager, compiled = _eager_and_compiled(torchop, namespace, form, program)
    assert compiled == eager


@takes_copies_out
@pytest.mark.parametrize("program", WRITTEN_COPIES)
def test_inductor_itself_overwrites_a_copy_that_is_written(namespace, program):
    eager, compiled = _eager_and_compiled(torch.library, namespace, "plain", program)
    assert compiled != eager


BETWEEN = {**COPIES, "plus 0": lambda x: x + 0, "a part": lambda x: x[1:].clone()}
# What the program writes to, first and second.
PLACES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "twice the same": (lambda x: x, lambda x: x),
    "then a part": (lambda x: x, lambda x: x[1:]),
    "first a part": (lambda x: x[1:], lambda x: x),
    "twice a part": (lambda x: x[1:], lambda x: x[1:]),
}


def _copies_between_writes(
    library: Any, namespace: str, form: str, place: str, offset: int
) -> list[Any]:
    write = define(form, namespace, library)
    first, second = PLACES[place]

    def function(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        copies = {}
        for name, x in inputs.items():
            write(first(x) + 1, first(x))
            copies[name] = BETWEEN[name](x)
            write(second(x) + 10, second(x))
        return copies

    outcomes = []
    for run in (function, torch.compile(function, fullgraph=True)):
        inputs = {name: torch.arange(4.0 + offset)[offset:] for name in BETWEEN}
        copies = run(inputs)
        outcomes.append([(name, copies[name].tolist(), inputs[name].tolist()) for name in BETWEEN])
    return outcomes


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("form", "offset"), [("plain", 0), ("plain", 1), ("inplace", 0)])
def test_copy_between_two_writes_keeps_its_contents(namespace, form, place, offset):
    eager, compiled = _copies_between_writes(torchop, namespace, form, place, offset)
    assert compiled == eager


@pytest.mark.needs_torch("2.13", "loops write to captured tensors")
def test_copy_after_a_loop_that_writes_keeps_its_contents(namespace):
    write = define("plain", namespace, torchop)

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        def body(i: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
            write(x + 1, x)
            return i + 1, total + x

        start = (torch.zeros((), dtype=torch.int64), torch.zeros(4))
        _, total = torch.while_loop(lambda i, _: i < 2, body, start)
        copy = x.clone()
        write(x + 10, x)
        return total, copy

    outcomes = []
    with torch.no_grad():
        for run in (function, torch.compile(function, fullgraph=True)):
            x = torch.arange(4.0)
            outcomes.append([each.tolist() for each in (*run(x), x)])
    assert outcomes[1] == outcomes[0]


@takes_copies_out
def test_inductor_itself_changes_a_copy_between_two_writes(namespace, monkeypatch):
    # torchop's pass applies to all operators, so remove it.
    monkeypatch.setattr(post_grad, "remove_noop_ops", post_grad.remove_noop_ops.__wrapped__)
    eager, compiled = _copies_between_writes(torch.library, namespace, "plain", "twice the same", 0)
    assert compiled != eager


@pytest.mark.parametrize("form", ["plain", "inplace"])
def test_copy_in_a_training_program_keeps_its_contents(namespace, form):
    write = define(form, namespace, torchop)

    def function(x: Tensor, weight: Tensor) -> Tensor:
        write(x.clone(), x)
        return (x * weight).sum()

    x, weight = torch.arange(4.0), torch.ones(4, requires_grad=True)
    torch.compile(function, fullgraph=True)(x, weight).backward()
    assert x.tolist() == weight.grad.tolist() == [3.0, 2.0, 1.0, 0.0]


def _made(namespace: str) -> Any:
    @torchop.custom_op(f"{namespace}::made", mutates_args=())
    def made(x: Tensor) -> Tensor:
        return x.clone()

    made.register_fake(lambda x: torch.empty_like(x))
    return made


@pytest.mark.parametrize("form", FORMS)
def test_two_copies_of_one_intermediate_are_not_merged(namespace, form):
    write, made = define(form, namespace, torchop), _made(namespace)

    def function(x: Tensor) -> Tensor:
        y = made(x)
        source, target = y.clone(), y.clone()
        write(source, target)
        return target * 2

    assert torch.compile(function, fullgraph=True)(torch.arange(4.0)).tolist() == [6, 4, 2, 0]


@pytest.mark.parametrize("form", FORMS)
def test_copies_of_a_part_and_in_a_row_of_calls(namespace, form):
    write = define(form, namespace, torchop)

    def function(x: Tensor) -> Tensor:
        write(x[1:].clone(), x[1:])
        write(x.clone(), x)
        write(x[:3].clone(), x[1:])
        return x + 1

    x, expected = torch.arange(4.0), torch.arange(4.0)
    assert torch.compile(function, fullgraph=True)(x).tolist() == function(expected).tolist()
    assert x.tolist() == expected.tolist()


@pytest.mark.parametrize("where", ["argument of a list", "keyword-only list"])
def test_a_copy_in_a_list_is_found(namespace, where):
    star = "*, " if where.startswith("keyword") else ""
    schema = f"(Tensor(a!) target, {star}Tensor?[] sources) -> ()"
    if star:  # only out= arguments may be keyword-only tensors
        schema = "(Tensor?[] sources, *, Tensor(a!) target) -> Tensor(a!)"

    def kernel(target=None, sources=None):
        for source in sources:
            if source is not None:
                reverse(target, source)
        return target if star else None

    if star:

        def function_of(sources, *, target):
            return kernel(target, sources)
    else:

        def function_of(target, sources):
            return kernel(target, sources)

    op = torchop.custom_op(f"{namespace}::op", function_of, mutates_args={"target"}, schema=schema)

    def program(x: Tensor) -> Tensor:
        op(sources=[None, x.clone()], target=x)
        return x * 2

    assert torch.compile(program, fullgraph=True)(torch.arange(4.0)).tolist() == [6, 4, 2, 0]


# --------------------------------------------------------------------------------------------------
# Programs that need no copy


def _clones(function: Callable[..., Any], *args: Any) -> int:
    _, (code,) = run_and_get_code(torch.compile(function, fullgraph=True), *args)
    return code.count("torch.ops.torchop.clone.default(")


RIGHT = {
    "another input": lambda write, x, y: write(y, x),
    "computed from what is written": lambda write, x, y: write(x + 1, x),
    "computed from both": lambda write, x, y: write(x * y, x),
    "an intermediate": lambda write, x, y: write(y.sin().clone(), x),
    "another view of what is written": lambda write, x, y: write(x[2:], x[:2]),
    "a clone of another input": lambda write, x, y: write(y.clone(), x),
    "written into fresh memory": lambda write, x, y: write(x, torch.empty_like(x)),
    "written into zeros": lambda write, x, y: write(x.clone(), torch.zeros(4)),
}


@pytest.mark.parametrize("form", FORMS)
def test_correct_programs_get_no_copies(namespace, form):
    write = define(form, namespace, torchop)

    def function(inputs: dict[str, tuple[Tensor, Tensor]]) -> list[Tensor]:
        for name, (x, y) in inputs.items():
            RIGHT[name](write, x, y)
        return [x + 1 for x, _ in inputs.values()]

    assert _clones(function, {name: (torch.arange(4.0), torch.arange(4.0)) for name in RIGHT}) == 0


@takes_copies_out
def test_programs_own_copy_is_the_only_one(namespace):
    write = define("plain", namespace, torchop)

    def function(x: Tensor) -> None:
        write(x.clone(), x)

    _, (code,) = run_and_get_code(torch.compile(function, fullgraph=True), torch.arange(4.0))
    assert code.count("torch.ops.torchop.clone.default(") == 1
    assert "empty_strided" not in code.partition("def call(")[2].partition("runner =")[0]

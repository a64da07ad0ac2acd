"""Compiled operators that mutate tensors with a storage offset, or copies of such tensors.

With operators of `torch.library`, PyTorch 2.13 compiles many of these programs incorrectly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import torchop
from tests._support.common import on_both
from tests._support.releases import INPLACE, needs_tags
from tests.integration.compile.mutating import (
    FORMS,
    accumulate,
    assert_equals_eager,
    calling,
    define,
    inputs,
    run_together,
)

# The tests name this parameter `compiler`. With the name `backend`, most cases would not compile
# C++ (see `combinations`), and without C++ Inductor does not make the mistakes that are tested.
BACKENDS = ["aot_eager", "inductor"]
LOW_LEVEL = ["defined", "accelerated"]
WITH_VIEWS = [
    "input_with_a_copy",
    "a_slice_of_an_input",
    "every_second_row_of_an_input",
    "a_slice_of_an_intermediate",
    "a_row_of_a_transposed_input",
    "a_view_that_is_read_afterwards",
    "overlapping_views_in_order",
    "read_argument_is_a_view_of_the_mutated_one",
]
# Functions that copy a part of an input. Inductor may remove such a copy and pass the part of the
# input to the operator instead, which would mutate the input.
COPIES: dict[str, Callable[[Tensor], Tensor]] = {
    "clone of a row": lambda x: x[2].clone(),
    "clone of rows": lambda x: x[1:].clone(),
    "clone of an input": lambda x: x.clone(),
    "view of a clone": lambda x: x[1:].clone()[1:],
    "contiguous": lambda x: x.chunk(2)[1].contiguous(),
    "split": lambda x: x.split(1)[1].clone(),
    "copy": lambda x: torch.empty_like(x[3]).copy_(x[3]),
    "full slice": lambda x: torch.zeros_like(x[3])[:].copy_(x[3]),
    "cat": lambda x: torch.cat([x[3]]),
}


def offset_inputs() -> tuple[Tensor, Tensor]:
    """Return two tensors, each with a storage offset because it is a row of a larger tensor."""
    x, y = (torch.stack([value - 1, value, value + 1])[1] for value in inputs())
    assert x.storage_offset()
    assert y.storage_offset()
    return x, y


@pytest.fixture
def write(namespace: str, request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """Define an operator `write(target, x)`. The parameter of the fixture is the form."""
    form = request.param
    if form == "defined":
        schema = "(Tensor(a!) target, Tensor x) -> ()"
        with torchop.Library(namespace, "FRAGMENT") as library:
            library.define(f"write{schema}")
            library.impl("write", _accumulate, "CompositeExplicitAutograd")
            torchop.register_fake(f"{namespace}::write", lambda target, x: None, lib=library)
            yield getattr(torch.ops, namespace).write
    elif form == "accelerated":
        op = define("plain", namespace, torch.library)
        with torchop.accelerate(f"{namespace}::*"):
            yield op
    else:
        yield define(form, namespace, torchop)


def add_one_to_each(xs: list[Tensor]) -> None:
    torch._foreach_add_(xs, 1)


def _accumulate(target: Tensor, x: Tensor) -> None:
    accumulate(target, x)


@pytest.mark.pairwise
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("compiler", BACKENDS)
@pytest.mark.parametrize("write", [*FORMS, *LOW_LEVEL], indirect=True)
def test_inputs_with_an_offset_are_written_in_place(
    write: Callable[..., Any], compiler: str, dynamic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.integration.compile.mutating.inputs", offset_inputs)
    function = run_together(calling(write, WITH_VIEWS))
    compiled = torch.compile(function, backend=compiler, fullgraph=True, dynamic=dynamic)
    assert_equals_eager(compiled, function, WITH_VIEWS)


@pytest.mark.pairwise
@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("compiler", BACKENDS)
@pytest.mark.parametrize("write", ["plain", "inplace", *LOW_LEVEL], indirect=True)
def test_copies_of_a_part_of_an_input_are_written(
    write: Callable[..., Any], compiler: str, offset: bool
) -> None:
    def function(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        results = {}
        for name, copy in COPIES.items():
            target = copy(inputs[name])
            write(target, torch.ones_like(target))
            results[name] = target + 1
        return results

    def arguments() -> dict[str, Tensor]:
        return {name: (offset_inputs() if offset else inputs())[0] for name in COPIES}

    ours, expected = arguments(), arguments()
    compiled = torch.compile(function, backend=compiler, fullgraph=True)
    assert_close(compiled(ours), function(expected), rtol=0, atol=0)
    assert_close(ours, expected, rtol=0, atol=0)


@pytest.mark.parametrize("compiler", BACKENDS)
@pytest.mark.parametrize("write", ["plain", *LOW_LEVEL], indirect=True)
def test_rows_of_one_tensor_may_be_separate_inputs(
    write: Callable[..., Any], compiler: str
) -> None:
    def function(x: Tensor, y: Tensor, z: Tensor) -> None:
        y.copy_(x)
        write(y, z)
        write(z[1:3], x[1:3])

    ours, expected = (torch.arange(24.0).reshape(3, 8) for _ in range(2))
    torch.compile(function, backend=compiler, fullgraph=True)(*ours)
    function(*expected)
    assert_close(ours, expected, rtol=0, atol=0)


@pytest.mark.parametrize("compiler", BACKENDS)
@pytest.mark.parametrize("write", ["plain", "inplace", *LOW_LEVEL], indirect=True)
def test_copies_of_operands_are_written_in_a_branch(
    write: Callable[..., Any], compiler: str
) -> None:
    def branch(row: Tensor) -> Tensor:
        copy = row.clone()
        write(copy, torch.ones_like(copy))
        return copy + 1

    def function(x: Tensor) -> Tensor:
        # Inductor removes both copies, and would write into the first row of `x`.
        return torch.cond(x.sum() > 0, branch, torch.neg, (x[2].clone(),))

    x = inputs()[0]
    compiled = torch.compile(function, backend=compiler, fullgraph=True)
    assert_close(compiled(x), function(x), rtol=0, atol=0)


@pytest.mark.parametrize("compiler", BACKENDS)
@pytest.mark.parametrize("write", ["plain", "inplace", *LOW_LEVEL], indirect=True)
@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_sizes_may_depend_on_data(write: Callable[..., Any], compiler: str) -> None:
    def function(x: Tensor, number: Tensor) -> Tensor:
        n = number.item()
        torch._check(n >= 0)
        torch._check(n <= 4)
        row = torch.zeros(4)
        row[:n].copy_(x[1, :n])
        write(row, torch.ones(4))
        write(x[:n], torch.ones(1, 4))
        return row + 1

    ours, expected = (offset_inputs()[0] for _ in range(2))
    compiled = torch.compile(function, backend=compiler, fullgraph=True)
    number = torch.tensor(2)
    assert_close(compiled(ours, number), function(expected, number), rtol=0, atol=0)
    assert_close(ours, expected, rtol=0, atol=0)


@pytest.mark.parametrize("write", ["plain", *LOW_LEVEL], indirect=True)
def test_sizes_stay_dynamic(write: Callable[..., Any]) -> None:
    @torch.compile(backend="aot_eager", fullgraph=True)
    def function(x: Tensor) -> Tensor:
        row = torch.zeros(4)
        row[: x.shape[1]].copy_(x[1])
        write(row, torch.ones(4))
        return row

    x = inputs()[0]
    torch._dynamo.mark_dynamic(x, 1)
    assert_close(function(x), x[1] * 2 + 1)


@needs_tags
def test_results_of_tagged_operators_of_a_library_are_their_arguments(namespace: str) -> None:
    def function(x: Tensor) -> Tensor:
        row = x[1:3]
        op(row, torch.ones(2, 4)).add_(1)
        return row * 2

    schema = "(Tensor(a!) target, Tensor x) -> Tensor(a!)"
    with torchop.Library(namespace, "FRAGMENT") as library:
        library.define(f"write{schema}", tags=INPLACE)
        library.impl("write", accumulate, "CompositeExplicitAutograd")
        torchop.register_fake(f"{namespace}::write", lambda target, x: target, lib=library)
        op = getattr(torch.ops, namespace).write
        for arguments in (inputs, offset_inputs):
            ours, expected = arguments()[0], arguments()[0]
            compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
            assert_close(compiled(ours), function(expected), rtol=0, atol=0)
            assert_close(ours, expected, rtol=0, atol=0)


def test_lists_with_optional_tensors_of_a_library_are_written(namespace: str) -> None:
    @torch.compile(backend="aot_eager", fullgraph=True)
    def function(x: Tensor) -> None:
        op([x[1:2], x[2:3]])

    with torchop.Library(namespace, "FRAGMENT") as library:
        # PyTorch shows this type as `Tensor?(a!)[]`, which it cannot parse.
        library.define("write(Tensor(a!)?[] xs) -> ()")
        library.impl("write", add_one_to_each, "CompositeExplicitAutograd")
        torchop.register_fake(f"{namespace}::write", lambda xs: None, lib=library)
        op = getattr(torch.ops, namespace).write
        numbers = torch.zeros(5, 1)
        function(numbers[1:])
        assert numbers.flatten().tolist() == [0, 0, 1, 1, 0]


def test_overlapping_slices_of_an_input_with_an_offset_are_rejected(namespace: str) -> None:
    @torchop.custom_op(f"{namespace}::both", mutates_args={"a", "b"})
    def both(a: Tensor, b: Tensor) -> None:
        a.add_(1)
        b.mul_(2)

    def compiled(first: slice, second: slice) -> Callable[[Tensor], None]:
        return torch.compile(
            lambda x: both(x[first], x[second]), backend="aot_eager", fullgraph=True
        )

    ours, expected = (torch.arange(16.0).reshape(2, 8) for _ in range(2))
    compiled(slice(0, 2), slice(4, 6))(ours[1])
    both(expected[1, 0:2], expected[1, 4:6])
    assert_close(ours, expected, rtol=0, atol=0)
    with pytest.raises(Exception, match=rf"{namespace}::both .* may share memory \(a, b\)"):
        compiled(slice(0, 4), slice(2, 6))(ours[1])


def test_a_slice_that_is_copied_counts_as_copied_bytes(namespace: str) -> None:
    write = define("plain", namespace, torchop)
    cache, row = torch.zeros(3, 8, 4)[1], torch.ones(2, 4)
    copied = torchop.testing.copied_bytes(lambda cache, row: write(cache[3:5], row), cache, row)
    assert copied == {"cache": 64}  # 8 floats of 4 bytes are copied, and copied back


def test_pytorch_writes_a_slice_of_an_offset_input_elsewhere(namespace: str) -> None:
    def scenario(library: Any, namespace: str) -> list[float]:
        write = define("plain", namespace, library)

        @torch.compile(backend="aot_eager", fullgraph=True)
        def function(x: Tensor) -> None:
            write(x[1:3], torch.ones(2))

        numbers = torch.zeros(8)
        function(numbers[1:])
        return numbers.tolist()

    assert on_both(scenario, namespace) == ([0, 0, 1, 1, 0, 0, 0, 0], [0, 0, 0, 1, 1, 0, 0, 0])


def test_pytorch_reads_another_row_for_a_clone(namespace: str) -> None:
    def scenario(library: Any, namespace: str) -> list[float]:
        write = define("plain", namespace, library)

        @torch.compile(backend="inductor", fullgraph=True)
        def function(x: Tensor) -> Tensor:
            row = x[1].clone()
            write(row, torch.ones(2))
            return row + 1

        return function(torch.tensor([[1.0, 2.0], [3.0, 4.0]])).tolist()

    assert on_both(scenario, namespace) == ([8, 10], [4, 6])


@pytest.mark.parametrize(
    "compiler",
    [
        "aot_eager",
        pytest.param(
            "inductor", marks=pytest.mark.needs_torch("2.13", "offsets of inputs in Inductor")
        ),
    ],
)
@pytest.mark.parametrize("write", ["plain", *LOW_LEVEL], indirect=True)
def test_rows_of_a_computed_tensor_are_written(write: Callable[..., Any], compiler: str) -> None:
    """Functionalization describes the rows by the offset of the input, which the sum lacks."""

    def function(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        x.add_(1)
        write(x[1], z[0])
        y[1:].copy_(x[:3])
        write(y[1], z[0])
        y.t().mul_(2)
        write(y.t()[1], z[:, 0])
        return y + 1

    def arguments() -> tuple[Tensor, ...]:
        return torch.arange(32.0).reshape(2, 4, 4)[1], torch.ones(3, 4, 4)[2], torch.ones(4, 4)

    for _ in range(2):  # the second time, PyTorch finds metadata in its caches
        torch._dynamo.reset()
        ours, expected = arguments(), arguments()
        compiled = torch.compile(function, backend=compiler, fullgraph=True)
        assert_close(compiled(*ours), function(*expected), rtol=0, atol=0)
        assert_close(ours, expected, rtol=0, atol=0)

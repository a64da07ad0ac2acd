"""Results with lists, tuples and dicts whose items are structures."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Optional

import pytest
import torch
from torch import Tensor

import torchop
from tests.schema.structure.generated import same
from torchop import ResultError


class Pair(NamedTuple):
    value: Tensor
    count: int


@dataclasses.dataclass
class Row:
    y: Tensor
    scale: Optional[Tensor]
    parts: list[Tensor]
    inner: Optional[Pair]
    kind: torch.dtype
    rate: float


@dataclasses.dataclass
class Table:
    rows: list[Row]
    named: dict[str, Pair]
    lists: list[list[Optional[Tensor]]]
    maybe: Optional[tuple[Pair, ...]]
    words: list[list[str]]


def row(x: Tensor, is_full: bool) -> Row:
    scale, inner = (x * 3, Pair(x * 4, 2)) if is_full else (None, None)
    return Row(x * 2, scale, [x * 5, x * 6] if is_full else [], inner, torch.int8, 0.5)


def table(x: Tensor, are_full: list[bool]) -> Table:
    return Table(
        [row(x, is_full) for is_full in are_full],
        {str(index): Pair(x * 7, index) for index, _ in enumerate(are_full)},
        [[x * 8, None], []],
        (Pair(x * 9, 1), Pair(x * 10, 2)) if all(are_full) else None,
        [["a"], []],
    )


def tensors(found: Table) -> list[Tensor]:
    rows = [
        tensor
        for each in found.rows
        for tensor in (each.y, each.scale, *each.parts, each.inner and each.inner.value)
        if tensor is not None
    ]
    pairs = [*found.named.values(), *(found.maybe or ())]
    lists = [tensor for each in found.lists for tensor in each if tensor is not None]
    return [*rows, *lists, *[pair.value for pair in pairs]]


def backward(ctx: Any, grad: Table) -> Any:
    assert all(each.kind is each.rate is None for each in grad.rows)
    assert grad.words is None
    ctx.seen.append(grad)
    return sum(tensor * (index + 1) for index, tensor in enumerate(tensors(grad))), None


def define(namespace: str, function: Callable[..., Any] = table) -> Any:
    op = torchop.custom_op(f"{namespace}::op", function, mutates_args=())
    op.register_fake(table)
    return op


CALLS = ([], [True], [False], [False, True], [True, True])


@pytest.mark.parametrize("backend", ["none", "aot_eager"])
@pytest.mark.parametrize("are_full", CALLS)
def test_results_and_gradients(namespace: str, backend: str, are_full: list[bool]) -> None:
    op, seen = define(namespace), []

    def setup_context(ctx: Any, inputs: Any, output: Table) -> None:
        ctx.seen = seen

    op.register_autograd(backward, setup_context=setup_context)

    def program(x: Tensor) -> tuple[Table, Tensor]:
        found = op(x, are_full)
        weighted = [(index + 1) * tensor.sum() for index, tensor in enumerate(tensors(found))]
        return found, torch.stack(weighted).sum()

    call = program if backend == "none" else torch.compile(program, fullgraph=True, backend=backend)
    x = torch.ones(2, requires_grad=True)
    found, loss = call(x)
    assert same(found, table(torch.ones(2), are_full))
    loss.backward()
    count = len(tensors(found))
    assert x.grad is not None
    assert x.grad.tolist() == [sum((n + 1) ** 2 for n in range(count))] * 2
    if backend == "none":
        (grad,) = seen
        assert list(grad.named) == list(found.named)
        assert [each.scale is None for each in grad.rows] == [not full for full in are_full]
        assert (grad.maybe is None) == (not all(are_full))


def test_opcheck_accepts(namespace: str) -> None:
    op = define(namespace)
    torchop.testing.opcheck(op, (torch.ones(2), [True, False]))


def test_jvp_receives_and_returns_the_structure(namespace: str) -> None:
    op = define(namespace)

    @op.register_jvp
    def _(ctx: Any, tangent: Tensor, are_full: None) -> Any:
        return dataclasses.replace(table(tangent, [False, True]), words=None)

    x = torch.ones(2)
    found, tangents = torch.func.jvp(
        lambda x: tuple(tensors(op(x, [False, True]))), (x,), (torch.full((2,), 3.0),)
    )
    assert len(found) == 9
    for value, tangent in zip(found, tangents, strict=True):
        torch.testing.assert_close(tangent, 3 * value)


def test_vmap_receives_and_returns_the_structure(namespace: str) -> None:
    op = define(namespace)

    @op.register_vmap
    def _(info: Any, in_dims: Any, x: Tensor, are_full: list[bool]) -> Any:
        dims = {"y": 0, "scale": 0, "parts": [0, 0], "inner": {"value": 0}}
        named = {str(index): {"value": 0} for index, _ in enumerate(are_full)}
        lists = [[0, None], []]
        return table(x.movedim(in_dims[0], 0), are_full), {
            "rows": [dims if is_full else {"y": 0} for is_full in are_full],
            "named": named,
            "lists": lists,
            "maybe": None,
        }

    x = torch.arange(6.0).reshape(3, 2)
    found = torch.func.vmap(lambda x: tuple(tensors(op(x, [False, True]))))(x)
    for value, expected in zip(found, tensors(table(x, [False, True])), strict=True):
        torch.testing.assert_close(value, expected)


def with_change(change: Callable[[Table], Any]) -> Callable[[Tensor, list[bool]], Table]:
    def function(x: Tensor, are_full: list[bool]) -> Table:
        found = table(x, are_full)
        change(found)
        return found

    return function


def change_inner(found: Table) -> None:
    found.rows[1].inner = None


def change_scale(found: Table) -> None:
    found.rows[1].scale = None


def change_rate(found: Table) -> None:
    found.rows[0].rate = 2.0


def change_parts(found: Table) -> None:
    found.rows[1].parts = found.rows[1].parts[:1]


def change_rows(found: Table) -> None:
    found.rows.pop()


def change_count(found: Table) -> None:
    found.named["1"] = found.named["1"]._replace(count=5)


def change_keys(found: Table) -> None:
    found.named["b"] = found.named.pop("1")


def change_lists(found: Table) -> None:
    found.lists[0][1] = found.rows[0].y.clone()


DISAGREEMENTS = [
    (change_inner, r"the result\.rows\[1\]\.inner is None, but the fake kernel returned not None"),
    (change_scale, r"the result\.rows\[1\]\.scale is None, but the fake kernel returned a tensor"),
    (change_rate, r"the result\.rows\[0\]\.rate is 2\.0, but the fake kernel returned 0\.5"),
    (change_parts, r"the result\.rows\[1\]\.parts is a list of 1, .* returned a list of 2"),
    (change_rows, r"the result\.rows is a list of 1, but the fake kernel returned a list of 2"),
    (change_count, r"the result\.named\['1'\]\.count is 5, but the fake kernel returned 1"),
    (change_keys, r"the result\.named is a dict with \('0', 'b'\), but the fake kernel returned"),
    (change_lists, r"the result\.lists\[0\]\[1\] is a tensor, but the fake kernel returned None"),
]


@pytest.mark.parametrize(("change", "message"), DISAGREEMENTS)
def test_a_kernel_that_disagrees_with_its_fake_kernel_is_an_error(
    namespace: str, change: Callable[[Table], Any], message: str
) -> None:
    op = define(namespace, with_change(change))
    op(torch.ones(3), [False, True])
    run = torch.compile(op, fullgraph=True, backend="aot_eager")
    with pytest.raises(ResultError, match=message):
        run(torch.ones(3), [False, True])


def wrong_row(found: Table) -> None:
    found.rows[1] = found.named["1"]  # type: ignore[call-overload]


def wrong_scale(found: Table) -> None:
    found.rows[0].scale = 3  # type: ignore[assignment]


def missing_y(found: Table) -> None:
    found.rows[0].y = None  # type: ignore[assignment]


def wrong_item(found: Table) -> None:
    found.lists[0][1] = "a"  # type: ignore[call-overload]


def wrong_rows(found: Table) -> None:
    found.rows = found.named  # type: ignore[assignment]


def wrong_key(found: Table) -> None:
    found.named[1] = found.named["1"]  # type: ignore[index]


WRONG = [
    (wrong_row, r"the result\.rows\[1\]: expected Row, but the function returned a .*Pair of 2"),
    (wrong_scale, r"the result\.rows\[0\]\.scale: expected torch\.Tensor, got int"),
    (missing_y, r"the result\.rows\[0\]\.y: expected torch\.Tensor, got NoneType"),
    (wrong_item, r"the result\.lists\[0\]\[1\]: expected torch\.Tensor, got str"),
    (wrong_rows, r"the result\.rows: expected a list or tuple, but the function returned a dict"),
    (wrong_key, r"the result\.named: the key 1: expected str, got int"),
]


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_a_wrong_item_is_named(
    namespace: str, change: Callable[[Table], Any], message: str
) -> None:
    op = define(namespace, with_change(change))
    with pytest.raises(ResultError, match=message):
        op(torch.ones(3), [False, True])


def test_ints_in_lists_must_be_constants(namespace: str) -> None:
    def function(x: Tensor) -> list[Pair]:
        return [Pair(x + 1, x.shape[0])]

    op = torchop.custom_op(f"{namespace}::op", function, mutates_args=())
    op.register_fake(function)
    assert op(torch.ones(3))[0].count == 3
    run = torch.compile(op, fullgraph=True, backend="aot_eager", dynamic=True)
    with pytest.raises(Exception, match=r"symbolic number.* of type int outside of lists and dict"):
        run(torch.ones(3))

"""Optional lists of tensors, which the dispatcher ignores when it computes dispatch keys."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad
from torch import Tensor

import torchop
from tests._support.common import needs_native, node_of, outcome
from tests.native.gradients.recording import make_formula

pytestmark = needs_native

KINDS = ("Tensor[]?", "Tensor?[]?")


def leaf(value: float = 1.0) -> Tensor:
    return torch.full((2,), value, requires_grad=True)


def total(x, ys=None):
    return x * 2 + sum(3 * y for y in ys or () if y is not None)


def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.present = None if inputs[1] is None else [y is not None for y in inputs[1]]
    ctx.needed = ctx.needs_input_grad


def backward(ctx: Any, grad: Tensor) -> Any:
    present = ctx.present
    return grad * 2, None if present is None else [grad * 3 if here else None for here in present]


def operator(package: Any, namespace: str, kind: str, formula: bool = True) -> Any:
    schema = f"(Tensor x, {kind} ys=None) -> Tensor"
    op = package.custom_op(f"{namespace}::op", total, mutates_args=(), schema=schema)
    if formula:
        op.register_autograd(backward, setup_context=setup_context)
    if package is torchop and formula:
        make_formula(op)
    return op


def lists(kind: str) -> list[Any]:
    fixed = torch.ones(2)
    values = [
        None,
        [],
        [leaf()],
        (fixed, leaf(2.0)),
        [fixed],
        [leaf()] * 2,
        [leaf()[:], leaf() * 1],
    ]
    return [*values, [None, leaf()], [None], [fixed, None]] if kind == "Tensor?[]?" else values


def observed(op: Callable[..., Any], x: Tensor, ys: Any) -> Any:
    result = op(x, ys)
    seen = [str(result), node_of(result)]
    wanted = [t for t in (x, *(ys or ())) if t is not None and t.requires_grad]
    if result.grad_fn is not None:
        total = result.sum()
        seen.append(str(outcome(lambda: torch.autograd.grad(total, wanted, allow_unused=True))))
    return seen


@pytest.mark.parametrize("formula", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("package", [torchop, torch.library])
def test_calls_equal_dispatched_calls(namespace, package, kind, formula):
    op = operator(package, namespace, kind, formula)
    with torchop.accelerate(f"{namespace}::*"):
        calls = 0
        for make in (leaf, lambda: torch.ones(2)):
            for native, dispatched in zip(lists(kind), lists(kind), strict=True):
                with torchop.native.disabled():
                    expected = observed(op, make(), dispatched)
                assert observed(op, make(), native) == expected
                calls += 1
        assert torchop.native.counters(op) == {"native": calls, "switched_off": calls}


def test_needs_input_grad(namespace):
    seen = []

    def note(ctx, grad):
        seen.append((ctx.needed, ctx.needs_input_grad))
        return backward(ctx, grad)

    op = operator(torchop, namespace, "Tensor?[]?")
    op.register_autograd(note, setup_context=setup_context)
    make_formula(op)
    for way in (torchop.native.disabled, contextlib.nullcontext):
        with way():
            for ys in (None, [leaf(), None, torch.ones(2)]):
                op(leaf(), ys).sum().backward()
    assert torchop.native.counters(op) == {"native": 2, "switched_off": 2}
    assert seen[2:] == seen[:2]
    assert seen[1] == ((True, [True, False, False]),) * 2


class Subclass(Tensor):
    pass


UNUSUAL: dict[str, Callable[[], tuple[Any, str]]] = {
    "meta": lambda: (torch.ones(2, device="meta"), "argument_type"),
    "sparse": lambda: (torch.ones(2).to_sparse(), "argument_type"),
    "conjugated": lambda: (torch.ones(2, dtype=torch.complex64).conj(), "argument_type"),
    "subclass": lambda: (torch.ones(2).as_subclass(Subclass), "tensor_subclass"),
    "number": lambda: (3, "argument_type"),
    "tangent": lambda: (
        torch.autograd.forward_ad.make_dual(torch.ones(2), torch.ones(2)),
        "tangent",
    ),
}


@pytest.mark.parametrize("unusual", UNUSUAL)
@pytest.mark.parametrize("package", [torchop, torch.library])
def test_tensor_with_special_keys_is_dispatched(namespace, package, unusual):
    op = operator(package, namespace, "Tensor[]?", formula=False)
    with torchop.accelerate(f"{namespace}::*"), torch.autograd.forward_ad.dual_level():
        value, reason = UNUSUAL[unusual]()
        explanation = torchop.explain(op, torch.ones(2), [torch.ones(2), value])
        with torchop.native.disabled():
            expected = str(outcome(lambda: op(torch.ones(2), [value])))
        assert str(outcome(lambda: op(torch.ones(2), [value]))) == expected
        # Compare only the reasons, not the counts, because a subclass calls the operator a second
        # time.
        assert torchop.native.counters(op).keys() == {reason, "switched_off"}
    if unusual in ("meta", "sparse", "conjugated"):
        assert explanation.reason == (
            "argument 'ys' is a list of optional tensors, and one of them has dispatch keys that "
            "no other argument has: the dispatcher does not inspect such lists"
        )
    if unusual == "number":
        assert "'ys' does not have exactly the schema's type" in explanation.reason


def test_optional_list_alone_has_no_dispatch_keys(namespace):
    op = torchop.custom_op(
        f"{namespace}::op",
        lambda ys: ys[0] + 1,
        mutates_args=(),
        schema="(Tensor[]? ys) -> Tensor",
    )
    assert op([torch.ones(2)]).tolist() == [2, 2]
    assert torchop.native.counters(op) == {"argument_type": 1}


def test_mutated_tensors_in_an_optional_list_count_versions(namespace):
    def write(x, ys=None):
        for y in ys or ():
            y.add_(x)

    op = torchop.custom_op(
        f"{namespace}::op",
        write,
        mutates_args={"ys"},
        schema="(Tensor x, Tensor(a!)[]? ys=None) -> ()",
    )
    y, other = torch.ones(2), torch.ones(2)
    op(torch.ones(2), [y])
    with torchop.native.disabled():
        op(torch.ones(2), [other])
    assert torchop.native.counters(op) == {"native": 1, "switched_off": 1}
    assert (y.tolist(), y._version) == (other.tolist(), other._version)

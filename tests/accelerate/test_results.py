"""The results of accelerated operators are converted and checked as in the dispatcher."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

import torchop
from tests._support.common import needs_native, outcome
from tests._support.devices import BACKEND
from tests._support.releases import needs_tags
from tests.accelerate.support import T, assert_same, stock

pytestmark = needs_native


@pytest.mark.parametrize(
    ("returns", "made"),
    [
        ("Tensor", lambda x: x + 1),
        ("Tensor", lambda x: x),
        ("Tensor", lambda x: x[1:]),
        ("Tensor", lambda x: None),
        ("Tensor", lambda x: 3),
        ("Tensor", lambda x: (x + 1,)),
        ("Tensor", lambda x: torch.nn.Parameter(x + 1)),
        ("(Tensor, Tensor)", lambda x: (x + 1, x + 2)),
        ("(Tensor, Tensor)", lambda x: [x + 1, x + 2]),
        ("(Tensor, Tensor)", lambda x: (x + 1,)),
        ("(Tensor, Tensor)", lambda x: (x + 1, x)),
        ("(Tensor, Tensor)", lambda x: (lambda y: (y, y))(x + 1)),
        ("(Tensor, Tensor)", lambda x: (x + 1, None)),
        ("(Tensor, int)", lambda x: (x + 1, 2)),
        ("(Tensor, Tensor?)", lambda x: (x + 1, None)),
        ("(Tensor, Tensor?)", lambda x: (x + 1, x + 2)),
        ("Tensor[]", lambda x: [x + 1, x + 2]),
        ("Tensor[]", lambda x: (x + 1, x + 2)),
        ("Tensor[]", lambda x: [x]),
        ("Tensor[]", lambda x: [x + 1, 5]),
        ("int", lambda x: 7),
        ("int", lambda x: True),
        ("int", lambda x: "seven"),
        ("int", lambda x: 2**70),
        ("float", lambda x: 7),
        ("float", lambda x: 7.5),
        ("bool", lambda x: False),
        ("bool", lambda x: 1),
        ("str", lambda x: "text"),
        ("Scalar", lambda x: 2),
        ("()", lambda x: None),
        ("()", lambda x: 5),
    ],
)
@pytest.mark.parametrize("how", ["custom_op", "define"])
def test_results_are_converted_and_checked_as_before(
    namespace, accelerated, library, returns, made, how
):
    schema = f"(Tensor x) -> {returns}"
    if how == "custom_op":
        op = torch.library.custom_op(f"{namespace}::op", made, mutates_args=(), schema=schema)
    else:
        library.define("op" + schema)
        library.impl("op", made, BACKEND)
        op = getattr(torch.ops, namespace).op
    assert_same(accelerated, op, lambda: op(T))


@needs_tags
def test_forms_must_return_their_mutated_arguments(namespace, accelerated):
    def right_(x: Tensor) -> Tensor:
        return x.add_(1)

    def wrong_(x: Tensor) -> Tensor:
        return x + 1

    options = {"mutates_args": {"x"}, "tags": torch.Tag.inplace}
    right = stock(namespace, right_, **options)
    wrong = stock(namespace, wrong_, **options)
    before = outcome(lambda: wrong(T.clone()))
    accelerated()
    x = T.clone()
    assert right(x) is x
    assert x._version == 2
    assert outcome(lambda: wrong(T.clone())) == before
    assert "must return its first argument" in before[1]
    assert torchop.native.counters(right) == torchop.native.counters(wrong) == {"native": 1}


@pytest.mark.parametrize(
    "made",
    [
        lambda x: 3,
        lambda x: None,
        lambda x: "text",
        lambda x: [x + 1],
        lambda x: (x + 1,),
        lambda x: (x + 1, x + 2),
        lambda x: [x + 1, x + 2],
        lambda x: (x + 1, None),
        lambda x: torch.nn.Parameter(x + 1),
        lambda x: x,
    ],
)
@pytest.mark.parametrize("returns", ["Tensor", "(Tensor, Tensor)", "()"])
def test_each_way_to_call_returns_the_same_as_before(namespace, accelerated, returns, made):
    """Since 2.14, PyTorch converts the results only if the packet is called.

    The acceleration must not change this.
    """
    handle = torch.library.custom_op(
        f"{namespace}::op", made, mutates_args=(), schema=f"(Tensor x) -> {returns}"
    )
    overload = handle._opoverload
    ways = {"handle": handle, "overload": overload, "packet": overload.overloadpacket}

    def called() -> dict[tuple[str, bool], str]:
        arguments = {
            needs_grad: T.clone().requires_grad_(needs_grad) for needs_grad in (False, True)
        }
        return {
            (way, needs_grad): str(outcome(functools.partial(op, argument)))
            for way, op in ways.items()
            for needs_grad, argument in arguments.items()
        }

    before = called()
    accelerated()
    assert called() == before
    assert torchop.native.counters(handle) == {"native": 6}


@pytest.mark.parametrize("made", [lambda x: (x + 1, x + 2, 3), lambda x: [x + n for n in range(9)]])
def test_more_results_than_the_schema_has_are_refused(namespace, accelerated, made):
    """Do not compare with PyTorch, because PyTorch reads past the end of the schema's results.

    The call passes a keyword argument, because PyTorch 2.14 and later convert results only for
    calls with keyword arguments.
    """
    op = torch.library.custom_op(
        f"{namespace}::op", made, mutates_args=(), schema="(Tensor x) -> (Tensor, Tensor)"
    )
    accelerated()
    count = len(made(T))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=rf"returned {count} values, expected the 2 of"):
            op(x=T)
    assert torchop.native.counters(op) == {"native": 2}

"""Results of kernels of others are converted and checked as without acceleration."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

import torchop
from tests._support.common import needs_native, outcome
from tests._support.devices import BACKEND
from tests._support.releases import needs_tags
from tests.accelerate.support import T, assert_same, counts_versions_once, stock

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


def test_a_tensor_is_the_very_one_that_the_kernel_returned(namespace, accelerated, library):
    made = []
    library.define("op(Tensor x) -> (Tensor, Tensor[])")

    def kernel(x):
        made.append((x + 1, [x + 2]))
        return made[-1]

    library.impl("op", kernel, BACKEND)
    accelerated()
    first, rest = getattr(torch.ops, namespace).op(T)
    assert first is made[0][0]
    assert rest[0] is made[0][1][0]


def test_an_exception_of_the_kernel_is_the_very_one(namespace, accelerated):
    error = KeyError("mine")

    def op(x: Tensor) -> Tensor:
        raise error

    handle = stock(namespace, op)
    accelerated()
    with pytest.raises(KeyError, match="mine") as caught:
        handle(T)
    assert caught.value is error


@needs_tags
def test_forms_must_return_what_they_write(namespace, accelerated):
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
def test_each_way_to_call_returns_what_it_did(namespace, accelerated, returns, made):
    """Since 2.14, PyTorch converts the results of calls of a packet, and of no others."""
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
    """PyTorch itself reads behind the end of the schema for them, so there is no stock arm.

    With a keyword, because since 2.14 PyTorch looks at the results of such calls only.
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


@pytest.mark.parametrize(
    "schema",
    [
        "(Tensor x, int k)",
        "(Tensor x, int k=3)",
        "(Tensor x, *, int k=3)",
        "(Tensor x, str? k=None)",
        "(Tensor x, Tensor? y=None)",
        "(Tensor x, Tensor y)",
        "(Tensor x, Tensor[] y)",
        "(Tensor x, Tensor?[] y)",
        "(Tensor[] y)",
        pytest.param("(Tensor x, Tensor(a!) y)", marks=counts_versions_once),
    ],
)
def test_each_schema_returns_what_it_did(namespace, accelerated, schema):
    """Since 2.14, PyTorch converts the results of calls with keywords, or with numbers."""
    numbers = {"k": None if "str?" in schema else 3}
    tensors = {"y": [T + 1] if "[]" in schema else T + 1}
    arguments = {"x": T} if " x" in schema else {}
    arguments |= numbers if " k" in schema else tensors
    most = 1 if "*" in schema else len(arguments)
    items = list(arguments.items())

    def called() -> list[str]:
        calls = [(list(arguments.values())[:n], dict(items[n:])) for n in range(most + 1)]
        if "=" in schema:
            calls.append(([T], {}))
        return [
            str(outcome(lambda op=op, args=args, kwargs=kwargs: op(*args, **kwargs)))
            for op in (*handles, *(handle._opoverload for handle in handles))
            for args, kwargs in calls
        ]

    results = [lambda: 3, lambda: [T + 2], lambda: (T + 2,), lambda: (T + 2, None), lambda: None]
    handles = [
        torch.library.custom_op(
            f"{namespace}::op{number}_{len(returns)}",
            lambda *args, made=made, **kwargs: made(),
            mutates_args={"y"} if "!" in schema else (),
            schema=f"{schema} -> {returns}",
        )
        for returns in ("Tensor", "(Tensor, Tensor)", "()")
        for number, made in enumerate(results)
    ]
    before = called()
    accelerated()
    assert called() == before
    for handle in handles:
        assert set(torchop.native.counters(handle)) == {"native"}

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import torchop
from tests._support.common import needs_native


def define(namespace: str, arguments: str, name: str = "op") -> Any:
    def kernel(x: Tensor, n: Any, m: Any = 1) -> Tensor:
        return x * m

    op = torchop.custom_op(
        f"{namespace}::{name}", kernel, mutates_args=(), schema=f"({arguments}) -> Tensor"
    )
    op.register_fake(lambda x, n, m=1: torch.empty_like(x))
    return op


def warned(function: Callable[[Tensor], Tensor], backend: str = "eager") -> list[str]:
    torch._dynamo.reset()
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for n in (4, 5, 6, 7):
            compiled(torch.ones(n, 2))
    return [str(w.message) for w in caught if w.category is torchop.SchemaWarning]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_the_argument_is_named_once(namespace: str, backend: str) -> None:
    op = define(namespace, "Tensor x, int n, int m=1")
    (message,) = warned(lambda x: op(x, x.shape[0]), backend)
    assert message.startswith(f"{namespace}::op: argument 'n' depends on a size")
    assert "Write SymInt n in the schema." in message
    assert warned(lambda x: op(x, x.shape[0] + 1), backend) == []
    (message,) = warned(lambda x: op(x, 3, m=x.shape[0]), backend)
    assert "argument 'm'" in message


@pytest.mark.parametrize(
    ("kind", "better", "call"),
    [
        ("int[]", "SymInt[]", lambda op, x: op(x, [x.shape[0], 1])),
        ("int[2]", "SymInt[2]", lambda op, x: op(x, [1, x.shape[0]])),
        ("int?", "SymInt?", lambda op, x: op(x, x.shape[0])),
        ("int", "SymInt", lambda op, x: op(x, n=x.shape[0])),
    ],
)
def test_lists_options_and_keywords(namespace: str, kind: str, better: str, call: Any) -> None:
    op = define(namespace, f"Tensor x, {kind} n")
    (message,) = warned(lambda x: call(op, x))
    assert f"the schema declares it as {kind}, so" in message
    assert f"Write {better} n in the schema." in message


def test_calls_through_torch_ops_and_low_level_operators(namespace: str) -> None:
    define(namespace, "Tensor x, int n")
    overload = getattr(torch.ops, namespace).op.default
    assert len(warned(lambda x: overload(x, x.shape[0]))) == 1
    with torchop.Library(namespace, "FRAGMENT") as lib:
        lib.define("low(Tensor x, int n) -> Tensor")
        lib.impl("low", lambda x, n: x * n, "CompositeExplicitAutograd")
        torchop.register_fake(f"{namespace}::low", lambda x, n: torch.empty_like(x), lib=lib)
        packet = getattr(torch.ops, namespace).low
        assert len(warned(lambda x: packet(x, x.shape[0]))) == 1


def test_constants_and_symbols_do_not_warn(namespace: str) -> None:
    op, symbolic = (
        define(namespace, "Tensor x, int n"),
        define(namespace, "Tensor x, SymInt n", "s"),
    )
    # The program itself branches on the size, so the size is specialized with any schema.
    assert warned(lambda x: op(x, 4) if x.shape[0] == 4 else op(x, 5)) == []
    assert warned(lambda x: op(x, 4)) == []
    assert warned(lambda x: symbolic(x, x.shape[0])) == []
    op(torch.ones(4), 4)


@needs_native
def test_accelerate_lists_them(namespace: str) -> None:
    @torch.library.custom_op(
        f"{namespace}::stock", mutates_args=(), schema="(Tensor x, int[] ns, SymInt m) -> Tensor"
    )
    def stock(x, ns, m):
        return x * m

    with torchop.accelerate(f"{namespace}::*") as acceleration:
        (row,) = acceleration.operators
        assert row.constants == ("ns",)
        assert "compiles it again for each value of ns" in str(acceleration)

"""Operators that out_op defines, under compilers and FakeTensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Optional

import pytest
import torch
from torch import Tensor
from torch._library._out_variant import to_out_variant
from torch._subclasses.fake_tensor import FakeTensorMode

import torchop
from tests.define.families import BACKENDS, bounds, sine, write_sine


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_forms_equal_eager(namespace: str, backend: str, dynamic: bool) -> None:
    torch._dynamo.reset()
    family, two = sine(namespace), bounds(namespace)

    def function(x: Tensor, out: Tensor, low: Tensor, high: Tensor) -> Tensor:
        first = family(x) + family(x * 2, out=out)
        assert family.inplace is not None
        family.inplace(x)
        lows, _ = two(x, scale=3)
        two(x, 2.0, low=low, high=high)
        return (first + out + lows * low).cos() + high[:, None]

    def inputs() -> list[Tensor]:
        torch.manual_seed(0)
        return [torch.randn(3, 4), torch.empty(3, 4), torch.empty(3, 4), torch.empty(3)]

    eager, compiled = inputs(), inputs()
    expected = function(*eager)
    result = torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)(*compiled)
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(compiled, eager)


# Where Inductor finds the form with out=, by its tag, it calls it in place of the functional one.
# It gets each of these signatures wrong on 2.13, those of tensors alone with dynamic shapes.
def _numbers_first(n: int, x: Tensor, *, out: Tensor) -> None:
    out.copy_(x * n)


def _default(x: Tensor, n: int = 3, *, out: Tensor) -> None:
    out.copy_(x * n)


def _keyword_only(x: Tensor, *, n: int = 3, out: Tensor) -> None:
    out.copy_(x * n)


def _list_of_numbers(x: Tensor, n: list[int], *, out: Tensor) -> None:
    out.copy_(x * n[0] * n[1])


def _list_of_tensors(xs: list[Tensor], n: int, *, out: Tensor) -> None:
    out.copy_(xs[0] * n + xs[1])


def _none_between(x: Tensor, b: Optional[Tensor], y: Tensor, *, out: Tensor) -> None:
    out.copy_(x - y if b is None else x - b)


INDUCTOR: dict[str, tuple[Callable[..., Any], Any, Callable[..., Any]]] = {
    "tensors": (write_sine, torch.empty_like, lambda f, x: f(x)),
    "numbers first": (_numbers_first, lambda n, x: torch.empty_like(x), lambda f, x: f(3, x)),
    "default": (_default, lambda x, n: torch.empty_like(x), lambda f, x: f(x) + f(x, 5)),
    "keyword": (_keyword_only, lambda x, *, n: torch.empty_like(x), lambda f, x: f(x, n=2)),
    "numbers": (_list_of_numbers, lambda x, n: torch.empty_like(x), lambda f, x: f(x, [2, 3])),
    "list": (_list_of_tensors, lambda xs, n: torch.empty_like(xs[0]), lambda f, x: f([x, x], 2)),
    "none": (_none_between, lambda x, b, y: torch.empty_like(x), lambda f, x: f(x, None, x * 3)),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("signature", list(INDUCTOR))
def test_inductor_calls_the_functional_operator(
    namespace: str, signature: str, dynamic: bool
) -> None:
    torch._dynamo.reset()
    kernel, allocate, call = INDUCTOR[signature]
    family = torchop.out_op(f"{namespace}::op", kernel, allocate=allocate)
    x = torch.randn(3)

    def function(x: Tensor) -> Tensor:
        return call(family, x * 2).cos()

    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic)
    torch.testing.assert_close(compiled(x), function(x))
    assert to_out_variant(family.functional.overload) is None


def test_exported_program_writes_into_the_buffer(family: torchop.OperatorFamily) -> None:
    class Module(torch.nn.Module):
        def forward(self, x: Tensor, out: Tensor) -> Tensor:
            family(x, out=out)
            assert family.inplace is not None
            return family.inplace(x * 2) + out

    x, out = torch.randn(3), torch.empty(3)
    program = torch.export.export(Module(), (x, out))
    for exported in (program.module(), program.run_decompositions({}).module()):
        out.zero_()
        torch.testing.assert_close(exported(x, out), (x * 2).sin() + x.sin())
        torch.testing.assert_close(out, x.sin())


def test_fake_tensors_are_checked_too(family: torchop.OperatorFamily) -> None:
    assert family.inplace is not None
    with FakeTensorMode():
        x, out = torch.randn(3), torch.empty(3)
        assert family(x).shape == (3,)
        assert family(x, out=out) is out
        assert family.inplace(x) is x
        with pytest.raises(torchop.MutationError, match=r"shape \[3\], but got \[4\]"):
            family(x, out=torch.empty(4))
    meta = torch.empty(3, device="meta")
    assert family(meta, out=meta.clone()).is_meta
    with pytest.raises(torchop.MutationError, match="dtype"):
        family(meta, out=meta.double())


@pytest.mark.parametrize("backend", BACKENDS)
def test_wrong_buffer_is_refused_when_compiled(
    family: torchop.OperatorFamily, backend: str
) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, out: family(x, out=out), backend=backend, fullgraph=True)
    out = torch.zeros(4)
    with pytest.raises(Exception, match=r"Expected out tensor 'out' to have shape \[3\]"):
        compiled(torch.ones(3), out)
    assert out.tolist() == [0, 0, 0, 0]

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import torchop
from tests._support.common import on_both
from tests._support.releases import needs_tags, of_form
from tests.integration.compile.graphs import fresh_compiler


@pytest.fixture(autouse=True)
def _fresh_compiler():
    with fresh_compiler():
        yield


def values() -> tuple[Tensor, Tensor]:
    return torch.tensor([1 + 2j, 3 - 4j]), torch.tensor([2j, 1 + 1j])


def _checked(*tensors: Tensor) -> None:
    assert not any(tensor.is_conj() or tensor.is_neg() for tensor in tensors)


def define(namespace: str, library: Any = torchop) -> dict[str, Callable[..., Any]]:
    @library.custom_op(f"{namespace}::plain", mutates_args=("x",))
    def plain(x: Tensor, y: Tensor) -> None:
        _checked(x, y)
        x.mul_(y)

    @library.custom_op(f"{namespace}::with_result", mutates_args=("x",))
    def with_result(x: Tensor, y: Tensor) -> Tensor:
        _checked(x, y)
        return x.mul_(y).clone()

    with_result.register_fake(lambda x, y: torch.empty_like(x))

    @library.custom_op(
        f"{namespace}::inplace",
        mutates_args=("x",),
        **of_form("inplace", "(Tensor(a!) x, Tensor y) -> Tensor(a!)"),
    )
    def inplace(x: Tensor, y: Tensor) -> Tensor:
        _checked(x, y)
        return x.mul_(y)

    @library.custom_op(
        f"{namespace}::out",
        mutates_args=("x",),
        **of_form("out", "(Tensor y, *, Tensor(a!) x) -> Tensor(a!)"),
    )
    def out(y: Tensor, *, x: Tensor) -> Tensor:
        _checked(x, y)
        return x.mul_(y)

    @library.custom_op(f"{namespace}::listed", mutates_args=("xs",))
    def listed(xs: list[Tensor], y: Tensor) -> None:
        _checked(*xs, y)
        for x in xs:
            x.mul_(y)

    return {
        "plain": plain,
        "with a result": with_result,
        "inplace": inplace,
        "out": lambda x, y: out(y, x=x),
        "a list": lambda x, y: listed([x], y),
    }


FORMS = ["plain", "with a result", "inplace", "out", "a list"]
VIEWS: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "a conjugate is written": lambda x, y: (x.conj(), y),
    "a conjugate is read": lambda x, y: (x, y.conj()),
    "both": lambda x, y: (x.conj(), y.conj()),
    "a part of a conjugate is written": lambda x, y: (x.conj()[1:], y[1:]),
    "a negated view is written": lambda x, y: (x.conj().imag, y.real),
    "a negated view is read": lambda x, y: (x.real, y.conj().imag),
    "a conjugate of a negated view is written": lambda x, y: (torch._neg_view(x).conj(), y),
}


@pytest.mark.pairwise
@pytest.mark.parametrize("backend", [None, "eager", "aot_eager"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("view", VIEWS)
def test_mutation_writes_through_the_view(namespace, view, form, backend):
    write = define(namespace)[form]

    def function(x: Tensor, y: Tensor) -> Any:
        return write(*VIEWS[view](x, y))

    ours, expected = values(), values()
    call = torch.compile(function, backend=backend, fullgraph=True) if backend else function
    result = call(*ours)
    target, factor = VIEWS[view](*expected)
    target.mul_(factor)
    assert_close(ours, expected)
    if result is not None:
        assert_close(result, target)


def test_inductor_writes_through_negated_views(namespace):
    # Test real tensors that are negated views of complex ones, because Inductor 2.13 cannot compile
    # any operator that mutates a complex tensor, not even PyTorch's own.
    write = define(namespace)["plain"]
    x, y = values()
    torch.compile(lambda x, y: write(x, y), fullgraph=True)(x.conj().imag, y.real)
    expected, factor = values()
    expected.conj().imag.mul_(factor.real)
    assert_close(x, expected)


@pytest.mark.parametrize(
    "form", [pytest.param(f, marks=needs_tags if f in ("inplace", "out") else ()) for f in FORMS]
)
def test_pytorch_fails_unless_the_argument_is_returned(namespace, form):
    def scenario(library, namespace):
        x, y = values()
        define(namespace, library)[form](x.conj(), y)
        return x

    both = on_both(scenario, namespace)
    expected, factor = values()
    expected.conj().mul_(factor)
    assert_close(both.ours, expected)
    if form in ("inplace", "out"):
        assert_close(both.stock, expected)
    else:
        assert isinstance(both.stock, RuntimeError)


def test_argument_itself_is_returned_and_its_version_counted_once(namespace):
    write = define(namespace)["inplace"]
    x, y = values()
    view = x.conj()
    assert write(view, y) is view
    assert view.is_conj()
    assert view._version == x._version == 1


def define_writing_both(namespace):
    @torchop.custom_op(f"{namespace}::both", mutates_args=("a", "b"))
    def both(a: Tensor, b: Tensor) -> None:
        a.mul_(2j)
        b.mul_(3j)

    return both


def test_several_views_are_written(namespace):
    both = define_writing_both(namespace)
    a, b = values()
    both(a.conj(), b.conj())
    expected = values()
    expected[0].conj().mul_(2j)
    expected[1].conj().mul_(3j)
    assert_close((a, b), expected)


def test_a_view_and_its_base_may_not_both_be_written(namespace):
    both = define_writing_both(namespace)
    x, _ = values()
    with pytest.raises(
        torchop.AliasError,
        match=rf"{namespace}::both was called with a conjugate or negated view among the mutated "
        r"arguments \(a, b\), and another of them has the same memory.*resolve_conj",
    ):
        both(x, x.conj())
    assert_close(x, values()[0])
    both(x, x.resolve_conj())


def test_gradients_flow_through_conjugates_that_are_read(namespace):
    write = define(namespace)["plain"]
    x, y = values()
    with torch.no_grad():
        write(x, y.requires_grad_().conj())
    expected, factor = values()
    assert_close(x, expected * factor.conj())

from __future__ import annotations

import inspect

import pytest
import torch
from torch import Tensor

import torchop
from tests._support.combinations import BACKENDS
from tests.define.families import bounds, sine


def test_maybe_out_calls_one_of_the_operators(namespace: str) -> None:
    family = sine(namespace)
    sin = torchop.maybe_out(family.functional, family.out)
    x, out = torch.randn(3), torch.empty(3)
    torch.testing.assert_close(sin(x), x.sin())
    torch.testing.assert_close(sin(x, out=None), x.sin())
    assert sin(x, out=out) is out
    torch.testing.assert_close(out, x.sin())


@pytest.mark.parametrize("how", ["name", "overload", "handle"])
def test_operators_may_be_given_in_any_way(namespace: str, how: str) -> None:
    family = sine(namespace)
    pair = [
        {"name": op.name, "overload": op.overload, "handle": op}[how]
        for op in (family.functional, family.out)
    ]
    out = torch.empty(2)
    assert torchop.maybe_out(*pair)(torch.ones(2), out=out) is out


def test_pytorchs_own_operators_fit() -> None:
    sin = torchop.maybe_out(torch.ops.aten.sin.default, torch.ops.aten.sin.out)
    out = torch.empty(2)
    assert sin(torch.ones(2), out=out) is out
    assert torch.equal(sin(torch.ones(2)), out)


def test_several_outputs_are_given_together(namespace: str) -> None:
    family = bounds(namespace)
    function = torchop.maybe_out(family.functional, family.out)
    x, low, high = torch.randn(3, 4), torch.empty(3, 4), torch.empty(3)
    assert function(x, low=low, high=high, scale=2)[1] is high
    torch.testing.assert_close(function(x, scale=2), (low, high))
    message = f"^{namespace}::bounds: pass all of low, high or none; high is missing"
    with pytest.raises(TypeError, match=message):
        function(x, low=low)


def test_operator_that_returns_nothing_serves_too(namespace: str) -> None:
    @torchop.custom_op(f"{namespace}::double", mutates_args=())
    def double(x: Tensor) -> Tensor:
        return x * 2

    @torchop.custom_op(f"{namespace}::double_into", mutates_args=("out",))
    def double_into(x: Tensor, out: Tensor) -> None:
        out.copy_(x * 2)

    function, out = torchop.maybe_out(double, double_into), torch.empty(1)
    assert function(torch.ones(1), out=out) is out
    assert out.tolist() == [2]


def test_maybe_out_has_the_signature_of_the_functional_operator(namespace: str) -> None:
    family = bounds(namespace)
    function = torchop.maybe_out(family.functional, family.out)
    parameters = inspect.signature(function).parameters
    assert list(parameters) == ["x", "margin", "scale", "low", "high"]
    assert parameters["high"].default is None
    assert parameters["high"].kind is inspect.Parameter.KEYWORD_ONLY
    assert function.__name__ == "write_bounds"
    assert function.__doc__ is not None
    assert "Writes the result into low, high and returns that, if given." in function.__doc__
    named = torchop.maybe_out(family.functional.name, family.out.name)
    assert named.__name__ == "bounds"


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_and_exported(namespace: str, backend: str) -> None:
    one, two = sine(namespace), bounds(namespace)
    sin = torchop.maybe_out(one.functional, one.out)
    both = torchop.maybe_out(two.functional, two.out)

    def function(x: Tensor, out: Tensor, low: Tensor, high: Tensor) -> Tensor:
        both(x, 2.0, low=low, high=high)
        return sin(x) + sin(x * 2, out=out) * out + both(x)[0] + low + high[:, None]

    def inputs() -> tuple[Tensor, ...]:
        torch.manual_seed(0)
        return torch.randn(3, 4), torch.empty(3, 4), torch.empty(3, 4), torch.empty(3)

    eager, compiled = inputs(), inputs()
    expected = function(*eager)
    torch.testing.assert_close(
        torch.compile(function, backend=backend, fullgraph=True)(*compiled), expected
    )
    torch.testing.assert_close(compiled, eager)

    class Module(torch.nn.Module):
        def forward(self, *inputs: Tensor) -> Tensor:
            return function(*inputs)

    program = torch.export.export(Module(), inputs())
    torch.testing.assert_close(program.module()(*inputs()), expected)


FUNCTIONAL = "(Tensor x, int n=1, *, float s=1.0) -> Tensor"
DIFFERENT = {
    "mutates nothing": ("(Tensor x, int n=1, *, float s=1.0) -> Tensor", "mutates no argument"),
    "two outputs": (
        "(Tensor x, int n=1, *, float s=1.0, Tensor(a!) o, Tensor(b!) p) -> ()",
        "returns 1 tensors, so the second must mutate as many Tensor arguments; it mutates o, p",
    ),
    "a list": (
        "(Tensor x, int n=1, *, float s=1.0, Tensor(a!)[] o) -> ()",
        "mutate as many Tensor arguments",
    ),
    "fresh result": (
        "(Tensor x, int n=1, *, float s=1.0, Tensor(a!) o) -> Tensor",
        "must return its mutated arguments, in order, or nothing",
    ),
    "output first": ("(Tensor(a!) o, Tensor x, int n=1, *, float s=1.0) -> ()", "after the others"),
    "argument missing": (
        "(Tensor x, *, float s=1.0, Tensor(a!) o) -> Tensor(a!)",
        r"takes \(x, n, s\), and the second \(x, s\) in addition to its outputs",
    ),
    "type": (
        "(Tensor x, float n=1, *, float s=1.0, Tensor(a!) o) -> Tensor(a!)",
        "argument 'n' has the type int in the first operator and float in the second",
    ),
    "default": (
        "(Tensor x, int n=2, *, float s=1.0, Tensor(a!) o) -> Tensor(a!)",
        "argument 'n' has the default 1 in the first operator and 2 in the second",
    ),
    "no default": (
        "(Tensor x, int n=1, *, float s, Tensor(a!) o) -> Tensor(a!)",
        "argument 's' has the default 1.0 in the first operator and none at all in the second",
    ),
    "kind": (
        "(Tensor x, *, int n=1, float s=1.0, Tensor(a!) o) -> Tensor(a!)",
        "argument 'n' has the kind positional in the first operator and keyword-only in the second",
    ),
}


@pytest.mark.parametrize("difference", list(DIFFERENT))
def test_operators_that_do_not_fit_are_refused(namespace: str, difference: str) -> None:
    schema, message = DIFFERENT[difference]
    torchop.define(f"{namespace}::f", FUNCTIONAL)
    torchop.define(f"{namespace}::g", schema)
    with pytest.raises(ValueError, match=message):
        torchop.maybe_out(f"{namespace}::f", f"{namespace}::g")


@pytest.mark.parametrize("schema", ["(Tensor(a!) x) -> ()", "(Tensor x) -> Tensor[]"])
def test_first_operator_must_be_functional(namespace: str, schema: str) -> None:
    torchop.define(f"{namespace}::f", schema)
    with pytest.raises(ValueError, match="the first operator must mutate nothing and return fresh"):
        torchop.maybe_out(f"{namespace}::f", f"{namespace}::f")


def test_unknown_operator_is_not_found(namespace: str) -> None:
    with pytest.raises(torchop.OperatorNotFoundError, match="does not exist"):
        torchop.maybe_out(f"{namespace}::f", f"{namespace}::g")

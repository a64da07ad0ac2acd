"""Functional traces contain helper operators in place of operators that mutate."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.testing import assert_close

import torchop
import torchop.export
from tests._support.devices import TYPE
from tests.integration.compile.graphs import fresh_compiler


@pytest.fixture(autouse=True)
def _fresh_compiler():
    with fresh_compiler():
        yield


def names(namespace: str) -> set[str]:
    return {
        name.partition("::")[2]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith(f"{namespace}::")
    }


def _scale_out(namespace: str, factor: float = 2.0) -> torchop.CustomOp:
    @torchop.custom_op(
        f"{namespace}::scale.out",
        mutates_args=("out",),
        schema="(Tensor x, *, Tensor(a!) out) -> Tensor(a!)",
    )
    def scale(x: Tensor, *, out: Tensor) -> Tensor:
        return torch.mul(x, factor, out=out)

    return scale


SCHEMAS = {
    "(Tensor(a!) x, Tensor y) -> ()": set(),
    "(Tensor(a!) x, Tensor y) -> (Tensor, Tensor)": set(),
    "(Tensor(a!)? x, Tensor y) -> ()": set(),
    "(Tensor(a!)[] x, Tensor y) -> ()": set(),
    "(Tensor(a!) x, Tensor y) -> float": set(),
    "(Tensor x, Tensor y) -> Tensor[]": set(),
    "(Tensor(a!) x, Tensor y, str model=' mode') -> ()": set(),
    "(Tensor(a!) x, Tensor y, str mode='') -> ()": {"op__mutable"},
    "(Tensor(a!)?[] x, Tensor y) -> ()": {"op__mutable"},
    "(Tensor(a!) x, Tensor y) -> Tensor[]": {"op__functional"},
    "(Tensor(a!)? x, Tensor y) -> Tensor": {"op__functional"},
    "(Tensor(a!)?[]? x, Tensor y) -> Tensor": {"op__mutable", "op__functional"},
}


@pytest.mark.parametrize("schema", SCHEMAS)
def test_helpers_are_defined_only_if_needed(namespace, schema):
    mutates = {"x"} if "!" in schema else ()
    torchop.custom_op(f"{namespace}::op", lambda *args: None, mutates_args=mutates, schema=schema)
    assert names(namespace) == {"op"} | SCHEMAS[schema]


def test_helpers_are_deregistered_with_their_operator(namespace):
    scale = _scale_out(namespace)
    helper = getattr(torch.ops, namespace).scale__mutable.out
    out = torch.zeros(2)
    assert helper(torch.ones(2), out=out) is None
    assert out.tolist() == [2.0, 2.0]

    again = _scale_out(namespace, 3.0)  # as if a notebook cell ran again
    with pytest.raises(torchop.OperatorGoneError, match="was deregistered"):
        helper(torch.ones(2), out=out)
    getattr(torch.ops, namespace).scale__mutable.out(torch.ones(2), out=out)
    assert out.tolist() == [3.0, 3.0]
    assert scale is not again

    with torchop.Library(namespace, "FRAGMENT") as home:
        torchop.custom_op(
            f"{namespace}::other",
            lambda x: [x],
            mutates_args={"x"},
            schema="(Tensor(a!) x) -> Tensor[]",
            lib=home,
        )
        assert {"other", "other__functional"} <= names(namespace)
    assert not {"other", "other__functional"} & names(namespace)


def test_a_definition_that_fails_leaves_no_helper(namespace):
    with torchop.Library(namespace, "FRAGMENT") as library:
        library.define("scale__mutable.out() -> ()")  # takes the name that the helper needs
        with pytest.raises(
            RuntimeError,
            match=r"scale\.out: .* an operator \S*scale__mutable\.out, but another library defined",
        ):
            _scale_out(namespace)
        assert names(namespace) == {"scale__mutable.out"}
    assert _scale_out(namespace)(torch.ones(1), out=torch.zeros(1)).tolist() == [2.0]


def test_a_compiled_program_runs_a_kernel_that_was_registered_later(namespace):
    scale = _scale_out(namespace)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def function(x: Tensor, out: Tensor) -> None:
        scale(x, out=out)

    out = torch.zeros(2)
    function(torch.ones(2), out)
    scale.register_kernel(TYPE, lambda x, *, out: torch.mul(x, 5, out=out))
    function(torch.ones(2), out)
    assert out.tolist() == [5.0, 5.0]


def test_user_rule_for_the_functional_trace_applies(namespace):
    scale = _scale_out(namespace)
    calls: list[Any] = []

    @scale.register_torch_dispatch(FunctionalTensorMode)
    def _(mode, func, types, args, kwargs):
        calls.append(func)
        with mode:
            kwargs["out"].copy_(args[0] * 7)
        return kwargs["out"]

    @torch.compile(backend="aot_eager", fullgraph=True)
    def function(x: Tensor, out: Tensor) -> Tensor:
        return scale(x, out=out)

    assert function(torch.ones(2), torch.zeros(2)).tolist() == [7.0, 7.0]
    assert set(calls) == {scale.overload}


def test_a_saved_program_names_the_module_of_a_helper(namespace):
    scale = _scale_out(namespace)

    class Model(torch.nn.Module):
        def forward(self, x: Tensor, out: Tensor) -> Tensor:
            return scale(x, out=out)

    program = torch.export.export(Model(), (torch.ones(2), torch.zeros(2))).run_decompositions()
    file = io.BytesIO()
    torchop.export.save(program, file)
    file.seek(0)
    assert_close(
        torchop.export.load(file).module()(torch.ones(2), torch.zeros(2)), torch.full((2,), 2.0)
    )
    scale._definition.deregister("for this test")
    file.seek(0)
    with pytest.raises(
        torchop.OperatorNotFoundError,
        match=rf"{namespace}::scale__mutable.out, .* Import the module '{__name__}'",
    ):
        torchop.export.load(file)

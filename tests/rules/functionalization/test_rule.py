"""Functional traces contain helper operators in place of operators that mutate.

Uses private names.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.testing import assert_close

import torchop
import torchop.export
from tests._support.devices import TYPE
from tests._support.releases import INPLACE, OUT, needs_tags
from tests.integration.compile.graphs import fresh_compiler
from torchop._compat import graphs


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


class Unsupported(NamedTuple):
    """A call that PyTorch cannot functionalize, or for which Inductor 2.13 plans memory wrongly."""

    schema: str
    kernel: Callable[..., Any]
    fake: Callable[..., Any]
    program: Callable[[Any, Tensor], tuple[Any, ...]]  # takes the operator and a matrix
    tags: Any = ()


def _add(x: Tensor, y: Tensor) -> Tensor:
    return x.add_(y)


def _add_to_each(xs: list[Tensor | None], y: Tensor) -> None:
    for x in xs:
        if x is not None:
            x.add_(y)


def _add_length(x: Tensor, mode: str) -> None:
    x.add_(len(mode))


def _add_if_given(x: Tensor | None, y: Tensor) -> Tensor:
    return y * 2 if x is None else x.add_(y) * 2


UNSUPPORTED = {
    "inplace": Unsupported(
        "(Tensor(a!) x, Tensor y) -> Tensor(a!)",
        _add,
        lambda x, y: x,
        lambda op, x: (op(x @ x, x) + (x + 1) @ x,),
        INPLACE,
    ),
    "out": Unsupported(
        "(Tensor y, *, Tensor(a!) x) -> Tensor(a!)",
        lambda y, *, x: x.add_(y),
        lambda y, *, x: x,
        lambda op, x: (op(x, x=x * 2) + (x + 1) @ x,),
        OUT,
    ),
    "a list with None": Unsupported(
        "(Tensor(a!)?[] xs, Tensor y) -> ()",
        _add_to_each,
        lambda xs, y: None,
        lambda op, x: (op([None, x], x * 2), x + 1),
    ),
    "an argument named mode": Unsupported(
        "(Tensor(a!) x, str mode) -> ()",
        _add_length,
        lambda x, mode: None,
        lambda op, x: (op(x, "abc"), x + 1),
    ),
    "a list result": Unsupported(
        "(Tensor(a!) x) -> Tensor[]",
        lambda x: [x.add_(1) * 2, x * 3],
        lambda x: [x.clone(), x.clone()],
        lambda op, x: (*op(x), x + 1),
    ),
    "None": Unsupported(
        "(Tensor(a!)? x, Tensor y) -> Tensor",
        _add_if_given,
        lambda x, y: y.clone(),
        lambda op, x: (op(None, x), op(x, x * 3)),
    ),
}


@needs_tags
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
@pytest.mark.parametrize("call", UNSUPPORTED)
def test_an_operator_of_a_library_is_called_by_name(namespace, call, compiler):
    schema, kernel, fake, program, tags = UNSUPPORTED[call]
    with torchop.Library(namespace, "FRAGMENT") as library:
        library.define(f"op{schema}", tags=tags)
        library.impl("op", kernel, "CompositeExplicitAutograd")
        torchop.register_fake(f"{namespace}::op", fake, lib=library)
        op = getattr(torch.ops, namespace).op
        given, expected = (torch.arange(9.0).reshape(3, 3) for _ in range(2))
        compiled = torch.compile(lambda x: program(op, x), backend=compiler, fullgraph=True)
        assert_close(compiled(given), program(op, expected))
        assert_close(given, expected)


def test_a_saved_program_names_an_operator_that_is_called_by_name(namespace):
    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            op(y, "abc")
            return y

    schema, kernel, fake, _, _ = UNSUPPORTED["an argument named mode"]
    with torchop.Library(namespace, "FRAGMENT") as library:
        library.define(f"op.overload{schema}")
        library.impl("op.overload", kernel, "CompositeExplicitAutograd")
        torchop.register_fake(f"{namespace}::op.overload", fake, lib=library)
        op = getattr(torch.ops, namespace).op.overload
        program = torch.export.export(Model(), (torch.ones(2),)).run_decompositions()
        assert op in graphs.operators_in(program.graph_module)
        file = io.BytesIO()
        torchop.export.save(program, file)
        file.seek(0)
        assert_close(torchop.export.load(file).module()(torch.ones(2)), torch.full((2,), 5.0))
    file.seek(0)
    with pytest.raises(
        torchop.OperatorNotFoundError, match=rf"uses the operator {namespace}::op\.overload, which"
    ):
        torchop.export.load(file)


@needs_tags
def test_an_accelerated_operator_is_called_by_name(namespace):
    schema, kernel, _, program, tags = UNSUPPORTED["inplace"]
    name = f"{namespace}::op"
    op = torch.library.custom_op(name, kernel, mutates_args=("x",), schema=schema, tags=tags)
    with torchop.accelerate(name):
        given, expected = (torch.arange(9.0).reshape(3, 3) for _ in range(2))
        compiled = torch.compile(lambda x: program(op, x), fullgraph=True)
        assert_close(compiled(given), program(op, expected))


@needs_tags
def test_inductor_itself_reuses_the_memory_of_a_returned_argument(namespace):
    schema, kernel, _, program, tags = UNSUPPORTED["inplace"]
    op = torch.library.custom_op(
        f"{namespace}::op", kernel, mutates_args=("x",), schema=schema, tags=tags
    )
    x = torch.arange(9.0).reshape(3, 3)
    assert torch.compile(lambda x: program(op, x))(x)[0].tolist() != program(op, x)[0].tolist()


def test_an_argument_of_an_unsupported_type_is_rejected(namespace):
    with torchop.Library(namespace, "FRAGMENT") as library:
        library.define("op(Tensor(a!) x, str mode, Dict(str, int) sizes) -> ()")
        library.impl("op", lambda x, mode, sizes: None, "CompositeExplicitAutograd")
        torchop.register_fake(f"{namespace}::op", lambda x, mode, sizes: None, lib=library)
        op = getattr(torch.ops, namespace).op
        x = FakeTensorMode().from_tensor(torch.ones(2))
        with (
            FunctionalTensorMode(),
            pytest.raises(torchop.TracingError, match=r"argument 'sizes' is of type dict\. Define"),
        ):
            op(FunctionalTensor.to_functional(x), "abc", {"n": 1})


def test_a_kernel_of_a_library_for_functionalization_takes_precedence(namespace):
    calls: list[str] = []
    with torchop.Library(namespace, "FRAGMENT") as library:
        library.define("op(Tensor(a!) x, str mode) -> ()")
        library.impl("op", lambda x, mode: calls.append("functionalize"), "Functionalize")
        x = FakeTensorMode().from_tensor(torch.ones(2))
        with FunctionalTensorMode():
            getattr(torch.ops, namespace).op(FunctionalTensor.to_functional(x), "abc")
    assert calls == ["functionalize"]

"""Operators that mutate the inputs of a `torch.compiler.nested_compile_region`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import torchop
from tests.integration.compile.graphs import fresh_compiler

cpp_functionalization = pytest.mark.needs_torch(
    "2.11", "nested regions that mutate inputs use C++ functionalization", before="2.15"
)


@pytest.fixture(autouse=True)
def _fresh_compiler():
    with fresh_compiler():
        yield


def _define(namespace: str, schema: str, kernel: Callable[..., Any]) -> Any:
    mutated = re.findall(r"!\S* (\w+)", schema)
    op = torchop.custom_op(f"{namespace}::op", kernel, mutates_args=mutated, schema=schema)
    if not schema.endswith(("()", "Tensor(a!)")):
        op.register_fake(lambda *args: kernel(*(a.clone() if a is not None else a for a in args)))
    return op


def _add_into(d: Tensor, x: Tensor) -> None:
    d.add_(x)


def _add_and_double(d: Tensor, x: Tensor) -> Tensor:
    return d.add_(x) * 2


def _add_and_list(d: Tensor, x: Tensor) -> list[Tensor]:
    return [d.add_(x) * 2, x * 3]


def _add_to_two(d: Tensor, e: Tensor, x: Tensor) -> None:
    d.add_(x)
    e.sub_(x)


def _compare(block: Callable[..., Tensor], backend: str, *inputs: Tensor, **options: Any) -> None:
    region = torch.compiler.nested_compile_region(block)

    def program(*inputs: Tensor) -> Tensor:
        return region(*inputs) + region(*inputs)

    expected, actual = ([x.clone() for x in inputs] for _ in range(2))
    result = torch.compile(program, backend=backend, fullgraph=True, **options)(*actual)
    assert_close(result, program(*expected))
    assert_close(actual, expected)


SCHEMAS: dict[str, Callable[..., Any]] = {
    "(Tensor(a!) d, Tensor x) -> ()": _add_into,
    "(Tensor! d, Tensor x) -> ()": _add_into,
    "(Tensor(a!)? d, Tensor x) -> ()": lambda d, x: _add_into(d, x),
    "(Tensor(a!) d, Tensor x) -> Tensor(a!)": lambda d, x: d.add_(x),
    "(Tensor(a!) d, Tensor x) -> Tensor": _add_and_double,
    "(Tensor(a!) d, Tensor x) -> Tensor[]": _add_and_list,
}


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("schema", SCHEMAS)
def test_a_region_mutates_its_input(namespace, schema, backend):
    op = _define(namespace, schema, SCHEMAS[schema])

    def block(d: Tensor, x: Tensor) -> Tensor:
        result = op(d, x)
        return d + (sum(result) if isinstance(result, list) else 1 if result is None else result)

    _compare(block, backend, torch.zeros(3), torch.ones(3))


@pytest.mark.parametrize("dynamic", [False, True])
def test_an_argument_that_the_mutable_helper_renames(namespace, dynamic):
    op = _define(
        namespace, "(Tensor(a!) d, Tensor x, str mode) -> ()", lambda d, x, mode: _add_into(d, x)
    )
    _compare(
        lambda d, x: (op(d, x, "add"), d + 1)[1],
        "aot_eager",
        torch.zeros(3),
        torch.ones(3),
        dynamic=dynamic,
    )


def test_the_in_place_overload_of_a_family(namespace):
    @torchop.out_op(f"{namespace}::plus", like="d", inplace=True, elementwise=True)
    def plus(d: Tensor, x: Tensor, *, out: Tensor) -> None:
        torch.add(d, x, out=out)

    _compare(lambda d, x: (plus.inplace(d, x), d + 1)[1], "inductor", torch.zeros(3), torch.ones(3))


TWO = "(Tensor(a!) d, Tensor(b!) e, Tensor x) -> ()"


def test_views_of_one_input(namespace):
    op = _define(namespace, TWO, _add_to_two)

    def block(cache: Tensor, x: Tensor) -> Tensor:
        op(*cache.unbind(0), x)
        return cache + 1

    _compare(block, "aot_eager", torch.zeros(2, 3), torch.ones(3))


def test_a_view_with_other_strides_and_one_of_another_dtype(namespace):
    op = _define(namespace, "(Tensor! d, Tensor x) -> ()", _add_into)

    def block(matrix: Tensor, pairs: Tensor, x: Tensor) -> Tensor:
        op(matrix.t()[1:], x)
        op(torch.view_as_complex(pairs), x)
        return matrix.sum() + pairs.sum()

    _compare(block, "aot_eager", torch.zeros(3, 3), torch.zeros(3, 2), torch.ones(3))


def test_the_same_tensor_twice(namespace):
    op = _define(namespace, TWO, _add_to_two)
    _compare(lambda d, x: (op(d, d, x), d + 1)[1], "aot_eager", torch.zeros(3), torch.arange(3.0))


def _increment(d: Tensor) -> None:
    d.add_(1)


def _runs_in_a_region(op: Any) -> None:
    _compare(lambda d: (op(d), d * 2)[1], "aot_eager", torch.zeros(3))


def test_an_operator_of_a_library(namespace):
    schema = "(Tensor(a!) d) -> ()"
    with torchop.Library(namespace, "FRAGMENT") as library:
        library.define(f"increment{schema}")
        library.impl("increment", _increment, "CompositeExplicitAutograd")
        torchop.register_fake(f"{namespace}::increment", lambda d: None, lib=library)
        _runs_in_a_region(getattr(torch.ops, namespace).increment)

        library.define(f"to_each{schema.replace(' d', '[] d')}")
        library.impl("to_each", lambda ds: torch._foreach_add_(ds, 1), "CompositeExplicitAutograd")
        torchop.register_fake(f"{namespace}::to_each", lambda ds: None, lib=library)
        op = getattr(torch.ops, namespace).to_each
        text = _refused(lambda d: (op([d]), d + 1)[1], torch.zeros(3))
        assert f"{namespace}::to_each mutates 'd', which is a list or None, in a region" in text


def test_an_accelerated_operator(namespace):
    op = torch.library.custom_op(f"{namespace}::op", mutates_args=("d",))(_increment)
    with torchop.accelerate(f"{namespace}::op"):
        _runs_in_a_region(op)
    assert torch._C.DispatchKey.Functionalize not in op._opoverload.py_kernels


@cpp_functionalization
def test_a_kernel_of_the_user_in_the_python_dispatcher_takes_precedence(namespace):
    op = torch.library.custom_op(f"{namespace}::op", mutates_args=("d",))(_increment)

    @op._opoverload.py_impl(torch._C.DispatchKey.Functionalize)
    def kernel(d: Tensor) -> None:
        raise RuntimeError("the kernel of the user")

    with torchop.accelerate(f"{namespace}::op"):
        with pytest.raises(Exception, match="of the user"):
            _runs_in_a_region(op)
        assert op._opoverload.py_kernels[torch._C.DispatchKey.Functionalize] is kernel


@cpp_functionalization
def test_pytorch_rejects_an_operator_that_mutates_an_input_of_a_region(namespace):
    op = torch.library.custom_op(f"{namespace}::op", mutates_args=("d",))(_increment)
    with pytest.raises(Exception, match=f"output has alias annotations: {namespace}::op"):
        _runs_in_a_region(op)


def _refused(block: Callable[..., Tensor], *inputs: Tensor) -> str:
    with pytest.raises(Exception, match="TracingError") as caught:
        _compare(block, "aot_eager", *inputs)
    return str(caught.value)


@cpp_functionalization
def test_views_that_overlap_are_refused(namespace):
    op = _define(namespace, TWO, _add_to_two)
    text = _refused(lambda c, x: (op(c[:2], c[1:], x), c + 1)[1], torch.zeros(3), torch.ones(2))
    assert f"{namespace}::op was called in a nested region" in text
    assert "may overlap in memory (d, e)" in text


@pytest.mark.parametrize(
    "schema", ["(Tensor(a!)[] ds, Tensor x) -> ()", "(Tensor(a!)?[] ds, Tensor x) -> ()"]
)
def test_a_mutated_list_is_refused(namespace, schema):
    op = _define(namespace, schema, lambda ds, x: torch._foreach_add_(ds, x))
    text = _refused(lambda d, x: (op([d], x), d + 1)[1], torch.zeros(3), torch.ones(3))
    assert f"{namespace}::op mutates 'ds', which is a list or None, in a region" in text


def test_none_for_a_mutated_argument_is_refused(namespace):
    op = _define(namespace, "(Tensor(a!)? d, Tensor x) -> ()", lambda d, x: None)
    text = _refused(lambda d, x: (op(None, x), d + x)[1], torch.zeros(3), torch.ones(3))
    assert f"{namespace}::op mutates 'd', which is a list or None, in a region" in text


def test_a_mutated_keyword_is_refused_only_for_an_input_of_the_region(namespace):
    op = torchop.custom_op(
        f"{namespace}::op.out",
        lambda x, *, out: torch.mul(x, 2, out=out),
        mutates_args=("out",),
        schema="(Tensor x, *, Tensor(a!) out) -> Tensor(a!)",
    )
    text = _refused(lambda d, x: (op(x, out=d[:]), d + 1)[1], torch.zeros(3), torch.ones(3))
    assert f"{namespace}::op.out mutates 'out', which is passed by keyword, in a region" in text
    assert "Call the operator outside of the region" in text

    def block(d: Tensor, x: Tensor) -> Tensor:
        return op(x, out=torch.empty_like(d)) + d.add_(1)

    _compare(block, "aot_eager", torch.zeros(3), torch.ones(3))


def test_a_kernel_of_the_user_for_functionalization_takes_precedence(namespace):
    op = _define(namespace, "(Tensor(a!) d, Tensor x) -> ()", _add_into)

    def kernel(d: Tensor, x: Tensor) -> None:
        raise RuntimeError("the kernel of the user")

    with torchop.Library(namespace, "IMPL") as library:
        library.impl("op", kernel, "Functionalize")
        region = torch.compiler.nested_compile_region(lambda d, x: (op(d, x), d + 1)[1])
        program = torch.compile(
            lambda d, x: region(d, x) + region(d, x), backend="aot_eager", fullgraph=True
        )
        d = torch.zeros(3)
        with pytest.raises(Exception, match="of the user"):
            program(d, torch.ones(3))

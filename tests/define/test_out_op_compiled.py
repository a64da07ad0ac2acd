"""Compilers and FakeTensor support the operators that out_op defines."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable
from typing import Any, Optional

import pytest
import torch
from torch import Tensor
from torch._inductor import config as inductor_config
from torch._inductor import lowering
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode

import torchop
from tests._support import combinations
from tests._support.combinations import BACKENDS
from tests.define.families import bounds, sine, write_sine
from tests.integration.compile.graphs import fresh_compiler


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_forms_equal_eager(namespace: str, backend: str, dynamic: bool) -> None:
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


needs_lowerings = pytest.mark.skipif(
    not hasattr(lowering, "user_lowerings"), reason="Inductor asks nobody for a lowering"
)


# If an operator has `torch.Tag.out`, Inductor 2.13 itself compiles calls with these signatures
# incorrectly, with `_numbers_first` only for dynamic shapes. torchop's own lowering passes the
# original arguments instead.
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


def _named(x: Tensor, *, result: Tensor) -> None:
    result.copy_(x + 1)


def _several(x: Tensor, n: float = 2.0, *, low: Tensor, high: Tensor) -> None:
    low.copy_(x - n)
    high.copy_(x + n)


def _like_first(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return torch.empty_like(x)


def _transposed(x: Tensor, *args: Any) -> Tensor:
    return x.new_empty(x.shape[1], x.shape[0]).t()


def _two(x: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


# For each name: a kernel, its allocation rule, a function that calls the operator, and a regular
# expression for this call in the code that Inductor generates.
PLANNED: dict[str, tuple[Callable[..., Any], Any, Callable[..., Any], str]] = {
    "tensors": (write_sine, _like_first, lambda f, x: f(x), r"\(buf\d+, out=buf\d+\)"),
    "numbers_first": (
        _numbers_first,
        lambda n, x: torch.empty_like(x),
        lambda f, x: f(3, x),
        r"\(3, buf\d+, out=buf\d+\)",
    ),
    "default": (_default, _like_first, lambda f, x: f(x), r"\(buf\d+, n=3, out=buf\d+\)"),
    "keyword": (_keyword_only, _like_first, lambda f, x: f(x, n=2), r"\(buf\d+, n=2, out=buf\d+\)"),
    "numbers": (
        _list_of_numbers,
        _like_first,
        lambda f, x: f(x, [2, x.shape[0]]),
        r"\(buf\d+, \[2, \w+\], out=buf\d+\)",
    ),
    "list": (
        _list_of_tensors,
        lambda xs, n: torch.empty_like(xs[0]),
        lambda f, x: f([x, x.cos()], 2),
        r"\(\[buf\d+, buf\d+\], 2, out=buf\d+\)",
    ),
    "none": (
        _none_between,
        _like_first,
        lambda f, x: f(x, None, x.cos()),
        r"\(buf\d+, None, buf\d+, out=buf\d+\)",
    ),
    "strides": (_default, _transposed, lambda f, x: f(x, 5), r"\(buf\d+, 5, out=buf\d+\)"),
    "named": (_named, _like_first, lambda f, x: f(x), r"\(buf\d+, result=buf\d+\)"),
    "several": (
        _several,
        _two,
        lambda f, x: sum(f(x)),
        r"\(buf\d+, n=2\.0, low=buf\d+, high=buf\d+\)",
    ),
    "unread": (
        _several,
        _two,
        lambda f, x: f(x, 1.5)[1],
        r"\(buf\d+, 1\.5, low=buf\d+, high=buf\d+\)",
    ),
}


@needs_lowerings
@pytest.mark.parametrize("dynamic", [False, True])
def test_inductor_plans_the_outputs_of_every_signature(namespace: str, dynamic: bool) -> None:
    families = {
        name: torchop.out_op(f"{namespace}::{name}", kernel, allocate=allocate)
        for name, (kernel, allocate, _, _) in PLANNED.items()
    }

    # Put matrix products between the calls, because Inductor needs no C++ compiler for them.
    def function(x: Tensor, weights: list[Tensor]) -> list[Tensor]:
        return [
            call(families[name], x @ weight) @ weight
            for weight, (name, (_, _, call, _)) in zip(weights, PLANNED.items(), strict=True)
        ]

    def inputs(rows: int, columns: int) -> tuple[Tensor, list[Tensor]]:
        return torch.randn(rows, columns), [torch.randn(columns, columns) for _ in PLANNED]

    given = inputs(3, 4)
    with fresh_compiler():
        compiled = torch.compile(function, fullgraph=True, dynamic=dynamic)
        result, (code,) = run_and_get_code(compiled, *given)
        torch.testing.assert_close(result, function(*given))
        if dynamic:
            other = inputs(5, 2)
            torch.testing.assert_close(compiled(*other), function(*other))
    for name, (_, _, _, arguments) in PLANNED.items():
        assert re.search(rf"torch\.ops\.{namespace}\.{name}\.out{arguments}", code), name
        assert f"torch.ops.{namespace}.{name}.default(" not in code


@needs_lowerings
def test_planned_outputs_reuse_the_memory_of_dead_outputs(namespace: str) -> None:
    family = torchop.out_op(f"{namespace}::op", _default, like="x")
    alone = torchop.out_op(f"{namespace}::alone", _default, like="x")
    alone.functional.register_kernel("cpu", lambda x, n=3: x * n + 1)

    def function(x: Tensor) -> Any:
        # Inductor must call the functional form of `alone`, because this form has its own kernel.
        own = alone(x)
        for _ in range(10):
            x = family(x)
        return x, own

    x = torch.ones(3)
    with fresh_compiler():
        result, (code,) = run_and_get_code(torch.compile(function, fullgraph=True), x)
    assert [each[0].item() for each in result] == [3.0**10, 4.0]
    assert code.count(f"torch.ops.{namespace}.op.out(") == 10
    assert code.count("empty_strided_cpu((3, )") == 2
    assert f"torch.ops.{namespace}.alone.default(" in code


# For each name: a program that calls the forms `f` of an operator, and the number of calls that may
# overwrite their input.
OVERWRITING: dict[str, tuple[Callable[[Any, Tensor, Tensor], Any], int]] = {
    "chain": (lambda f, x, y: f(f(f(x * 2, []), [], n=2), []).cos(), 3),
    "read later": (lambda f, x, y: (z := x * 2, f(z, []), z + 1)[1:], 0),
    "read before": (lambda f, x, y: (z := x * 2, z.flip(0) + 1, f(z, []))[1:], 1),
    "returned": (lambda f, x, y: (z := x * 2, f(z, [])), 0),
    "a view is read later": (lambda f, x, y: (z := x * 2, v := z[1:], f(z, []), v.cos())[2:], 0),
    "a view is overwritten": (lambda f, x, y: f((x * 2)[1:], []), 1),
    "half is read later": (lambda f, x, y: (z := (x * 2).chunk(2), f(z[0], []), z[1] + 1)[1:], 1),
    "two calls": (lambda f, x, y: (z := x * 2, f(z, []), f(z, []) + 1)[1:], 1),
    "an input": (lambda f, x, y: f(x, []), 0),
    "a view of an input": (lambda f, x, y: f(x[1:], []), 0),
    "in place": (lambda f, x, y: f.inplace(x, []), 1),
    "in place, then read": (lambda f, x, y: f.inplace(x, []).cos(), 1),
    "an input that is written later": (lambda f, x, y: (z := f(x, []), x.copy_(z + z), z)[2], 0),
    "an input written back": (lambda f, x, y: (x.copy_(f(x, [])), y.cos())[1], 1),
    "a view of it written back": (lambda f, x, y: (x[1:].copy_(f(x[1:], [])), y.cos())[1], 0),
    "other strides": (lambda f, x, y: f((x * 2)[:, ::2], []), 0),
    "each element again": (lambda f, x, y: f((x[:1] * 2).expand(4, 6), []), 0),
    "another type": (lambda f, x, y: f((x * 2).to(torch.int32), []), 1),
    "as another type": (lambda f, x, y: f((x * 2).view(torch.int32).view(24), []), 0),
    "complex": (lambda f, x, y: f(torch.complex(x, y), []), 0),
    "beside others": (lambda f, x, y: f(x * 2, [y, x]), 1),
    "beside itself": (lambda f, x, y: (z := x * 2, f(z, [z]))[1], 0),
    "beside a view of itself": (lambda f, x, y: (z := x[:, :4] * 2, f(z, [y[:, :4], z.t()]))[1], 0),
}


def _write_over(x: Tensor, others: list[Tensor], *, n: int = 3, out: Tensor) -> None:
    torch.mul(x, n, out=out)
    for other in others:
        out += other


@needs_lowerings
@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_result_overwrites_an_input_that_is_not_read_later(
    namespace: str, request: pytest.FixtureRequest, dynamic: bool
) -> None:
    chosen = combinations.share([*OVERWRITING], int(dynamic), 2, request.config)
    define = functools.partial(torchop.out_op, like="x", inplace=True, elementwise=True)
    names = {name: f"{namespace}::{name.replace(' ', '_').replace(',', '')}" for name in chosen}
    families = {name: define(operator, _write_over) for name, operator in names.items()}

    def programs(inputs: dict[str, tuple[Tensor, Tensor]]) -> list[Any]:
        return [OVERWRITING[name][0](families[name], *inputs[name]) for name in chosen]

    inputs = {name: (torch.randn(4, 6), torch.randn(4, 6)) for name in chosen}
    own = copy.deepcopy(inputs)
    with fresh_compiler():
        compiled = torch.compile(programs, fullgraph=True, dynamic=dynamic)
        result, (code,) = run_and_get_code(compiled, own)
    for name, got, expected in zip(chosen, result, programs(inputs), strict=True):
        torch.testing.assert_close(got, expected, msg=name)
        torch.testing.assert_close(own[name], inputs[name], msg=name)
        count = code.count(f"torch.ops.{names[name].replace('::', '.')}_.default(")
        assert count == OVERWRITING[name][1], name


@needs_lowerings
def test_overwritten_input_needs_no_other_memory(namespace: str) -> None:
    families = {
        "over": torchop.out_op(
            f"{namespace}::over", write_sine, like="x", inplace=True, elementwise=True
        ),
        "reads_again": torchop.out_op(
            f"{namespace}::reads_again", write_sine, like="x", inplace=True
        ),
        "own": torchop.out_op(
            f"{namespace}::own", write_sine, like="x", inplace=True, elementwise=True
        ),
    }
    own = families["own"].inplace
    assert own is not None
    own.register_kernel("cpu", lambda x: x.sin_())  # an in-place form with its own kernel
    x = torch.randn(3)
    for name, family in families.items():

        def chain(x: Tensor, family: Any = family) -> Tensor:
            for _ in range(10):
                x = family(x)
            return x

        with fresh_compiler():
            result, (code,) = run_and_get_code(torch.compile(chain, fullgraph=True), x)
        torch.testing.assert_close(result, chain(x))
        overwritten, buffers = (9, 1) if name == "over" else (0, 2)
        assert code.count(f"torch.ops.{namespace}.{name}_.default(") == overwritten
        assert code.count("empty_strided_cpu((3, )") == buffers


@needs_lowerings
def test_graphs_are_split_at_operators_named_by_the_user(namespace: str) -> None:
    family = torchop.out_op(
        f"{namespace}::op", write_sine, like="x", inplace=True, elementwise=True
    )
    x = torch.randn(3)
    for names, calls in (([], 0), ([f"{namespace}::op"], 2), ([f"{namespace}::op.default"], 2)):
        settings = inductor_config.patch(custom_should_partition_ops=names)
        with fresh_compiler(), settings:
            result, (code,) = run_and_get_code(torch.compile(lambda x: family(family(x))), x)
        torch.testing.assert_close(result, x.sin().sin())
        # Inductor splits the graph only at functional calls of the named operators, so torchop must
        # leave these calls functional.
        assert code.count(f"torch.ops.{namespace}.op.default(") == calls


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
    compiled = torch.compile(lambda x, out: family(x, out=out), backend=backend, fullgraph=True)
    out = torch.zeros(4)
    with pytest.raises(Exception, match=r"Expected out tensor 'out' to have shape \[3\]"):
        compiled(torch.ones(3), out)
    assert out.tolist() == [0, 0, 0, 0]


@pytest.mark.needs_torch("2.13", "torch._library._out_variant")
def test_pytorchs_lookup_of_out_variants_finds_no_form(namespace):
    """If this fails, Inductor may call out= forms with its own arguments (row C16)."""
    from torch._library._out_variant import to_out_variant

    @torchop.custom_op(f"{namespace}::sin", mutates_args=())
    def sin(x: Tensor) -> Tensor:
        return x.sin()

    sin.register_fake(torch.empty_like)
    sin.derive_out()
    assert to_out_variant(sin.overload) is None
    out = torch.empty(2)
    assert sin.out.overload(torch.zeros(2), out=out) is out

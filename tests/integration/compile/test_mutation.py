"""Compiled programs with operators that mutate tensors have the same results as in eager mode."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._dynamo.exc
from torch import Tensor
from torch.testing import assert_close

import torchop
from tests._support import combinations
from tests._support.common import assert_clean, on_both
from tests._support.forking import run_compiling
from tests._support.releases import of_form
from tests.integration.compile.graphs import BACKENDS, WITHOUT_CPP, Recorder
from tests.integration.compile.mutating import (
    FORMS,
    PROGRAMS,
    assert_equals_eager,
    calling,
    define,
    inputs,
    run_together,
)


@pytest.mark.parametrize("backend", WITHOUT_CPP)
@pytest.mark.parametrize("form", FORMS)
def test_compiled_programs_equal_eager(namespace, form, backend, request):
    # By default, run only half of the programs with each form, to save time.
    names = combinations.share([*PROGRAMS], FORMS.index(form), 2, request.config)
    function = run_together(calling(define(form, namespace, torchop), names))
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    assert_equals_eager(compiled, function, names)


@pytest.mark.parametrize("form", ["plain", "out"])
def test_exported_programs_equal_eager(namespace, form):
    function = run_together(calling(define(form, namespace, torchop)))

    class Module(torch.nn.Module):
        def forward(self, x: dict[str, tuple[Tensor, Tensor]]) -> Any:
            return function(x)

    exported = torch.export.export(Module(), ({name: inputs() for name in PROGRAMS},))
    for program in (exported, exported.run_decompositions()):
        assert_equals_eager(program.module(), Module(), PROGRAMS)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", FORMS)
def test_sizes_may_change_without_compiling_again(namespace, form, backend):
    write = define(form, namespace, torchop)
    recorder = Recorder(backend)

    def function(x: Tensor, y: Tensor) -> Any:
        z = x + y
        write(z[1:], y[1:])
        write(x[: x.shape[0] // 2], y[: x.shape[0] // 2])
        return z

    compiled = torch.compile(function, backend=recorder, fullgraph=True, dynamic=True)
    for rows in (4, 6, 9):
        ours, expected = (
            (torch.arange(rows * 3.0).view(rows, 3), torch.ones(rows, 3)) for _ in range(2)
        )
        assert_close(compiled(*ours), function(*expected))
        assert_close(ours, expected)
    assert len(recorder.graphs) == 1


_CACHED = """
import sys
import torch, torchop
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor import config

config.fallback_by_default = True  # saves time: Inductor compiles no C++

namespace = sys.argv[1]

@torchop.custom_op(f"{namespace}::reverse", mutates_args=("target",))
def reverse(source: Tensor, target: Tensor) -> None:
    for i in range(4):
        target[i] = source[3 - i]


OUT = "(Tensor x, *, Tensor(a!) out) -> Tensor(a!)"


@torchop.custom_op(f"{namespace}::square", mutates_args=("out",), schema=OUT)
def square(x: Tensor, *, out: Tensor) -> Tensor:
    return torch.mul(x, x, out=out)


@torchop.custom_op(f"{namespace}::listed", mutates_args=("x",))
def listed(x: Tensor) -> list[Tensor]:
    return [x.add_(1) * 2]


listed.register_fake(lambda x: [torch.empty_like(x)])


@torch.compile(fullgraph=True)
def function(x: Tensor) -> Tensor:
    reverse(x.clone(), x)
    squares = torch.empty_like(x)
    square(x, out=squares)
    return listed(squares)[0] + squares


print(function(torch.arange(4.0)).tolist(), counters["aot_autograd"]["autograd_cache_hit"])
"""


def test_cached_graph_finds_its_operators():
    # Use a new name, so that no cache contains the operator yet.
    namespace = f"cached_{uuid.uuid4().hex}"
    for hits in (0, 1):  # two processes: the second one finds the graph in the cache
        done = run_compiling(_CACHED, namespace)
        assert assert_clean(done) == f"[30.0, 15.0, 6.0, 3.0] {hits}\n"


# --------------------------------------------------------------------------------------------------
# Tensors that are not arguments of the program


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", FORMS)
def test_a_buffer_of_a_module_is_written(namespace, form, backend):
    write = define(form, namespace, torchop)

    class Cache(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("rows", torch.ones(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            write(self.rows[1:3], x)
            return self.rows.sum()

    ours, expected = Cache(), Cache()
    compiled = torch.compile(ours, backend=backend, fullgraph=True)
    for _ in range(2):
        assert_close(compiled(torch.ones(2, 4)), expected(torch.ones(2, 4)))
        assert_close(ours.rows, expected.rows)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", FORMS)
def test_a_tensor_of_a_closure_that_is_also_an_argument_is_written(namespace, form, backend):
    write = define(form, namespace, torchop)
    constant = torch.ones(4)

    @torch.compile(backend=backend, fullgraph=True)
    def function(x: Tensor, y: Tensor) -> Tensor:
        write(constant, y)
        return x + constant

    assert_close(function(torch.ones(4), torch.ones(4)), torch.full((4,), 4.0))
    assert_close(constant, torch.full((4,), 3.0))
    # Pass `constant` as an argument, too. The operator must still mutate it only once.
    assert_close(function(constant, torch.ones(4)), torch.full((4,), 14.0))
    assert_close(constant, torch.full((4,), 7.0))


# --------------------------------------------------------------------------------------------------
# Operators that read their out= argument


@pytest.mark.parametrize("backend", BACKENDS)
def test_out_operator_reads_its_output_argument(namespace, backend):
    def scenario(library, namespace):
        @library.custom_op(
            f"{namespace}::op",
            mutates_args={"out"},
            **of_form("out", "(Tensor x, *, Tensor(a!) out) -> Tensor(a!)"),
        )
        def op(x: Tensor, *, out: Tensor) -> Tensor:
            out[1:] += x[1:]  # reads `out`, and does not write to its first element
            return out

        def function(x: Tensor, out: Tensor) -> Tensor:
            return op(x, out=out) + op(x, out=torch.full_like(x, 5.0))

        out = torch.full((64,), 3.0)
        result = torch.compile(function, backend=backend, fullgraph=True)(torch.ones(64), out)
        return result.tolist(), out.tolist()

    expected = [8.0] + [10.0] * 63, [3.0] + [4.0] * 63
    both = on_both(scenario, namespace)
    assert both.ours == expected
    if backend != "eager":
        assert both.stock != expected


def _writes_by_mode(library: Any, name: str, star: str) -> Any:
    def kernel(x: Tensor, by: float, mode: str = " mode") -> Tensor:
        x.copy_(x + by if mode == "add" else x * by)
        return x.sum()

    schema = f'(Tensor(a!) x, float by, {star}str mode=" mode") -> Tensor'
    op = library.custom_op(name, kernel, mutates_args=("x",), schema=schema)
    op.register_fake(lambda x, by, mode=" mode": x.new_empty(()))
    return op


@pytest.mark.parametrize("star", ["", "*, "])
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_argument_may_be_named_mode(namespace: str, backend: str, star: str) -> None:
    op = _writes_by_mode(torchop, f"{namespace}::f", star)

    def program(x: Tensor) -> tuple[Tensor, ...]:
        y = x + 1
        return op(y[1:], 2.0, mode="add"), op(y, 3.0), op(x[:1], 5.0, mode="times"), y

    given, expected = torch.arange(3.0), torch.arange(3.0)
    compiled = torch.compile(program, backend=backend, fullgraph=True)(given)
    torch.testing.assert_close(compiled, program(expected))
    torch.testing.assert_close(given, expected)


def test_argument_may_be_named_mode_with_underscore(namespace: str) -> None:
    """torchop calls a helper operator if a mutated list contains None.

    In the helper operator, an argument `mode` is renamed, because PyTorch's functionalization fails
    with an argument of this name. An argument `mode_` must keep its name.
    """

    def write(xs: list[Tensor | None], *, mode_: int) -> None:
        for x in xs:
            if x is not None:
                x.add_(mode_)

    op = torchop.custom_op(
        f"{namespace}::f",
        write,
        mutates_args=("xs",),
        schema="(Tensor(a!)?[] xs, *, SymInt mode_) -> ()",
    )

    def write_both(x: Tensor, mode: int, mode_: int) -> None:
        x.add_(mode - mode_)

    both = torchop.custom_op(f"{namespace}::both", write_both, mutates_args=("x",))

    def program(x: Tensor) -> Tensor:
        y = x + 1
        op([None, y], mode_=3)
        both(y, 7, 2)
        return y

    compiled = torch.compile(program, backend="aot_eager", fullgraph=True)
    assert compiled(torch.zeros(2)).tolist() == program(torch.zeros(2)).tolist() == [9, 9]


def test_an_argument_named_mode_fails_in_pytorch(namespace: str) -> None:
    op = _writes_by_mode(torch.library, f"{namespace}::f", "")
    with pytest.raises(Exception, match="multiple values for argument 'mode'"):
        torch.compile(lambda x: op(x, 2.0), backend="aot_eager")(torch.ones(2))

"""Programs that read a tensor, mutate it with an operator, and then use the old value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import torchop
from tests._support.common import assert_clean, on_both
from tests._support.devices import BACKEND
from tests._support.forking import run_forked
from tests._support.releases import of_form

Write = Callable[..., Any]


def _writes(name: str) -> dict[str, Write]:
    """Define operators that add 100 to a tensor, one of each form of mutation."""

    def kernel(x: Tensor) -> Tensor:
        return x.add_(100)

    def plain(x: Tensor) -> None:
        kernel(x)

    def with_result(x: Tensor) -> Tensor:
        return kernel(x) + 1

    def with_results(xs: list[Tensor]) -> list[Tensor]:
        return [with_result(x) for x in xs]

    def optional(x: Tensor | None, xs: list[Tensor | None]) -> None:
        for each in (x, *xs):
            if each is not None:
                kernel(each)

    def out(value: Tensor, *, x: Tensor) -> Tensor:
        return x.add_(value)

    ops = {
        "plain": torchop.custom_op(f"{name}::plain", plain, mutates_args=("x",)),
        "with_result": torchop.custom_op(f"{name}::result", with_result, mutates_args=("x",)),
        "with_results": torchop.custom_op(f"{name}::results", with_results, mutates_args=("xs",)),
        "optional": torchop.custom_op(
            f"{name}::optional",
            optional,
            mutates_args=("x", "xs"),
            schema="(Tensor(a!)? x, Tensor(b!)?[] xs) -> ()",
        ),
        "inplace": torchop.custom_op(
            f"{name}::inplace",
            kernel,
            mutates_args=("x",),
            **of_form("inplace", "(Tensor(a!) x) -> Tensor(a!)"),
        ),
        "out": torchop.custom_op(
            f"{name}::out",
            out,
            mutates_args=("x",),
            **of_form("out", "(Tensor value, *, Tensor(a!) x) -> Tensor(a!)"),
        ),
    }
    ops["with_result"].register_fake(torch.empty_like)
    ops["with_results"].register_fake(lambda xs: [*map(torch.empty_like, xs)])
    return {
        "plain": ops["plain"],
        "with_result": ops["with_result"],
        "with_results": lambda x: ops["with_results"]([x]),
        "optional": lambda x: ops["optional"](x, [None]),
        "optional_in_list": lambda x: ops["optional"](None, [None, x]),
        "inplace": ops["inplace"],
        "out": lambda x: ops["out"](torch.full_like(x, 100), x=x),
    }


# Each program takes an operator, the tensor that the operator mutates, and two tensors to which the
# program writes the old values.
READS: dict[str, Callable[[Write, Tensor, Tensor, Tensor], Any]] = {}


def _reads(function: Callable[..., Any]) -> Callable[..., Any]:
    READS[function.__name__] = function
    return function


@_reads
def a_value(write, x, one, two):
    y = x + 0.5
    write(x)
    one.copy_(y)


@_reads
def a_chain_of_values(write, x, one, two):
    y = ((x + 0.5).sin() * 2).exp() + two
    write(x)
    one.copy_(y)


@_reads
def a_sum(write, x, one, two):
    y = x.sum() + two
    write(x)
    one.copy_(y)


@_reads
def a_value_for_a_part(write, x, one, two):
    y = x[1:] + 0.5
    write(x[:3])
    one[:-1].copy_(y)


@_reads
def values_between_two_writes(write, x, one, two):
    y = x + 0.5
    write(x)
    z = x * 2
    write(x)
    one.copy_(y)
    two.copy_(y + z)


@_reads
def a_value_that_is_written_back(write, x, one, two):
    y, z = x + 1, one * 2
    write(x)
    write(one)
    x.copy_(z)
    one.copy_(y)


@_reads
def a_value_before_and_after(write, x, one, two):
    y = x + 0.5
    write(x)
    one.add_(y).mul_(x)
    two.copy_(x * 2)


@_reads
def a_value_of_an_intermediate(write, x, one, two):
    z = x * 1.5
    y = z + 1
    write(z)
    one.copy_(y)
    two.copy_(z)


def _assert_equals_eager(programs: dict[Any, Any], compile_: Callable[..., Any]) -> None:
    """Compare all programs with eager mode, in one graph, because compiling a graph takes long."""

    def tensors() -> dict[Any, tuple[Tensor, ...]]:
        return {
            key: (torch.arange(4.0) + n, torch.zeros(4), torch.ones(4))
            for n, key in enumerate(programs)
        }

    def run_all(given: dict[Any, tuple[Tensor, ...]]) -> None:
        for key, program in programs.items():
            program(*given[key])

    ours, expected = tensors(), tensors()
    compile_(run_all)(ours)
    run_all(expected)
    assert_close(ours, expected)


@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_values_read_before_a_write_are_unchanged(namespace: str, dynamic: bool) -> None:
    def reading(read: Callable[..., Any], write: Write) -> Callable[..., Any]:
        return lambda *tensors: read(write, *tensors)

    writes = _writes(namespace)
    # Instead of all combinations, test each form with the simplest program, and each program with
    # one form.
    programs = {form: reading(a_value, write) for form, write in writes.items()}
    forms = [*writes.values()]
    for n, (name, read) in enumerate(READS.items()):
        programs[name] = reading(read, forms[n % len(forms)])
    _assert_equals_eager(programs, lambda run: torch.compile(run, fullgraph=True, dynamic=dynamic))


def test_stock_operators_write_after_the_read(namespace: str) -> None:
    """Test two operators from `Library.define`, and an accelerated operator of torch.library."""

    def kernel(x: Tensor) -> None:
        x.add_(100)

    schema = "(Tensor(a!) x) -> ()"
    with torchop.Library(namespace, "FRAGMENT") as library:
        library.define(f"low{schema}")
        library.impl("low", kernel, BACKEND)
        torchop.define(f"{namespace}::function", schema, lib=library)
        torchop.impl(f"{namespace}::function", BACKEND, kernel, lib=library)
        stock = torch.library.custom_op(f"{namespace}::stock", mutates_args=("x",))(kernel)
        ops = getattr(torch.ops, namespace)
        with torchop.accelerate(f"{namespace}::stock"):
            writes = {"low": ops.low, "function": ops.function, "stock": stock}
            programs = {
                name: lambda x, one, two, write=write: a_value(write, x, one, two)
                for name, write in writes.items()
            }
            _assert_equals_eager(programs, lambda run: torch.compile(run, fullgraph=True))


def test_inductor_itself_reads_the_value_after_the_write(namespace: str) -> None:
    def scenario(library: Any, namespace: str) -> Any:
        @library.custom_op(f"{namespace}::touch", mutates_args=("x",))
        def touch(x: Tensor) -> None:
            x.add_(100)

        x, one = torch.arange(4.0), torch.zeros(4)
        torch.compile(a_value, fullgraph=True)(touch, x, one, one)
        return one.tolist()

    both = on_both(scenario, namespace)
    assert both.ours == [0.5, 1.5, 2.5, 3.5]
    assert both.stock == [100.5, 101.5, 102.5, 103.5]


def test_a_module_that_trains_reads_its_buffers_before_they_are_written(namespace: str) -> None:
    write = _writes(namespace)["plain"]

    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(4))
            self.register_buffer("seen", torch.zeros(4))
            self.register_buffer("state", torch.arange(4.0))

        def forward(self, x: Tensor) -> Tensor:
            y = self.state + 0.5
            write(self.state)
            self.seen.copy_(y)
            return (self.weight * x).sum() + y.sum()

    ours, expected = Module(), Module()
    compiled = torch.compile(ours, fullgraph=True)
    for _ in range(2):
        results = [module(torch.ones(4)) for module in (compiled, expected)]
        for result in results:
            result.backward()
        assert_close(*results)
        assert_close(ours.state_dict(), expected.state_dict())
    assert_close(ours.weight.grad, expected.weight.grad)


# --------------------------------------------------------------------------------------------------
# Views with a symbolic offset, which Inductor copies for the operator


VIEWS: dict[str, tuple[Callable[[Tensor], Any], Callable[..., Any]]] = {
    "two rows": (lambda x: x[:2], lambda ops, x: ops["both"](x[0], x[1])),
    "rows": (lambda x: (x[1], x[2]), lambda ops, x: ops["both"](*x)),
    "a list": (lambda x: (x[1], x[3], x[2]), lambda ops, x: ops["all"]([*x])),
    "an optional list": (
        lambda x: (x[1], x[3]),
        lambda ops, x: ops["optional"](x[0], [None, x[1]]),
    ),
    "shapes": (lambda x: (x[1:2], x[2:]), lambda ops, x: ops["both"](*x)),
    "columns": (lambda x: (x[:, 1], x[:, 2]), lambda ops, x: ops["both"](*x)),
    "a view and its base": (
        lambda x: (x[1], x),
        lambda ops, x: [*map(ops["all"], ([x[0]], [x[1]]))],
    ),
}


as_strided_of_views = pytest.mark.needs_torch(
    "2.13", "as_strided of a graph input with a storage offset (pytorch/pytorch#184232)"
)


@pytest.mark.parametrize(
    "dynamic", [True, pytest.param(None, marks=[as_strided_of_views, pytest.mark.exhaustive])]
)
def test_views_of_one_base_are_written_in_place(namespace: str, dynamic: bool | None) -> None:
    @torchop.custom_op(f"{namespace}::both", mutates_args=("a", "b"))
    def both(a: Tensor, b: Tensor) -> None:
        a.add_(1)
        b.mul_(2)

    @torchop.custom_op(f"{namespace}::all", mutates_args=("xs",))
    def write_all(xs: list[Tensor]) -> None:
        for n, x in enumerate(xs, 2):
            x.mul_(n)

    @torchop.custom_op(
        f"{namespace}::optional",
        mutates_args=("x", "xs"),
        schema="(Tensor(a!) x, Tensor(b!)?[] xs) -> ()",
    )
    def optional(x: Tensor, xs: list[Tensor | None]) -> None:
        for each in (x, *xs):
            if each is not None:
                each.add_(1)

    ops = {"both": both, "all": write_all, "optional": optional}

    def program(views: dict[str, Any]) -> Tensor:
        for name, (_, write) in VIEWS.items():
            write(ops, views[name])
        # The program needs the old value of `read` after the call, so Inductor must copy it
        # although the call has only one view.
        (read,) = views["read"]
        y = read + 0.5
        write_all([read])
        return y * 2 + read

    def tensors(columns: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        bases = {name: torch.arange(4.0 * columns).reshape(4, columns) for name in (*VIEWS, "read")}
        views = {name: view(bases[name]) for name, (view, _) in VIEWS.items()}
        return bases, {**views, "read": (bases["read"][1],)}

    compiled = torch.compile(program, fullgraph=True, dynamic=dynamic)
    for columns in (3, 5):
        (ours, views), (expected, others) = tensors(columns), tensors(columns)
        assert_close(compiled(views), program(others))
        assert_close(ours, expected)


def test_inductor_is_imported_after_an_operator_was_deregistered() -> None:
    """Inductor's import must skip a name whose operator was deregistered.

    `register_kernel` registered the kernel of `gone::f_` with another library, so the dispatcher
    keeps the name.
    """
    program = run_forked("""
        import torch, torchop
        library = torchop.Library("gone", "DEF")
        library.define("f_(Tensor(a!) x) -> ()")
        torchop.register_kernel("gone::f_", "cpu", lambda x: None)
        library._destroy()
        library = torchop.Library("stays", "DEF")
        library.define("f_(Tensor(a!) x) -> ()")
        import torch._inductor.lowering as module
        table = getattr(module, "user_lowerings", module.lowerings)
        print(*(op for op in map(str, table) if op.startswith(("gone.", "stays."))))
    """)
    assert assert_clean(program).split() == ["stays.f_.default"]

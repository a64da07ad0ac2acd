"""Operators that mutate, in every form, under every compiler: results equal those of eager mode."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._dynamo.exc
from torch import Tensor
from torch.testing import assert_close

import torchop
from tests.releases import of_form
from tests.subsystems.graphs import Recorder
from tests.support import assert_clean, on_both, run_program

from .mutating import FORMS, PROGRAMS, accumulate, define

BACKENDS = ["eager", "aot_eager", "inductor"]


def inputs() -> tuple[Tensor, Tensor]:
    return torch.arange(16.0).reshape(4, 4), torch.arange(16.0).reshape(4, 4).cos()


def assert_equals_eager(compiled: Callable[..., Any], eager: Callable[..., Any]) -> None:
    """Compares what two programs return, and what they leave in their inputs."""
    ours, expected = inputs(), inputs()
    for _ in range(2):  # the second call finds what the first has left
        assert_close(compiled(*ours), eager(*expected), rtol=0, atol=0)
        assert_close(ours, expected, rtol=0, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_compiled_program_does_what_it_does_in_eager_mode(namespace, name, form, backend):
    write = define(form, namespace, torchop)

    def function(x: Tensor, y: Tensor) -> Any:
        return PROGRAMS[name](write, x, y)

    assert_equals_eager(torch.compile(function, backend=backend, fullgraph=True), function)


@pytest.mark.parametrize("form", ["plain", "out"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_an_exported_program_does_what_it_does_in_eager_mode(namespace, name, form):
    write = define(form, namespace, torchop)

    class Module(torch.nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Any:
            return PROGRAMS[name](write, x, y)

    exported = torch.export.export(Module(), inputs())
    assert_equals_eager(exported.module(), Module())
    assert_equals_eager(exported.run_decompositions().module(), Module())


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
import torch, torchop
from torch import Tensor
from torch._dynamo.utils import counters


@torchop.custom_op("cached::reverse", mutates_args=("target",))
def reverse(source: Tensor, target: Tensor) -> None:
    for i in range(4):
        target[i] = source[3 - i]


OUT = "(Tensor x, *, Tensor(a!) out) -> Tensor(a!)"


@torchop.custom_op("cached::square", mutates_args=("out",), schema=OUT)
def square(x: Tensor, *, out: Tensor) -> Tensor:
    return torch.mul(x, x, out=out)


@torchop.custom_op("cached::listed", mutates_args=("x",))
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


def test_a_graph_from_a_cache_finds_the_operators_it_names(tmp_path):
    for hits in (0, 1):  # the second process traces nothing
        done = run_program(_CACHED, TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
        # A build for CUDA says that the machine has none.
        done.stderr = re.sub(r".*(triton not found|No CUDA runtime).*\n", "", done.stderr)
        assert assert_clean(done) == f"[30.0, 15.0, 6.0, 3.0] {hits}\n"


# --------------------------------------------------------------------------------------------------
# Tensors that are no arguments of the program


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
    # Now the closure and the argument are one tensor.
    assert_close(function(constant, torch.ones(4)), torch.full((4,), 14.0))
    assert_close(constant, torch.full((4,), 7.0))


# --------------------------------------------------------------------------------------------------
# Lists, and tensors that may be missing

SHAPES = {
    "Tensor[]": ("Tensor(a!)[] xs", lambda a, b: [a, b]),
    "views in a list": ("Tensor(a!)[] xs", lambda a, b: [a[1:], b[0], b[2:]]),
    "views of one tensor": ("Tensor(a!)[] xs", lambda a, b: [a[:2], a[2:]]),
    "an empty list": ("Tensor(a!)[] xs", lambda a, b: []),
    "Tensor?": ("Tensor(a!)? xs", lambda a, b: a),
    "Tensor? that is None": ("Tensor(a!)? xs", lambda a, b: None),
    "Tensor?[]": ("Tensor(a!)?[] xs", lambda a, b: [a, b]),
    "Tensor?[] with None": ("Tensor(a!)?[] xs", lambda a, b: [None, a, None, b[1:]]),
    "Tensor?[] of None": ("Tensor(a!)?[] xs", lambda a, b: [None, None]),
    "Tensor[]?": ("Tensor(a!)[]? xs", lambda a, b: [a, b]),
    "Tensor[]? that is None": ("Tensor(a!)[]? xs", lambda a, b: None),
    "Tensor?[]? with None": ("Tensor(a!)?[]? xs", lambda a, b: [a, None]),
    "Tensor?[]? that is None": ("Tensor(a!)?[]? xs", lambda a, b: None),
}
WITHOUT_TENSORS = {
    "an empty list",
    "Tensor? that is None",
    "Tensor?[] of None",
    "Tensor[]? that is None",
    "Tensor?[]? that is None",
}


def _each(xs: Any) -> list[Tensor]:
    return [x for x in (xs if isinstance(xs, (list, tuple)) else [xs]) if x is not None]


def _writes_all(namespace: str, arguments: str, result: str) -> torchop.CustomOp:
    schema = f'({arguments}, float by, *, str label="a, \\")(") -> {result}'

    def kernel(xs, by, *, label='a, ")('):
        assert label in ('a, ")(', "given")
        for x in _each(xs):
            accumulate(x, torch.full_like(x, by))
        pattern = [x is not None for x in xs] if isinstance(xs, (list, tuple)) else [xs is None]
        count = torch.tensor([float(len(_each(xs))), float(sum(pattern)), float(len(pattern))])
        return {"()": None, "Tensor": count, "Tensor[]": [count, count + 1]}[result]

    def fake(xs, by, *, label=""):
        count = torch.empty(3)
        return {"()": None, "Tensor": count, "Tensor[]": [count, torch.empty(3)]}[result]

    op = torchop.custom_op(f"{namespace}::op", kernel, mutates_args={"xs"}, schema=schema)
    op.register_fake(fake)
    return op


def _list_program(op: Any, pick: Callable[..., Any]) -> Callable[..., Any]:
    def function(a: Tensor, b: Tensor) -> Any:
        first = op(pick(a, b), 1.0)
        intermediate = a + b
        second = op(pick(intermediate, b), by=2.0, label="given")
        return first, second, intermediate, a * 2

    return function


def _calls(results: Iterable[str], shapes: Iterable[str] = SHAPES) -> list[Any]:
    """Every shape with every result and backend, so far as Inductor can lower them."""
    fails = pytest.mark.needs_torch("2.12", "results of calls without tensors under Inductor")
    return [
        pytest.param(shape, result, backend, marks=[fails] if is_hard else [])
        for shape, result, backend in itertools.product(shapes, results, BACKENDS)
        for is_hard in [shape in WITHOUT_TENSORS and result != "()" and backend == "inductor"]
    ]


@pytest.mark.parametrize(("shape", "result", "backend"), _calls(["()", "Tensor"]))
def test_mutated_lists_and_optional_tensors(namespace, shape, result, backend):
    arguments, pick = SHAPES[shape]
    function = _list_program(_writes_all(namespace, arguments, result), pick)
    assert_equals_eager(torch.compile(function, backend=backend, fullgraph=True), function)


@pytest.mark.parametrize("result", ["()", "Tensor", "Tensor[]"])
@pytest.mark.parametrize("shape", ["Tensor?[] with None", "Tensor?[]? with None", "Tensor?"])
def test_mutated_lists_and_optional_tensors_are_exported(namespace, shape, result):
    arguments, pick = SHAPES[shape]
    op = _writes_all(namespace, arguments, result)

    class Module(torch.nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Any:
            results = _list_program(op, pick)(a, b)
            return [result for result in results if result is not None]

    exported = torch.export.export(Module(), inputs())
    assert_equals_eager(exported.module(), Module())
    assert_equals_eager(exported.run_decompositions().module(), Module())


def test_a_mutated_list_with_none_fails_in_pytorch(namespace):
    def scenario(library, namespace):
        @library.custom_op(
            f"{namespace}::op", mutates_args={"xs"}, schema="(Tensor(a!)?[] xs) -> ()"
        )
        def op(xs):
            _each(xs)[0].add_(1)

        x = torch.zeros(2)
        torch.compile(lambda x: op([None, x]), backend="aot_eager", fullgraph=True)(x)
        return x.tolist()

    both = on_both(scenario, namespace)
    assert both.ours == [1.0, 1.0]
    assert "has no attribute 'append'" in str(both.stock)


# --------------------------------------------------------------------------------------------------
# Results that are lists


@pytest.mark.parametrize(
    ("shape", "result", "backend"),
    _calls(["Tensor[]"], [shape for shape in SHAPES if "views" not in shape]),
)
def test_an_operator_that_mutates_and_returns_a_list(namespace, shape, result, backend):
    arguments, pick = SHAPES[shape]
    function = _list_program(_writes_all(namespace, arguments, result), pick)
    assert_equals_eager(torch.compile(function, backend=backend, fullgraph=True), function)


def _halves(namespace: str, library: Any = torchop) -> Any:
    @library.custom_op(f"{namespace}::halves", mutates_args={"x"})
    def halves(x: Tensor, y: Tensor) -> tuple[list[Tensor], Tensor]:
        x.add_(1)
        rows = x.clone(memory_format=torch.contiguous_format)
        return [rows[:2].clone(), rows[2:] + y[2:]], y[0, 1].clone()

    @halves.register_fake
    def _(x, y):
        return [x.new_empty(2, 4), x.new_empty(2, 4)], y.new_empty(())

    return halves


@pytest.mark.parametrize("backend", BACKENDS)
def test_lists_beside_other_results_and_views(namespace, backend):
    halves = _halves(namespace)

    def function(x: Tensor, y: Tensor) -> Any:
        (first, second), total = halves(x.t(), y)
        halves(x.t(), y)
        return first + 1, second, total, x * 2

    assert_equals_eager(torch.compile(function, backend=backend, fullgraph=True), function)


def test_a_list_result_fails_in_pytorch(namespace):
    def scenario(library, namespace):
        halves = _halves(namespace, library)
        compiled = torch.compile(lambda x, y: halves(x, y)[0], backend="aot_eager", fullgraph=True)
        return len(compiled(*inputs()))

    both = on_both(scenario, namespace)
    assert both.ours == 2
    assert "output has alias annotations" in str(both.stock)


def test_a_list_result_beside_mutated_arguments_that_share_memory_is_refused(namespace):
    @torchop.custom_op(f"{namespace}::both", mutates_args={"a", "b"})
    def both(a: Tensor, b: Tensor) -> list[Tensor]:
        a.add_(1)
        b.mul_(2)
        return [a + b]

    both.register_fake(lambda a, b: [torch.empty_like(a)])
    compiled = torch.compile(lambda x: both(x[:2], x[1:3]), backend="aot_eager", fullgraph=True)
    with pytest.raises(
        torch._dynamo.exc.BackendCompilerFailed,
        match=rf"{namespace}::both was called with mutated arguments that share memory \(a, b\)."
        r" .* return a tuple of tensors instead of a list",
    ):
        compiled(torch.ones(4))


@pytest.mark.parametrize(
    ("annotation", "result"), [(float, 1.5), (int, 1), (bool, True)], ids=lambda v: str(v)
)
def test_a_number_beside_a_mutation_is_refused(namespace, annotation, result):
    def kernel(x):
        x.add_(1)
        return result

    kernel.__annotations__ = {"x": Tensor, "return": annotation}
    op = torchop.custom_op(f"{namespace}::op", kernel, mutates_args={"x"})
    op.register_fake(lambda x: result)
    compiled = torch.compile(lambda x: (x + 1, op(x)), backend="aot_eager", fullgraph=True)
    # Dynamo refuses numbers that may change with the data by itself; others reach our rule.
    with pytest.raises(
        (torch._dynamo.exc.BackendCompilerFailed, torch._dynamo.exc.Unsupported),
        match=rf"{namespace}::op mutates an argument and returns {annotation.__name__}, which a "
        r"compiler cannot follow.*Return tensors instead, 0-dim"
        if annotation is float
        else "non-Tensor",
    ):
        compiled(torch.ones(2))


# --------------------------------------------------------------------------------------------------
# Operators with out= that read what is there


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_operator_with_out_sees_what_the_output_holds(namespace, backend):
    def scenario(library, namespace):
        @library.custom_op(
            f"{namespace}::op",
            mutates_args={"out"},
            **of_form("out", "(Tensor x, *, Tensor(a!) out) -> Tensor(a!)"),
        )
        def op(x: Tensor, *, out: Tensor) -> Tensor:
            out[1:] += x[1:]  # reads it, and leaves a part as it was
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


# --------------------------------------------------------------------------------------------------
# Views whose elements are of another type

TYPED_VIEWS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "real": lambda x, z: z.real,
    "imag of a part": lambda x, z: z[1:3].imag,
    "view_as_real": lambda x, z: torch.view_as_real(z),
    "view_as_complex": lambda x, z: torch.view_as_complex(x.view(2, 2)),
    "view of bits": lambda x, z: x.view(torch.int32)[1:],
    "view of halves": lambda x, z: x.view(torch.int16)[::2],
}


@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", TYPED_VIEWS)
def test_views_of_another_type_are_written(namespace, name, form, backend):
    write = define(form, namespace, torchop)

    def function(x: Tensor, z: Tensor) -> Any:
        target = TYPED_VIEWS[name](x, z)
        result = write(target, torch.ones_like(target))
        return None if result is None else result + 1

    def tensors() -> tuple[Tensor, Tensor]:
        return torch.arange(4.0), torch.arange(4) * (1 + 2j)

    ours, expected = tensors(), tensors()
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    if name == "view_as_complex" and backend == "inductor":
        # It compiles no operator that mutates complex numbers, whoever made it, and says so.
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="was not removed"):
            compiled(*ours)
        return
    assert_close(compiled(*ours), function(*expected))
    assert_close(ours, expected)


def test_a_view_of_another_type_beside_its_base_is_refused(namespace):
    @torchop.custom_op(f"{namespace}::both", mutates_args={"a", "b"})
    def both(a: Tensor, b: Tensor) -> None:
        a.add_(1)
        b.mul_(2)

    compiled = torch.compile(lambda z: both(z.real, z.imag), backend="aot_eager", fullgraph=True)
    with pytest.raises(
        torch._dynamo.exc.BackendCompilerFailed,
        match=rf"{namespace}::both was called with a view of another type .* \(a, b\), and another",
    ):
        compiled(torch.ones(2, dtype=torch.complex64))


def test_pytorch_gets_the_type_of_a_view_wrong(namespace):
    def scenario(library, namespace):
        types = []

        @library.custom_op(f"{namespace}::op", mutates_args={"x"})
        def op(x: Tensor) -> None:
            types.append(x.dtype)

        @torch.compile(backend="aot_eager", fullgraph=True)
        def function(x: Tensor) -> None:
            op(torch.view_as_complex(x))

        function(torch.ones(2, 2))
        return types

    assert on_both(scenario, namespace) == ([torch.complex64], [torch.float32])


# --------------------------------------------------------------------------------------------------
# Gradients and autocast


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", FORMS)
def test_autocast_writes_into_the_tensor_of_the_caller(namespace, form, backend):
    write = define(form, namespace, torchop)
    torchop.register_autocast(f"{namespace}::accumulate", "cpu", torch.bfloat16)

    def function(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            z = x + 1
            write(x, y)
            write(z[1:], y[1:])
        return z * 2

    assert_equals_eager(torch.compile(function, backend=backend, fullgraph=True), function)
    x, y = inputs()
    function(x, y)
    assert_close(x, inputs()[0] * 2 + y.bfloat16().float())  # only what is read is cast


def _without_grad(write, leaf, x):
    with torch.no_grad():
        write(leaf, x)


def _result_of_an_intermediate(write, leaf, x):
    target = leaf * 1
    result = write(target, x)
    return target.sum() if result is None else result.sum()


GRADIENTS: dict[str, Callable[..., Any]] = {
    "a leaf is written": lambda write, leaf, x: write(leaf, x),
    "a view of a leaf is written": lambda write, leaf, x: write(leaf[1:], x[1:]),
    "a leaf is written without grad": _without_grad,
    "a leaf is read": lambda write, leaf, x: write(x, leaf),
    "the result of an intermediate": _result_of_an_intermediate,
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", GRADIENTS)
def test_what_requires_grad_is_refused_as_in_eager_mode(namespace, name, form, backend):
    write = define(form, namespace, torchop)

    def outcome(function: Callable[..., Any]) -> tuple[str, Any]:
        leaf, x = torch.ones(4, requires_grad=True), torch.ones(4)
        try:
            result = function(leaf, x)
            if isinstance(result, Tensor):
                result.sum().backward()
        except RuntimeError as error:
            return str(error), None
        return "", (leaf.detach(), leaf.grad, x.detach(), x.requires_grad)

    def function(leaf: Tensor, x: Tensor) -> Any:
        return GRADIENTS[name](write, leaf, x)

    message, values = outcome(function)
    compiled_message, compiled_values = outcome(
        torch.compile(function, backend=backend, fullgraph=True)
    )
    assert bool(compiled_message) is bool(message)
    assert message in compiled_message.replace("\\'", "'")
    if values is not None:
        assert_close(compiled_values[:1], values[:1])
        assert_close(compiled_values[2:3], values[2:3])
        assert (compiled_values[1] is None, compiled_values[3]) == (values[1] is None, values[3])


def test_operators_with_out_are_refused_where_something_requires_grad(namespace):
    write = define("out", namespace, torchop)
    compiled = torch.compile(
        lambda leaf, x: write(x, leaf * 1), backend="aot_eager", fullgraph=True
    )
    with pytest.raises(
        (torch._dynamo.exc.TorchRuntimeError, torch._dynamo.exc.Unsupported),
        match=rf"{namespace}::accumulate: functions with out=.* don.*t support automatic diff",
    ):
        compiled(torch.ones(2, requires_grad=True), torch.ones(2))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", FORMS)
def test_memory_without_gradient_is_written_in_a_program_that_trains(namespace, form, backend):
    write = define(form, namespace, torchop)

    def function(weight: Tensor, statistics: Tensor, x: Tensor) -> Tensor:
        hidden = (x * weight).sin()
        write(statistics, hidden.detach())
        return (hidden * 2).sum()

    outcomes = []
    for call in (function, torch.compile(function, backend=backend, fullgraph=True)):
        weight = torch.full((4,), 0.5, requires_grad=True)
        statistics = torch.ones(4)
        loss = call(weight, statistics, torch.arange(4.0))
        loss.backward()
        outcomes.append((loss.detach(), statistics, weight.grad))
    assert_close(outcomes[1], outcomes[0])

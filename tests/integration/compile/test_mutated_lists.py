from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._dynamo.exc
from torch import Tensor

import torchop
from tests._support.common import on_both
from tests.integration.compile.graphs import BACKENDS
from tests.integration.compile.mutating import accumulate, assert_equals_eager, inputs, run_together

# --------------------------------------------------------------------------------------------------
# Lists and optional tensors


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

RESULTS = ["()", "Tensor", "Tensor[]"]


def _each(xs: Any) -> list[Tensor]:
    return [x for x in (xs if isinstance(xs, (list, tuple)) else [xs]) if x is not None]


def _writes_all(name: str, arguments: str, result: str) -> torchop.CustomOp:
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

    op = torchop.custom_op(name, kernel, mutates_args={"xs"}, schema=schema)
    op.register_fake(fake)
    return op


def _programs(
    namespace: str, result: str, shapes: Iterable[str]
) -> dict[str, Callable[[Tensor, Tensor], Any]]:
    programs = {}
    for number, shape in enumerate(shapes):
        arguments, pick = SHAPES[shape]
        op = _writes_all(f"{namespace}::op{number}", arguments, result)
        programs[shape] = _list_program(op, pick)
    return programs


def _list_program(op: Any, pick: Callable[..., Any]) -> Callable[..., Any]:
    def function(a: Tensor, b: Tensor) -> Any:
        first = op(pick(a, b), 1.0)
        intermediate = a + b
        second = op(pick(intermediate, b), by=2.0, label="given")
        return first, second, intermediate, a * 2

    return function


def _calls() -> list[Any]:
    fails = pytest.mark.needs_torch("2.12", "results of calls without tensors under Inductor")
    return [
        pytest.param(result, backend, marks=marks)
        for result in RESULTS
        for backend, marks in (
            ("aot_eager", []),
            ("inductor", [pytest.mark.without_cpp, *([] if result == "()" else [fails])]),
        )
    ]


@pytest.mark.parametrize(("result", "backend"), _calls())
def test_mutated_lists_and_optional_tensors(namespace, result, backend):
    # Omit views that share memory if the operator returns a list, because torchop rejects these
    # calls.
    shapes = [shape for shape in SHAPES if result != "Tensor[]" or "views" not in shape]
    programs = _programs(namespace, result, shapes)
    function = run_together(programs)
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    assert_equals_eager(compiled, function, programs)


@pytest.mark.parametrize("result", RESULTS)
def test_mutated_lists_and_optional_tensors_are_exported(namespace, result):
    shapes = ["Tensor?[] with None", "Tensor?[]? with None", "Tensor?"]
    programs = _programs(namespace, result, shapes)

    class Module(torch.nn.Module):
        def forward(self, inputs: dict[str, tuple[Tensor, Tensor]]) -> Any:
            results = run_together(programs)(inputs).values()
            return [each for several in results for each in several if each is not None]

    exported = torch.export.export(Module(), ({shape: inputs() for shape in shapes},))
    for program in (exported, exported.run_decompositions()):
        assert_equals_eager(program.module(), Module(), shapes)


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
def test_lists_with_other_results_and_views(namespace, backend):
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


def test_a_list_result_with_mutated_arguments_that_share_memory_is_rejected(namespace):
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
def test_a_number_result_with_a_mutation_is_rejected(namespace, annotation, result):
    def kernel(x):
        x.add_(1)
        return result

    kernel.__annotations__ = {"x": Tensor, "return": annotation}
    op = torchop.custom_op(f"{namespace}::op", kernel, mutates_args={"x"})
    op.register_fake(lambda x: result)
    compiled = torch.compile(lambda x: (x + 1, op(x)), backend="aot_eager", fullgraph=True)
    # For some of these results, Dynamo raises before torchop does, so accept both exceptions.
    with pytest.raises(
        (torch._dynamo.exc.BackendCompilerFailed, torch._dynamo.exc.Unsupported),
        match=rf"{namespace}::op mutates an argument and returns {annotation.__name__}\. A "
        r"compiler would keep.*Return tensors instead, 0-dim"
        if annotation is float
        else "non-Tensor",
    ):
        compiled(torch.ones(2))

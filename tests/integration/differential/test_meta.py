"""The comparison of `test_differential.py` detects differences. Uses private names."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import torchop
from tests.integration.differential.calls import CallSpec, Passed
from tests.integration.differential.observe import Example, differences, observe
from tests.integration.differential.operators import Workshop
from tests.integration.differential.scripts import Script
from tests.integration.differential.spec import KINDS, OperatorSpec, Parameter
from tests.integration.differential.tensors import TensorSpec
from torchop._native.reasons import Reason
from torchop._rules.kernels.rule import KernelRule

KIND = {kind.schema: kind for kind in KINDS}
X = Parameter("x", KIND["Tensor"])
FUNCTIONAL = OperatorSpec((X, Parameter("n", KIND["float"])), "Tensor", formula="setup_context")
MUTATING = OperatorSpec((X._replace(mutated=True),), "()")
RECORDED = TensorSpec(autograd="non-leaf")


@pytest.fixture
def workshop() -> Iterator[Workshop]:
    workshop = Workshop()
    yield workshop
    workshop.close()


def example(spec: OperatorSpec, *values: Any, **script: Any) -> Example:
    call = CallSpec(tuple(Passed(None, value) for value in values))
    return Example(spec, call, Script(**script), "nothing special")


def see(one: Example, other: Example, workshop: Workshop) -> str:
    first = observe(one, workshop.operator(one.operator))
    second = observe(other, workshop.operator(other.operator))
    return "\n".join(differences(first, second))


def test_equal_runs_are_equal(workshop: Workshop) -> None:
    same = example(FUNCTIONAL, RECORDED, 0.5)
    assert see(same, same, workshop) == ""


def with_script(spec: OperatorSpec, *values: Any, **script: Any) -> tuple[Example, Example]:
    """Return two examples that differ only in the script, that is, in the actions of the kernel."""
    return example(spec, *values), example(spec, *values, **script)


NUMBER = OperatorSpec((X,), "SymInt")
# Each case consists of two examples that differ in one respect, and the path of the value for which
# the comparison must report the difference.
CASES: dict[str, tuple[tuple[Example, Example], str]] = {
    "a negative zero": (
        (example(FUNCTIONAL, TensorSpec(), 0.0), example(FUNCTIONAL, TensorSpec(), -0.0)),
        "/events/0/1/n",
    ),
    "a number in the result": (with_script(NUMBER, TensorSpec(), result="NumPy number"), "/result"),
    "strides of the result": (
        with_script(FUNCTIONAL, TensorSpec(), 0.5, result="transposed"),
        "/result/strides",
    ),
    "a result that requires no grad": (
        with_script(FUNCTIONAL, RECORDED, 0.5, marks="non_differentiable"),
        "/result/requires_grad",
    ),
    "what is saved": (with_script(FUNCTIONAL, RECORDED, 0.5, saves="both"), "/result/node/saved"),
    "a gradient": (with_script(FUNCTIONAL, RECORDED, 0.5, gradients="None"), "/backward"),
    "what happens to an argument": (
        with_script(MUTATING, TensorSpec(), writes="nothing"),
        "/arguments/1/contents",
    ),
    "a leaf for a non-leaf": (
        (
            example(FUNCTIONAL, RECORDED, 0.5),
            example(FUNCTIONAL, TensorSpec(autograd="leaf"), 0.5),
        ),
        "/result/node/next",
    ),
    "an exception": (with_script(FUNCTIONAL, TensorSpec(), 0.5, result="raises"), "/error"),
    "the message of an exception": (
        (example(FUNCTIONAL, TensorSpec(), "a"), example(FUNCTIONAL, TensorSpec(), "b")),
        "/error/message",
    ),
    "autograd inside the kernel": (
        (
            example(FUNCTIONAL, TensorSpec(), 0.5),
            example(FUNCTIONAL, TensorSpec(), 0.5)._replace(situation="no_grad"),
        ),
        "/events/0/2/grad",
    ),
}


@pytest.mark.parametrize(("examples", "where"), CASES.values(), ids=CASES)
def test_a_difference_is_seen(
    examples: tuple[Example, Example], where: str, workshop: Workshop
) -> None:
    assert f"\n{where}" in f"\n{see(*examples, workshop)}"


@contextlib.contextmanager
def _doctored(workshop: Workshop, spec: OperatorSpec, wrong: Callable[..., Any]) -> Iterator[None]:
    """Simulate a bug by making only native calls run `wrong` in place of the kernel."""
    definition = workshop.operator(spec).handle._definition
    compiled = definition.plan
    kernels = compiled[KernelRule]
    changed = kernels._replace(functions=dict.fromkeys(kernels.functions, wrong))

    class Plan:
        schema = compiled.schema

        def __getitem__(self, rule: type) -> Any:
            return changed if rule is KernelRule else compiled[rule]

    right = definition.entry.plan
    definition.entry.plan = definition.calls.compiled(Plan())
    try:
        yield
    finally:
        definition.entry.plan = right


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda x: x.detach().clone().mul_(2), "/result/contents"),
        (lambda x: x.detach().clone().t().contiguous().t(), "/result/strides"),
        (lambda x: torch._C._nn.relu(x), "/events"),
    ],
    ids=["values", "strides", "unseen kernel"],
)
def test_a_mistake_of_native_calls_is_seen(
    change: Callable[..., Any], where: str, workshop: Workshop
) -> None:
    case = example(OperatorSpec((X,), "Tensor"), TensorSpec())
    operator = workshop.operator(case.operator)
    with _doctored(workshop, case.operator, change):
        before = operator.counters()[Reason.NATIVE]
        native = observe(case, operator)
        assert operator.counters()[Reason.NATIVE] == before + 1
        with torchop.native.disabled():
            dispatched = observe(case, operator)
    found = differences(native, dispatched)
    assert any(line.startswith(where) for line in found)

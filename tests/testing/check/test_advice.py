"""Findings name the fault, its place and a fix that suits the fault.

Uses private names.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import torchop
from torchop.testing import check
from torchop.testing._check.advice import finding_in_words
from torchop.testing._check.findings import grouped
from torchop.testing._check.run import plan_checks
from torchop.testing._fork import can_fork
from torchop.testing._worker import CheckWorker

X = torch.linspace(-1, 1, 12).view(3, 4)


def first_finding(op: Any, *examples: Any, only: Any, **options: Any) -> str:
    (operator,) = {each.subject.operator for each in plan_checks(op, examples, only=only)}
    report = check(op, *examples, only=only, raise_exception=False, **options)
    return finding_in_words(operator, report.findings[0])


def test_wrong_result_of_contiguous_tensors_is_not_about_strides(namespace: str) -> None:
    op = torchop.custom_op(
        f"{namespace}::thrice", lambda x: x * 2, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    text = first_finding(op, (X,), only=["given", "gaps"], reference=lambda x: x * 3)
    assert "The result for an example is wrong. (memory.given; also fails: memory.gaps)" in text
    assert "The layout is not the cause" in text
    assert "strides" not in text


def test_reference_that_raises_for_an_example_is_a_failure(namespace: str) -> None:
    def reference(x: Tensor) -> Tensor:
        raise ValueError("not finished")

    op = torchop.custom_op(
        f"{namespace}::twice", lambda x: x * 2, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    report = check(op, (X,), only="given", reference=reference, raise_exception=False)
    (failure,) = report.failures
    assert "the reference refuses it: ValueError: not finished" in failure.message
    assert "The operator accepts this example." in failure.message


def test_unwritten_elements_are_named_in_each_check(namespace: str) -> None:
    def pairs(x: Tensor) -> Tensor:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        half = x.shape[-1] // 2 * 2
        out[..., :half] = x[..., :half]
        return out

    op = torchop.custom_op(f"{namespace}::pairs", pairs, mutates_args=())
    text = first_finding(op, (X,), only="memory.blocks")
    assert "Some elements of a result are never written. (memory.blocks)" in text


def test_fix_names_the_out_argument(namespace: str) -> None:
    with torchop.Library(namespace, "FRAGMENT") as lib:
        lib.define("scaled(Tensor x, *, Tensor(a!) out) -> Tensor(a!)")

        def scaled(x: Tensor, *, out: Tensor) -> Tensor:
            return out.copy_(2 * x) if out.shape == x.shape else out

        lib.impl("scaled", scaled, "CPU")
        example = ((X,), {"out": torch.zeros(3, 4)})
        text = first_finding(f"{namespace}::scaled", example, only="memory.out")
    assert "fix:   Call resize_ on out, or raise an error." in text


def test_wrong_gradient_names_its_argument(namespace: str) -> None:
    op = torchop.custom_op(
        f"{namespace}::rows",
        lambda x, index, w: x[index] * w,
        mutates_args=(),
        schema="(Tensor x, Tensor index, Tensor w) -> Tensor",
    )

    def backward(ctx: Any, grad: Tensor) -> Any:
        x, index, w = ctx.saved_tensors
        return torch.zeros_like(x).index_add(0, index, grad * w), None, 2 * grad * x[index]

    op.register_autograd(
        backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
    )
    example = (X, torch.tensor([2, 0, 0]), X + 2)
    text = first_finding(op, example, only="gradcheck")
    assert "with respect to argument 'w'" in text
    assert "fix:   Correct the gradient of w in the formula." in text


def test_reading_beyond_the_end_is_not_an_unwritten_element(namespace: str) -> None:
    def total(x: Tensor) -> Tensor:
        memory = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
        return memory[: -(-x.numel() // 8) * 8].sum()

    op = torchop.custom_op(f"{namespace}::total", total, mutates_args=())
    text = first_finding(op, (torch.ones(3),), only="memory.contiguous")
    assert "The kernel reads or writes outside of a contiguous tensor." in text


def test_wrong_gradient_in_one_dtype_names_its_argument(namespace: str) -> None:
    op = torchop.custom_op(
        f"{namespace}::product",
        lambda x, y: x * y,
        mutates_args=(),
        schema="(Tensor x, Tensor y) -> Tensor",
    )

    def backward(ctx: Any, grad: Tensor) -> Any:
        x, y = ctx.saved_tensors
        return grad * y, grad * x * (1.1 if x.dtype is torch.half else 1)

    op.register_autograd(
        backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
    )
    text = first_finding(op, (X, X + 2), only="gradcheck")
    assert "the gradient of argument 'y' in torch.float16" in text
    assert "fix:   Correct the gradient of y in the formula." in text


def crashes_if_empty(x: Tensor) -> Tensor:
    if not x.numel():
        ctypes.string_at(0)
    return x * 2


def crashes_if_transposed(x: Tensor) -> Tensor:
    if not x.is_contiguous():
        ctypes.string_at(0)
    return x * 2


def hangs_if_empty(x: Tensor) -> Tensor:
    while not x.numel():
        time.sleep(0.01)
    return x * 2


@pytest.mark.skipif(not can_fork(), reason="checks run in a forked process")
@pytest.mark.parametrize(
    ("kernel", "only", "fault", "fix"),
    [
        (
            crashes_if_empty,
            ["contracts.schema", "memory.empty"],
            "The call ended the process by SIGSEGV for tensors with 0 elements. (memory.empty; "
            "also fails: contracts.schema)",
            "Return early if x has 0 elements, or check the sizes before reading memory.",
        ),
        (
            crashes_if_transposed,
            ["contracts.schema"],
            "The call ended the process by SIGSEGV for this case: the tensor transposed. "
            "(contracts.schema)",
            "Check the sizes, strides and dtype of x before reading or writing memory, and raise "
            "an error if the kernel does not support them.",
        ),
        (
            hangs_if_empty,
            ["contracts.schema"],
            "The call took over 4 seconds for tensors with 0 elements. (contracts.schema)",
            "Check the conditions of loops, and release each lock, for such a call.",
        ),
    ],
)
def test_advice_for_a_crash_names_the_case(
    namespace: str, kernel: Callable[[Tensor], Tensor], only: list[str], fault: str, fix: str
) -> None:
    op = torch.library.custom_op(f"{namespace}::op", kernel, mutates_args=())
    checks = {check.name: check for check in plan_checks(op, [(X,)], only=only)}
    worker = CheckWorker(lambda: checks)
    try:
        (finding,) = grouped([worker.run(name, 4, math.inf) for name in checks])
    finally:
        worker.close()
    (operator,) = {each.subject.operator for each in checks.values()}
    text = finding_in_words(operator, finding)
    assert text.startswith(f"{namespace}::op: {fault}\n")
    assert f"  fix:   {fix}\n" in text


def wrong_backward(ctx: Any, grad: Tensor) -> Any:
    return 3 * grad


def wrong_backward_of_list(ctx: Any, grad: Tensor) -> Any:
    return [3 * grad]


@pytest.mark.parametrize("form", ["custom_op", "torchop", "Library", "torchop.Library", "list"])
def test_place_of_a_wrong_gradient_is_the_backward_function(namespace: str, form: str) -> None:
    name, backward = f"{namespace}::twice", wrong_backward
    example: Any = (X,)
    if form in ("custom_op", "torchop"):
        define: Any = torch.library.custom_op if form == "custom_op" else torchop.custom_op
        schema = "(Tensor x) -> Tensor"
        op = define(name, lambda x: 2 * x, mutates_args=(), schema=schema)
        op.register_autograd(backward)
        text = first_finding(op, example, only="gradcheck")
    else:
        library: Any = torchop.Library if form == "torchop.Library" else torch.library.Library
        kind = "Tensor"
        if form == "list":
            kind, backward, example = "Tensor[]", wrong_backward_of_list, ([X],)
        with torch.library._scoped_library(namespace, "FRAGMENT") as lib:
            lib = library(namespace, "FRAGMENT") if form == "torchop.Library" else lib
            lib.define(f"twice({kind} x) -> Tensor")
            lib.impl("twice", lambda x: 2 * (x[0] if form == "list" else x), "CPU")
            torch.library.register_autograd(name, backward, lib=lib)
            text = first_finding(name, example, only="gradcheck")
    line = backward.__code__.co_firstlineno
    assert f"  where: {__file__}:{line} ({backward.__name__})\n" in text

"""Findings name the fault, its place and a fix that suits the fault.

Uses private names.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import torchop
from torchop.testing import check
from torchop.testing._check.advice import finding_in_words
from torchop.testing._check.run import plan_checks

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

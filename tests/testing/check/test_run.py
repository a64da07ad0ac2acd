"""Kernels may raise an exception or crash during a check. Uses private names."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import torchop
from tests._support.forking import run_forked
from torchop.testing import check
from torchop.testing._check import run
from torchop.testing._check.run import plan_checks, run_check


def test_failures_name_the_exception_of_the_kernel(namespace: str) -> None:
    @torchop.custom_op(f"{namespace}::picky", mutates_args=())
    def picky(x: Tensor) -> Tensor:
        return x.contiguous() + int(not x.is_contiguous())

    @picky.register_fake
    def _(x: Tensor) -> Tensor:
        raise KeyError("scale")

    names = ["subsystems.fake", "memory.transposed", "memory.given"]
    report = check(picky, (torch.ones(2, 3),), only=names, raise_exception=False)
    assert {result.check: result.cause for result in report.results} == {
        "memory.given": "",
        "memory.transposed": "",  # the check fails, but the kernel does not raise
        "subsystems.fake": "KeyError: 'scale'",
    }
    assert len(report.failures) == 2


def test_traceback_of_a_crash_names_the_check(namespace: str) -> None:
    outcome = run_forked(f"""
        import os, torch, torchop

        @torchop.custom_op("{namespace}::crash", mutates_args=())
        def crash(x: torch.Tensor) -> torch.Tensor:
            if not x.is_contiguous():
                os.abort()
            return x + 1

        torchop.testing.check(crash, (torch.ones(2, 3),), only="memory.*")
    """)
    assert outcome.returncode != 0
    assert f"in memory.transposed of {namespace}::crash" in outcome.stderr


def test_exception_in_a_formula_is_one_cause_in_all_checks(namespace: str) -> None:
    def wrong(ctx: Any, inputs: Any, output: Tensor) -> None:
        raise ValueError("it is wrong")

    schema = "(Tensor x) -> Tensor"
    op = torchop.custom_op(f"{namespace}::op", lambda x: x * 2, mutates_args=(), schema=schema)
    op.register_fake(torch.empty_like)
    op.register_autograd(lambda ctx, grad: grad * 2, setup_context=wrong)
    names = ["leaks", "gradcheck", "threads", "compiled"]
    checks = plan_checks(op, [(torch.ones(3, requires_grad=True),)], only=names)
    results = [run_check(check) for check in checks]
    assert [result.outcome for result in results] == ["failed"] * 4
    assert {result.cause for result in results} == {"ValueError: it is wrong"}


def test_failures_name_arguments(namespace: str) -> None:
    @torchop.custom_op(f"{namespace}::second", mutates_args=())
    def second(x: Tensor, ys: list[Tensor]) -> Tensor:
        memory = torch.empty(0).set_(ys[0].untyped_storage())
        return x + memory[: x.numel()].view(x.shape)

    example = (torch.rand(2, 3), [torch.rand(2, 3)])
    names = ["memory.offset", "sharing.one", "sharing.overlap"]
    report = check(second, example, only=names, raise_exception=False)
    messages = {failure.check: failure.message for failure in report.failures}
    assert messages["sharing.overlap"].startswith("argument 'x' and argument 'ys[0]' overlap: ")

    @torchop.custom_op(f"{namespace}::around", mutates_args=("x",))
    def around(x: Tensor, y: Tensor) -> None:
        torch.empty(0).set_(y.untyped_storage()).add_(0 * y.sum() + 1)

    report = check(around, example[:1] * 2, only="memory.gaps", raise_exception=False)
    assert "wrote into the memory around argument 'y'" in report.failures[0].message


def test_schema_violation_does_not_suggest_valid(namespace: str) -> None:
    @torchop.custom_op(f"{namespace}::swap", mutates_args=("x",))
    def swap(x: Tensor, y: Tensor) -> None:
        x.set_(y.clone())

    call = (torch.rand(2, 3), torch.rand(2, 3))
    report = check(swap, call, only="memory.transposed", raise_exception=False)
    assert "swapped the storage of argument 'x'" in report.failures[0].message
    assert "register_examples" not in report.failures[0].message


def _float8(*shape: int) -> Tensor:
    return torch.arange(1.0, math.prod(shape) + 1).view(shape).to(torch.float8_e4m3fn)


def test_operators_with_float8_tensors_are_checked(namespace: str) -> None:
    """PyTorch has no arithmetic for float8, so checks must not compute with these tensors."""

    @torchop.custom_op(f"{namespace}::scaled", mutates_args=())
    def scaled(x: Tensor, scale: Tensor) -> Tensor:
        return (x.double() * scale.double()).to(torch.float8_e4m3fn)

    @scaled.register_fake
    def _(x: Tensor, scale: Tensor) -> Tensor:
        return torch.empty_like(x, dtype=torch.float8_e4m3fn)

    @torchop.custom_op(f"{namespace}::store", mutates_args=("cache",))
    def store(cache: Tensor, x: Tensor) -> None:
        cache.copy_(x)

    names = ["schema", "state", "written", "process", "accepted", "promotion", "numbers"]
    for op, other in (scaled, _float8(2, 3)), (store, torch.ones(2, 3)):
        report = check(op, (_float8(2, 3), other), only=names, raise_exception=False)
        assert not report.failures, report
        assert "float8" not in str(report).lower().replace("-> float8", ""), report


def test_float8_does_not_hide_failures(namespace: str) -> None:
    """A check that fails also searches for a smaller example, and computes with its tensors."""

    @torchop.custom_op(f"{namespace}::widened", mutates_args=())
    def widened(x: Tensor) -> Tensor:
        return x.float()

    widened.register_fake(torch.empty_like)
    report = check(widened, (_float8(2, 3),), only="subsystems.fake", raise_exception=False)
    assert [failure.check for failure in report.failures] == ["subsystems.fake"]
    assert "torch.float8_e4m3fn from the fake kernel" in report.failures[0].message


def test_failure_is_reported_if_searching_for_a_smaller_example_is_not_implemented(
    namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shrunk(*args: object) -> None:
        raise NotImplementedError("no kernel for this dtype")

    monkeypatch.setattr(run, "shrunk", shrunk)
    schema = "(Tensor x) -> Tensor"
    op = torchop.custom_op(f"{namespace}::op", lambda x: x * 2, mutates_args=(), schema=schema)
    op.register_fake(lambda x: x.new_empty(7))
    report = check(op, (torch.ones(3),), only="subsystems.fake", raise_exception=False)
    assert [failure.check for failure in report.failures] == ["subsystems.fake"]


def test_fake_kernel_that_returns_its_argument_is_compared_with_the_schema(namespace: str) -> None:
    """The kernel returns its argument too, so the message must not compare the two kernels."""
    with torch.library._scoped_library(namespace, "FRAGMENT") as library:
        library.define("same(Tensor x) -> Tensor")
        library.impl("same", lambda x: x, "CompositeExplicitAutograd")
        name = f"{namespace}::same"
        report = check(name, (torch.ones(3),), only="subsystems.fake", raise_exception=False)
    (failure,) = report.failures
    assert "'x', but the schema declares a new tensor" in failure.message


def test_missing_fake_kernel_is_named(namespace: str) -> None:
    with torch.library._scoped_library(namespace, "FRAGMENT") as library:
        library.define("bare(Tensor x) -> Tensor")
        library.impl("bare", lambda x: x + 1, "CPU")
        name = f"{namespace}::bare"
        report = check(name, (torch.ones(3),), only="subsystems.fake", raise_exception=False)
    (failure,) = report.failures
    assert f"{name} has no fake kernel" in failure.message
    assert failure.message.endswith("Register one with register_fake.")


@pytest.mark.parametrize(
    ("is_contiguous", "advice"),
    [
        (True, "memory_format=torch.contiguous_format"),
        (False, "Return these strides from the fake"),
    ],
    ids=["contiguous", "other strides"],
)
def test_advice_on_strides(namespace: str, is_contiguous: bool, advice: str) -> None:
    def like_the_argument(values: Tensor) -> Tensor:
        return torch.empty_like(values)

    def contiguous(values: Tensor) -> Tensor:
        return torch.empty_like(values, memory_format=torch.contiguous_format)

    kernel, fake = like_the_argument, contiguous
    if is_contiguous:
        kernel, fake = fake, kernel
    op = torchop.custom_op(
        f"{namespace}::op",
        lambda values: kernel(values).fill_(1),
        mutates_args=(),
        schema="(Tensor values) -> Tensor",
    )
    op.register_fake(fake)
    report = check(op, (torch.ones(2, 3),), only="subsystems.fake", raise_exception=False)
    (failure,) = report.failures
    assert advice in failure.message

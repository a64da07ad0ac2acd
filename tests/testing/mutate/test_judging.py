"""judging: calls that are compared to the bit, also of operators that fork."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

import torchop
from torchop.testing._check.subject import Subject
from torchop.testing._mutate.judging import digests


def test_an_operator_that_forks_is_only_called_in_the_guard(
    namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its copies would fork in turn, until the machine has no process left."""
    guarded, calls, refusal = [False], [], Subject.refusal

    def in_guard(*args: Any) -> Any:
        guarded[0] = True
        try:
            return refusal(*args)
        finally:
            guarded[0] = False

    def fork(x: Tensor) -> Tensor:
        calls.append(guarded[0])
        if (child := os.fork()) == 0:
            os._exit(0)  # here the copy ends at once, so that a test which fails does no harm
        os.waitpid(child, 0)
        return x.clone()

    monkeypatch.setattr(Subject, "refusal", in_guard)
    op = torchop.custom_op(f"{namespace}::fork", fork, mutates_args=())
    op.register_vmap("sequential")
    op.register_autograd(lambda ctx, grad: grad)
    found = digests(Subject(op, [(torch.ones(2, 3),)]))
    assert set(found.values()) == {"ForkError: a call forks the process"}
    assert calls
    assert all(calls)


def test_equal_calls_have_equal_digests(namespace: str) -> None:
    op = torchop.custom_op(f"{namespace}::double", _double, mutates_args=())
    op.register_vmap("sequential")
    first, again = (digests(Subject(op, [(torch.ones(2, 3),)])) for _ in range(2))
    assert first == again
    assert "vmap 0" in first
    changed = torchop.custom_op(
        f"{namespace}::triple", lambda x: x * 3, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    other = digests(Subject(changed, [(torch.ones(2, 3),)]))
    assert other["memory.given 0"] != first["memory.given 0"]


def _double(x: Tensor) -> Tensor:
    return x * 2

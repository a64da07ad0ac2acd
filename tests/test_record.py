"""record: what a program calls, and with what."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import torchop
from torchop import CallRecord, TensorRecord

T = torch.ones(2, 3)


@pytest.fixture
def op(namespace):
    @torch.library.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor, sizes: list[int], k: float = 1.0, *, name: str = "a") -> Tensor:
        return x * k

    op.register_autograd(lambda ctx, g: (g, None, None))
    return op


def test_calls_are_counted_by_their_kind(op, namespace):
    with torchop.record(f"{namespace}::*") as recorded:
        op(T, [1], 2.0)
        op(T + 1, [1], 2.0)
        op(T, [1], 3.0)
        op(T.double().requires_grad_(), [1, 2], name="b")
        T.sin()
    op(T, [1], 2.0)
    tensor = TensorRecord(torch.float32, (2, 3), "cpu", False)
    learnt = TensorRecord(torch.float64, (2, 3), "cpu", True)
    assert dict(recorded) == {
        f"{namespace}::op": [
            (CallRecord((tensor, [1], 2.0), {}), 2),
            (CallRecord((tensor, [1], 3.0), {}), 1),
            (CallRecord((learnt, [1, 2]), {"name": "b"}), 1),
        ]
    }
    assert len(recorded) == 1


def test_equal_values_of_other_types_are_other_calls(namespace):
    @torch.library.custom_op(
        f"{namespace}::op", mutates_args=(), schema="(Tensor x, Scalar k) -> Tensor"
    )
    def op(x, k):
        return x * k

    with torchop.record(f"{namespace}::op") as recorded:
        for k in (1, 1.0, True):
            op(T, k)
    assert [count for _, count in recorded[f"{namespace}::op"]] == [1, 1, 1]


def test_an_example_has_the_recorded_kind(op, namespace):
    with torchop.record(f"{namespace}::op") as recorded:
        op(T, [1], 2.0, name="b")
    call, _ = recorded[f"{namespace}::op"][0]
    args, kwargs = call.example()
    assert torch.equal(op(*args, **kwargs), T * 2)
    assert kwargs == {"name": "b"}


def test_contents_are_not_kept(op, namespace):
    secret = torch.full((2, 3), 42.125)
    with torchop.record(f"{namespace}::op") as recorded:
        op(secret, [1])
    assert "42.125" not in repr(recorded[f"{namespace}::op"])


def test_what_has_no_example_says_so():
    assert CallRecord((TensorRecord(torch.int8, (1,), "cpu", False), object), {}).example() is None


def test_results_are_those_of_the_program(op, namespace):
    with torchop.record("*"):
        assert torch.equal(op(T, [1], 3.0), T * 3)


def test_what_is_no_pattern_is_refused():
    with pytest.raises(ValueError, match=r"record\(\) got no pattern"):
        torchop.record()
    with pytest.raises(ValueError, match=r"record\('mylib'\): no name of an operator matches"):
        torchop.record("mylib")

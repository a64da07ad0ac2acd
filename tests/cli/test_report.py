"""The table of what operators would gain."""

from __future__ import annotations

import importlib

import pytest
import torch

import torchop
from tests.support import needs_native
from torchop import CallRecord, TensorRecord, TypeRecord

pytest.importorskip("click")
from torchop.cli import report  # it needs click

pytestmark = needs_native

X = TensorRecord(torch.float32, (3,), "cpu", False)


@pytest.fixture
def module(package):
    return importlib.import_module(package)


@pytest.fixture
def reason(module, namespace):
    """What the table says of an operator of which these calls were recorded."""

    def reason(op, *calls):
        recorded = torchop.record("*")
        for count, call in enumerate(calls, 1):
            recorded._add(f"{namespace}::{op}", call, 10 - count)
        [row] = report.rows_of_recorded(recorded, (f"{namespace}::*",))
        text = report.table([row], recorded)
        line = text.splitlines()[1]
        assert line.split()[1] == "yes"
        return line.partition("not measured: ")[2]

    return reason


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (X._replace(shape=(10**5, 10**5)), "its tensors take 37.3 GiB, more than 1 GiB"),
        (
            X._replace(shape=(2, 3), stride=(10**10, 1)),
            "its tensors take 37.3 GiB, more than 1 GiB",
        ),
        (X._replace(device="cuda:99"), "its tensors were on cuda:99, which is not here"),
        (X._replace(device="mtia"), "its tensors were on mtia, which is not here"),
        (X._replace(shape=(2**62, 2**62)), "its tensors take 79228162514264337593543950336.0 GiB"),
        (X._replace(dtype=torch.quint8), "its tensors cannot be made here ("),
        (TypeRecord("sparse_coo tensor"), "no example can be made of an argument: sparse_coo ten"),
    ],
)
def test_why_a_call_is_not_measured(reason, tensor, text):
    assert reason("called", CallRecord((tensor, 2), {})).startswith(text)


def test_a_call_that_fails_is_told(reason):
    index = TensorRecord(torch.int64, (1,), "cpu", False)
    assert reason("pick", CallRecord((X._replace(shape=(1,)), index), {})) == (
        "a call with tensors of ones raises IndexError: index 1 is out of bounds for dimension 0 "
        "with size 1"
    )


def test_another_kind_of_call_is_measured_then(reason):
    index = TensorRecord(torch.int64, (1,), "cpu", False)
    good, bad = (CallRecord((X._replace(shape=(n,)), index), {}) for n in (2, 1))
    assert reason("pick", bad, good) == ""


@pytest.mark.parametrize(
    "tensor",
    [
        X._replace(stride=None, shape=(0, 3)),
        X._replace(shape=(3, 2), stride=(1, 3)),
        X._replace(dtype=torch.bool),
        X._replace(dtype=torch.complex64),
        X._replace(shape=()),
        X._replace(shape=(4, 2), stride=(0, 1)),
    ],
)
def test_tensors_of_all_kinds_are_measured(reason, tensor):
    assert reason("called", CallRecord((tensor, 2), {})) == ""


def test_what_is_written_does_not_overflow(reason, module):
    assert reason("double_", CallRecord((X,), {})) == ""
    values = {tensor[0].item() for tensor in module.written}
    assert len(module.written) > 1
    assert all(value < float("inf") for value in values)


def test_what_is_written_may_have_required_grad(namespace):
    op = torchop.custom_op(
        f"{namespace}::add_",
        lambda x: x.add_(1),
        mutates_args=("x",),
        schema="(Tensor(a!) x) -> Tensor(a!)",
    )
    op.register_autograd(lambda ctx, g: g)
    recorded = torchop.record("*")
    call = CallRecord((X._replace(requires_grad=True),), {})
    recorded._add(f"{namespace}::add_", call)
    cost = report._measured(f"{namespace}::add_", recorded[f"{namespace}::add_"])
    assert cost.before > 0


def test_lists_none_and_keywords_are_measured(namespace):
    library = torch.library.Library(namespace, "DEF")
    library.define("op(Tensor?[] xs, *, Tensor(a!) out, float k=1.0) -> Tensor(a!)")
    library.impl("op", lambda xs, *, out, k=1.0: out.copy_(xs[1] * k), "CPU")
    recorded = torchop.record("*")
    recorded._add(f"{namespace}::op", CallRecord(([None, X],), {"out": X, "k": 3.0}))
    cost = report._measured(f"{namespace}::op", recorded[f"{namespace}::op"])
    assert cost.before > 0
    library._destroy()


def test_what_has_an_effect_is_not_repeated(namespace):
    calls = []
    op = torch.library.custom_op(f"{namespace}::op", lambda x: calls.append(x), mutates_args=(),
                                 schema="(Tensor x) -> ()")  # fmt: skip
    torchop.register_effect(op, torchop.EffectType.ORDERED)
    recorded = torchop.record("*")
    recorded._add(f"{namespace}::op", CallRecord((X,), {}))
    rows = report.rows_of_recorded(recorded, ("*",))
    assert "not measured: it has an effect, which a measurement would repeat" in report.table(
        rows, recorded
    )
    assert calls == []


def test_a_slow_operator_does_not_take_long(namespace):
    import time

    calls = []

    def slow(x):
        calls.append(x)
        time.sleep(0.1)

    torch.library.custom_op(f"{namespace}::op", slow, mutates_args=(), schema="(Tensor x) -> ()")
    recorded = torchop.record("*")
    recorded._add(f"{namespace}::op", CallRecord((X,), {}))
    cost = report._measured(f"{namespace}::op", recorded[f"{namespace}::op"])
    assert cost.before > 1e5
    assert len(calls) < 20


def test_what_gains_nothing_is_not_measured():
    recorded = torchop.record("*")
    recorded._add("aten::sin", CallRecord((X,), {}), 4)
    rows = report.rows_of_recorded(recorded, ("aten::*",))
    lines = report.table(rows, recorded).splitlines()
    assert [line.split() for line in lines] == [
        ["operator", "accelerated", "calls", "before", "after", "reason"],
        ["aten::sin", "no", "4", "it", "was", "defined", "in", "C++"],
    ]


@pytest.mark.parametrize(
    ("microseconds", "text"), [(3.456, "3.46 us"), (3456, "3.46 ms"), (3.456e6, "3.46 s")]
)
def test_durations_have_a_fitting_unit(microseconds, text):
    assert report._duration(microseconds) == text


@pytest.mark.cuda
def test_tensors_on_a_gpu_are_measured(module, namespace):
    recorded = torchop.record("*")
    recorded._add(f"{namespace}::called", CallRecord((X._replace(device="cuda:0"), 2), {}))
    cost = report._measured(f"{namespace}::called", recorded[f"{namespace}::called"])
    assert 0 < cost.after < cost.before

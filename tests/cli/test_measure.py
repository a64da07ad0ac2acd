from __future__ import annotations

import importlib
import os
import time
from pathlib import Path

import pytest
import torch

import torchop
from tests._support.common import needs_native
from torchop.testing import CallRecord, TensorRecord, TypeRecord

pytest.importorskip("click")
import click

from torchop.cli import measure  # needs click
from torchop.cli.measure import Cost, measurements

pytestmark = needs_native

X = TensorRecord(torch.float32, (3,), "cpu", False)


def cost_of(op, *calls):
    return list(measurements(op, [(call, 1) for call in calls]))[-1].cost


def share_of(op, *kinds):
    """Return the share of native calls, which is known before any call is timed."""
    return next(measurements(op, list(kinds))).native


@pytest.fixture
def module(package):
    return importlib.import_module(package)


@pytest.fixture
def reason(module, namespace):
    """Return a function that measures calls, and returns the reason if they cannot be measured."""

    def reason(op, *calls):
        try:
            cost = cost_of(f"{namespace}::{op}", *calls)
        except click.ClickException as error:
            return str(error)
        assert cost.before > 0
        return ""

    return reason


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (X._replace(shape=(10**5, 10**5)), "its tensors take 37.3 GiB, more than 1 GiB"),
        (
            X._replace(shape=(2, 3), stride=(10**10, 1)),
            "its tensors take 37.3 GiB, more than 1 GiB",
        ),
        (X._replace(device="cuda:99"), "its tensors were on cuda:99, which is not available here"),
        (X._replace(device="mtia"), "its tensors were on mtia, which is not available here"),
        (X._replace(shape=(2**62, 2**62)), "its tensors take 79228162514264337593543950336.0 GiB"),
        (X._replace(dtype=torch.quint8), "its tensors cannot be created here ("),
        (TypeRecord("sparse_coo tensor"), "no example can be created of an argument: sparse_coo"),
    ],
)
def test_why_a_call_is_not_measured(reason, tensor, text):
    assert reason("called", CallRecord((tensor, 2), {})).startswith(text)


def test_a_failing_call_is_reported(reason):
    index = TensorRecord(torch.int64, (1,), "cpu", False)
    assert reason("pick", CallRecord((X._replace(shape=(1,)), index), {})) == (
        "a call with tensors of ones raises IndexError: index 1 is out of bounds for dimension 0 "
        "with size 1"
    )


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


def test_operators_with_an_effect_are_not_measured(namespace):
    calls = []
    op = torch.library.custom_op(
        f"{namespace}::op", calls.append, mutates_args=(), schema="(Tensor x) -> ()"
    )
    torchop.register_effect(op, torchop.EffectType.ORDERED)
    with pytest.raises(click.ClickException, match="it has an effect, so measuring"):
        cost_of(f"{namespace}::op", CallRecord((X,), {}))
    assert calls == []


def test_native_share_counts_the_calls(module, namespace):
    sparse = TypeRecord("sparse_coo tensor")
    kinds = [(CallRecord((X, 2), {}), 3), (CallRecord((sparse, 2), {}), 1)]
    assert share_of(f"{namespace}::called", *kinds) == 0.75
    assert share_of(f"{namespace}::called") is None


def test_calls_that_record_a_gradient_have_a_share(namespace):
    op = torch.library.custom_op(
        f"{namespace}::op", lambda x: x * 2, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    op.register_autograd(lambda ctx, g: g * 2)
    learnt = CallRecord((X._replace(requires_grad=True),), {})
    assert share_of(f"{namespace}::op", (CallRecord((X,), {}), 1), (learnt, 1)) == 1


@pytest.mark.parametrize(
    ("before", "after", "noise", "is_noise"),
    [(2.0, 1.0, 0.9, False), (2.0, 1.0, 1.0, True), (1.0, 2.0, 1.5, True), (9.0, 9.0, 0.0, True)],
)
def test_a_difference_may_be_noise(before, after, noise, is_noise):
    assert Cost(before, after, noise).is_noise == is_noise


# --------------------------------------------------------------------------------------------------
# Measuring in a child process

INDEX = TensorRecord(torch.int64, (1,), "cpu", False)

TRUSTING = """
import os, time, torch

@torch.library.custom_op("NAMESPACE::good", mutates_args=())
def good(x: torch.Tensor) -> torch.Tensor:
    return x * 2

@torch.library.custom_op("NAMESPACE::write", mutates_args=())
def write(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    if index.item():  # 1 is out of its bounds
        os.abort()
    return x * 2

@torch.library.custom_op("NAMESPACE::wait", mutates_args=())
def wait(x: torch.Tensor) -> torch.Tensor:
    time.sleep(1000 * x[0].item())
    return x * 2

@torch.library.custom_op("NAMESPACE::exit", mutates_args=())
def exit(x: torch.Tensor) -> torch.Tensor:
    os._exit(7)
"""


@pytest.fixture
def trusting(write):
    return importlib.import_module(write("trusting", TRUSTING))


def test_a_crash_is_reported_and_other_operators_are_measured(trusting, namespace):
    measurements = measure.measure(
        {
            f"{namespace}::write": [(CallRecord((X, INDEX), {}), 4)],
            f"{namespace}::exit": [(CallRecord((X,), {}), 2)],
            f"{namespace}::good": [(CallRecord((X,), {}), 3)],
        }
    )
    crashed, ended, good = measurements.values()
    assert crashed == (1.0, None, "a call with tensors of ones ended the process, by SIGABRT")
    assert ended == (1.0, None, "a call with tensors of ones ended the process, with exit code 7")
    assert good.native == 1.0
    assert good.cost.before > good.cost.after > 0


def test_a_call_that_hangs_is_killed(trusting, namespace, monkeypatch):
    monkeypatch.setattr(measure, "_LIMIT", 1.0)
    start = time.monotonic()
    name = f"{namespace}::wait"
    measurement = measure.measure({name: [(CallRecord((X,), {}), 1)]})[name]
    assert measurement == (1.0, None, "a call with tensors of ones took over 1 seconds")
    assert time.monotonic() - start < 100


def test_operator_of_no_module_is_measured_in_a_fork(namespace):
    # `mul` of a large tensor uses PyTorch's thread pool, whose threads do not exist in a fork. The
    # child must not wait for them.
    large = TensorRecord(torch.float32, (1 << 20,), "cpu", False)
    torch.ones(1 << 20).mul(2)
    caller = os.getpid()

    def kernel(x):
        if os.getpid() == caller:
            raise AssertionError("it was called in this process")
        return x * 2

    torch.library.custom_op(
        f"{namespace}::op", kernel, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    name = f"{namespace}::op"
    measurement = measure.measure({name: [(CallRecord((large,), {}), 1)]})[name]
    assert measurement.problem == ""
    assert measurement.cost.before > 0


def test_a_program_that_uses_an_accelerator_is_not_forked(namespace):
    torch.library.custom_op(
        f"{namespace}::op", lambda x: x * 2, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    name, call = f"{namespace}::op", CallRecord((X._replace(device="cuda:0"),), {})
    measurement = measure.measure({name: [(call, 1)]})[name]
    assert measurement.problem == "no module registers it in a separate process"


def test_a_module_that_cannot_be_imported_again_is_reported(trusting, namespace):
    name = f"{namespace}::good"
    path = trusting.__file__
    with open(path, "a", encoding="utf-8") as file:
        file.write("\nraise KeyError('again')\n")
    measurement = measure.measure({name: [(CallRecord((X,), {}), 1)]})[name]
    line = len(Path(path).read_text(encoding="utf-8").splitlines())
    assert measurement.problem == (
        f"{trusting.__name__} cannot be imported: KeyError: 'again' ({path}:{line})"
    )


@pytest.mark.cuda
def test_tensors_on_a_gpu_are_measured_although_the_program_used_it(trusting, namespace):
    torch.ones(2, device="cuda").sum().item()
    name, call = f"{namespace}::good", CallRecord((X._replace(device="cuda:0"),), {})
    measurement = measure.measure({name: [(call, 1)]})[name]
    assert measurement.problem == ""
    assert measurement.native == 1.0
    assert measurement.cost.before > measurement.cost.after > 0

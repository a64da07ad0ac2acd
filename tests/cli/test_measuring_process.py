"""Measuring an operator in a process of its own."""

from __future__ import annotations

import importlib
import os
import time

import pytest
import torch

from tests.support import needs_native
from torchop import CallRecord, TensorRecord

pytest.importorskip("click")
from torchop.cli import measuring_process  # it needs click

pytestmark = needs_native

X = TensorRecord(torch.float32, (3,), "cpu", False)
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
    """A module with operators that crash, or hang, when they get ones."""
    return importlib.import_module(write("trusting", TRUSTING))


def test_a_crash_is_told_and_the_others_are_measured(trusting, namespace):
    measurements = measuring_process.measure(
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


def test_a_call_that_does_not_end_is_ended(trusting, namespace, monkeypatch):
    monkeypatch.setattr(measuring_process, "_LIMIT", 1.0)
    start = time.monotonic()
    name = f"{namespace}::wait"
    measurement = measuring_process.measure({name: [(CallRecord((X,), {}), 1)]})[name]
    assert measurement == (1.0, None, "a call with tensors of ones took over 1 seconds")
    assert time.monotonic() - start < 100


def test_what_no_module_registers_is_measured_in_a_fork(namespace):
    # Its kernel uses threads, as the program did, which a fork does not have.
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
    measurement = measuring_process.measure({name: [(CallRecord((large,), {}), 1)]})[name]
    assert measurement.problem == ""
    assert measurement.cost.before > 0


def test_a_program_that_uses_an_accelerator_is_not_forked(namespace):
    torch.library.custom_op(
        f"{namespace}::op", lambda x: x * 2, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    name, call = f"{namespace}::op", CallRecord((X._replace(device="cuda:0"),), {})
    measurement = measuring_process.measure({name: [(call, 1)]})[name]
    assert measurement.problem == "no module registers it in a process of its own"


def test_a_module_that_cannot_be_imported_again_is_told(trusting, namespace):
    name = f"{namespace}::good"
    path = trusting.__file__
    with open(path, "a", encoding="utf-8") as file:
        file.write("\nraise KeyError('again')\n")
    measurement = measuring_process.measure({name: [(CallRecord((X,), {}), 1)]})[name]
    assert measurement.problem == (f"{trusting.__name__} cannot be imported: KeyError: 'again'")


def test_the_environment_stays(trusting, namespace, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    measuring_process.measure({f"{namespace}::good": [(CallRecord((X,), {}), 1)]})
    assert "PYTHONPATH" not in os.environ


@pytest.mark.cuda
def test_tensors_on_a_gpu_are_measured_although_the_program_used_it(trusting, namespace):
    torch.ones(2, device="cuda").sum().item()
    name, call = f"{namespace}::good", CallRecord((X._replace(device="cuda:0"),), {})
    measurement = measuring_process.measure({name: [(call, 1)]})[name]
    assert measurement.problem == ""
    assert measurement.native == 1.0
    assert measurement.cost.before > measurement.cost.after > 0

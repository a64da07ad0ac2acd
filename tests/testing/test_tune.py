"""`tune` and `tuning` measure kernels. Later calls use the fastest one. Uses private names."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import torchop
from tests._support.forking import run_forked
from torchop._core.lock import registration_lock
from torchop._rules.providers import tuned
from torchop.testing._timing import Timing, Way, timed


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("TORCHOP_CACHE_DIR", str(folder))
    monkeypatch.setattr(tuned, "_own", [])
    with registration_lock:
        tuned.forget()
    yield folder
    with registration_lock:
        tuned.forget()


@pytest.fixture
def slow(namespace: str) -> Any:
    """Define an operator with a slow reference, and a provider with a fast and a slow config."""

    @torchop.custom_op(f"{namespace}::slow", mutates_args=(), priority=["tuned", "sleepy"])
    def slow(x: Tensor) -> Tensor:
        time.sleep(0.002)
        return x * 2

    @slow.register_kernel("cpu", provider="sleepy", configs=[{"naps": 4}, {"naps": 0}])
    def _(x, naps):
        time.sleep(naps / 1000)
        return x + x

    @slow.register_kernel("cpu", provider="wrong", tolerance={torch.float32: (0.0, 0.1)})
    def _(x):
        return x * 3

    @slow.register_kernel("cpu", provider="broken")
    def _(x):
        raise RuntimeError("no kernel image")

    return slow


def chosen(op: Any, *args: Any) -> str:
    return torchop.explain(op, *args).provider


def test_fastest_kernel_that_agrees_with_the_reference_runs(slow, cache):
    found = torchop.testing.tune(slow, [(torch.ones(5),), {"x": torch.ones(5, 5)}], budget=10)
    for measurement in found.measurements:
        labels = [kernel.label for kernel in measurement.kernels]
        assert labels == ["sleepy naps=0", "reference", "sleepy naps=4"]
        for kernel, least in zip(measurement.kernels, (0, 2000, 4000), strict=True):
            assert kernel.interval[0] <= kernel.microseconds <= kernel.interval[1]
            assert kernel.microseconds >= least
    assert [m.call for m in found.measurements] == ["float32[5..8]", "float32[5..8, 5..8]"]
    assert "wrong is left out: its result: result 0 of 1 is [3, 3, 3" in found.problems[0]
    assert "broken is left out: no kernel image" in found.problems[1]
    assert "us  (" in str(found)
    assert chosen(slow, torch.ones(8)) == "sleepy"
    written = json.loads((cache / "tuning.json").read_text())
    assert [m["sizes"] for m in written["measurements"]] == [[[5, 8], [5, 8]], [[5, 8]]]


def test_kernel_must_agree_within_its_tolerance(namespace):
    @torchop.custom_op(f"{namespace}::near", mutates_args=())
    def near(x: Tensor) -> Tensor:
        return x * 2

    near.register_kernel(
        "cpu", lambda x: x * 2 + 0.05, provider="near", tolerance={torch.float32: (0.0, 0.1)}
    )
    near.register_kernel("cpu", lambda x: x * 2 + 0.05, provider="far")
    found = torchop.testing.tune(near, [(torch.ones(3),)], budget=0.2)
    assert {k.provider for k in found.measurements[0].kernels} == {"reference", "near"}


def test_exceeded_budget_is_reported(slow):
    found = torchop.testing.tune(slow, [(torch.ones(1),), (torch.ones(100),)], budget=1e-6)
    assert [m.call for m in found.measurements] == ["float32[1]"]
    assert found.problems[-1] == "float32[65..128] was left out: the budget is spent"


def test_inputs_of_a_mutating_operator_are_unchanged(namespace):
    @torchop.custom_op(f"{namespace}::grow", mutates_args=("x",))
    def grow(x: Tensor) -> None:
        x.mul_(2)

    grow.register_kernel("cpu", lambda x: x.add_(x.clone()) and None, provider="half")
    grow.register_kernel("cpu", lambda x: None, provider="idle")
    x = torch.ones(1)
    state = torch.get_rng_state()
    found = torchop.testing.tune(grow, [(x,)], budget=0.2)
    assert x.tolist() == [1.0]
    assert torch.equal(torch.get_rng_state(), state)
    assert {k.provider for k in found.measurements[0].kernels} == {"reference", "half"}


def test_buckets_of_the_author_are_used(slow):
    slow.set_tuning(buckets={"x": {0: [10, 100]}})
    found = torchop.testing.tune(slow, [(torch.ones(5),), (torch.ones(500),)], budget=0.3)
    assert [m.call for m in found.measurements] == ["float32[0..10]", "float32[101..]"]


def test_registered_examples_are_the_default_inputs(slow, tmp_path):
    with pytest.raises(torchop.MissingRuleError, match="has no examples"):
        torchop.testing.tune(slow)
    slow.register_examples(lambda: [(torch.ones(3),)])
    table = tmp_path / "shipped.json"
    found = torchop.testing.tune(slow, budget=0.1, table=table)
    again = torchop.testing.tune(slow, [(torch.ones(9),)], budget=0.1, table=table)
    kept = [m["arguments"] for m in json.loads(table.read_text())["measurements"]]
    assert len(kept) == len(found.measurements) + len(again.measurements) == 2


def test_call_that_cannot_be_measured_is_rejected(slow, namespace):
    @torchop.custom_op(f"{namespace}::alone", mutates_args=())
    def alone(x: Tensor) -> Tensor:
        return x.clone()

    @torchop.custom_op(f"{namespace}::printing", mutates_args=(), effects="ordered")
    def printing(x: Tensor) -> Tensor:
        return x.clone()

    printing.register_kernel("cpu", torch.clone, provider="other")
    call = [(torch.ones(2),)]
    with pytest.raises(ValueError, match="has no providers, so there is nothing to choose from"):
        torchop.testing.tune(alone, call)
    with pytest.raises(ValueError, match="has an effect, which measuring would repeat"):
        torchop.testing.tune(printing, call)
    with pytest.raises(ValueError, match="has no data"):
        torchop.testing.tune(slow, [(torch.ones(2, device="meta"),)])
    for wrong in (torch.ones(2), [], [3]):
        with pytest.raises(TypeError, match=r"^tune: "):
            torchop.testing.tune(slow, wrong)
    with pytest.raises(TypeError, match="budget is a number of seconds, got '3'"):
        torchop.testing.tune(slow, call, budget="3")


def test_block_measures_each_kind_of_call_once_and_then_applies_the_results(slow):
    with torchop.testing.tuning(budget=1):
        slow(torch.ones(5))
        start = time.perf_counter()
        slow(torch.ones(6))  # not measured: sizes 5 to 8 share a measurement
        assert time.perf_counter() - start < 0.05
    assert chosen(slow, torch.ones(8)) == "sleepy"
    # The size 9 was not measured, so the next entry in the priority is used.
    assert chosen(slow, torch.ones(9)) == "sleepy"
    assert tuned._own[0].kernels[0].label == "sleepy naps=0"
    before = list(tuned._own)
    with torchop.testing.tuning(budget=1):
        slow(torch.ones(5))
    assert tuned._own == before


def test_calls_are_measured_only_in_a_block_with_the_tuned_priority(slow):
    slow(torch.ones(5))
    torchop.explain(slow, torch.ones(5))
    with torchop.testing.tuning(budget=1), torchop.priority({slow: ["sleepy"]}):
        slow(torch.ones(5))
    with torchop.testing.tuning(budget=1):
        torchop.explain(slow, torch.ones(5))
        torch.compile(slow, backend="eager")  # returns a function without calling it
    assert tuned._own == []


def test_nothing_is_measured_in_a_backward_or_on_fake_tensors(slow, namespace):
    @torchop.custom_op(f"{namespace}::f", mutates_args=())
    def f(x: Tensor) -> Tensor:
        return x * 2

    f.register_autograd(lambda ctx, grad: slow(grad))
    slow.register_fake(torch.empty_like)
    x = torch.ones(5, requires_grad=True)
    with torchop.testing.tuning(budget=1):
        f(x).sum().backward()
        with torch._subclasses.FakeTensorMode():
            slow(torch.ones(5))
    assert tuned._own == []


@pytest.mark.parametrize("native", [True, False])
def test_measured_call_returns_its_own_residuals(namespace, native):
    def drop(x: Tensor) -> Tensor:
        kept = torch.rand_like(x).round()
        return torchop.residuals(x * kept, kept)

    residuals = {"kept": Tensor}
    op = torchop.custom_op(
        f"{namespace}::op", drop, mutates_args=(), residuals=residuals, priority=["tuned", "same"]
    )
    op.register_kernel("cpu", drop, provider="same", tolerance={torch.float32: (1.0, 1.0)})
    op.register_autograd(backward_kernel=_masked)
    sizes = (100, 200, 400)
    way = contextlib.nullcontext() if native else torchop.native.disabled()
    with way, torchop.testing.tuning(budget=2):
        for size in sizes:
            x = torch.ones(size, requires_grad=True)
            result = op(x)
            (gradient,) = torch.autograd.grad(result.sum(), x)
            assert torch.equal(gradient, result)
    assert len(tuned._own) == len(sizes)


def _masked(grad: Tensor, kept: Tensor) -> Tensor:
    return grad * kept


def test_unwritable_table_raises_a_warning(slow, tmp_path):
    path = tmp_path / "newer.json"
    path.write_text('{"format": 99, "torchop": "9.9", "measurements": []}')
    with pytest.warns(torchop.ProviderWarning, match="in this process only.*newer torchop"):
        torchop.testing.tune(slow, [(torch.ones(5),)], budget=0.1, table=path)
    assert chosen(slow, torch.ones(5)) == "sleepy"
    assert "99" in path.read_text()
    with pytest.warns(torchop.ProviderWarning, match="No such file or directory"):
        torchop.testing.tune(
            slow, [(torch.ones(50),)], budget=0.1, table=tmp_path / "no" / "table.json"
        )


def test_all_ranks_use_the_measurements_of_rank_0():
    program = """
import os, sys, torch, torch.multiprocessing as mp, torchop
from torch import Tensor

def rank(number, folder):
    torch.set_num_threads(1)
    os.environ["TORCHOP_CACHE_DIR"] = f"{folder}/cache{number}"
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=number, world_size=2)
    @torchop.custom_op("ranks::f", mutates_args=(), priority=["tuned"])
    def f(x: Tensor) -> Tensor:
        return x * 2
    measured = []
    @f.register_kernel("cpu", provider="other")
    def _(x):
        measured.append(None)
        return x + x
    found = torchop.testing.tune(f, [(torch.ones(5),)], budget=0.1)
    if number:
        assert measured == [], "the second rank measured too"
    with torchop.testing.tuning(budget=0.2):
        f(torch.ones(50))
    kinds = [torchop.explain(f, torch.ones(n)).provider for n in (5, 50)]
    both = [None, None]
    torch.distributed.all_gather_object(both, (found, kinds))
    assert both[0] == both[1], both
    assert os.path.exists(f"{folder}/cache{number}/tuning.json") is (number == 0)

if __name__ == "__main__":
    import tempfile
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(rank, (folder,), nprocs=2, start_method="fork")
    print("same")
"""
    done = run_forked(program, TORCHOP_NATIVE="0")
    assert (done.returncode, done.stdout) == (0, "same\n"), done.stderr


def test_median_lies_in_its_confidence_interval():
    timing = timed({"nap": Way(lambda: lambda: time.sleep(0.001))}, (), 0.1)["nap"]
    assert isinstance(timing, Timing)
    assert timing.best <= timing.interval[0] <= timing.median <= timing.interval[1]
    assert timing.median >= 1000

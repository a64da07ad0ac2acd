"""Timings of several functions that are called in turn. Uses private names."""

from __future__ import annotations

import contextlib
import math
import time

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from torchop.testing._timing import Timing, Way, timed


def test_calls_alternate_in_their_own_modes() -> None:
    made: list[str] = []

    def way(name: str) -> Way:
        def make():
            made.append(f"{name}, recording: {torch.is_grad_enabled()}")
            return lambda: time.sleep(0.002)

        return Way(make, torch.enable_grad if name == "first" else torch.no_grad)

    ways = {"first": way("first"), "second": way("second")}
    timings = timed(ways, (), 0.1)
    assert list(timings) == ["first", "second"]
    rounds = made[8:]  # the first rounds only estimate a call's duration
    assert rounds[:4] == ["first, recording: True", "second, recording: False"] * 2
    for timing in timings.values():
        assert isinstance(timing, Timing)
        assert timing.best >= 2000
        assert timing.noise >= 0


def test_call_that_raises_does_not_stop_the_others() -> None:
    calls = []

    def fail_later():
        calls.append(None)
        if len(calls) > 5:
            raise ValueError("spent")

    def fail():
        raise TypeError("never works")

    ways = {
        "good": Way(lambda: lambda: time.sleep(0.001)),
        "bad": Way(lambda: fail),
        "worn": Way(lambda: fail_later),
    }
    timings = timed(ways, (), 0.01)
    assert isinstance(timings["good"], Timing)
    assert repr(timings["bad"]) == "TypeError('never works')"
    assert repr(timings["worn"]) == "ValueError('spent')"
    assert len(calls) == 6


def test_slow_call_is_made_twice_and_has_infinite_noise() -> None:
    made = []

    def slow():
        made.append(None)
        time.sleep(0.02)

    timing = timed({"slow": Way(lambda: slow)}, (), 0.01)["slow"]
    assert len(made) == 2
    assert isinstance(timing, Timing)
    assert timing.noise == math.inf


def test_accelerator_is_synchronized_only_if_an_argument_uses_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waits.append)
    ways = {"call": Way(lambda: contextlib.nullcontext)}
    timed(ways, ([torch.ones(2)], {"x": torch.ones(2, device="meta")}), 1e-4)
    assert waits == []
    # Use a fake tensor, because it can be on an accelerator that this machine does not have.
    with FakeTensorMode():
        on_device = torch.empty(2, device="cuda:1")
    timed(ways, (on_device,), 1e-4)
    assert set(waits) == {torch.device("cuda", 1)}  # the tensor's device, not the current one

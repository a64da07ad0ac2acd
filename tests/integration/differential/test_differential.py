"""Compare native and dispatched calls of generated operators.

`nox -s fuzz` compares more examples; `TORCHOP_FUZZ_SEED` selects them, and repeats a run.

Uses private names.
"""

from __future__ import annotations

import importlib
import logging
import os
import zlib
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings

import torchop
from tests.integration.differential.examples import examples
from tests.integration.differential.known import hangs, unknown
from tests.integration.differential.observe import Example, differences, observe
from tests.integration.differential.operators import Operator, Workshop
from tests.integration.differential.stock import (
    is_comparable,
    is_deliberate,
    is_wanted_of_accelerated,
    outcome,
)
from torchop._native.reasons import Reason

EXAMPLES = int(os.environ.get("TORCHOP_FUZZ_EXAMPLES", "450"))
SEED = int(os.environ.get("TORCHOP_FUZZ_SEED", "0"))
# After ten examples of a run, Hypothesis mostly combines parts of earlier examples. Many short runs
# with different seeds find more.
EXAMPLES_OF_A_RUN = 11
# Compare one of so many examples with torch.library, or none if 0, because creating its operator
# takes 30 ms. The choice depends on the example's text, so a failing example fails again.
STOCK = int(os.environ.get("TORCHOP_FUZZ_STOCK", "12"))
NATIVE_SHARE = 0.35
CALLS_PER_REASON = 25
# Fewer calls have these reasons. Calls that record a gradient are mostly native, and CAPTURE needs
# an accelerator.
RARE = {Reason.GRADIENT: 4, Reason.CAPTURE: 0}


class Tally:
    def __init__(self) -> None:
        self.examples = self.native = self.stock = self.accelerated = self.skipped = 0
        self.calls: Counter[Reason] = Counter()

    def count(self, before: tuple[int, ...], after: tuple[int, ...]) -> None:
        for reason in Reason:
            self.calls[reason] += after[reason] - before[reason]

    def __str__(self) -> str:
        share = self.native / max(self.examples, 1)
        lines = [
            f"{self.examples} examples, {share:.0%} with a native call; {self.stock} compared with "
            f"stock, {self.accelerated} of them with a native call of stock's operator, "
            f"{self.skipped} left out as known to hang",
            *(f"{self.calls[reason]:8} {reason.name}" for reason in Reason),
        ]
        return "\n".join(lines)

    def too_few(self) -> list[Reason]:
        return [
            reason for reason in Reason if self.calls[reason] < RARE.get(reason, CALLS_PER_REASON)
        ]


@pytest.fixture
def workshop() -> Iterator[Workshop]:
    # Otherwise the second run would lack the warnings that PyTorch shows once per process.
    warned = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    # Compiles PyTorch's forward-mode formulas now, which warns.
    importlib.import_module("torch._decomp.decompositions_for_jvp")
    logging.disable()  # fake tensors log each exception that they raise
    workshop = Workshop()
    yield workshop
    workshop.close()
    logging.disable(logging.NOTSET)
    torch.set_warn_always(warned)


# Each run records its own warnings, which are compared.
@pytest.mark.filterwarnings("ignore")
def test_native_calls_equal_dispatched_calls(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    tally = Tally()
    for number in range(-(-EXAMPLES // EXAMPLES_OF_A_RUN)):

        @seed(SEED * 1_000_000 + number)
        @settings(
            max_examples=EXAMPLES_OF_A_RUN,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(examples())
        def run(example: Example) -> None:
            check(example, workshop, tally)

        run()
    with capsys.disabled():
        print(f"\n{tally}")
    assert tally.native >= NATIVE_SHARE * tally.examples
    # Two standard deviations below the expected share, because runs on a device compare only about
    # thirty.
    deviation = (tally.stock * NATIVE_SHARE * (1 - NATIVE_SHARE)) ** 0.5
    assert tally.accelerated >= max(1, NATIVE_SHARE * tally.stock - 2 * deviation)
    if EXAMPLES >= 3000:
        assert tally.too_few() == []


def check(example: Example, workshop: Workshop, tally: Tally) -> None:
    if hangs(example):
        tally.skipped += 1
        return
    operator = workshop.operator(example.operator)
    # A second call would see what the kernel appended to a default.
    times = 1 + example.script.grows_lists
    try:
        arms = {}
        start = operator.counters()
        for native in (True, False) if example.native_first else (False, True):
            before = operator.counters()
            if native:
                arms[native] = observe_again(example, operator, times)
                tally.native += operator.counters()[Reason.NATIVE] > before[Reason.NATIVE]
            else:
                with torchop.native.disabled():
                    arms[native] = observe_again(example, operator, times)
        tally.count(start, operator.counters())
        tally.examples += 1
    finally:
        workshop.release(operator)
    found = unknown(example, differences(arms[True], arms[False]))
    assert not found, "native != dispatched:\n" + "\n".join(found)
    if STOCK and zlib.crc32(repr(example).encode()) % STOCK == 0 and is_comparable(example):
        tally.stock += 1
        stock = workshop.operator(example.operator, stock=True)
        seen = observe_again(example, stock, times)
        compare_with_stock(example, arms[False], seen)
        tally.accelerated += compare_accelerated(example, stock, seen)
        workshop.release(stock)


def compare_with_stock(example: Example, ours: dict[str, object], stock: dict[str, object]) -> None:
    if is_deliberate(example, ours, stock):
        return
    found = differences(outcome(ours), outcome(stock))
    assert not found, "torchop != torch.library:\n" + "\n".join(found)


def observe_again(example: Example, operator: Operator, times: int) -> dict[str, object]:
    if not operator.fills_defaults:
        # The function uses its own defaults. An earlier call may have mutated them.
        operator.restore_defaults()
    return [observe(example, operator) for _ in range(times)][-1]


def compare_accelerated(example: Example, operator: Operator, stock: dict[str, object]) -> bool:
    """Compare a stock operator with itself, accelerated; return whether a call was native."""
    times = 1 + example.script.grows_lists
    with torchop.accelerate(operator.name):
        accelerated = observe_again(example, operator, times)
        native = torchop.native.counters(operator.handle).get("native", 0)
        with operator.changed():
            changed = observe(example, operator)
    with operator.changed():
        expected = observe(example, operator)
    found = differences(accelerated, stock) + differences(changed, expected)
    found = [line for line in found if not is_wanted_of_accelerated(example, stock, line)]
    assert not found, "accelerated != torch.library:\n" + "\n".join(found)
    return native > 0

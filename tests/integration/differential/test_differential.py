"""Compare native and dispatched calls of generated operators.

`nox -s fuzz` compares more examples. `TORCHOP_FUZZ_SEED` selects the examples, so a run with the
same seed repeats them.

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
from torchop._rules.autograd.derived import repeats

EXAMPLES = int(os.environ.get("TORCHOP_FUZZ_EXAMPLES", "450"))
SEED = int(os.environ.get("TORCHOP_FUZZ_SEED", "0"))
# After ten examples, Hypothesis mostly combines parts of earlier examples. So many short runs with
# different seeds find more differences than one long run.
EXAMPLES_OF_A_RUN = 11
# Only one in STOCK examples (none if 0) is also compared with torch.library, because creating an
# operator with torch.library takes 30 ms. The text of an example decides whether it is compared, so
# an example that failed will fail again.
STOCK = int(os.environ.get("TORCHOP_FUZZ_STOCK", "12"))
NATIVE_SHARE = 0.35
CALLS_PER_REASON = 25
# The number of calls that must use the dispatcher for a reason, for reasons that are too rare for
# CALLS_PER_REASON. Most calls that record a gradient are native, and CAPTURE needs an accelerator.
# Generated operators declare no memory layouts.
RARE = {Reason.GRADIENT: 4, Reason.CAPTURE: 0, Reason.LAYOUT: 0}


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
    # PyTorch shows some warnings only once per process. The warnings of two runs are compared, so
    # show them each time.
    warned = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    # Import this module of PyTorch now, because its import causes a warning, which only the first
    # run would see.
    importlib.import_module("torch._decomp.decompositions_for_jvp")
    logging.disable()  # because fake tensors log each exception that they raise
    workshop = Workshop()
    yield workshop
    workshop.close()
    logging.disable(logging.NOTSET)
    torch.set_warn_always(warned)


# pytest must not turn warnings into errors, because each run records its warnings, which are then
# compared.
@pytest.mark.filterwarnings("ignore")
def test_native_calls_equal_dispatched_calls(
    workshop: Workshop, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The first backwards of a derived formula run the body once more, so the second of two equal
    # calls would run it less often than the first.
    monkeypatch.setattr(repeats, "_ENOUGH", 0)
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
    # Tolerate two standard deviations below the expected share, because a run on a device compares
    # only about thirty examples.
    deviation = (tally.stock * NATIVE_SHARE * (1 - NATIVE_SHARE)) ** 0.5
    assert tally.accelerated >= max(1, NATIVE_SHARE * tally.stock - 2 * deviation)
    if EXAMPLES >= 3000:
        assert tally.too_few() == []


def check(example: Example, workshop: Workshop, tally: Tally) -> None:
    if hangs(example):
        tally.skipped += 1
        return
    operator = workshop.operator(example.operator)
    # If the kernel appends to its list arguments, make a second call, which would see the changed
    # default if a default were not copied.
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
        # The kernel uses the defaults of its function, which an earlier call may have mutated.
        operator.restore_defaults()
    return [observe(example, operator) for _ in range(times)][-1]


def compare_accelerated(example: Example, operator: Operator, stock: dict[str, object]) -> bool:
    """Check that `accelerate` does not change an operator of torch.library.

    Return whether an accelerated call was native.
    """
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

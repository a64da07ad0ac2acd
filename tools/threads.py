"""Test operators by calling and changing them in many threads, or measure how calls scale.

    python tools/threads.py [--threads 16] [--seconds 5] [--stock] [SCENARIO ...]
    python tools/threads.py --scaling [--seconds 5] [--stock]

In each scenario, one thread changes an operator while the other threads call it. Each call must
return the result of some definition of the operator, or raise OperatorGoneError. Each scenario runs
in its own process, because a failure may be a crash. With --stock, the script tests torch.library
instead of torchop. With --scaling, it measures the time of a call, first in one thread and then in
one thread per core. (With the GIL, the threads never run in parallel, and it prints no result.)
"""

from __future__ import annotations

import argparse
import bisect
import gc
import math
import os
import random
import statistics
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import torchop


def adding(amount: int) -> Callable[[Tensor], Tensor]:
    """Return a function that adds `amount` to a tensor."""

    def body(x: Tensor) -> Tensor:
        return x + amount

    return body


def check(y: Tensor) -> str:
    """Raise an error unless `y` is a result that some definition of the operator computes."""
    if y.shape != (2,) or y.detach()[0].item() not in range(1, 1000):
        raise AssertionError(f"a call returned {y}")
    return "result"


class Scenario:
    """A stress test: one thread calls `change`, and all others call `call`."""

    def __init__(self, library: Any, namespace: str) -> None:
        self.library, self.namespace = library, namespace
        self.define(0)

    def define(self, amount: int) -> None:
        """Define or redefine the operator that all threads call."""
        name = f"{self.namespace}::op"
        self.handle: Any = self.library.custom_op(name, adding(amount), mutates_args=())

    def change(self, chance: random.Random) -> str:
        """Change the operator. Return the name under which `run` counts the change."""
        raise NotImplementedError

    def call(self, chance: random.Random) -> str:
        """Call the operator. Return the name under which `run` counts the call."""
        return check(self.handle(torch.ones(2)))

    def callee(self, chance: random.Random) -> Any:
        """Return the handle, the packet or the overload of the operator, at random."""
        packet = getattr(torch.ops, self.namespace).op
        return chance.choice((self.handle, packet, packet.default))


class Plans(Scenario):
    """One thread registers kernels and formulas, and redefines other operators."""

    def define(self, amount: int) -> None:
        super().define(amount)
        self.handle.register_autograd(lambda ctx, grad: grad)

    def change(self, chance: random.Random) -> str:
        amount, choice = chance.randrange(100), chance.randrange(4)
        if choice == 0:
            self.handle.register_kernel("cpu", adding(amount))
        elif choice == 1:
            self.handle.register_autograd(lambda ctx, grad: grad * amount)
        elif choice == 2:
            self.handle.register_fake(lambda x: x.new_empty(x.shape))
        else:
            own = f"{self.namespace}::own{chance.randrange(8)}"
            op: Any = self.library.custom_op(own, adding(amount), mutates_args=())
            check(op(torch.ones(2)))
            gc.collect()
        return "registered"

    def call(self, chance: random.Random) -> str:
        x = torch.ones(2, requires_grad=chance.random() < 0.3)
        y = self.callee(chance)(x)
        if x.requires_grad:
            y.sum().backward()
        return check(y)


class Redefined(Scenario):
    """One thread redefines the operator."""

    def change(self, chance: random.Random) -> str:
        self.define(chance.randrange(100))
        return "defined"

    def call(self, chance: random.Random) -> str:
        return check(self.callee(chance)(torch.ones(2)))

    def callee(self, chance: random.Random) -> Any:
        try:
            return super().callee(chance)
        except (AttributeError, RuntimeError) as missing:  # there is no operator at the moment
            raise torchop.OperatorGoneError(str(missing)) from None


class Closed(Redefined):
    """One thread closes the operator's library, and defines the operator in a new library."""

    def define(self, amount: int) -> None:
        self.owner = torchop.Library(self.namespace, "FRAGMENT")
        name = f"{self.namespace}::op"
        self.handle = torchop.custom_op(name, adding(amount), mutates_args=(), lib=self.owner)

    def change(self, chance: random.Random) -> str:
        self.owner.close()
        self.define(chance.randrange(100))
        return "closed"


class Implemented(Closed):
    """Like `Closed`, but the operator is defined with `Library.define` and `Library.impl`."""

    def define(self, amount: int) -> None:
        self.owner = torchop.Library(self.namespace, "FRAGMENT")
        self.owner.define("op(Tensor x) -> Tensor")
        self.owner.impl("op", adding(amount), "CompositeExplicitAutograd")
        self.handle = getattr(torch.ops, self.namespace).op.default

    def call(self, chance: random.Random) -> str:
        try:
            return super().call(chance)
        except NotImplementedError:  # there is no kernel yet
            return "NotImplementedError"
        except RuntimeError as error:
            # Before it reports a missing kernel, PyTorch compares the operator's tables without a
            # lock, so it may see a kernel half registered (OperatorEntry::reportError).
            if "_equalsBoxedAndUnboxed" not in str(error):
                raise
            return "NotImplementedError"


class Dispatched(Redefined):
    """Like `Redefined`, but all calls go through the dispatcher."""

    def call(self, chance: random.Random) -> str:
        with torchop.native.disabled():
            return super().call(chance)


class Kernels(Scenario):
    """One thread registers and removes an autocast kernel, by opening and closing a library."""

    def define(self, amount: int) -> None:
        super().define(amount)
        self.implement(amount)

    def implement(self, amount: int) -> None:
        """Register an autocast kernel with a new library."""
        self.owner = self.library.Library(self.namespace, "IMPL")
        self.owner.impl("op", adding(amount), "AutocastCPU")

    def change(self, chance: random.Random) -> str:
        self.owner._destroy()
        self.implement(chance.randrange(100))
        return "implemented"

    def call(self, chance: random.Random) -> str:
        with torch.autocast("cpu"):
            return super().call(chance)


class Lists(Scenario):
    """One thread modifies the list that the other threads pass to the operator."""

    def define(self, amount: int) -> None:
        self.list = [torch.ones(2) for _ in range(8)]

        def body(x: list[Tensor]) -> Tensor:
            return x[0] + amount

        self.handle = self.library.custom_op(f"{self.namespace}::op", body, mutates_args=())

    def change(self, chance: random.Random) -> str:
        self.list[1:] = [torch.ones(2) for _ in range(chance.randrange(1, 20))]
        return "written"

    def call(self, chance: random.Random) -> str:
        return check(self.handle(self.list))


class Chosen(Scenario):
    """One thread registers providers' kernels again, while calls choose between the providers."""

    def define(self, amount: int) -> None:
        name = f"{self.namespace}::op"
        self.handle = torchop.custom_op(name, adding(amount), mutates_args=())
        self.change(random.Random(0))
        self.call(random.Random(0))  # the first call takes seconds to import parts of PyTorch

    def change(self, chance: random.Random) -> str:
        for provider in ("one", "two"):
            self.handle.register_kernel(
                "cpu", adding(chance.randrange(100)), provider=provider, supports=is_contiguous
            )
        return "registered"

    def call(self, chance: random.Random) -> str:
        x = torch.ones(2, chance.randrange(1, 30))[:, 0]
        with torchop.priority({f"{self.namespace}::op": [chance.choice(("one", "two"))]}):
            return check(self.handle(x))


def is_contiguous(x: Tensor) -> bool:
    """Return whether a provider supports a tensor."""
    return x.is_contiguous()


class Recorded(Scenario):
    """One thread replaces the gradient formula of an operator with residuals."""

    def define(self, amount: int) -> None:
        def kernel(x: Tensor) -> Tensor:
            return torchop.residuals(x + amount, x * 2)

        name = f"{self.namespace}::op"
        self.handle = torchop.custom_op(name, kernel, mutates_args=(), residuals={"twice": Tensor})
        self.plain = torchop.custom_op(f"{self.namespace}::plain", adding(1), mutates_args=())
        self.change(random.Random(0))

    def change(self, chance: random.Random) -> str:
        def keep(ctx: Any, inputs: Any, output: Tensor, residuals: Any) -> None:
            ctx.save_for_backward(residuals.twice)

        self.handle.register_autograd(
            lambda ctx, grad: grad * ctx.saved_tensors[0], setup_context=keep
        )
        return "registered"

    def call(self, chance: random.Random) -> str:
        x = torch.ones(2, requires_grad=chance.random() < 0.7)
        y = self.handle(x)
        if x.requires_grad:
            (grad,) = torch.autograd.grad(y.sum(), x)
            check(grad)
        return check(self.plain(y.detach()))


class Accelerated(Scenario):
    """One thread accelerates an operator of torch.library, and restores it."""

    def define(self, amount: int) -> None:
        name = f"{self.namespace}::op"
        self.handle = torch.library.custom_op(name, adding(amount), mutates_args=())
        self.handle(torch.ones(2))  # the first call takes seconds to import Dynamo

    def change(self, chance: random.Random) -> str:
        with torchop.accelerate(f"{self.namespace}::*") as acceleration:
            time.sleep(0.001)
            assert all(row.accelerated for row in acceleration.operators)
        return "accelerated"

    def call(self, chance: random.Random) -> str:
        packet = getattr(torch.ops, self.namespace).op
        return check(chance.choice((self.handle, packet, packet.default))(torch.ones(2)))


class Overloads(Scenario):
    """One thread redefines overloads or replaces their kernels, while others call the packet."""

    def define(self, amount: int) -> None:
        self.handles = {name: self.overload(name, 0) for name in ("pair", "alone")}

    def overload(self, name: str, amount: int) -> Any:
        """Define or redefine an overload."""
        body = self.body(name, amount)
        return torchop.custom_op(f"{self.namespace}::op.{name}", body, mutates_args=())

    def body(self, overload: str, amount: int) -> Callable[..., Tensor]:
        def pair(x: Tensor, y: Tensor) -> Tensor:
            return x + y + amount

        return pair if overload == "pair" else adding(amount)

    def change(self, chance: random.Random) -> str:
        name, amount = chance.choice(("pair", "alone")), chance.randrange(100)
        if chance.random() < 0.5:
            self.handles[name] = self.overload(name, amount)
            return "defined"
        self.handles[name].register_kernel("cpu", self.body(name, amount))
        return "registered"

    def call(self, chance: random.Random) -> str:
        packet = getattr(torch.ops, self.namespace).op
        x = [torch.ones(2)] * chance.randrange(1, 3)
        if chance.random() < 0.9:
            return check(packet(*x))
        with torchop.native.disabled():  # PyTorch selects the overload
            return check(packet(*x))


class Ending(Plans):
    """Like `Plans`, but each call runs in a new thread that ends after the call."""

    def call(self, chance: random.Random) -> str:
        found: list[str] = []
        thread = threading.Thread(target=lambda: found.append(super(Ending, self).call(chance)))
        thread.start()
        thread.join()
        return found[0]


SCENARIOS = {
    kind.__name__.lower(): kind
    for kind in (
        *(Plans, Redefined, Closed, Implemented, Dispatched, Kernels, Lists),
        *(Chosen, Recorded, Accelerated, Overloads, Ending),
    )
}


def run(name: str, library: Any, threads: int, seconds: float) -> Counter[str]:
    """Run a scenario in this process.

    Returns:
        The number of calls that returned a result, of calls that raised OperatorGoneError, and of
        changes of each kind.

    Raises:
        RuntimeError: a call or a change failed. The message contains the traceback.
    """
    scenario = SCENARIOS[name](library, f"{name}_threads")
    counts: list[Counter[str]] = [Counter() for _ in range(threads)]
    failures: list[str] = []
    start = threading.Barrier(threads)

    def work(number: int) -> None:
        step = scenario.change if number == 0 else scenario.call
        chance = random.Random(number)
        start.wait()
        end = time.monotonic() + seconds
        while time.monotonic() < end and not failures:
            try:
                counts[number][step(chance)] += 1
            except torchop.OperatorGoneError:
                counts[number]["OperatorGoneError"] += 1
                time.sleep(0.001)  # yield to the thread that redefines the operator
            except BaseException:
                failures.append(traceback.format_exc())

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if failures:
        raise RuntimeError(failures[0])
    return sum(counts, Counter())


class Batch(NamedTuple):
    """A batch of `CALLS` calls by one thread. All times are in nanoseconds."""

    start: int
    end: int
    processor: int  # CPU time that the thread used

    def is_whole(self) -> bool:
        """Return whether the thread ran without interruption."""
        return self.end - self.start < 1.1 * self.processor + 2000


def at_once(batches: list[Batch], others: list[list[Batch]]) -> list[int]:
    """Return the times of a thread's batches, but only while all other threads were running."""
    for other in others:
        runs: list[list[int]] = []  # the intervals while the other thread was running
        for batch in filter(Batch.is_whole, other):
            if runs and batch.start == runs[-1][1]:
                runs[-1][1] = batch.end
            else:
                runs.append([batch.start, batch.end])
        last = [bisect.bisect(runs, [batch.start, sys.maxsize]) - 1 for batch in batches]
        batches = [
            batch
            for batch, run in zip(batches, last, strict=True)
            if run >= 0 and batch.end <= runs[run][1]
        ]
    return [batch.end - batch.start for batch in batches if batch.is_whole()]


def pace(library: Any, threads: int, seconds: float) -> float:
    """Return how many nanoseconds a call takes while all threads call the same operator.

    The operator has an empty kernel. Only batches of calls that really ran in parallel are counted,
    so it does not matter if other programs use the CPU. Returns nan if no batch ran in parallel.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchop warns about an operator without results
        op: Any = library.custom_op("scaling::op", lambda x: None, mutates_args=(), schema=NOTHING)
    batches: list[list[Batch]] = [[] for _ in range(threads)]
    start = threading.Barrier(threads)

    def work(number: int) -> None:
        # Use a local variable, because reading `op` from the closure acquires a lock.
        x, calls, call = torch.ones(2), range(CALLS), op
        with torch.inference_mode():
            op(x)  # the first call is slow, because it imports modules and compiles a plan
            start.wait()
            now, used = time.perf_counter_ns(), time.thread_time_ns()
            end = now + int(seconds * 1e9)
            while now < end:
                for _ in calls:
                    call(x)
                before, used_before = now, used
                now, used = time.perf_counter_ns(), time.thread_time_ns()
                batches[number].append(Batch(before, now, used - used_before))

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    taken = [
        time
        for number, own in enumerate(batches)
        for time in at_once(own, batches[:number] + batches[number + 1 :])
    ]
    return statistics.median(taken) / CALLS if taken else math.nan


CALLS = 200  # per batch; a batch must be much shorter than a time slice of the scheduler
NOTHING = "(Tensor x) -> ()"


def main() -> int:
    """Run the selected scenarios; return the number of failures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("scenarios", nargs="*", default=list(SCENARIOS), metavar="SCENARIO")
    parser.add_argument("--threads", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--stock", action="store_true", help="test torch.library")
    parser.add_argument("--scaling", action="store_true", help="measure calls by several threads")
    parser.add_argument("--here", action="store_true", help="run in this process")
    options = parser.parse_args()
    library: Any = torch.library if options.stock else torchop
    if not options.stock:
        torchop.native.wait()
    if options.scaling:
        cores = len(os.sched_getaffinity(0))
        one, many = (pace(library, count, options.seconds) for count in (1, cores))
        if math.isnan(many):
            print(f"{one:,.0f} ns per call with 1 thread; {cores} threads never ran in parallel")
            return 0
        print(
            f"{one:,.0f} ns per call with 1 thread, {many:,.0f} ns with {cores} threads: "
            f"{one / many:.2f} of the speed"
        )
        return 0
    if options.here:
        warnings.simplefilter("ignore")
        for name in options.scenarios:
            counts = run(name, library, options.threads, options.seconds)
            print(name, *(f"{count:,} {what}" for what, count in counts.most_common()), sep=", ")
        return 0
    failed = 0
    for name in options.scenarios:
        given = [argument for argument in sys.argv[1:] if argument not in options.scenarios]
        code = subprocess.run([sys.executable, __file__, "--here", *given, name], check=False)
        failed += code.returncode != 0
        if code.returncode != 0:
            print(f"{name}: FAILED with exit code {code.returncode}", flush=True)
    return failed


if __name__ == "__main__":
    raise SystemExit(main())

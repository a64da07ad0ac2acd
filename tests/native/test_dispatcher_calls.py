"""Running calls finish although another thread registers, removes or deregisters what they use.

Uses private names.
"""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch
from torch import Tensor

import torchop
from tests._support.common import adding, assert_clean, needs_native
from tests._support.forking import run_forked
from torchop._core.lock import registration_lock
from torchop._native.plan import OwnCalls

pytestmark = needs_native

T = torch.zeros(2)


class InDispatcher:
    """A call in another thread that stays inside the dispatcher until `released` is set."""

    def __init__(self, namespace: str) -> None:
        self.entered, self.released = threading.Event(), threading.Event()
        self.results: list[Tensor] = []

        def kernel(x: Tensor) -> Tensor:
            self.entered.set()
            assert self.released.wait(20)
            return x + 1

        self.op = torchop.custom_op(f"{namespace}::op", kernel, mutates_args=())
        self.op.register_fake(lambda x: x.new_empty(x.shape))

    def __enter__(self) -> InDispatcher:
        self.call = threading.Thread(target=self._call)
        self.call.start()
        assert self.entered.wait(60)
        return self

    def __exit__(self, *exception: object) -> None:
        self.released.set()
        self.call.join(60)

    def _call(self) -> None:
        with torchop.native.disabled():
            self.results.append(self.op(T))


@pytest.mark.filterwarnings("ignore::torchop.RedefinitionWarning")
@pytest.mark.parametrize("change", ["kernel", "library", "definition", "closed"])
def test_a_running_call_finishes_with_the_old_kernel(namespace, change):
    dispatched = InDispatcher(namespace)
    library = torchop.Library(namespace, "IMPL")
    if change == "library":
        library.impl("op", lambda x: x + 5, "AutocastCPU")
    changes = {
        "kernel": lambda: dispatched.op.register_kernel("cpu", lambda x: x + 2),
        "library": library.close,
        "definition": lambda: adding(namespace, 3),
        "closed": lambda: dispatched.op._definition.deregister("it was closed"),
    }
    with dispatched:
        changes[change]()
        assert not dispatched.results
    assert [y.tolist() for y in dispatched.results] == [[1, 1]]


def test_all_calls_that_wait_for_a_plan_run(namespace, monkeypatch):
    op = adding(namespace)
    op(T)
    compiled: list[object] = []
    compile_plan = OwnCalls._compile

    def counted(calls: OwnCalls) -> object:
        compiled.append(calls)
        return compile_plan(calls)

    monkeypatch.setattr(OwnCalls, "_compile", counted)
    started = threading.Barrier(9)
    results: list[Tensor] = []

    def call() -> None:
        started.wait(60)
        results.append(op(T))

    threads = [threading.Thread(target=call) for _ in range(8)]
    with registration_lock:
        op.register_fake(lambda x: x.new_empty(x.shape))
        for thread in threads:
            thread.start()
        started.wait(60)
        time.sleep(0.1)  # gives all threads the time to reach the lock
    for thread in threads:
        thread.join(60)
    assert [y.tolist() for y in results] == [[1, 1]] * 8
    # Plans are compiled without the lock, so several threads may compile the same plan.
    assert 1 <= len(compiled) <= 8


def test_threads_call_an_operator_that_is_redefined_with_other_schemas():
    """Runs in a child process, which would crash if PyTorch freed data that a running call uses."""
    program = """
        import threading, time, warnings
        import torch, torchop

        warnings.simplefilter("ignore", torchop.RedefinitionWarning)
        torchop.native.wait()
        T, wrong, counts = torch.zeros(2), [], []

        def short(x):
            return x + 1

        def long(x, y=None, z=None, n=1):
            return x + 2

        def define(number):
            function, schema = [
                (short, "(Tensor x) -> Tensor"),
                (long, "(Tensor x, Tensor? y=None, Tensor? z=None, int n=1) -> Tensor"),
            ][number % 2]
            op = torchop.custom_op("threads::op", function, mutates_args=(), schema=schema)
            op.register_fake(lambda x, *rest: torch.empty_like(x))
            op.register_autograd(lambda ctx, grad: (grad, None, None, None)[: 1 + number % 2 * 3])
            return op

        def call(way, x, is_native):
            count = 0
            while not stopped:
                try:
                    called = [
                        lambda: op,
                        lambda: torch.ops.threads.op,
                        lambda: torch.ops.threads.op.default,
                    ][way]()
                    if is_native:
                        result = called(x)
                    else:
                        with torchop.native.disabled():
                            result = called(x)
                    if result.tolist() not in ([1, 1], [2, 2]):
                        wrong.append(result)
                    count += 1
                except torchop.OperatorGoneError:
                    pass
                except AttributeError as error:
                    # Between two definitions, `torch.ops` does not find the name.
                    if "has no attribute 'op'" not in str(error):
                        wrong.append(error)
                except BaseException as error:
                    wrong.append(error)
            counts.append(count)

        op, stopped = define(0), False
        threads = [
            threading.Thread(target=call, args=(way, x, is_native))
            for way in range(3)
            for x, is_native in ((T, True), (T, False), (T.clone().requires_grad_(), False))
        ]
        for thread in threads:
            thread.start()
        until, number = time.monotonic() + 3, 0
        while time.monotonic() < until:
            number += 1
            op = define(number)
        stopped = True
        for thread in threads:
            thread.join(60)
        print(wrong[:3], number > 20, min(counts) > 0)
    """
    assert assert_clean(run_forked(program)) == "[] True True\n"


@pytest.mark.skipif(
    "libasan" in os.environ.get("LD_PRELOAD", ""), reason="AddressSanitizer keeps freed memory"
)
def test_a_redefinition_costs_at_most_10_kb():
    program = """
        import gc, warnings
        import torch, torchop

        warnings.simplefilter("ignore", torchop.RedefinitionWarning)
        torchop.native.wait()
        x = torch.zeros(2, requires_grad=True)

        def redefine(times):
            for _ in range(times):
                big = bytearray(10**5)
                op = torchop.custom_op(
                    "memory::op",
                    lambda x: x + len(big),
                    mutates_args=(),
                    schema="(Tensor x) -> Tensor",
                )
                op.register_kernel("cpu", lambda x: x + len(big))
                op.register_fake(torch.empty_like)
                op.register_autograd(lambda ctx, grad: grad + len(big))
                op.register_vmap(lambda info, in_dims, x: (op(x), in_dims[0]))
                op(x).sum().backward()
                torch.ops.memory.op(x)
            gc.collect()

        def resident():
            with open("/proc/self/statm") as file:
                return int(file.read().split()[1]) * 4096

        redefine(200)
        before = resident()
        redefine(1000)
        print((resident() - before) // 1000)
    """
    assert int(assert_clean(run_forked(program))) < 10_000

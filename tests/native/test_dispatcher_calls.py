"""Registration and deregistration wait for dispatcher calls in other threads.

Uses private names.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import torchop
from tests._support.common import adding, assert_clean, needs_native
from tests._support.forking import run_forked
from torchop._core.lock import registration_lock
from torchop._native import switch
from torchop._native.plan import OwnCalls

pytestmark = needs_native

T = torch.zeros(2)


class InDispatcher:
    """A call in another thread that stays inside the dispatcher until `released` is set."""

    def __init__(self, namespace: str, prepare: Callable[[], object] | None = None) -> None:
        self.entered, self.released = threading.Event(), threading.Event()
        self.results: list[Tensor] = []

        def kernel(x: Tensor) -> Tensor:
            self.entered.set()
            assert self.released.wait(20)
            return x + 1

        self.op = torchop.custom_op(f"{namespace}::op", kernel, mutates_args=())
        self.op.register_fake(lambda x: x.new_empty(x.shape))
        if prepare is not None:
            prepare()
        self.call = threading.Thread(target=self._call)
        self.call.start()
        assert self.entered.wait(60)

    def _call(self) -> None:
        with torchop.native.disabled():
            self.results.append(self.op(T))


@pytest.mark.filterwarnings("ignore::torchop.RedefinitionWarning")
@pytest.mark.parametrize("change", ["kernel", "library", "definition"])
def test_a_change_waits_for_a_call_of_another_thread(namespace, change):
    implementation = torchop.Library(namespace, "IMPL")
    dispatched = InDispatcher(
        namespace, lambda: implementation.impl("op", lambda x: x + 5, "AutocastCPU")
    )
    changes = {
        "kernel": lambda: dispatched.op.register_kernel("cuda", lambda x: x + 2),
        "library": implementation._destroy,
        "definition": lambda: adding(namespace, 3),
    }
    done: list[str] = []

    def make() -> None:
        changes[change]()
        done.append("changed")

    changing = threading.Thread(target=make)
    changing.start()
    changing.join(0.1)
    assert done == []
    dispatched.released.set()
    changing.join(60)
    dispatched.call.join(60)
    assert done == ["changed"]
    assert [y.tolist() for y in dispatched.results] == [[1, 1]]


def test_a_change_waits_once_for_a_call_that_takes_long(namespace):
    """Only the first change waits for a call that takes long, and for at most a second.

    If each of the 20 changes waited for the same call, the test would take 20 seconds.
    """
    dispatched = InDispatcher(namespace)
    native = switch.native_module()
    for _ in range(20):
        assert native.hold_calls([f"{namespace}::op"]) is not None
    later = InDispatcher.__new__(InDispatcher)
    later.entered, later.released, later.results = threading.Event(), dispatched.released, []
    later.op = dispatched.op
    dispatched.entered.clear()
    later.call = threading.Thread(target=later._call)
    later.call.start()
    assert dispatched.entered.wait(60)
    done: list[object] = []
    changing = threading.Thread(target=lambda: done.append(native.hold_calls([f"{namespace}::op"])))
    changing.start()
    changing.join(0.1)
    assert done == []
    dispatched.released.set()
    for thread in (changing, dispatched.call, later.call):
        thread.join(60)
    assert len(done) == 1
    assert [y.tolist() for y in dispatched.results + later.results] == [[1, 1]] * 2


def test_a_call_waits_for_a_change_of_another_thread(namespace):
    op = adding(namespace)
    op(T)
    change = switch.native_module().hold_calls([f"{namespace}::op"])
    results: list[Tensor] = []

    def call() -> None:
        with torchop.native.disabled():
            results.append(op(T))

    calling = threading.Thread(target=call)
    calling.start()
    calling.join(0.1)
    assert results == []
    with torchop.native.disabled():
        assert op(T).tolist() == [1, 1]  # a thread does not wait for its own change
    assert op(T).tolist() == [1, 1]  # native calls do not use the dispatcher, so they do not wait
    del change
    calling.join(60)
    assert [y.tolist() for y in results] == [[1, 1]]


def test_change_does_not_wait_for_a_call_that_waits_for_the_lock(namespace):
    """A change holds the registration lock, so it must not wait for a call that needs the lock.

    Once that call has got the lock, the next change waits for the call as usual.
    """
    entered, is_through, released = threading.Event(), threading.Event(), threading.Event()
    done: list[object] = []

    def kernel(x: Tensor) -> Tensor:
        entered.set()
        with registration_lock:
            is_through.set()
        assert released.wait(20)
        return x + 1

    op = torchop.custom_op(f"{namespace}::op", kernel, mutates_args=())
    op.register_fake(lambda x: x.new_empty(x.shape))

    def call() -> None:
        with torchop.native.disabled():
            done.append(op(T))

    def change() -> None:
        done.append(switch.native_module().hold_calls([f"{namespace}::op"]))

    calling, changing = threading.Thread(target=call), threading.Thread(target=change)
    with registration_lock:
        released.set()
        op(T)  # prepare the operator, so that the call below first takes the lock in its kernel
        for event in (entered, is_through, released):
            event.clear()
        calling.start()
        assert entered.wait(60)
        start = time.monotonic()
        change()
        # The change did not wait for the call, because the call needs the lock that this thread
        # holds. For a call that does not need the lock, the change would wait a second.
        assert time.monotonic() - start < 0.9
        assert not is_through.is_set()
    del done[:]  # ends the change
    assert is_through.wait(60)
    changing.start()
    changing.join(0.1)
    assert done == []
    released.set()
    changing.join(60)
    calling.join(60)
    assert len(done) == 2


def test_an_exit_stack_takes_the_lock():
    with contextlib.ExitStack() as stack:
        stack.enter_context(registration_lock)
        assert registration_lock._is_owned()
    assert not registration_lock._is_owned()


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


def test_changes_of_missing_operators_do_not_wait(namespace):
    native = switch.native_module()
    assert native.hold_calls([f"{namespace}::missing"]) is None
    assert native.end_calls([f"{namespace}::missing"]) is None
    with pytest.raises(TypeError):
        native.hold_calls([1])


def test_deregistration_during_a_call_in_the_dispatcher():
    """Runs in a child process, which would crash if PyTorch freed data that a running call uses."""
    program = """
        import torch, torchop, warnings
        from tests.native.test_dispatcher_calls import InDispatcher
        from tests._support.common import adding

        class Refused(InDispatcher):
            def _call(self):
                try:
                    super()._call()
                except torchop.OperatorGoneError as error:
                    print(error)

        warnings.simplefilter("ignore", torchop.RedefinitionWarning)
        dispatched = Refused("kept")
        dispatched.op._definition.deregister("it was closed")
        dispatched.released.set()
        dispatched.call.join(60)
        assert not dispatched.results

        dispatched = Refused("kept")
        new = adding("kept", 3)
        dispatched.released.set()
        dispatched.call.join(60)
        assert [y.tolist() for y in dispatched.results] == [[1, 1]]
        with torchop.native.disabled():
            assert new(torch.zeros(2)).tolist() == [3, 3]
        assert torch.ops.kept.op(torch.zeros(2)).tolist() == [3, 3]
    """
    assert assert_clean(run_forked(program)) == "it was closed\n"

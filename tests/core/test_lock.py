"""A child forked while another thread holds the registration lock can register operators.

Uses private names.
"""

from __future__ import annotations

import os
import signal
import threading

import pytest
import torch
from torch import Tensor

import torchop
from torchop._core.lock import registration_lock


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform has no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_child_of_a_fork_during_a_registration_is_not_locked_out(namespace: str) -> None:
    locked, done = threading.Event(), threading.Event()

    def register_slowly() -> None:
        with registration_lock:
            locked.set()
            done.wait(30)

    thread = threading.Thread(target=register_slowly)
    thread.start()
    locked.wait(30)
    child = os.fork()
    if child == 0:
        is_right = False
        try:
            signal.alarm(20)

            @torchop.custom_op(f"{namespace}::double", mutates_args=())
            def double(x: Tensor) -> Tensor:
                return x * 2

            # Use the CPU, because a forked process cannot use a GPU.
            is_right = double(torch.ones(1, device="cpu")).item() == 2
        finally:
            os._exit(0 if is_right else 1)  # else the child would run the other tests
    done.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform has no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_child_forked_by_the_registering_thread_releases_the_lock(namespace: str) -> None:
    parent = os.getpid()
    is_free = []
    try:
        with registration_lock:
            child = os.fork()
            torchop.custom_op(
                f"{namespace}::more", lambda x: x + 1, mutates_args=(), schema="(int x) -> int"
            )
        if os.getpid() != parent:
            signal.alarm(20)
            thread = threading.Thread(
                target=lambda: is_free.append(registration_lock.acquire(timeout=5))
            )
            thread.start()
            thread.join()
    finally:
        if os.getpid() != parent:
            os._exit(0 if is_free == [True] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

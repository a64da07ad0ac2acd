"""The lock for all registrations, and the hooks that run once it is released.

The lock rule: validate and call user code first, then lock, then publish. A thread that holds the
lock must run only code of torchop and PyTorch. It must not call a function that a user registered
(`supported`, `validate`, `attach`, `detach`), convert a user's object, import a module, or emit a
warning, since warning filters and hooks may run user code. Otherwise, two threads could deadlock:
one holds this lock and waits for a user's lock or an import lock, and the other one does the
reverse.

Libraries run hooks when they are closed, possibly from a finalizer. The garbage collector may run
finalizers in any thread at any time, so for the same reason, finalizers must never wait for the
lock or call user code. If the lock is held, or if a hook calls user code, a finalizer just adds the
hook to a queue. The next registration, or the next call that compiles a plan, then runs the queued
hooks in `run_waiting_hooks`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from torchop._compat import libraries

Result = TypeVar("Result")
Published = TypeVar("Published")

# Every registration holds this lock while it updates several of PyTorch's registries, which are
# plain dicts and sets without any locking of their own.
registration_lock: Any = threading.RLock()

libraries.lock = registration_lock


def run_waiting_hooks() -> None:
    """Run the hooks of closed libraries, unless this thread holds the lock."""
    if libraries.waiting_hooks and not registration_lock._is_owned():
        libraries.run_waiting_hooks()


class then_run_hooks:  # noqa: N801  # used like a function
    """Hold the lock, and run the waiting hooks after releasing it."""

    def __enter__(self) -> None:
        registration_lock.acquire()

    def __exit__(self, kind: object, *error: object) -> None:
        registration_lock.release()
        if kind is None:
            run_waiting_hooks()


def compute_then_publish(
    compute: Callable[[], Result],
    publish: Callable[[Result], Published],
    version: Callable[[], object],
) -> Published:
    """Call `compute` without the lock, because it may run user code, then `publish` with the lock.

    Every registration changes the value of `version()`. If the value changes while `compute` runs,
    `compute` may have seen an incomplete registration, so discard its result or exception and run
    it again.
    """
    while True:
        before = version()
        try:
            result = compute()
        except Exception:
            with registration_lock:
                if version() == before:
                    raise
            continue
        with registration_lock:
            if version() == before:
                return publish(result)


def _release_after_fork() -> None:
    """Reset the lock in a forked child process, unless the forking thread itself holds it."""
    if not registration_lock._is_owned():
        registration_lock._at_fork_reinit()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_release_after_fork)

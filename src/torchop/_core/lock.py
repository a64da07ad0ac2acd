"""The lock of all registrations, and the hooks that run after it is released.

The lock rule: validate and call user code first, then lock, then publish. While a thread holds the
lock, it runs only code of torchop and PyTorch: no function that a user registered (`supported`,
`validate`, `attach`, `detach`), no conversion of a user's object, no import and no warning, because
a filter or a hook may run user code for a warning. Otherwise, two threads would deadlock if one
holds the lock and waits for a user's lock, or for the lock of an import, and the other does the
reverse.

For the same reason, finalizers never wait for the lock and never call user code, because the
garbage collector may run them in any thread at any time. If the lock is held, and for all hooks
that call user code, they only add the hooks to a queue. The next registration, or the next call
that compiles a plan, runs these hooks in `run_waiting_hooks`.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torchop._compat import deregistration, libraries

Result = TypeVar("Result")
Published = TypeVar("Published")

# Each registration holds this lock, because it changes several of PyTorch's registries, and these
# are plain dicts and sets without locks.
registration_lock: Any = threading.RLock()

libraries.lock = deregistration.lock = registration_lock


def run_waiting_hooks() -> None:
    """Run the hooks of closed libraries, unless this thread holds the lock."""
    if libraries.waiting_hooks and not registration_lock._is_owned():
        libraries.run_waiting_hooks()


@contextlib.contextmanager
def then_run_hooks() -> Iterator[None]:
    """Hold the lock, and run the waiting hooks after releasing it."""
    with registration_lock:
        yield
    run_waiting_hooks()


def compute_then_publish(
    compute: Callable[[], Result],
    publish: Callable[[Result], Published],
    version: Callable[[], object],
) -> Published:
    """Call `compute` without the lock, because it may run user code, and `publish` with the lock.

    A concurrent registration changes `version()`, so the result of incomplete rules, or an
    exception because of them, is discarded and computed again.
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
    """Reset the lock in a forked child process, unless the forking thread holds the lock."""
    if not registration_lock._is_owned():
        registration_lock._at_fork_reinit()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_release_after_fork)

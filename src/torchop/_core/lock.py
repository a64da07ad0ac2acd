"""The process-wide lock for registrations."""

from __future__ import annotations

import os
import threading

# Registrations hold this lock, because defining an operator changes several of PyTorch's
# registries, and these are plain dicts and sets. The lock has its own class because the C++
# extension replaces the class's `__enter__`, and RLock is immutable.
registration_lock = type("RegistrationLock", (type(threading.RLock()),), {})()


def _release_after_fork() -> None:
    """Reset the lock in a forked child, unless the thread that forked holds it."""
    if not registration_lock._is_owned():
        registration_lock._at_fork_reinit()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_release_after_fork)

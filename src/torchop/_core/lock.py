"""The process-wide lock for registrations."""

from __future__ import annotations

import os
import threading

# PyTorch's registries are plain dicts and sets, and a definition changes several of them. A
# subclass of RLock, because native calls replace `__enter__` in the class.
registration_lock = type("RegistrationLock", (type(threading.RLock()),), {})()


def _release_after_fork() -> None:
    """Release the lock in a forked child, which does not have the thread that held it."""
    if not registration_lock._is_owned():
        registration_lock._at_fork_reinit()


if hasattr(os, "register_at_fork"):  # there is no forking on Windows
    os.register_at_fork(after_in_child=_release_after_fork)

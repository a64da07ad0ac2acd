"""The process-wide lock for registrations."""

from __future__ import annotations

import os
import threading

# PyTorch's registries are plain dicts and sets, and defining an operator changes several of them. A
# subclass of RLock, because the C++ extension replaces `__enter__` of the class.
registration_lock = type("RegistrationLock", (type(threading.RLock()),), {})()


def _release_after_fork() -> None:
    """Release the lock in a forked child if it was held by a thread that is not in the child."""
    if not registration_lock._is_owned():
        registration_lock._at_fork_reinit()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_release_after_fork)

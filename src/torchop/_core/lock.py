"""The process-wide lock for registrations."""

from __future__ import annotations

import os
import threading

# Needed because a definition changes several registries of PyTorch, which are plain dicts and sets.
# A subclass of RLock, because the C++ extension replaces `__enter__` of the class.
registration_lock = type("RegistrationLock", (type(threading.RLock()),), {})()


def _release_after_fork() -> None:
    """Release the lock in a forked child if another thread held it, which the child lacks."""
    if not registration_lock._is_owned():
        registration_lock._at_fork_reinit()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_release_after_fork)

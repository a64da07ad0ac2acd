"""The lock of registrations: one at a time in the whole process."""

from __future__ import annotations

import os
import threading

# PyTorch's registries are plain dicts and sets, and a definition touches several of them. The lock
# has a class of its own because native calls give that another `__enter__`.
registration_lock = type("RegistrationLock", (type(threading.RLock()),), {})()


def _let_go_after_fork() -> None:
    """Frees the lock if another thread held it at the fork: that one is not there in the child."""
    if not registration_lock._is_owned():
        registration_lock._at_fork_reinit()


if hasattr(os, "register_at_fork"):  # there is no forking on Windows
    os.register_at_fork(after_in_child=_let_go_after_fork)

from __future__ import annotations

import os
import threading

# Each registration holds this lock, because it changes several of PyTorch's registries, and these
# are plain dicts and sets without locks. The lock is an instance of a subclass, because the C++
# extension replaces `__enter__`, and RLock itself is immutable.
registration_lock = type("RegistrationLock", (type(threading.RLock()),), {})()


def _release_after_fork() -> None:
    """Reset the lock in a forked child process, unless the forking thread holds the lock."""
    if not registration_lock._is_owned():
        registration_lock._at_fork_reinit()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_release_after_fork)

"""What a thread of ours does while the interpreter ends: nothing.

Python stops daemon threads wherever they are. One that is stopped while it writes to stderr aborts
the process, and one that is stopped inside C++ unwinds through code that is not made for it.
"""

from __future__ import annotations

import atexit
import os
import threading

# Held by a thread while it loads the extension, or writes. When the interpreter ends, it takes the
# lock after that, and never gives it back: a thread that comes later waits for good.
not_exiting = threading.RLock()


@atexit.register
def _stop_threads() -> None:
    # A thread that hangs must not keep the program from ending.
    not_exiting.acquire(timeout=10)


if hasattr(os, "register_at_fork"):  # there is no forking on Windows
    os.register_at_fork(after_in_child=not_exiting._at_fork_reinit)  # type: ignore[attr-defined]

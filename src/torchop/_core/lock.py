"""The lock of registrations: one at a time in the whole process."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

# PyTorch's registries are plain dicts and sets, and a definition touches several of them.
registration_lock = threading.RLock()
# A thread that holds it while another forks is not there in the child, and would never let go.
if hasattr(os, "register_at_fork"):  # there is no forking on Windows
    os.register_at_fork(
        after_in_child=registration_lock._at_fork_reinit  # type: ignore[attr-defined]
    )


def completed(step: Callable[[], None]) -> None:
    """Takes a step that is safe to repeat, and repeats it if an exception interrupts it.

    So an operator never stays half-ended, whatever is raised in between, `KeyboardInterrupt` too.
    """
    try:
        step()
    except BaseException:
        step()
        raise

"""The lock of registrations: one at a time in the whole process."""

from __future__ import annotations

import os
import threading

# PyTorch's registries are plain dicts and sets, and a definition touches several of them.
registration_lock = threading.RLock()
# A thread that holds it while another forks is not there in the child, and would never let go.
if hasattr(os, "register_at_fork"):  # there is no forking on Windows
    os.register_at_fork(
        after_in_child=registration_lock._at_fork_reinit  # type: ignore[attr-defined]
    )

"""Mark tests that fail on a Python without the GIL, which frees some objects later or never.

    @pytest.mark.needs_gil("deregistered classes are freed")

On Python 3.13t such a test must fail, as with the marker of `releases.py`. Later versions free more
objects, though not all of them, so there it may pass or fail.
"""

from __future__ import annotations

import sys
import sysconfig
import threading
from collections.abc import Iterable

import pytest

MARKER = "needs_gil(reason): fails on a Python without the GIL, for this reason"
HAS_GIL = not sysconfig.get_config_var("Py_GIL_DISABLED")
HAS_TO_FAIL = sys.version_info[:2] == (3, 13)  # used only if Python has no GIL


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", MARKER)
    if not HAS_GIL:
        # Once a process has started a thread, Python 3.13t frees no more classes or module
        # functions. Start one now, so the results don't depend on which test is the first to start
        # a thread.
        thread = threading.Thread(target=int)
        thread.start()
        thread.join()


def pytest_collection_modifyitems(items: Iterable[pytest.Item]) -> None:
    for item in items if not HAS_GIL else ():
        for marker in item.iter_markers("needs_gil"):
            reason = f"needs a Python with the GIL: {marker.args[0]}"
            item.add_marker(pytest.mark.xfail(reason=reason, strict=HAS_TO_FAIL))


# Remove this mark when a release after greenlet 3.5.6 compiles for Python 3.13t.
needs_greenlets = pytest.mark.needs_gil("greenlet, which does not compile for Python 3.13t")

"""Tests that a Python without the GIL cannot pass, because it frees objects later, or never.

    @pytest.mark.needs_gil("classes that end are freed")

On Python 3.13t the test is not left out: it runs, and has to fail, as those of `releases` do. Later
ones free more of it, but not all, so there it may fail.
"""

from __future__ import annotations

import sys
import sysconfig
import threading
from collections.abc import Iterable

import pytest

MARKER = "needs_gil(reason): fails on a Python without the GIL, for this reason"
HAS_GIL = not sysconfig.get_config_var("Py_GIL_DISABLED")
HAS_TO_FAIL = sys.version_info[:2] == (3, 13)  # where it has no GIL


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", MARKER)
    if not HAS_GIL:
        # Python 3.13t frees no class from here on, nor the functions of modules. Otherwise that
        # would depend on which test happens to be the first that starts a thread.
        thread = threading.Thread(target=int)
        thread.start()
        thread.join()


def pytest_collection_modifyitems(items: Iterable[pytest.Item]) -> None:
    for item in items if not HAS_GIL else ():
        for marker in item.iter_markers("needs_gil"):
            reason = f"needs a Python with the GIL: {marker.args[0]}"
            item.add_marker(pytest.mark.xfail(reason=reason, strict=HAS_TO_FAIL))


# The latest is 3.5.6.
needs_greenlets = pytest.mark.needs_gil("greenlet, which does not compile for Python 3.13t")

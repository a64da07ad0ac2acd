"""Tests that a release of PyTorch cannot pass, because it lacks something or does it otherwise.

    @pytest.mark.needs_torch("2.13", "torch.Tag.inplace and torch.Tag.out")

On an older release the test is not left out: it runs, and has to fail. So a reason that no longer
holds, or never did, fails the run. `needs_torch(..., before="2.14")` is for what a release ended.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch

MARKER = (
    "needs_torch(since, reason, *, before=None): fails on PyTorch older than `since`, or not older "
    "than `before`, for this reason"
)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", MARKER)


def pytest_collection_modifyitems(items: Iterable[pytest.Item]) -> None:
    for item in items:
        for marker in item.iter_markers("needs_torch"):
            lacking = _lacking(*marker.args, **marker.kwargs)
            if lacking is not None:
                item.add_marker(lacking)


def _lacking(since: str, reason: str, *, before: str | None = None) -> pytest.MarkDecorator | None:
    """Return the effect of the marker on a test with this release."""
    is_there = _release(since) <= _release(torch.__version__)
    is_still_there = before is None or _release(torch.__version__) < _release(before)
    if is_there and is_still_there:
        return None
    until = "" if before is None else f", and older than {before}"
    text = f"needs PyTorch {since}{until}: {reason}"
    return pytest.mark.xfail(reason=text, strict=True)


def is_older(release: str) -> bool:
    """Return whether the installed PyTorch is older than a release."""
    return _release(torch.__version__) < _release(release)


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2])


# The tags of the conventional forms of mutation; before 2.13 something that no operator has.
INPLACE: Any = getattr(torch.Tag, "inplace", "torch.Tag.inplace")
OUT: Any = getattr(torch.Tag, "out", "torch.Tag.out")


def of_form(tag: str, schema: str) -> dict[str, Any]:
    """Return the options for an in-place or out= operator: the tag, or a schema without tags.

    The second is for our operators alone; torch.library refuses what aliases an argument.
    """
    return {"tags": getattr(torch.Tag, tag)} if hasattr(torch.Tag, tag) else {"schema": schema}


needs_tags = pytest.mark.needs_torch("2.13", "torch.Tag.inplace and torch.Tag.out")

# Enumerations are a schema type since 2.12.
needs_enums = pytest.mark.needs_torch("2.12", "enumerations in schemas")
# Generators have a class of their own since 2.13.
GENERATOR = "torch._C.Generator" if _release(torch.__version__) >= (2, 13) else "Generator"

"""Mark tests that fail on an older or newer release of PyTorch.

    @pytest.mark.needs_torch("2.13", "torch.Tag.inplace and torch.Tag.out")

On any other release, the test still runs, and must fail. So a marker that is wrong or outdated
makes the run fail. `needs_torch(..., before="2.14")` is for behaviour that a release removed.
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
    is_there = _release(since) <= _release(torch.__version__)
    is_still_there = before is None or _release(torch.__version__) < _release(before)
    if is_there and is_still_there:
        return None
    until = "" if before is None else f", and older than {before}"
    text = f"needs PyTorch {since}{until}: {reason}"
    return pytest.mark.xfail(reason=text, strict=True)


def is_older(release: str) -> bool:
    return _release(torch.__version__) < _release(release)


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2])


# The tags of in-place and out= operators. Before 2.13 they don't exist, so use a value that no
# operator has.
INPLACE: Any = getattr(torch.Tag, "inplace", "torch.Tag.inplace")
OUT: Any = getattr(torch.Tag, "out", "torch.Tag.out")


def of_form(tag: str, schema: str) -> dict[str, Any]:
    """Return the options that define an in-place or out= operator.

    The option is the tag, or the schema before 2.13, which lacks the tags.
    """
    return {"tags": getattr(torch.Tag, tag)} if hasattr(torch.Tag, tag) else {"schema": schema}


needs_tags = pytest.mark.needs_torch("2.13", "torch.Tag.inplace and torch.Tag.out")

needs_enums = pytest.mark.needs_torch("2.12", "enumerations in schemas")
# The type of `torch.Generator` in schemas was renamed in 2.13.
GENERATOR = "torch._C.Generator" if _release(torch.__version__) >= (2, 13) else "Generator"

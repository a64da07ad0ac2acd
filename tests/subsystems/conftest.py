"""A compiler without memories for every test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.subsystems.graphs import fresh_compiler


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    with fresh_compiler():
        yield

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.rules.user.sharding import ranks


@pytest.fixture
def mesh() -> Iterator[Any]:
    with ranks.simulated_mesh((2,)) as mesh:
        yield mesh


@pytest.fixture
def square() -> Iterator[Any]:
    with ranks.simulated_mesh((2, 2)) as mesh:
        yield mesh

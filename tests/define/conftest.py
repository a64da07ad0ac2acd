from __future__ import annotations

import pytest

import torchop
from tests.define.families import sine


@pytest.fixture
def family(namespace: str) -> torchop.OperatorFamily:
    return sine(namespace)

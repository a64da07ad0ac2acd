from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch._dynamo.symbolic_convert import InliningInstructionTranslator

from tests.integration.compile.graphs import fresh_compiler


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    with fresh_compiler():
        yield


@pytest.fixture
def traced(monkeypatch) -> list[str]:
    """Return a list to which Dynamo adds the name of each function that it inlines."""
    names = []
    inline = InliningInstructionTranslator.inline_call

    def inline_and_note(parent: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
        names.append(func.get_name())
        return inline(parent, func, *args, **kwargs)

    monkeypatch.setattr(InliningInstructionTranslator, "inline_call", inline_and_note)
    return names

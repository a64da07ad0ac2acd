"""setup_context: what a formula saves of a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchop._definition import Definition
from torchop._schema.callables import accepts, check_signature

SetupContext = Callable[..., Any]

_SETUP = ("ctx", "inputs", "output")
_SETUP_KEYWORD_ONLY = ("ctx", "inputs", "keyword_only_inputs", "output")


def check_setup_context(definition: Definition, setup_context: SetupContext | None) -> None:
    """Refuses a function that does not take what it will be called with.

    Raises:
        RuleSignatureError: a `TypeError`.
    """
    parameters = _setup_parameters(definition)
    if setup_context is None or (
        callable(setup_context) and accepts(setup_context, (), parameters)
    ):
        return
    check_signature(f"{definition}: setup_context", setup_context, parameters)


def setup_caller(
    setup_context: SetupContext | None, definition: Definition
) -> Callable[[Any, Any, Any, Any], Any] | None:
    """Calls `setup_context` by keyword, as PyTorch does, or by position if its names differ."""
    if setup_context is None:
        return None
    by_keyword = accepts(setup_context, (), _setup_parameters(definition))
    if definition.schema.keyword_only:
        if by_keyword:
            return lambda ctx, inputs, keywords, output: setup_context(
                ctx=ctx, inputs=inputs, keyword_only_inputs=keywords, output=output
            )
        return setup_context
    if by_keyword:
        return lambda ctx, inputs, keywords, output: setup_context(
            ctx=ctx, inputs=inputs, output=output
        )
    return lambda ctx, inputs, keywords, output: setup_context(ctx, inputs, output)


def _setup_parameters(definition: Definition) -> tuple[str, ...]:
    return _SETUP_KEYWORD_ONLY if definition.schema.keyword_only else _SETUP

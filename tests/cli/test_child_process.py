"""Processes of commands: the modules that they import first."""

from __future__ import annotations

from collections.abc import Iterator

import click
import pytest

from torchop.cli.child_process import answers_of


def answers_nothing() -> Iterator[int]:
    yield from ()


def test_a_module_that_cannot_be_imported_is_told() -> None:
    with (
        answers_of(answers_nothing, (), 60, ["no_such_module_at_all"]) as messages,
        pytest.raises(click.ClickException, match="no_such_module_at_all cannot be imported: Mod"),
    ):
        next(messages)

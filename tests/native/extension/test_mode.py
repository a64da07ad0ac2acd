"""What TORCHOP_NATIVE may be."""

from __future__ import annotations

import pytest

from torchop._native.extension.mode import mode


@pytest.mark.parametrize("value", ["auto", "0", "require"])
def test_value_is_the_mode(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHOP_NATIVE", value)
    assert mode() == value


def test_default_is_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHOP_NATIVE", raising=False)
    assert mode() == "auto"
    monkeypatch.setenv("TORCHOP_NATIVE", "")
    assert mode() == "auto"


def test_another_value_is_an_error_that_names_the_three(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHOP_NATIVE", "yes")
    with pytest.raises(ValueError, match=r"TORCHOP_NATIVE is 'yes'.*auto \(.*0 \(.*require \("):
        mode()

"""Warnings name the line of the user's code that caused them. Uses private names."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests._support.common import in_threads
from torchop import _errors


def test_users_place_is_the_first_frame_outside_torchop() -> None:
    place = _errors.users_place()
    assert (place.file, place.module) == (__file__, __name__)
    assert (
        "place = _errors.users_place()" in Path(__file__).read_text().splitlines()[place.line - 1]
    )


def test_users_place_skips_frames_of_torchop_and_of_imports() -> None:
    inside = {"__name__": "torchop._somewhere", "users_place": _errors.users_place}
    exec("def find(): return users_place()", inside)
    outside = {"__name__": "torchop", "find": inside["find"]}
    exec("place = find()", outside)
    assert outside["place"].module == __name__  # type: ignore[attr-defined]


def test_warning_of_another_thread_points_at_the_place() -> None:
    place = _errors.users_place()

    with pytest.warns(UserWarning, match="it rains") as caught:
        in_threads(lambda _: _errors.warn_at(place, "it rains", UserWarning), count=1)
    assert (caught[0].filename, caught[0].lineno) == (place.file, place.line)

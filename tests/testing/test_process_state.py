"""Tests can read and restore process state, such as the rounding mode."""

from __future__ import annotations

import ctypes
import os
import threading

import pytest
import torch

from torchop.testing.process_state import (
    open_files,
    process_state,
    restored,
    threads,
)


def test_flush_denormal_is_read_and_restored() -> None:
    name = "torch.set_flush_denormal()"
    before = process_state()[name]
    with restored():
        if not torch.set_flush_denormal(not before):
            pytest.skip("this processor cannot")
        assert process_state()[name] is not before
    assert process_state()[name] is before


def test_rounding_mode_is_read_and_restored() -> None:
    c = ctypes.CDLL(None)
    downward = 0x400 if c.fesetround(0x400) == 0 else 0x800000  # FE_DOWNWARD on x86 and ARM
    c.fesetround(0)
    with restored():
        c.fesetround(downward)
        assert process_state()["fegetround()"] == downward
    assert process_state()["fegetround()"] == c.fegetround() == 0


def test_threads_are_counted() -> None:
    before, end = threads(), threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    assert threads() == before + 1
    end.set()
    thread.join()


def test_open_files_are_counted() -> None:
    before = open_files()
    if not before:
        pytest.skip("the system does not say")
    with open(os.devnull):
        assert open_files() == before + 1
    assert open_files() == before

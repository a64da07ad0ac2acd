"""The output of TORCH_LOGS=torchop."""

from __future__ import annotations

import logging
import os
import re
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

import torchop
from tests._support.common import needs_native, run_program, without_notes_of_pytorch

ROOT = Path(__file__).parents[2]
PROGRAM = """
    {first}
    {second}

    @torchop.custom_op("logged::scale", mutates_args=())
    def scale(x: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
        return x * factor

    scale.register_fake(like="x")
    scale.register_flop_formula(lambda x, factor: 1)
    scale(torch.ones(1))
    with torchop.native.disabled():
        scale(torch.ones(1))
        scale(torch.ones(1), factor=3.0)
"""
# Do not set TORCHOP_NATIVE=require, because importing torchop would then load the extension before
# PyTorch has read TORCH_LOGS.
NATIVE = {} if os.environ.get("TORCHOP_NATIVE") == "0" else {"TORCHOP_NATIVE": "auto"}
# Matches a line of the log, such as
# `I1123 16:23:22.651000 23371 torchop/_native/plan.py:142] [__torchop_calls] ...`.
_LINE = re.compile(r"^([IV])\d.*?\] \[__(torchop_\w+)\] (.*)$")


def logged(settings: str, *, torchop_first: bool = False) -> list[tuple[str, str, str]]:
    first, second = "import torch", "import torchop"
    if torchop_first:
        first, second = second, first
    done = run_program(PROGRAM.format(first=first, second=second), TORCH_LOGS=settings, **NATIVE)
    text = without_notes_of_pytorch(done.stderr)
    assert done.returncode == 0, text
    matches = [(line, _LINE.match(line)) for line in text.splitlines()]
    assert all(match for _, match in matches), text
    return [match.groups() for _, match in matches if match]  # type: ignore[misc]


@needs_native
def test_the_log_says_why_calls_are_not_native_and_how_the_extension_was_found() -> None:
    lines = logged("torchop")
    assert {(level, artifact) for level, artifact, _ in lines} == {
        ("I", "torchop_calls"),
        ("I", "torchop_extension"),
    }
    (loaded,) = (text for _, artifact, text in lines if artifact == "torchop_extension")
    assert re.match(r"loaded /.*_call_path-torch.*\.so$", loaded)
    calls = [text for _, artifact, text in lines if artifact == "torchop_calls"]
    # Each reason is logged once, so there is one line for two calls.
    assert calls == [
        "logged::scale: a call goes through the dispatcher, because torchop.native.disabled() is "
        "active in this thread"
    ]


@pytest.mark.parametrize(
    "torchop_first",
    [False, pytest.param(True, marks=pytest.mark.exhaustive)],
    ids=["torch first", "torchop first"],
)
def test_single_log_artifact(torchop_first: bool) -> None:
    lines = logged("-torchop,torchop_registration", torchop_first=torchop_first)
    assert {artifact for _, artifact, _ in lines} == {"torchop_registration"}
    texts = [text for _, _, text in lines]
    assert "logged::scale(Tensor x, float factor=2.0) -> Tensor is defined" in texts
    assert "logged::scale has a kernel at CompositeExplicitAutograd" in texts
    assert "logged::scale has the rule: fake" in texts
    assert "logged::scale has the rule: flop_formula" in texts


@pytest.fixture
def op(namespace: str) -> torchop.CustomOp[..., Tensor]:
    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor, factor: float = 2.0) -> Tensor:
        return x * factor

    return op


def test_nothing_is_logged_unless_asked_for(
    op: torchop.CustomOp[..., Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    op.register_fake(like="x")
    with torchop.native.disabled():
        op(torch.ones(1))
    assert caplog.records == []


def test_deregistration_is_logged(namespace: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "torchop"), torchop.Library(namespace, "FRAGMENT") as lib:
        torchop.custom_op(
            f"{namespace}::op", torch.sin, mutates_args=(), schema="(Tensor x) -> Tensor", lib=lib
        )
    name = f"{namespace}::op"
    assert caplog.messages[-1].startswith(f"{name} is deregistered: The operator {name} was")


@needs_native
def test_each_reason_is_logged_once_for_each_operator(
    op: torchop.CustomOp[..., Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    x = torch.ones(1)
    with caplog.at_level(logging.INFO, "torchop"):
        for _ in range(3):
            op(x)
            op(x.to_sparse())
            with torchop.native.disabled():
                op(x)
    start = f"{op.name}: a call goes through the dispatcher, because "
    assert [message.removeprefix(start)[:17] for message in caplog.messages] == [
        "a tensor is not p",
        "torchop.native.di",
    ]
    caplog.clear()
    # After the registration, the next call compiles a new plan. By then logging is off.
    op.register_fake(like="x")
    op(x.requires_grad_())
    assert caplog.messages == []


@needs_native
def test_operator_deregistered_while_its_call_is_logged(
    namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    library = torchop.Library(namespace, "FRAGMENT")
    op = torchop.custom_op(
        f"{namespace}::op", torch.sin, mutates_args=(), schema="(Tensor x) -> Tensor", lib=library
    )
    overload = op.overload

    class Ends(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            # Deregister the operator in another thread, because this thread is inside of a call.
            thread = threading.Thread(target=library._destroy)
            thread.start()
            thread.join()

    handler = Ends()
    with caplog.at_level(logging.INFO, "torchop"):
        op(torch.ones(1))
        logging.getLogger("torchop").addHandler(handler)
        try:
            with pytest.raises(
                torchop.OperatorGoneError, match=rf"The operator {namespace}::op was deregistered"
            ):
                overload(3)
        finally:
            logging.getLogger("torchop").removeHandler(handler)


@pytest.mark.parametrize("page", ["tutorials/debugging.md", "how-to/several-kernels.md"])
def test_no_page_names_an_artifact_without_torchop_before_it(page: str) -> None:
    # If TORCH_LOGS contains "torchop_calls" without "torchop" before it, `import torch` fails.
    text = (ROOT / "docs" / page).read_text()
    values = re.findall(r"(?:TORCH_LOGS=\"?|^\| `)([-+,\w]+)", text, re.MULTILINE)
    named = [value.split(",") for value in values if "torchop" in value]
    assert named
    assert [names for names in named if names[0].lstrip("+-") != "torchop"] == []

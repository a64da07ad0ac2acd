"""A pytest plug-in: tensors that the tests make without a device are on `TORCHOP_TEST_DEVICE`.

    nox -s on_device
    TORCHOP_TEST_DEVICE=cuda:0 python -m pytest -p tests._support.on_device  # FOLDERS below
    TORCHOP_TEST_DEVICE=cuda:0 python -m pytest -p tests._support.on_device tests/rules tests/define

So tests that are about no device in particular hold on that one, too. A test that says "cpu" keeps
it. Functions are replaced instead of setting a default device, because that is a mode, in which
calls are not native. What is about the CPU is listed in `about_the_cpu.py`.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests._support import about_the_cpu

TESTS = str(Path(__file__).parents[1])
# Not from `tests._support.devices`: PyTorch knows the device only when its plug-in is there.
DEVICE_TYPE = os.environ.get("TORCHOP_TEST_DEVICE", "cpu").partition(":")[0]
# Those with tests that are about no device in particular.
FOLDERS = (
    "core",
    "define",
    "accelerate",
    "rules",
    "schema",
    "inspect",
    "export",
    "compat",
    "native",
    "integration/compile",
    "integration/subsystems",
    *(f"testing/test_{name}.py" for name in ("contents", "opcheck", "samples", "saved")),
)
FACTORIES = (
    "arange",
    "empty",
    "empty_strided",
    "eye",
    "full",
    "linspace",
    "ones",
    "rand",
    "randint",
    "randn",
    "randperm",
    "scalar_tensor",
    "tensor",
    "zeros",
)


def pytest_configure(config: pytest.Config) -> None:
    if config.args_source is not pytest.Config.ArgsSource.ARGS:
        config.args[:] = [os.path.join(TESTS, folder) for folder in FOLDERS]


def pytest_plugin_registered(plugin: object) -> None:
    """Load the stand-in, if it is the device, once `tests/conftest.py` has prepared torchop.

    So tensors that are made while pytest imports other files of that name are on the device, too.
    """
    if getattr(plugin, "__name__", None) != "tests.conftest":
        return
    if DEVICE_TYPE == "standin":
        # Or an operator that a test registers for the CPU by accident would run there, too.
        os.environ["STANDIN_FALLBACK"] = "pytorch"
        importlib.import_module("tests.integration.device.standin").load()
    device = importlib.import_module("tests._support.devices").DEVICE  # which exists from here on
    # PyTorch compiles this module from its source, where the functions have to be its own.
    importlib.import_module("torch._decomp.decompositions_for_jvp")
    # Dynamo lists the functions of PyTorch, which it leaves alone. It is to look into those here.
    importlib.import_module("torch._dynamo.trace_rules").get_torch_obj_rule_map()
    for name in FACTORIES:
        setattr(torch, name, _on_device(getattr(torch, name), device))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        file = item.path.relative_to(TESTS).as_posix()
        reason = about_the_cpu.reason(file, item.name, DEVICE_TYPE)
        if reason is not None:
            # Whether an operator of PyTorch fails may depend on the timing of autograd's threads.
            strict = reason != about_the_cpu.STOCK
            item.add_marker(pytest.mark.xfail(reason=f"about the CPU: {reason}", strict=strict))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Tells failures by which a test says itself that it is about the CPU; see `of_failure`."""
    report = yield
    if report.failed and call.excinfo is not None:
        reason = about_the_cpu.of_failure(call.excinfo, DEVICE_TYPE)
        if reason is not None:
            report.outcome, report.wasxfail = "skipped", f"about the CPU: {reason}"
    return report


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    is_here = collection_path.is_relative_to(TESTS)
    place = collection_path.relative_to(TESTS).as_posix() if is_here else ""
    return True if place in about_the_cpu.FILES else None


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    asked = [(config.invocation_params.dir / argument).resolve() for argument in config.args]
    for place, reason in about_the_cpu.FILES.items():
        if any(Path(TESTS, place).is_relative_to(folder) for folder in asked):
            terminalreporter.line(f"left out: tests/{place}, as {reason}")


def _caller() -> str:
    """The file that calls the function that calls this one."""
    return sys._getframe(2).f_code.co_filename


def _on_device(factory: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    @functools.wraps(factory)
    def made(*args: Any, **kwargs: Any) -> Any:
        decided = [kwargs.get(name) for name in ("device", "out", "generator", "pin_memory")]
        is_dense = kwargs.get("layout") in (None, torch.strided)
        # Dynamo has no frames to ask; what it traces is a function of a test.
        is_ours = torch.compiler.is_dynamo_compiling() or _caller().startswith(TESTS)
        if is_ours and is_dense and all(each is None or each is False for each in decided):
            kwargs["device"] = device
        return factory(*args, **kwargs)

    return made

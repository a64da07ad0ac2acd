"""A pytest plug-in that runs device-independent tests on `TORCHOP_TEST_DEVICE`.

    nox -s on_device
    TORCHOP_TEST_DEVICE=cuda:0 python -m pytest -p tests._support.on_device  # FOLDERS below
    TORCHOP_TEST_DEVICE=cuda:0 python -m pytest -p tests._support.on_device tests/rules tests/define

If a test creates a tensor without naming a device, the plug-in creates the tensor on
`TORCHOP_TEST_DEVICE`. Tests that ask for "cpu" still get the CPU. To do this, the plug-in patches
PyTorch's factory functions. It does not call `torch.set_default_device`, because that function
enables a mode, and modes turn off native calls. Tests that need the CPU are listed in
`about_the_cpu.py`.
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
# Read from the environment, because importing `tests._support.devices` requires that the device is
# already registered.
DEVICE_TYPE = os.environ.get("TORCHOP_TEST_DEVICE", "cpu").partition(":")[0]
# Folders and files with tests that do not depend on the device.
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
    """Set up the device after `tests/conftest.py` has prepared torchop.

    The other `conftest.py` files are imported later, so the tensors that they create at import are
    on the device.
    """
    if getattr(plugin, "__name__", None) != "tests.conftest":
        return
    if DEVICE_TYPE == "standin":
        # Only PyTorch's own operators may fall back to the CPU. Otherwise, a custom operator that a
        # test registers only for the CPU would also run with tensors of the stand-in.
        os.environ["STANDIN_FALLBACK"] = "pytorch"
        importlib.import_module("tests.integration.device.standin").load()
    device = importlib.import_module("tests._support.devices").DEVICE  # needs the registered device
    # TorchScript compiles this module when it is imported, and cannot compile patched factories, so
    # import it now.
    importlib.import_module("torch._decomp.decompositions_for_jvp")
    # Dynamo does not trace functions that it lists as PyTorch's own. Build that list before
    # patching, so Dynamo traces into the patched factories.
    importlib.import_module("torch._dynamo.trace_rules").get_torch_obj_rule_map()
    for name in FACTORIES:
        setattr(torch, name, _on_device(getattr(torch, name), device))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        file = item.path.relative_to(TESTS).as_posix()
        reason = about_the_cpu.reason(file, item.name, DEVICE_TYPE)
        if reason is not None:
            # Tests with the reason STOCK fail because of a bug of PyTorch that depends on the
            # timing of autograd's threads, so these tests sometimes pass.
            strict = reason != about_the_cpu.STOCK
            item.add_marker(pytest.mark.xfail(reason=f"about the CPU: {reason}", strict=strict))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Skip a failed test if its exception shows that it needs the CPU; see `reason_for_failure`."""
    report = yield
    if report.failed and call.excinfo is not None:
        reason = about_the_cpu.reason_for_failure(call.excinfo, DEVICE_TYPE)
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
    """Return the file of the caller's caller."""
    return sys._getframe(2).f_code.co_filename


def _on_device(factory: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    @functools.wraps(factory)
    def made(*args: Any, **kwargs: Any) -> Any:
        decided = [kwargs.get(name) for name in ("device", "out", "generator", "pin_memory")]
        is_dense = kwargs.get("layout") in (None, torch.strided)
        # The caller's frame cannot be inspected while Dynamo traces. But Dynamo traces only
        # functions of tests, so the caller is one of them.
        is_ours = torch.compiler.is_dynamo_compiling() or _caller().startswith(TESTS)
        if is_ours and is_dense and all(each is None or each is False for each in decided):
            kwargs["device"] = device
        return factory(*args, **kwargs)

    return made

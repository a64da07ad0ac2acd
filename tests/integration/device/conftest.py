"""Run tests on a simulated device.

The device type `standin`, which has two simulated devices, is in the folder `standin/`. A process
cannot unload it, so these tests need their own process. `pytest tests` skips the tests, but
`tests/integration/test_device.py` runs all of them in a child process. To run them directly, use
`nox -s device` or `python -m pytest tests/integration/device -q`, or name one of the files.

Importing `standin` loads the device, so a test can be as short as this:

    from tests.integration.device import standin

    def test_scaling_does_not_wait(namespace):
        op = torchop.custom_op(f"{namespace}::scale", lambda x: x * 2, mutates_args=(),
                               schema="(Tensor x) -> Tensor")
        x = torch.ones(3, device="standin:1")  # `torch.standin` is like `torch.cuda`
        with standin.host_waits() as waits:
            y = op(x)
        assert waits == []                      # y.tolist() would add "copy to the host"

`standin.trace()` lists the operations on the devices. `standin.capture()` captures a graph, with
the restrictions of CUDA graphs. `standin.memory_limit(bytes)` limits memory. In
`standin.without_fallback()`, operators without a kernel for the device raise instead of running on
the CPU. With STANDIN_FALLBACK=0, they raise everywhere. If the host reads the device's memory, for
example in `numpy.from_dlpack`, the process crashes. Test that with
`tests._support.forking.run_forked`, in a program that starts with `from tests.integration.device
import standin; standin.load()`.

Tests that work on any device take the device from `tests._support.devices`. To also run such tests
on the simulated device, import them into a file in this folder, as `test_leaks.py` does.
`target.py` provides traces and streams for both the simulated device and a GPU. To use the GPU, run
`nox -s gpu` or `TORCHOP_TEST_DEVICE=cuda:0 python -m pytest tests/integration/device`.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.integration.device import standin

HERE = Path(__file__).parent
_DEVICE = "TORCHOP_TEST_DEVICE"
# These files are skipped on a GPU, because they test properties of PrivateUse1 backends or of the
# simulated device.
_ABOUT_THE_STANDIN = (
    "test_standin.py",
    "test_kernels.py",
    "test_overrides.py",
    "test_explain.py",
    "test_derived.py",
    "test_devices.py",
)


def runs_alone(config: pytest.Config) -> bool:
    """Return whether only tests of this folder were selected. Raise if it is a mixture."""
    folder = config.invocation_params.dir
    paths = [(folder / argument.partition("::")[0]).resolve() for argument in config.args]
    are_here = {path.is_relative_to(HERE) for path in paths}
    if len(are_here) > 1:
        raise pytest.UsageError(f"the tests of {HERE} need a process of their own: name no others")
    return are_here == {True}


def pytest_configure(config: pytest.Config) -> None:
    if runs_alone(config) and _DEVICE not in os.environ:
        standin.load()
        os.environ[_DEVICE] = "standin:1"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if not runs_alone(config):
        return True
    is_real = not os.environ[_DEVICE].startswith("standin")
    return True if is_real and collection_path.name in _ABOUT_THE_STANDIN else None

"""Run tests on a simulated device.

The device is `standin`, a PrivateUse1 backend of two devices; see `standin/`. A process can have
one such backend and keeps it, so these tests have processes of their own: `pytest tests` leaves
them out, and `tests/integration/test_device.py` runs them all in one child. To run them, name them:
`nox -s device`, or `python -m pytest tests/integration/device -q`, or one file of theirs.

To write a test, put a file here. The device is loaded when it is imported, so this works:

    from tests.integration.device import standin

    def test_scaling_does_not_wait(namespace):
        op = torchop.custom_op(f"{namespace}::scale", lambda x: x * 2, mutates_args=(),
                               schema="(Tensor x) -> Tensor")
        x = torch.ones(3, device="standin:1")  # torch.standin is as torch.cuda
        with standin.host_waits() as waits:
            y = op(x)
        assert waits == []                      # reading y.tolist() is one: "copy to the host"

`standin.trace()` tells what ran where, `standin.capture()` makes a graph, and refuses what CUDA
refuses meanwhile, `standin.memory_limit(bytes)` ends memory, and in `standin.without_fallback()`
nothing runs on the CPU in place of a missing kernel (or with STANDIN_FALLBACK=0 from the start).
What reads memory of the device on the host, such as `numpy.from_dlpack`, ends the process: test
that with `tests._support.forking.run_forked`, whose program starts with
`from tests.integration.device import standin; standin.load()`.

Tests that hold for any device take it from `tests._support.devices`, and a file here imports them,
as `test_leaks.py` does. What tests ask of a device is in `target.py`, for the stand-in and for one
that is really there: `nox -s gpu`, or
`TORCHOP_TEST_DEVICE=cuda:0 python -m pytest tests/integration/device`.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.integration.device import standin

HERE = Path(__file__).parent
_DEVICE = "TORCHOP_TEST_DEVICE"
# Of backends that are plug-ins, their fallbacks, and what the stand-in alone can show.
_ABOUT_THE_STANDIN = (
    "test_standin.py",
    "test_kernels.py",
    "test_overrides.py",
    "test_explain.py",
    "test_derived.py",
    "test_devices.py",
)


def runs_alone(config: pytest.Config) -> bool:
    """Whether all that was asked for is in this folder; raises UsageError if only some of it is."""
    folder = config.invocation_params.dir
    paths = [(folder / argument.partition("::")[0]).resolve() for argument in config.args]
    are_here = {path.is_relative_to(HERE) for path in paths}
    if len(are_here) > 1:
        raise pytest.UsageError(f"the tests of {HERE} need a process of their own: name no others")
    return are_here == {True}


def pytest_configure(config: pytest.Config) -> None:
    if runs_alone(config) and _DEVICE not in os.environ:
        standin.load()
        os.environ[_DEVICE] = "standin:1"  # for tests that run on any device


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if not runs_alone(config):
        return True
    is_real = not os.environ[_DEVICE].startswith("standin")
    return True if is_real and collection_path.name in _ABOUT_THE_STANDIN else None

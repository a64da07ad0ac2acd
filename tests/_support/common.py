"""Helpers for many test files: operators, scenarios, programs, threads and command lines."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import torchop


class Both(NamedTuple):
    ours: Any
    stock: Any


def on_both(scenario: Callable[[Any, str], Any], namespace: str) -> Both:
    """Run `scenario(library, namespace)` with torchop and with torch.library.

    Tests also assert that torch.library has a different outcome, which proves that the scenario can
    tell the two apart.
    """
    ours = _outcome(scenario, torchop, namespace)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stock = _outcome(scenario, torch.library, f"{namespace}_stock")
    return Both(ours, stock)


def _outcome(scenario: Callable[[Any, str], Any], library: Any, namespace: str) -> Any:
    try:
        return scenario(library, namespace)
    except Exception as error:
        return error


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        return type(error), str(error)


def node_of(tensor: torch.Tensor) -> Any:
    """Return the name of a tensor's autograd node and its edges, or None for a leaf."""
    node = tensor.grad_fn
    return node and (node.name(), [(type(edge), index) for edge, index in node.next_functions])


def adding(namespace: str, amount: float = 1, **options: Any) -> torchop.CustomOp[..., Any]:
    """Define `ns::op`, which adds `amount` to a tensor. `options` are passed to `custom_op`."""
    return torchop.custom_op(
        f"{namespace}::op",
        lambda x: x + amount,
        mutates_args=(),
        schema="(Tensor x) -> Tensor",
        **options,
    )


# --------------------------------------------------------------------------------------------------
# Native calls

# Skips a test only if native calls were turned off with TORCHOP_NATIVE=0. If the extension cannot
# be built, the whole run stops before the first test, so a broken build is never overlooked.
needs_native = pytest.mark.skipif(
    os.environ.get("TORCHOP_NATIVE") == "0", reason="TORCHOP_NATIVE=0 turns native calls off"
)


@contextlib.contextmanager
def counting(op: torchop.CustomOp[..., Any]) -> Iterator[dict[str, int]]:
    """Yield a dict that, after the block, contains the number of calls by counter.

    A counter is "native", or the reason why a call went through the dispatcher instead.
    """
    calls: dict[str, int] = {}
    before = torchop.native.counters(op)
    yield calls
    after = torchop.native.counters(op)
    calls.update({reason: n - before.get(reason, 0) for reason, n in after.items()})
    for reason in [reason for reason, n in calls.items() if n == 0]:
        del calls[reason]


def run_program(
    source: str, *arguments: str, timeout: float = 120, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", textwrap.dedent(source), *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


# Some builds of PyTorch log the first two lines if the machine lacks an optional feature. PyTorch
# 2.15 logs the third one because torch/_functorch/partitioners.py calls a deprecated function of
# torch/_library/opaque_object.py.
_NOTES = re.compile(
    r"^.*(triton not found|No CUDA runtime|is_opaque_value is deprecated).*\n", re.MULTILINE
)


def without_notes_of_pytorch(text: str) -> str:
    return _NOTES.sub("", text)


def assert_clean(done: subprocess.CompletedProcess[str]) -> str:
    """Check that a program succeeded and wrote nothing to stderr, and return its output."""
    # Pass the output as the message, because pytest shortens the strings of a failed comparison.
    ended = f"exit code {done.returncode}\n{done.stderr}"
    assert done.returncode == 0, ended
    assert not without_notes_of_pytorch(done.stderr), ended
    return done.stdout


ROOT = Path(__file__).parents[2]
# The README and the pages of the documentation, except pages that Sphinx generates.
PAGES = [
    ROOT / "README.md",
    *sorted(p for p in (ROOT / "docs").rglob("*.md") if not {"_build", "api"} & {*p.parts}),
]


def load_tool(name: str) -> Any:
    file = ROOT / "tools" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --------------------------------------------------------------------------------------------------
# Threads

THREADS = 8


def in_threads(work: Callable[[int], Any], count: int = THREADS) -> list[Any]:
    """Run `work(number)` in `count` threads that start together, and return their results."""
    barrier = threading.Barrier(count)
    results: list[Any] = [None] * count

    def run(number: int) -> None:
        barrier.wait()
        try:
            results[number] = work(number)
        except BaseException as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    errors = [result for result in results if isinstance(result, BaseException)]
    if errors:
        raise errors[0]
    return results


# --------------------------------------------------------------------------------------------------
# The command line


class Outcome:
    def __init__(self, *arguments: str) -> None:
        from click.testing import CliRunner

        from torchop import cli

        result = CliRunner().invoke(cli.main, arguments)
        if not isinstance(result.exception, SystemExit | None):
            raise result.exception
        self.code, self.out, self.err = result.exit_code, result.stdout, result.stderr

    def row(self, name: str) -> list[str]:
        """Return the cells of a table row, without the name."""
        (found,) = [line for line in self.out.splitlines() if line.startswith(f"{name} ")]
        return found.split()[1:]


def close_operators(namespace: dict[str, Any]) -> None:
    """Deregister the operators of a docs page, so that the next page can define the same names."""
    for value in namespace.values():
        if isinstance(value, torchop.CustomOp):
            value._definition.deregister("the page that defined it is over")
        elif isinstance(value, torchop.Library):
            value.close()


def is_defined(name: str) -> bool:
    names = torch._C._dispatch_get_all_op_names()
    return any(each.partition(".")[0] == name for each in names)

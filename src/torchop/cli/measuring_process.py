"""Measuring each operator in a process of its own, because its kernel may crash or hang.

A kernel that does not check an index, for example, writes out of bounds when it gets tensors of
ones. The process is forked from a server that has only imported the modules which register the
operators. Unlike a fork of the program, it can use threads and accelerators, and holds none of the
program's locks. An operator that the program itself registers can be measured only in a fork of the
program, and with one thread: OpenMP would wait forever for threads that a fork does not have.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from torchop._compat import operators
from torchop._inspect.registrant import modules_of
from torchop._schema import naming
from torchop.cli.measure import (
    Cost,
    Kinds,
    NotMeasuredError,
    accelerated,
    first_line,
    is_on_accelerator,
    measured,
    native_share,
)

_START_LIMIT = 600.0  # seconds, for the imports of all the modules
_LIMIT = 60.0  # seconds, for all calls of an operator
_NOT_REGISTERED = "no module registers it in a process of its own"


class Measurement(NamedTuple):
    """What was measured of an operator."""

    native: float | None = None  # the share of the recorded calls that would be; None if unknown
    cost: Cost | None = None  # of a call
    problem: str = ""  # why there is no cost


def measure(recorded: Mapping[str, Kinds]) -> dict[str, Measurement]:
    """Measures operators, each in a process of its own."""
    modules = {op: modules_of(naming.parse(op)) for op in recorded}
    multiprocessing.set_forkserver_preload(
        [__name__, *sorted({name for names in modules.values() for name in names})]
    )
    return {op: _measure(op, kinds, modules[op]) for op, kinds in recorded.items()}


def _measure(op: str, kinds: Kinds, modules: list[str]) -> Measurement:
    measurement = Measurement(problem=_NOT_REGISTERED)
    if modules:
        with _path_in_environment():
            measurement = _measure_in_child("forkserver", op, kinds, modules)
    # A fork of a program that uses an accelerator cannot use it.
    if measurement.problem != _NOT_REGISTERED or any(is_on_accelerator(call) for call, _ in kinds):
        return measurement
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of threads
        return _measure_in_child("fork", op, kinds, [])


@contextlib.contextmanager
def _path_in_environment() -> Iterator[None]:
    """Passes `sys.path` on to the server, which otherwise would not find the modules."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    try:
        yield
    finally:
        del os.environ["PYTHONPATH"]
        if before is not None:
            os.environ["PYTHONPATH"] = before


def _measure_in_child(method: str, op: str, kinds: Kinds, modules: list[str]) -> Measurement:
    context: Any = multiprocessing.get_context(method)
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_run, args=(sender, op, kinds, modules))
    try:
        child.start()
    except (OSError, EOFError) as error:
        return Measurement(problem=f"no process can be started for it ({first_line(error)})")
    sender.close()
    measurement = Measurement()
    activity = "importing what registers it"
    try:
        for limit in (_START_LIMIT, _LIMIT):
            if not receiver.poll(limit):
                return measurement._replace(problem=f"{activity} took over {limit:.0f} seconds")
            measurement = receiver.recv()
            if measurement.problem:
                break
            activity = "a call with tensors of ones"
        return measurement
    except (OSError, EOFError):
        child.join()
        problem = f"{activity} ended the process, {_how_ended(child.exitcode)}"
        return measurement._replace(problem=problem)
    finally:
        child.kill()
        child.join()
        receiver.close()


def _how_ended(exit_code: int) -> str:
    with contextlib.suppress(ValueError):
        return f"by {signal.Signals(-exit_code).name}"
    return f"with exit code {exit_code}"


def _run(sender: Connection, op: str, kinds: Kinds, modules: list[str]) -> None:
    if not modules:  # a fork of the program
        torch.set_num_threads(1)
    for measurement in _measurements(op, kinds, modules):
        sender.send(measurement)


def _measurements(op: str, kinds: Kinds, modules: list[str]) -> Iterator[Measurement]:
    """Yields what is known before the first call, and after the last one.

    The first result counts if a call crashes or hangs.
    """
    try:
        for module in modules:
            importlib.import_module(module)
    except Exception as error:
        yield Measurement(problem=f"{module} cannot be imported: {first_line(error)}")
        return
    name = naming.parse(op)
    if not operators.is_registered(name.packet, name.overload):
        yield Measurement(problem=_NOT_REGISTERED)
        return
    with accelerated(op):
        native = native_share(op, kinds)
        yield Measurement(native)
        try:
            cost = measured(op, kinds)
        except NotMeasuredError as error:
            yield Measurement(native, problem=str(error))
        else:
            yield Measurement(native_share(op, kinds), cost)

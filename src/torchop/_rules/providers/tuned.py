"""Look up measurements of kernels, to find the fastest kernel for a call.

Calls use this module only if the order of providers contains `"tuned"`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import platform
import tokenize
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from torchop._compat import logs
from torchop._core.cache_folder import cache_folder
from torchop._core.call import tensors_in
from torchop._core.lock import registration_lock
from torchop._errors import NativeUnavailableError, ProviderWarning, warn
from torchop._rules.providers import measurements, priority
from torchop._rules.providers.measurements import Measurement, TableError
from torchop.extend import OpName, short_repr

# Buckets are ranges of tensor sizes that share one measurement. This maps argument names and
# dimensions to the upper bounds of the buckets, as in {"x": {0: [1, 16, 256]}}.
Buckets: TypeAlias = "Mapping[str, Mapping[int, Sequence[int]]]"


class Tuning(NamedTuple):
    table: Path | None = None
    buckets: Buckets = types.MappingProxyType({})


class UnknownKindError(Exception):
    """Raised if an argument, such as a sparse tensor, cannot be part of a cache key."""


# The measurements that this process made, or received from rank 0 in a distributed program
_own: list[Measurement] = []


def users_table() -> Path | None:
    with contextlib.suppress(NativeUnavailableError):
        return cache_folder() / "tuning.json"
    return None


def add(new: Sequence[Measurement]) -> None:
    with registration_lock:
        _own[:] = measurements.merged(_own, new)
        forget()


def forget() -> None:
    """Clear the caches, so that later calls read the measurements from the files again.

    The caller must hold `registration_lock`.
    """
    _read.cache_clear()
    known.cache_clear()
    priority.outdate_plans()


def find(
    op: OpName,
    tuning: Tuning,
    digests: Mapping[str, str],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    reported: set[tuple[str, bool]],
) -> Measurement | None:
    """Return a measurement that matches a call and is not outdated, or None.

    A measurement is outdated if it was made on a different device, with a different PyTorch
    release, or with a different version of a kernel. If all matching measurements are outdated,
    warn once.

    `digests` maps each provider to the digest (a hash of the code) of its current kernel, and
    `reported` contains the problems that were already reported to the user.
    """
    try:
        arguments, sizes = described(args, kwargs)
    except UnknownKindError:
        return None
    problems = []
    for measurement, where in known(op, tuning.table):
        if measurement.arguments == arguments and measurement.fits(sizes):
            device = device_name((*args, *kwargs.values()))
            problem = _staleness(measurement, device, digests)
            if problem is None:
                return measurement
            problems.append(f"the measurements in {where} are not used, because {problem}")
    if problems and (problems[0], True) not in reported:
        reported.add((problems[0], True))
        text = (
            f"{op}: {problems[0]}. Measure here: torchop.testing.tune, or torchop.testing.tuning."
        )
        logs.calls.info("%s", text)
        warn(text, ProviderWarning)
    return None


@functools.cache
def known(op: OpName, table: Path | None) -> Sequence[tuple[Measurement, str]]:
    """Return an operator's measurements, each with its source.

    The measurements of this process come first, followed by the user's table and the author's
    table, because `find` uses the first match.
    """
    user = users_table()
    sources = [(_own, "this process"), (_read(user) if user and user.exists() else (), str(user))]
    sources += [] if table is None else [(_read(table), str(table))]
    return [(each, where) for found, where in sources for each in found if each.op == str(op)]


def _staleness(measurement: Measurement, device: str, digests: Mapping[str, str]) -> str | None:
    if measurement.device != device:
        return f"they were made on {short_repr(measurement.device)}, and this is {device!r}"
    if measurement.torch != torch_release():
        return f"they were made with PyTorch {measurement.torch}, and this is {torch_release()}"
    for kernel in measurement.kernels:
        # A provider that is no longer registered has no digest (hash of the code) to compare, so
        # ignore its kernel.
        if digests.get(kernel.provider, kernel.digest) != kernel.digest:
            return f"the kernel of {kernel.provider!r} has changed since they were made"
    return None


@functools.cache
def _read(path: Path) -> Sequence[Measurement]:
    try:
        return measurements.read(path)
    except TableError as error:
        text = f"{error}, so it is ignored. Remove it, or write it again with torchop.testing.tune."
        logs.calls.info("%s", text)
        warn(text, ProviderWarning)
        return ()


def described(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[str, list[Any]]:
    """Return a text that describes a call's arguments, and a list of all tensor sizes.

    The text has the format of `Measurement.arguments`: dtypes and plain values, with a `*` in place
    of each tensor size. Raise UnknownKindError for arguments of other types, such as sparse
    tensors.
    """
    sizes: list[Any] = []

    def spelled(value: Any) -> str:
        if isinstance(value, Tensor):
            if value.layout is not torch.strided:
                raise UnknownKindError
            sizes.extend(value.shape)
            stars = ", ".join("*" * value.ndim)
            return f"{str(value.dtype).removeprefix('torch.')}[{stars}]"
        if isinstance(value, (list, tuple)):
            return f"({', '.join(map(spelled, value))})"
        if not isinstance(value, PLAIN):
            raise UnknownKindError
        return repr(value).replace("*", "\\x2a")

    return ", ".join(map(spelled, (*args, *kwargs.values()))), sizes


PLAIN = (
    *(bool, int, float, complex, str, type(None)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


def bucketed(
    names: Sequence[str], buckets: Buckets, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> measurements.Sizes:
    """Return the bucket, i.e. the range of sizes, of each tensor dimension of a call.

    If `buckets` has no entry for a dimension, the upper bounds are the powers of two.
    """
    ranges = []
    for name, value in zip(names, (*args, *kwargs.values()), strict=True):
        bounds = buckets.get(name, {})
        for tensor in tensors_in([value]):
            for dim, size in enumerate(tensor.shape):
                own = bounds.get(dim, bounds.get(dim - tensor.ndim, _POWERS_OF_TWO))
                ranges.append(_between(own, size))
    return tuple(ranges)


_POWERS_OF_TWO = (0, *(1 << power for power in range(63)))


def _between(bounds: Sequence[int], size: int) -> tuple[int, int | None]:
    low = 0
    for bound in sorted(bounds):
        if size <= bound:
            return low, bound
        low = bound + 1
    return low, None


def device_name(values: Sequence[Any]) -> str:
    devices: Iterator[torch.device] = (tensor.device for tensor in tensors_in(values))
    device = next((each for each in devices if each.type != "cpu"), torch.device("cpu"))
    if device.type == "cpu":
        return f"{_processor()}, {torch.get_num_threads()} threads"
    module = torch.get_device_module(device)
    return (
        str(module.get_device_name(device)) if hasattr(module, "get_device_name") else device.type
    )


@functools.cache
def _processor() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "CPU part"):
                return value.strip()
    return platform.processor() or platform.machine()


def torch_release() -> str:
    return ".".join(torch.__version__.split(".")[:2])


def digest(function: Callable[..., Any]) -> str:
    """Return a digest of a kernel's source code, to detect whether the kernel has changed.

    The digest also covers the functions in the same module that the kernel calls, and the strings
    (such as C++ source code) and numbers among the global variables that it uses. If a global
    variable is a `Path` of a file, the digest covers the contents of the file.
    """
    function = _written(function)
    if not isinstance(function, types.FunctionType):  # a builtin or callable object
        return getattr(function, "__qualname__", type(function).__qualname__)
    return _digest(function)


@functools.lru_cache(1024)
def _digest(function: types.FunctionType) -> str:
    texts = list(_sources(function, set()))
    return hashlib.sha256("\0".join(texts).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _written(function: Any) -> Any:
    """Return the author's function, without the wrappers of Triton, functools and torchop."""
    inner = getattr(function, "fn", getattr(function, "func", function))
    return inspect.unwrap(inner)


def _sources(function: Any, seen: set[int]) -> Iterator[str]:
    function = _written(function)
    if not isinstance(function, types.FunctionType) or id(function) in seen:
        return
    seen.add(id(function))
    code = function.__code__
    try:
        yield inspect.getsource(function)
    except (OSError, SyntaxError, tokenize.TokenError):
        yield code.co_code.hex() + repr(code.co_consts)
    for name in code.co_names:
        value = function.__globals__.get(name)
        if isinstance(value, (str, int, float)):
            yield f"{name} = {value!r}"
        elif isinstance(value, Path) and value.is_file():
            yield hashlib.sha256(value.read_bytes()).hexdigest()
        elif getattr(value, "__module__", None) == function.__module__:
            yield from _sources(value, seen)

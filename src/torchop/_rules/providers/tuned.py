"""`"tuned"` in an order of providers: look up measurements for a call."""

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

# The upper bounds of size buckets, by argument and dimension.
Buckets: TypeAlias = "Mapping[str, Mapping[int, Sequence[int]]]"


class Tuning(NamedTuple):
    """The author's table of measurements and buckets."""

    table: Path | None = None
    buckets: Buckets = types.MappingProxyType({})


class UnknownKindError(Exception):
    """A call has an argument whose value cannot be part of a key."""


# Measurements made in this process, or received from rank 0.
_own: list[Measurement] = []


def users_table() -> Path | None:
    """Return the table in the user's cache folder; None without a cache folder."""
    with contextlib.suppress(NativeUnavailableError):
        return cache_folder() / "tuning.json"
    return None


def add(new: Sequence[Measurement]) -> None:
    """Add measurements, and make calls use them."""
    with registration_lock:
        _own[:] = measurements.merged(_own, new)
        forget()


def forget() -> None:
    """Reread the tables on the next calls; the registration lock must be held."""
    _read.cache_clear()
    _index.cache_clear()
    priority.outdate_plans()


def find(
    op: OpName,
    tuning: Tuning,
    digests: Mapping[str, str],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    reported: set[tuple[str, bool]],
) -> Measurement | None:
    """Return the measurement for a call; warn once if only unusable ones exist.

    Args:
        op: the operator.
        tuning: the author's measurements and buckets.
        digests: digests of the registered kernels, by provider.
        args: the positional arguments of the call.
        kwargs: the keyword arguments of the call.
        reported: problems that were reported already.
    """
    try:
        arguments, sizes = described(args, kwargs)
    except UnknownKindError:
        return None
    problems = []
    known = _index(tuning.table).get((str(op), arguments), ())
    device = device_name((*args, *kwargs.values())) if known else ""
    for measurement, where in known:
        if measurement.fits(sizes):
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


def known(op: OpName, tuning: Tuning) -> list[tuple[Any, ...]]:
    """Return an operator's measurements, as part of cache keys of graphs with inlined kernels."""
    index = _index(tuning.table)
    found = [m for (name, _), each in index.items() if name == str(op) for m, _ in each]
    return [(*m.key, [(k.provider, repr(k.config), k.digest) for k in m.kernels]) for m in found]


def _staleness(measurement: Measurement, device: str, digests: Mapping[str, str]) -> str | None:
    if measurement.device != device:
        return f"they were made on {short_repr(measurement.device)}, and this is {device!r}"
    if measurement.torch != torch_release():
        return f"they were made with PyTorch {measurement.torch}, and this is {torch_release()}"
    for kernel in measurement.kernels:
        # the provider may be removed
        if digests.get(kernel.provider, kernel.digest) != kernel.digest:
            return f"the kernel of {kernel.provider!r} has changed since they were made"
    return None


@functools.cache
def _index(
    table: Path | None,
) -> Mapping[tuple[str, str], Sequence[tuple[Measurement, str]]]:
    """Index the measurements of the author, the user and this process."""
    index: dict[tuple[str, str], list[tuple[Measurement, str]]] = {}
    user = users_table()
    sources = [(_own, "this process"), (_read(user) if user and user.exists() else (), str(user))]
    sources += [] if table is None else [(_read(table), str(table))]
    for found, where in sources:
        for measurement in found:
            index.setdefault((measurement.op, measurement.arguments), []).append(
                (measurement, where)
            )
    return index


@functools.cache
def _read(path: Path) -> Sequence[Measurement]:
    """Return the measurements in a file; warn and return none if it is not a table."""
    try:
        return measurements.read(path)
    except TableError as error:
        text = f"{error}, so it is ignored. Remove it, or write it again by torchop.testing.tune."
        logs.calls.info("%s", text)
        warn(text, ProviderWarning)
        return ()


def described(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[str, list[Any]]:
    """Return a call's dtypes and plain values, with a `*` for each size, and the sizes.

    Raises:
        UnknownKindError: an argument has another type.
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


# Types identified by value; tensors and lists are identified by their contents.
PLAIN = (
    *(bool, int, float, complex, str, type(None)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


def bucketed(
    names: Sequence[str], buckets: Buckets, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> measurements.Sizes:
    """Return the bucket of each size of a call; powers of two without the author's buckets."""
    ranges = []
    for name, value in zip(names, (*args, *kwargs.values()), strict=True):
        bounds = buckets.get(name, {})
        for tensor in tensors_in([value]):
            for dim, size in enumerate(tensor.shape):
                own = bounds.get(dim, bounds.get(dim - tensor.ndim))
                ranges.append(_power_of_two(size) if own is None else _between(own, size))
    return tuple(ranges)


def _power_of_two(size: int) -> tuple[int, int]:
    high = 1 << max(0, size - 1).bit_length() if size else 0
    return (high // 2 + 1 if high > 1 else high), high


def _between(bounds: Sequence[int], size: int) -> tuple[int, int | None]:
    low = 0
    for bound in sorted(bounds):
        if size <= bound:
            return low, bound
        low = bound + 1
    return low, None


def device_name(values: Sequence[Any]) -> str:
    """Return the device's name, with the number of threads for a CPU."""
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
    """Return PyTorch's major and minor version."""
    return ".".join(torch.__version__.split(".")[:2])


def digest(function: Callable[..., Any]) -> str:
    """Return a digest of a kernel's source, and of the names it uses from its module.

    These are functions, plain values such as C++ source text, and files referenced by a `Path`.
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
    """Unwrap the author's function from Triton, functools and torchop wrappers."""
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

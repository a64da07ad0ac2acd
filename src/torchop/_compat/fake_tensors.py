"""Fake tensors, their mode, and what a fake kernel raises."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.library
from torch._decomp import decomposition_table
from torch._guards import detect_fake_mode
from torch._library.fake_impl import set_ctx_getter
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
)
from torch.utils._python_dispatch import _disable_current_modes

from torchop._compat.classes import FakeImplCtx, OpOverload


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor carries no data: a FakeTensor or a meta tensor."""
    return isinstance(tensor, FakeTensor) or tensor.is_meta  # which FakeTensor answers in Python


def active_fake_mode() -> Any | None:
    """The FakeTensorMode that is running an operator in this thread, or None."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)


def only_runs_fake(mode: Any, op: OpOverload, tensors: Iterable[torch.Tensor]) -> bool:
    """Whether FakeTensor would do nothing in a call but look for the fake kernel, and run it."""
    profiles = getattr(sys.modules.get("torch._dynamo.config"), "_custom_ops_profile", None)
    return profiles is None and op not in decomposition_table and _are_plain(mode, tensors)


def made_like(
    tensor: torch.Tensor,
    shape: Sequence[Any] | None,
    dtype: torch.dtype | None,
    memory_format: torch.memory_format | None = None,
) -> Any:
    """`tensor.new_empty(shape, dtype=dtype)`; without a shape, `torch.empty_like`.

    Where FakeTensor runs a kernel, it is made as FakeTensor makes it, but not looked up in its
    cache, which takes longer.
    """
    if memory_format is torch.contiguous_format:
        if shape is None and tensor.layout is torch.strided:
            shape = tensor.shape
        memory_format = None
    mode: Any = active_fake_mode() if memory_format is None else None
    is_plain = mode is not None and tensor.layout is torch.strided and _are_plain(mode, [tensor])
    strides = _written(tensor.stride()) if is_plain and shape is None else []
    if is_plain and strides[-1:] in ([], [1]):  # what `torch.empty` makes has no other last stride
        with in_kernel_invocation_manager(mode):
            size = tensor.shape if shape is None else shape
            made = torch.empty(size, dtype=dtype or tensor.dtype, device="meta")
        if shape is not None or _written(made.stride()) == strides:
            return FakeTensor(mode, made, cast(FakeTensor, tensor).fake_device)
    if shape is None:
        return torch.empty_like(tensor, dtype=dtype, memory_format=memory_format)
    if memory_format is None:
        return tensor.new_empty(shape, dtype=dtype)
    options: Any = {"dtype": dtype or tensor.dtype, "device": tensor.device}
    return torch.empty(shape, memory_format=memory_format, **options)


def _written(sizes: Sequence[Any]) -> list[Any]:
    """Sizes or strides as expressions, whose comparison adds no guard on their symbols."""
    return [size if type(size) is int else size.node.expr for size in sizes]


def _are_plain(mode: Any, tensors: Iterable[torch.Tensor]) -> bool:
    """Whether a mode made all of the tensors, and knows nothing of their values."""
    return not mode.propagate_real_tensors and all(
        type(t) is FakeTensor and t.fake_mode is mode and t.constant is None for t in tensors
    )


# Whether FakeTensor is calling a kernel of the dispatcher in this thread, for meta tensors.
is_calling_kernels: Callable[[], bool] = torch._C._meta_in_tls_dispatch_include


def keep_out_of_log(error: type[Exception]) -> None:
    """Has FakeTensor not log an exception that a kernel for meta tensors raises on purpose.

    It logs a traceback of its own code for every exception of these kernels, and raises it then.
    """

    def is_news(record: logging.LogRecord) -> bool:
        return record.exc_info is None or not isinstance(record.exc_info[1], error)

    logging.getLogger(FakeTensorMode.__module__).addFilter(is_news)


def new_fake_mode() -> Any:
    """A mode that makes fake tensors, and knows symbols for sizes that depend on data."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return FakeTensorMode(shape_env=ShapeEnv())


def check_symbols(mode: Any, results: object) -> None:
    """Raises PyTorch's error if symbols for data were made that no size of the results has."""
    from torch.fx.experimental.symbolic_shapes import compute_unbacked_bindings  # as above

    compute_unbacked_bindings(mode.shape_env, results)


def stock_fake_context() -> FakeImplCtx | None:
    """The context of a fake kernel that torch.library is running in this thread.

    torch.library keeps one for the process, so it may be that of another thread.
    """
    context = cast("FakeImplCtx | None", torch.library.get_ctx())
    return context if context is not None and context._fake_mode is active_fake_mode() else None


# A context in which `torch.library.get_ctx` returns what a function returns, in every thread.
stock_context: Callable[[Callable[[], Any]], contextlib.AbstractContextManager[Any]]
stock_context = set_ctx_getter


def number_of(size: Any) -> int | None:
    """The number that a size stands for at the moment; None if only data would tell."""
    if isinstance(size, int):
        return size
    hint = size.node.hint
    return None if hint is None else int(hint)


def shapes_differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two shapes differ; sizes that depend on data count as equal."""
    return one.dim() != other.dim() or any(
        a != b
        for a, b in zip(one.shape, other.shape, strict=True)
        if number_of(a) is not None and number_of(b) is not None
    )


@contextlib.contextmanager
def fake_calls() -> Iterator[Callable[[Sequence[Any], torch.Tensor], torch.Tensor]]:
    """Has calls run fake kernels, out of sight of transforms and modes.

    Yields what makes a fake tensor, given a shape and a tensor that has the dtype and device.
    """
    mode = detect_fake_mode() or FakeTensorMode()
    # A mode stores state under this key, which a transform excludes. Until 2.12, a mode needs the
    # key.
    notes = torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.PythonTLSSnapshot, False)
    with torch._C._DisableFuncTorch(), _disable_current_modes(), notes, mode:
        yield lambda shape, like: torch.empty(tuple(shape), dtype=like.dtype, device=like.device)


# FakeTensor's exceptions for reading a value, and for a size that depends on one.
DATA_DEPENDENT_ERRORS = (DataDependentOutputException, DynamicOutputShapeException)


def explained_tracing_error(
    error: type[BaseException], op: OpOverload, message: str
) -> RuntimeError:
    """An exception that Dynamo treats like `error`, and that reads `message`."""
    explained = type(error.__name__, (error,), {"__str__": lambda self: message})
    return cast(RuntimeError, explained(op))


# PyTorch has no exception type for these; the texts are those of its C++ and Python checks.
_PHRASES = (
    "() is not supported for tensor subclasses",
    "Can't call numpy() on Tensor that requires grad",
    "Cannot access data pointer of Tensor",
    "The tensor has a non-zero number of elements, but its data is not allocated yet",
    "Cannot copy out of meta tensor",
    "Tensor.item() cannot be called on meta tensors",
    "aten::_local_scalar_dense",
    "a correct data-independent implementation does not exist",
    "can't convert meta device type tensor to numpy",
    "Could not guard on data-dependent expression",
    "Could not extract specialized integer from data-dependent expression",
    "we don't support vmap over calling .item()",
    "Batching rule not implemented for aten::detach",  # the first step of `numpy()`
)


def reads_data(error: Exception, op: OpOverload | None) -> bool:
    """Whether `error` came from reading data; the context's own refusals of `op` do not count."""
    if isinstance(error, DATA_DEPENDENT_ERRORS):
        return getattr(error, "func", None) is not op
    text = str(error)
    return any(phrase in text for phrase in _PHRASES)

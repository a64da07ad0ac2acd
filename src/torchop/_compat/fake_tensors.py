"""FakeTensor, FakeTensorMode, and PyTorch's errors for code that reads the data of fake tensors."""

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
from torch._subclasses.fake_tensor import (
    UnsupportedOperatorException as UnsupportedOperatorException,
)
from torch.utils._python_dispatch import _disable_current_modes

from torchop._compat.classes import FakeImplCtx, OpOverload


def is_fake(tensor: torch.Tensor) -> bool:
    # Check the type first, because reading `is_meta` of a FakeTensor runs Python code.
    return isinstance(tensor, FakeTensor) or tensor.is_meta


def active_fake_mode() -> Any | None:
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)


def without_new_symbols(mode: Any) -> contextlib.AbstractContextManager[None]:
    """Discard new unbacked symbols, so that PyTorch does not raise if no result uses them."""
    shape_env = mode.shape_env
    if shape_env is None:
        return contextlib.nullcontext()
    ignore: contextlib.AbstractContextManager[None] = shape_env.ignore_fresh_unbacked_symbols()
    return ignore


def is_unbacked(size: Any) -> bool:
    """Return whether a size is data-dependent, i.e. known only at run time."""
    if not isinstance(size, torch.SymInt):
        return False
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols  # imports sympy

    return bool(free_unbacked_symbols(size))


def only_runs_fake(mode: Any, op: OpOverload, tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether FakeTensorMode would only run the fake kernel for a call to `op`."""
    profiles = getattr(sys.modules.get("torch._dynamo.config"), "_custom_ops_profile", None)
    return profiles is None and op not in decomposition_table and _are_plain(mode, tensors)


def new_empty_like(
    tensor: torch.Tensor,
    shape: Sequence[Any] | None,
    dtype: torch.dtype | None,
    memory_format: torch.memory_format | None = None,
) -> Any:
    """Return `tensor.new_empty(shape)`, or `torch.empty_like(tensor)` if `shape` is None.

    Inside a fake kernel, this creates the FakeTensor directly. That is faster than calling either
    function on a FakeTensor, even if the result is in FakeTensorMode's cache.
    """
    if memory_format is torch.contiguous_format:
        if shape is None and tensor.layout is torch.strided:
            shape = tensor.shape
        memory_format = None
    mode: Any = active_fake_mode() if memory_format is None else None
    is_plain = mode is not None and tensor.layout is torch.strided and _are_plain(mode, [tensor])
    strides = _written(tensor.stride()) if is_plain and shape is None else []
    if is_plain and strides[-1:] in ([], [1]):  # the last stride of `torch.empty` is always 1
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
    """Return sizes or strides as sympy expressions, which can be compared without adding guards."""
    return [size if type(size) is int else size.node.expr for size in sizes]


def _are_plain(mode: Any, tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether all tensors are FakeTensors of `mode` that carry no real values."""
    return not mode.propagate_real_tensors and all(
        type(t) is FakeTensor and t.fake_mode is mode and t.constant is None for t in tensors
    )


# Returns whether FakeTensorMode is running a kernel on meta tensors in this thread.
is_calling_kernels: Callable[[], bool] = torch._C._meta_in_tls_dispatch_include


def keep_out_of_log(error: type[Exception]) -> None:
    """Prevent FakeTensorMode from logging exceptions that torchop raises on purpose.

    If a meta kernel raises an exception, `_dispatch_impl` (torch/_subclasses/fake_tensor.py) logs a
    traceback before it reraises the exception. This filter drops the log record if the exception is
    an instance of `error`.
    """

    def is_unexpected(record: logging.LogRecord) -> bool:
        return record.exc_info is None or not isinstance(record.exc_info[1], error)

    logging.getLogger(FakeTensorMode.__module__).addFilter(is_unexpected)


def new_fake_mode() -> Any:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return FakeTensorMode(shape_env=ShapeEnv())


def check_symbols(mode: Any, results: object) -> None:
    """Raise PyTorch's error if a fake kernel created an unbacked symbol that no result uses."""
    from torch.fx.experimental.symbolic_shapes import compute_unbacked_bindings  # imports sympy

    compute_unbacked_bindings(mode.shape_env, results)


def stock_fake_context() -> FakeImplCtx | None:
    """Return the context of the fake kernel that torch.library is running in this thread, or None.

    `torch.library.get_ctx` may return the context of another thread, because torch.library stores
    it in a global variable (`global_ctx_getter` in torch/_library/fake_impl.py). So also check that
    the context belongs to this thread's mode.
    """
    context = cast("FakeImplCtx | None", torch.library.get_ctx())
    return context if context is not None and context._fake_mode is active_fake_mode() else None


# A context manager that makes `torch.library.get_ctx` call the given function, in all threads.
stock_context: Callable[[Callable[[], Any]], contextlib.AbstractContextManager[Any]]
stock_context = set_ctx_getter


def number_of(size: Any) -> int | None:
    """Return the value of a possibly symbolic size, or None if the size is data-dependent."""
    if isinstance(size, int):
        return size
    hint = size.node.hint
    return None if hint is None else int(hint)


def shapes_differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two shapes are known to differ, without comparing data-dependent sizes."""
    return one.dim() != other.dim() or any(
        a != b
        for a, b in zip(one.shape, other.shape, strict=True)
        if number_of(a) is not None and number_of(b) is not None
    )


@contextlib.contextmanager
def fake_calls() -> Iterator[Callable[[Sequence[Any], torch.Tensor], torch.Tensor]]:
    """Leave all transforms and modes, and enter a FakeTensorMode.

    Yields a function `make(shape, like)`, which creates a fake tensor of this shape with the dtype
    and device of `like`.
    """
    mode = detect_fake_mode() or FakeTensorMode()
    # Workaround for `tls_on_entry` in aten/src/ATen/core/PythonFallbackKernel.cpp: before 2.13,
    # calls under a mode fail if the key PythonTLSSnapshot is excluded. Transforms exclude it, so
    # clear the exclusion here.
    snapshots = torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.PythonTLSSnapshot, False)
    with torch._C._DisableFuncTorch(), _disable_current_modes(), snapshots, mode:
        yield lambda shape, like: torch.empty(tuple(shape), dtype=like.dtype, device=like.device)


# The exceptions that FakeTensorMode raises for code that reads a value of a fake tensor, or calls
# an operator with a data-dependent output.
DATA_DEPENDENT_ERRORS = (DataDependentOutputException, DynamicOutputShapeException)


def explained_tracing_error(
    error: type[BaseException], op: OpOverload, message: str
) -> RuntimeError:
    """Return an exception with `message` that Dynamo handles as if it were an `error`."""
    explained = type(error.__name__, (error,), {"__str__": lambda self: message})
    return cast(RuntimeError, explained(op))


# Fragments of PyTorch's error messages for code that reads the data of a tensor without data, such
# as a fake or meta tensor. These errors share no exception class, so they can only be recognized by
# their messages.
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
    """Return whether `error` was raised because code read the data of a fake or batched tensor.

    Returns False if FakeTensorMode rejected the call to `op` itself, because its output is
    data-dependent.
    """
    if isinstance(error, DATA_DEPENDENT_ERRORS):
        return getattr(error, "func", None) is not op
    text = str(error)
    return any(phrase in text for phrase in _PHRASES)

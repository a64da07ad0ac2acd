"""Query the state of Dynamo, compiler backends and TorchScript, and exclude code from tracing."""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, TypeVar

import torch
from torch._guards import TracingContext
from torch._library import triton

import torchop._errors

_Function = TypeVar("_Function", bound=Callable[..., Any])
_eval_frame = torch._C._dynamo.eval_frame
_SKIP = _eval_frame._FrameExecStrategy(_eval_frame._FrameAction.SKIP, _eval_frame._FrameAction.SKIP)


def never_traced(function: _Function) -> _Function:
    """Prevent Dynamo from compiling `function` and its callees when `function` runs eagerly.

    Otherwise, when a compiled function calls an operator, Dynamo would also try to compile the
    operator's kernel. Unlike `torch.compiler.disable`, this does not import Dynamo. It adds no
    overhead to calls either, because Dynamo stores the mark in the code object.
    """
    _eval_frame.set_code_exec_strategy(function.__code__, _SKIP)
    return function


def constant_in_traces(function: _Function) -> _Function:
    """Make Dynamo call `function` while tracing, and treat the result as a constant.

    Unlike `torch.compiler.assume_constant_result`, this does not import Dynamo.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def eager_only(function: _Function) -> _Function:
    """Make Dynamo break the graph at calls to `function`, a function such as `register_fake`.

    If Dynamo traced through a registration, it would evaluate lookups in PyTorch's registries at
    trace time, before the registration has taken effect. Unlike `torch.compiler.disable`, this does
    not import Dynamo and adds no overhead to calls.
    """
    inner: Any = function
    inner._torchdynamo_disable = True
    inner._torchdynamo_disable_msg = "torchop registers operators and rules only in eager code"
    return never_traced(function)


DYNAMO = "torch._dynamo"


def dynamo_is_tracing() -> bool:
    return TracingContext.try_get() is not None


torchop._errors.dynamo_is_tracing = dynamo_is_tracing


def break_graph(reason: str) -> None:
    if torch.compiler.is_dynamo_compiling():
        torch._dynamo.graph_break(msg=reason)


def compiling_backend() -> str | None:
    """Return the name of the backend that this thread is compiling for, or None.

    AOTAutograd does not record which backend called it, so search the call stack for `compile_fx`
    and for `OutputGraph.call_user_compiler`.
    """
    for frame, _ in traceback.walk_stack(sys._getframe()):
        code = frame.f_code
        if code.co_filename.endswith(_INDUCTOR_FILE):
            return "inductor"
        if code.co_name in _CALLS_OF_BACKENDS and code.co_filename.endswith(_DYNAMO_FILE):
            backend = frame.f_locals.get("compiler_fn") or frame.f_locals["self"].compiler_fn
            name = getattr(backend, "compiler_name", None) or getattr(backend, "__name__", None)
            return name if isinstance(name, str) else type(backend).__name__
    return None


_INDUCTOR_FILE = os.path.join("torch", "_inductor", "compile_fx.py")
_DYNAMO_FILE = os.path.join("torch", "_dynamo", "output_graph.py")
_CALLS_OF_BACKENDS = ("_call_user_compiler", "call_user_compiler")


def call_traced_by_dynamo(op: Any) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return the arguments of the call to `op` that Dynamo is tracing, or None outside of a trace.

    The arguments are read from the frame of `run_node` (torch/_dynamo/utils.py). The kernel does
    not receive the original arguments, because the dispatcher has already converted symbolic values
    to numbers.
    """
    for frame, _ in traceback.walk_stack(sys._getframe()):
        if frame.f_code.co_name == "run_node" and frame.f_code.co_filename.endswith(_NODES_FILE):
            values = frame.f_locals
            called = values["node"].target in (op, op.overloadpacket)
            return (values["args"], values["kwargs"]) if called else None
    return None


_NODES_FILE = os.path.join("torch", "_dynamo", "utils.py")


def torchscript_is_inspecting() -> bool:
    """Return whether TorchScript called the caller of this function, directly or via `inspect`."""
    for frame, _ in traceback.walk_stack(sys._getframe(2)):
        if frame.f_globals.get("__name__") != inspect.__name__:
            return frame.f_globals.get("__name__") == _TORCHSCRIPT_MODULE
    return False


_TORCHSCRIPT_MODULE = "torch.jit.annotations"


def torchscript_is_tracing() -> bool:
    """Return whether this thread is in `torch.jit.trace`, even inside a kernel.

    PyTorch's own check returns False inside a kernel, because `general_trace_function`
    (torch/csrc/autograd/TraceTypeManual.cpp) clears the tracing state while the kernel runs. So
    search the call stack instead.
    """
    return any(
        frame.f_globals.get("__name__") == _TRACING_MODULE
        for frame, _ in traceback.walk_stack(sys._getframe())
    )


_TRACING_MODULE = "torch.jit._trace"


def decomposes_for_backends() -> bool:
    """Return whether the current trace replaces each `triton_op` with the code of its kernel.

    Traces for compiler backends do so, whereas `torch.export` keeps the operator by default.
    """
    from torch.export._trace import custom_triton_ops_decomposition_disabled

    return not custom_triton_ops_decomposition_disabled()


def launching_triton() -> contextlib.AbstractContextManager[Any]:
    """Return a context manager in which `wrap_triton` returns the Triton kernel itself.

    Do not enter it while tracing, because the trace would then miss the kernel.
    """
    return triton.set_wrap_triton_enabled(False)


def triton_kernels(function: Callable[..., Any]) -> list[Any]:
    if find_spec("triton") is None:  # without Triton, PyTorch's function would warn
        return []
    try:
        return list(triton.get_inner_triton_kernels(function))
    except ValueError:  # raised if a closure variable is not assigned yet
        return []


def note_triton_kernels(qualname: str, kernels: list[Any]) -> None:
    """Make PyTorch include an operator's Triton kernels in the cache keys of compiled graphs."""
    triton.triton_ops_to_kernels[qualname] = kernels


def makes_cuda_graphs() -> bool:
    config: Any = sys.modules.get("torch._inductor.config")
    return config is not None and bool(config.triton.cudagraphs)

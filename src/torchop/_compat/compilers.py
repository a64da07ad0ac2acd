"""Query the state of Dynamo, backends and TorchScript, and exclude code from tracing."""

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
    """Prevent Dynamo from compiling `function`, and the functions that it calls, in eager calls.

    Otherwise, if a compiled frame calls a kernel, Dynamo would also compile the kernel. Unlike
    `torch.compiler.disable`, this does not import Dynamo, and adds no overhead to calls, because
    the mark is stored in the code object.
    """
    _eval_frame.set_code_exec_strategy(function.__code__, _SKIP)
    return function


DYNAMO = "torch._dynamo"


def dynamo_is_tracing() -> bool:
    """Return whether Dynamo is tracing in this thread. If it is, all calls have fake tensors."""
    return TracingContext.try_get() is not None


torchop._errors.dynamo_is_tracing = dynamo_is_tracing


def break_graph(reason: str) -> None:
    """Make Dynamo break the graph; with `fullgraph=True`, the error shows `reason`."""
    if torch.compiler.is_dynamo_compiling():
        torch._dynamo.graph_break(msg=reason)


def compiling_backend() -> str | None:
    """Return the name of the backend that this thread compiles for, or None.

    AOTAutograd does not record which backend called it, so this searches the call stack for
    `compile_fx` and for `OutputGraph.call_user_compiler`.
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
    """Return the arguments of the call to `op` that Dynamo is tracing, or None if there is none.

    The arguments are read from the frame of `run_node` (torch/_dynamo/utils.py), because the
    dispatcher converts symbolic values to numbers before it calls a kernel.
    """
    for frame, _ in traceback.walk_stack(sys._getframe()):
        if frame.f_code.co_name == "run_node" and frame.f_code.co_filename.endswith(_NODES_FILE):
            values = frame.f_locals
            called = values["node"].target in (op, op.overloadpacket)
            return (values["args"], values["kwargs"]) if called else None
    return None


_NODES_FILE = os.path.join("torch", "_dynamo", "utils.py")


def torchscript_is_inspecting() -> bool:
    """Return whether TorchScript has called our caller, through `inspect.signature`."""
    for frame, _ in traceback.walk_stack(sys._getframe(2)):
        if frame.f_globals.get("__name__") != inspect.__name__:
            return frame.f_globals.get("__name__") == _TORCHSCRIPT_MODULE
    return False


_TORCHSCRIPT_MODULE = "torch.jit.annotations"


def torchscript_is_tracing() -> bool:
    """Return whether this thread is in `torch.jit.trace`, even inside a kernel.

    This searches the call stack, because `general_trace_function` (torch/csrc/autograd/
    TraceTypeManual.cpp) clears the tracing state while a kernel runs.
    """
    return any(
        frame.f_globals.get("__name__") == _TRACING_MODULE
        for frame, _ in traceback.walk_stack(sys._getframe())
    )


_TRACING_MODULE = "torch.jit._trace"


def decomposes_for_backends() -> bool:
    """Return whether the current trace is for a backend, and not for `torch.export`."""
    from torch.export._trace import custom_triton_ops_decomposition_disabled

    return not custom_triton_ops_decomposition_disabled()


def launching_triton() -> contextlib.AbstractContextManager[Any]:
    """In a block outside of a trace, make `wrap_triton` return the bare Triton kernel."""
    return triton.set_wrap_triton_enabled(False)


def triton_kernels(function: Callable[..., Any]) -> list[Any]:
    """Return the Triton kernels that the source of `function` launches."""
    if find_spec("triton") is None:  # otherwise PyTorch would warn
        return []
    try:
        return list(triton.get_inner_triton_kernels(function))
    except ValueError:  # raised if a closure variable is not assigned yet
        return []


def note_triton_kernels(qualname: str, kernels: list[Any]) -> None:
    """Register the Triton kernels of an operator, which PyTorch includes in cache keys."""
    triton.triton_ops_to_kernels[qualname] = kernels


def makes_cuda_graphs() -> bool:
    """Return whether Inductor creates CUDA graphs, e.g. with mode="reduce-overhead"."""
    config: Any = sys.modules.get("torch._inductor.config")
    return config is not None and bool(config.triton.cudagraphs)

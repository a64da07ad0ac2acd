"""Dynamo, the backends behind it, and TorchScript: what they are doing, and must not trace."""

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
    """Keeps Dynamo from compiling `function`, and whatever runs below it, when called eagerly.

    A kernel that runs below a compiled frame would otherwise be traced as if it were the user's
    program. The mark lives in the code object, so it costs nothing per call, and unlike
    `torch.compiler.disable` it does not import Dynamo.
    """
    _eval_frame.set_code_exec_strategy(function.__code__, _SKIP)
    return function


DYNAMO = "torch._dynamo"  # the module


def dynamo_is_tracing() -> bool:
    """Whether Dynamo calls an operator to see what it returns, and will call it again."""
    return TracingContext.try_get() is not None


torchop._errors.dynamo_is_tracing = dynamo_is_tracing


def break_graph(reason: str) -> None:
    """Ends a graph that Dynamo traces; with `fullgraph=True`, its error gives the reason."""
    if torch.compiler.is_dynamo_compiling():
        torch._dynamo.graph_break(msg=reason)


def compiling_backend() -> str | None:
    """The name of the backend for which this thread compiles, if there is one.

    Nothing that AOT Autograd sets tells backends apart, but it is called by one.
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
    """Return the arguments with which Dynamo calls an overload; None if it is not calling it.

    They hold symbols that the dispatcher converts to numbers before a kernel sees them. Dynamo
    passes them to `run_node` in torch/_dynamo/utils.py.
    """
    for frame, _ in traceback.walk_stack(sys._getframe()):
        if frame.f_code.co_name == "run_node" and frame.f_code.co_filename.endswith(_NODES_FILE):
            values = frame.f_locals
            called = values["node"].target in (op, op.overloadpacket)
            return (values["args"], values["kwargs"]) if called else None
    return None


_NODES_FILE = os.path.join("torch", "_dynamo", "utils.py")


def torchscript_asks() -> bool:
    """Whether TorchScript is who calls `inspect.signature`, which calls the caller of this."""
    for frame, _ in traceback.walk_stack(sys._getframe(2)):
        if frame.f_globals.get("__name__") != inspect.__name__:
            return frame.f_globals.get("__name__") == _TORCHSCRIPT_MODULE
    return False


_TORCHSCRIPT_MODULE = "torch.jit.annotations"


def torchscript_is_tracing() -> bool:
    """Whether this thread is inside of `torch.jit.trace`, also in a kernel, which it skips."""
    return any(
        frame.f_globals.get("__name__") == _TRACING_MODULE
        for frame, _ in traceback.walk_stack(sys._getframe())
    )


_TRACING_MODULE = "torch.jit._trace"


def decomposes_for_backends() -> bool:
    """Whether what is being traced goes to a backend, and not into an exported program."""
    from torch.export._trace import custom_triton_ops_decomposition_disabled

    return not custom_triton_ops_decomposition_disabled()


def launching_triton() -> contextlib.AbstractContextManager[Any]:
    """Lets `wrap_triton` hand out the bare kernels, outside of a trace."""
    return triton.set_wrap_triton_enabled(False)


def triton_kernels(function: Callable[..., Any]) -> list[Any]:
    """The Triton kernels that a function launches, as far as its source shows them."""
    if find_spec("triton") is None:  # or PyTorch warns that it finds none
        return []
    try:
        return list(triton.get_inner_triton_kernels(function))
    except ValueError:  # the function uses a variable around it that is assigned later
        return []


def note_triton_kernels(qualname: str, kernels: list[Any]) -> None:
    """Tells PyTorch's compile caches which Triton kernels an operator consists of."""
    triton.triton_ops_to_kernels[qualname] = kernels


def makes_cuda_graphs() -> bool:
    """Whether Inductor compiles for CUDA graphs now, as with mode="reduce-overhead"."""
    config: Any = sys.modules.get("torch._inductor.config")
    return config is not None and bool(config.triton.cudagraphs)

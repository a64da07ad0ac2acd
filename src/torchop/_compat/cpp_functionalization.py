"""C++ functionalization, which PyTorch uses if a subgraph of `invoke_subgraph` mutates inputs.

All other traces are functionalized in Python, by `FunctionalTensorMode`. But if a subgraph mutates
inputs, `FunctionalCallableWithEpilogue` (torch/_higher_order_ops/auto_functionalize.py) calls
`torch.func.functionalize`, which is implemented in C++. By default, C++ functionalization rejects
custom operators that mutate arguments, so torchop registers a functionalization kernel for each of
these operators.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch._higher_order_ops.invoke_subgraph import InvokeSubgraphHOP
from torch._subclasses.functional_tensor import FunctionalTensor

from torchop._compat import tracing
from torchop._compat.classes import DispatchKey, FunctionalTensorMode, OpOverload


def implement(overload: OpOverload, kernel: Callable[..., Any]) -> None:
    """Register an operator's kernel for C++ functionalization, but only in the Python dispatcher.

    Traces use the Python dispatcher, so this is sufficient. A kernel in the C++ dispatcher would
    also turn off auto-functionalization of the operator in all other traces (see
    `FunctionalTensorMode.__torch_dispatch__`). If the user has registered a kernel in the C++
    dispatcher, it takes precedence over `kernel`. If the Python dispatcher already has a kernel,
    this function is a no-op.
    """
    name, key = overload.name(), DispatchKey.Functionalize

    def functionalize(*args: Any, **kwargs: Any) -> Any:
        if torch._C._dispatch_has_kernel_for_dispatch_key(name, key):
            return overload._op_dk(key, *args, **kwargs)
        return kernel(*args, **kwargs)

    overload.py_kernels.setdefault(key, functionalize)
    overload._dispatch_cache.clear()


def withdraw(overload: OpOverload) -> None:
    """Remove the kernel that `implement` registered, if there is one."""
    key = DispatchKey.Functionalize
    if getattr(overload.py_kernels.get(key), "__module__", None) == __name__:
        del overload.py_kernels[key]
        overload._dispatch_cache.clear()


def is_functional(tensor: torch.Tensor) -> bool:
    return torch._is_functional_tensor(tensor)


@contextlib.contextmanager
def traced_by_mode() -> Iterator[FunctionalTensorMode]:
    """Functionalize calls in a `with` block by `FunctionalTensorMode` instead of in C++."""
    keys = (
        DispatchKey.Functionalize,
        DispatchKey.FuncTorchDynamicLayerBackMode,
        DispatchKey.FuncTorchDynamicLayerFrontMode,
    )
    include = torch._C._dispatch_tls_local_include_set()
    for key in keys:
        include = include.remove(key)
    # Before 2.13, PyTorch's fallback kernel for modes asserts that the key PythonTLSSnapshot is
    # included (`tls_on_entry` in aten/src/ATen/core/PythonFallbackKernel.cpp). Include it here,
    # because a transform may have excluded it.
    include = include.add(DispatchKey.PythonTLSSnapshot)
    exclude = torch._C._dispatch_tls_local_exclude_set().remove(DispatchKey.PythonTLSSnapshot)
    below: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if torch._C._functorch.peek_interpreter_stack() is not None:
        below = retrieve_current_functorch_interpreter().lower()
    with below, torch._C._ForceDispatchKeyGuard(include, exclude), FunctionalTensorMode() as mode:
        yield mode


def current_value(tensor: torch.Tensor) -> torch.Tensor:
    """Apply a functional tensor's pending writes, and return the tensor's current value."""
    torch._functionalize_sync(tensor)
    return torch._from_functional_tensor(tensor)


def replace_value(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Record a write of `value` into a functional tensor, and propagate the write to the base."""
    torch._functionalize_replace(tensor, value)
    torch._functionalize_commit_update(tensor)
    torch._functionalize_sync(tensor)


wrap: Callable[[torch.Tensor], torch.Tensor] = torch._to_functional_tensor
# Wraps a tensor for the mode that `traced_by_mode` enters.
wrap_for_mode: Callable[[torch.Tensor], Any] = FunctionalTensor.to_functional


def value_in_mode(tensor: Any) -> torch.Tensor:
    return tensor.from_functional() if isinstance(tensor, FunctionalTensor) else tensor


_FINDS_MUTATIONS = InvokeSubgraphHOP.gen_schema.__code__


def is_finding_mutations() -> bool:
    """Return whether PyTorch is tracing a subgraph only to find out which inputs it mutates.

    `InvokeSubgraphHOP.gen_schema` makes this trace before the subgraph is functionalized.
    """
    callers = traceback.walk_stack(sys._getframe())
    return any(frame.f_code is _FINDS_MUTATIONS for frame, _ in callers)


def overlap_inputs(mode: Any, tensors: Iterable[torch.Tensor]) -> bool:
    inputs = (node.meta.get("val") for node in mode.tracer.graph.find_nodes(op="placeholder"))
    memory = {tracing.functional_storage(t) for t in inputs if isinstance(t, torch.Tensor)}
    return any(tracing.functional_storage(tensor) in memory for tensor in tensors)

"""Traces of exported programs in which operators that write become functional ones."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch._subclasses.functional_tensor import PythonFunctionalizeAPI
from torch.fx.experimental import proxy_tensor

from torchop._compat import registries
from torchop._compat.classes import CustomOpDef, FunctionalTensorMode, OpOverload


def has_rule(handle: CustomOpDef) -> bool:
    """Whether a rule for such traces was registered on a handle."""
    return FunctionalTensorMode in handle._torch_dispatch_fns


@contextlib.contextmanager
def traced_by(op: OpOverload, rule: Callable[..., Any]) -> Iterator[None]:
    """Puts a rule for the functional trace in place of the one that there is, in this thread."""
    name, cls, thread = op.name(), FunctionalTensorMode, threading.get_ident()
    before = registries.torch_dispatch_rule(name, cls)

    def of_this_thread(mode: Any, *call: Any) -> Any:
        if threading.get_ident() == thread:
            return rule(mode, *call)
        return mode.__torch_dispatch__(*call) if before is None else before(mode, *call)

    traced: Callable[..., Any] = of_this_thread
    if before is None or isinstance(before, registries.Offer):
        traced = registries.Offer(of_this_thread)  # so another thread can still register a rule
    if before is not None:
        registries.withdraw_torch_dispatch(name, cls, before)
    registries.register_torch_dispatch(name, cls, traced)
    try:
        yield
    finally:
        registries.withdraw_torch_dispatch(name, cls, traced)
        if before is not None and registries.torch_dispatch_rule(name, cls) is None:
            registries.register_torch_dispatch(name, cls, before)


def untraced(mode: Any, op: OpOverload, args: Any, kwargs: Any) -> Any:
    """What an operator returns for tensors of a functional trace, without being recorded."""
    functionalize: Any = PythonFunctionalizeAPI(mode)
    args, kwargs = functionalize.unwrap_tensors((tuple(args), kwargs))
    with functionalize.redispatch_to_next(), proxy_tensor.disable_proxy_modes_tracing():
        return op(*args, **kwargs)

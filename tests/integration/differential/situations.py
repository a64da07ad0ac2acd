"""Situations: the context of a generated call, such as a mode, a transform or a profiler."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests._support.devices import BACKEND, DEVICE
from tests.integration.differential.calls import Arguments
from tests.integration.differential.describe import describe
from tests.integration.differential.scripts import Running

AUTOCAST = f"Autocast{BACKEND}"
Situation = Callable[[Callable[..., Any], Arguments, Running], Any]


class _SeesDispatch(TorchDispatchMode):
    def __init__(self, running: Running) -> None:
        super().__init__()
        self._running = running

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        seen = describe([args, kwargs], self._running.names)
        self._running.report("dispatch mode", str(func), seen)
        return func(*args, **(kwargs or {}))


class _SeesFunctions(TorchFunctionMode):
    def __init__(self, running: Running) -> None:
        super().__init__()
        self._running = running

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._running.report("function mode", str(func))
        return func(*args, **(kwargs or {}))


def _inside(*contexts: Callable[[Running], Any]) -> Situation:
    def situation(function: Callable[..., Any], arguments: Arguments, running: Running) -> Any:
        with contextlib.ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context(running))
            return arguments.pass_to(function)

    return situation


def _plain(context: Callable[[], Any]) -> Situation:
    return _inside(lambda running: context())


def _saved_tensors_hooks(running: Running) -> Any:
    def pack(tensor: Tensor) -> Tensor:
        running.report("pack", describe(tensor, running.names))
        return tensor

    def unpack(tensor: Tensor) -> Tensor:
        running.report("unpack")
        return tensor

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def _excluding(name: str) -> Callable[[], Any]:
    key = getattr(torch._C.DispatchKey, name)

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        excluded = torch._C._dispatch_tls_local_exclude_set() | torch._C.DispatchKeySet(key)
        with torch._C._ExcludeDispatchKeyGuard(excluded):
            try:
                yield
            except Exception as error:
                # The traceback of the exception keeps a frame alive, and that frame holds a guard
                # whose destructor restores the excluded keys. Clear the frame now, so that the
                # destructor runs before our own guard exits.
                traceback.clear_frames(error.__traceback__)
                raise

    return context


@contextlib.contextmanager
def _including(key: str) -> Iterator[None]:
    chosen = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    with torch._C._IncludeDispatchKeyGuard(chosen):
        yield


@contextlib.contextmanager
def _anomaly() -> Iterator[None]:
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        yield


def _profiled(function: Callable[..., Any], arguments: Arguments, running: Running) -> Any:
    with torch.autograd.profiler.profile(use_kineto=False) as profile:
        result = arguments.pass_to(function)
    running.report("profile", [event.name for event in profile.function_events])
    return result


def _dual(function: Callable[..., Any], arguments: Arguments, running: Running) -> Any:
    with forward_ad.dual_level():
        duals = [
            forward_ad.make_dual(t, torch.ones_like(t)) if _is_dense_float(t) else t
            for t in arguments.tensors
        ]
        return arguments.pass_to(function, duals)


def _dual_level_only(function: Callable[..., Any], arguments: Arguments, running: Running) -> Any:
    """Make the call with forward-mode AD turned on, but without a tangent."""
    with forward_ad.dual_level():
        return arguments.pass_to(function)


def _dual_view(function: Callable[..., Any], arguments: Arguments, running: Running) -> Any:
    with forward_ad.dual_level():
        duals = [
            forward_ad.make_dual(t, torch.ones_like(t)).view_as(t) if _is_dense_float(t) else t
            for t in arguments.tensors
        ]
        return arguments.pass_to(function, duals)


def _is_dense_float(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.layout is torch.strided and tensor.is_floating_point()


def _vmapped(function: Callable[..., Any], arguments: Arguments, running: Running) -> Any:
    tensors = arguments.tensors
    dims = tuple(0 if t.dim() else None for t in tensors)
    return torch.vmap(lambda *ts: arguments.pass_to(function, list(ts)), in_dims=dims)(*tensors)


def _functionalized(function: Callable[..., Any], arguments: Arguments, running: Running) -> Any:
    return torch.func.functionalize(lambda *ts: arguments.pass_to(function, list(ts)))(
        *arguments.tensors
    )


def _differentiated(function: Callable[..., Any], arguments: Arguments, running: Running) -> Any:
    def loss(*tensors: Tensor) -> Tensor:
        result = arguments.pass_to(function, list(tensors))
        first = result[0] if isinstance(result, (tuple, list)) else result
        running.report("inside grad", type(result).__name__)
        return first.sum()

    return torch.func.grad(loss)(*arguments.tensors)


def _traced(function: Callable[..., Any], arguments: Arguments, running: Running) -> Any:
    traced = torch.jit.trace(
        lambda *ts: arguments.pass_to(function, list(ts)),
        tuple(arguments.tensors),
        check_trace=False,
    )
    running.report("trace", str(traced.graph).count("differential::"))
    return None


def _faked(function: Callable[..., Any], arguments: Arguments, running: Running) -> Any:
    with FakeTensorMode() as mode:
        return arguments.pass_to(function, [mode.from_tensor(t) for t in arguments.tensors])


def _fake_outside(function: Callable[..., Any], arguments: Arguments, running: Running) -> Any:
    mode = FakeTensorMode()
    return arguments.pass_to(function, [mode.from_tensor(t) for t in arguments.tensors])


# Maps each focus of examples to the situations that suit it, by name.
SITUATIONS: dict[str, dict[str, Situation]] = {
    "plain": {
        "no_grad": _plain(torch.no_grad),
        "enable_grad in no_grad": _inside(
            lambda running: torch.no_grad(), lambda running: torch.enable_grad()
        ),
        "set_grad_enabled(False)": _plain(lambda: torch.set_grad_enabled(False)),
        "saved_tensors_hooks": _inside(_saved_tensors_hooks),
        "inference_mode": _plain(torch.inference_mode),
        "inference_mode(False) in inference_mode": _inside(
            lambda running: torch.inference_mode(), lambda running: torch.inference_mode(False)
        ),
        "below autograd": _plain(torch._C._AutoDispatchBelowAutograd),
        "below ADInplaceOrView": _plain(_excluding("ADInplaceOrView")),
        f"excluding {BACKEND}": _plain(_excluding(BACKEND)),
        "excluding BackendSelect": _plain(_excluding("BackendSelect")),
        "multithreading off": _plain(lambda: torch.autograd.set_multithreading_enabled(False)),
        "dual level, no dual argument": _dual_level_only,
    },
    "mode": {
        "TorchDispatchMode": _inside(_SeesDispatch),
        "FakeTensorMode": _faked,
        "fake tensors": _fake_outside,
        "vmap": _vmapped,
        "torch.func.grad": _differentiated,
        "functionalize": _functionalized,
        "jit.trace": _traced,
        f"including {AUTOCAST}": _plain(lambda: _including(AUTOCAST)),
        "including AutogradOther": _plain(lambda: _including("AutogradOther")),
    },
    "function mode": {
        "TorchFunctionMode": _inside(_SeesFunctions),
        "torch.device('cpu')": _plain(lambda: torch.device("cpu")),
        "torch.device('meta')": _plain(lambda: torch.device("meta")),
    },
    "autocast": {
        "autocast": _plain(lambda: torch.autocast(DEVICE.type, dtype=torch.bfloat16)),
        "autocast(float16)": _plain(lambda: torch.autocast(DEVICE.type, dtype=torch.float16)),
        "autocast off in autocast": _inside(
            lambda running: torch.autocast(DEVICE.type, dtype=torch.bfloat16),
            lambda running: torch.autocast(DEVICE.type, enabled=False),
        ),
        "autocast excluded": _inside(
            lambda running: torch.autocast(DEVICE.type, dtype=torch.bfloat16),
            lambda running: _excluding(AUTOCAST)(),
        ),
    },
    "tangent": {"dual": _dual, "view of dual": _dual_view},
    "profiler": {"profiler": _profiled},
    "anomaly": {"anomaly": _plain(_anomaly)},
}
EVERY: dict[str, Situation] = {
    "nothing special": _inside(),
    **{name: situation for group in SITUATIONS.values() for name, situation in group.items()},
}


def situations(focus: str) -> st.SearchStrategy[str]:
    if focus in SITUATIONS and focus != "plain":
        return st.sampled_from(list(SITUATIONS[focus]))
    rare = st.sampled_from(list(SITUATIONS["plain"]))
    # Most examples should have only one unusual feature. Some have two, because bugs hide in
    # combinations.
    anything = st.sampled_from(list(EVERY))
    usual = st.just("nothing special")
    return st.one_of(*[usual] * 8, rare, rare, *([anything] if focus != "plain" else [usual]))

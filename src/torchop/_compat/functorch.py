"""The transforms of `torch.func`, and the batching kernels of `torch.vmap`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch._functorch import vmap
from torch._functorch.autograd_function import custom_function_call_vmap_helper
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

from torchop._compat import dispatch
from torchop._compat.classes import DispatchKey, DispatchKeySet, OpOverload
from torchop._compat.settings import changed

# The key at which a transform takes hold of a call.
ENTRY = "FuncTorchDynamicLayerFrontMode"


# Whether a `torch.func` transform is on the stack.
is_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
# Two questions about tensors inside of a transform.
is_wrapped: Callable[[torch.Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
is_batched: Callable[[torch.Tensor], bool] = torch._C._functorch.is_batchedtensor


def holds_batch(tensor: torch.Tensor) -> bool:
    """Whether `torch.vmap` maps over a tensor, at any level of the transforms around it."""
    while is_wrapped(tensor):
        if is_batched(tensor):
            return True
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return False


def make_leaf(tensor: torch.Tensor) -> torch.Tensor:
    """An alias of a tensor that requires grad and is a leaf of this level of the transforms."""

    def make() -> torch.Tensor:
        # Not detach(), which also drops the tangents of forward mode.
        leaf: torch.Tensor = torch.ops.aten.alias.default(tensor)
        return leaf.requires_grad_()

    if not (is_active() or tensor.requires_grad):
        return make()  # nothing has to be set for it
    functorch: Any = torch._C._functorch
    allow = functorch.set_inplace_requires_grad_allowed
    with torch.no_grad(), changed(allow, True, functorch.get_inplace_requires_grad_allowed()):
        return make()


def call_vmap_rule(rule: Callable[..., Any], op: OpOverload, args: Any, kwargs: Any) -> Any:
    """Runs a vmap rule at the current functorch level: unwraps, calls, wraps the results."""
    interpreter: Any = retrieve_current_functorch_interpreter()
    return custom_function_call_vmap_helper(interpreter, rule, op, *args, **kwargs)


# The key at which PyTorch's own random operators meet vmap, mapped over or not.
VMAP_OF_RANDOM_CALLS = "FuncTorchVmapMode"


def without_randomness_of_vmap() -> contextlib.AbstractContextManager[Any]:
    """Lets what runs in a vmap rule draw random numbers as if no vmap were around it.

    PyTorch keeps the key of the mode that says how `torch.vmap` draws them while a rule runs. An
    older mode, which batches of gradients still use, refuses to draw any.
    """
    return torch._C._ExcludeDispatchKeyGuard(_VMAP_MODES)


_VMAP_MODES = DispatchKeySet(DispatchKey.FuncTorchVmapMode)
if (_older_mode := torch._C._parse_dispatch_key("VmapMode")) is not None:
    _VMAP_MODES |= DispatchKeySet(_older_mode)


class Vmap(NamedTuple):
    """The innermost `vmap` that is active."""

    level: int
    batch_size: int
    randomness: str

    def unwrap(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int | None]:
        """The tensor with the dimension that is mapped over, and which that is."""
        tensor, dim = torch._C._functorch._unwrap_batched(tensor, self.level)
        return tensor, dim

    def wrap(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor whose first dimension is mapped over, as `vmap` shows it."""
        wrapped: torch.Tensor = cast(Any, vmap)._add_batch_dim(tensor, 0, self.level)
        return wrapped


def current_vmap() -> Vmap:
    """The `vmap` in whose batching kernel we are."""
    interpreter: Any = retrieve_current_functorch_interpreter()
    return Vmap(interpreter.level(), int(interpreter.batch_size()), interpreter.randomness())


def below_vmap() -> contextlib.AbstractContextManager[Any]:
    """Makes calls go on from the batching kernel of the innermost `vmap`."""
    return dispatch.without_keys("FuncTorchBatched", VMAP_OF_RANDOM_CALLS)

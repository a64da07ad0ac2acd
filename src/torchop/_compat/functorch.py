"""`torch.func` transforms, and batching kernels of `torch.vmap`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch._functorch import vmap
from torch._functorch.autograd_function import custom_function_call_vmap_helper
from torch._functorch.eager_transforms import enable_inplace_requires_grad
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

from torchop._compat import dispatch
from torchop._compat.classes import DispatchKey, DispatchKeySet, OpOverload

# The key at which a transform intercepts calls.
ENTRY = "FuncTorchDynamicLayerFrontMode"


# Return whether a `torch.func` transform is active in this thread.
is_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
# Return whether any transform, or `vmap` in particular, wraps a tensor.
is_wrapped: Callable[[torch.Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
is_batched: Callable[[torch.Tensor], bool] = torch._C._functorch.is_batchedtensor


def holds_batch(tensor: torch.Tensor) -> bool:
    """Return whether `torch.vmap` maps over `tensor` at any functorch level."""
    while is_wrapped(tensor):
        if is_batched(tensor):
            return True
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return False


def make_leaf(tensor: torch.Tensor) -> torch.Tensor:
    """Return an alias of `tensor` that is a leaf, and requires grad at the current level."""

    def make() -> torch.Tensor:
        # Do not use `detach()`, because it would drop forward-mode tangents.
        leaf: torch.Tensor = torch.ops.aten.alias.default(tensor)
        return leaf.requires_grad_()

    if not (is_active() or tensor.requires_grad):
        return make()  # functorch does not forbid `requires_grad_` here
    with torch.no_grad(), enable_inplace_requires_grad(True):
        return make()


def call_vmap_rule(rule: Callable[..., Any], op: OpOverload, args: Any, kwargs: Any) -> Any:
    """Unwrap the arguments at the current functorch level, call the rule, and wrap the results."""
    interpreter: Any = retrieve_current_functorch_interpreter()
    return custom_function_call_vmap_helper(interpreter, rule, op, *args, **kwargs)


# The key of PyTorch's batching kernels for random operators.
VMAP_OF_RANDOM_CALLS = "FuncTorchVmapMode"


def without_randomness_of_vmap() -> contextlib.AbstractContextManager[Any]:
    """Return a context manager for vmap rules in which random operators work as outside of vmap.

    PyTorch does not exclude the dispatch key that implements `randomness=` while a rule runs.
    Batched gradients (`is_grads_batched`) also use an older key, which rejects random operators.
    """
    return torch._C._ExcludeDispatchKeyGuard(_VMAP_MODES)


_VMAP_MODES = DispatchKeySet(DispatchKey.FuncTorchVmapMode)
if (_older_mode := torch._C._parse_dispatch_key("VmapMode")) is not None:
    _VMAP_MODES |= DispatchKeySet(_older_mode)


class Vmap(NamedTuple):
    level: int
    batch_size: int
    randomness: str

    def unwrap(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int | None]:
        """Return the tensor inside a batched tensor, and the mapped dimension or None."""
        tensor, dim = torch._C._functorch._unwrap_batched(tensor, self.level)
        return tensor, dim

    def wrap(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a batched tensor that maps over dimension 0 of `tensor`."""
        wrapped: torch.Tensor = cast(Any, vmap)._add_batch_dim(tensor, 0, self.level)
        return wrapped


def current_vmap() -> Vmap:
    interpreter: Any = retrieve_current_functorch_interpreter()
    return Vmap(interpreter.level(), int(interpreter.batch_size()), interpreter.randomness())


def below_vmap() -> contextlib.AbstractContextManager[Any]:
    """Return a context manager in which calls skip the batching kernel of the innermost `vmap`."""
    return dispatch.without_keys("FuncTorchBatched", VMAP_OF_RANDOM_CALLS)

"""Query `torch.func` transforms, call vmap rules, and skip the batching kernels of `vmap`."""

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

# torch.func transforms intercept calls at this dispatch key.
ENTRY = "FuncTorchDynamicLayerFrontMode"


is_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
is_wrapped: Callable[[torch.Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
is_batched: Callable[[torch.Tensor], bool] = torch._C._functorch.is_batchedtensor


def holds_batch(tensor: torch.Tensor) -> bool:
    """Return whether `torch.vmap` maps over `tensor`, at this or an outer functorch level."""
    while is_wrapped(tensor):
        if is_batched(tensor):
            return True
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return False


def make_leaf(tensor: torch.Tensor) -> torch.Tensor:
    """Return a leaf that aliases `tensor` and requires grad at the current functorch level."""

    def make() -> torch.Tensor:
        # Do not use `detach()`, because it would drop forward-mode tangents.
        leaf: torch.Tensor = torch.ops.aten.alias.default(tensor)
        return leaf.requires_grad_()

    if not (is_active() or tensor.requires_grad):
        return make()  # outside of transforms, `requires_grad_` is always allowed
    with torch.no_grad(), enable_inplace_requires_grad(True):
        return make()


def call_vmap_rule(rule: Callable[..., Any], op: OpOverload, args: Any, kwargs: Any) -> Any:
    interpreter: Any = retrieve_current_functorch_interpreter()
    return custom_function_call_vmap_helper(interpreter, rule, op, *args, **kwargs)


# PyTorch registers batching kernels for random operators at this dispatch key.
VMAP_OF_RANDOM_CALLS = "FuncTorchVmapMode"


def without_randomness_of_vmap() -> contextlib.AbstractContextManager[Any]:
    """Return a context manager in which random operators behave as they do outside of `vmap`.

    While a vmap rule runs, PyTorch still applies `randomness=` to random operators, because it does
    not exclude the dispatch key FuncTorchVmapMode. Batched gradients (`is_grads_batched`) use the
    older key VmapMode, at which random operators raise an error. So exclude both keys.
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
        """Return the tensor inside a batched tensor, and the mapped dimension.

        The mapped dimension is None if this `vmap` does not map over the tensor.
        """
        tensor, dim = torch._C._functorch._unwrap_batched(tensor, self.level)
        return tensor, dim

    def wrap(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a batched tensor whose mapped dimension is dimension 0 of `tensor`."""
        wrapped: torch.Tensor = cast(Any, vmap)._add_batch_dim(tensor, 0, self.level)
        return wrapped


def current_vmap() -> Vmap:
    interpreter: Any = retrieve_current_functorch_interpreter()
    return Vmap(interpreter.level(), int(interpreter.batch_size()), interpreter.randomness())


def below_vmap() -> contextlib.AbstractContextManager[Any]:
    """Return a context manager in which calls skip the batching kernels of the innermost `vmap`."""
    return dispatch.without_keys("FuncTorchBatched", VMAP_OF_RANDOM_CALLS)

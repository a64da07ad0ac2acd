"""Reject fake kernels whose outputs depend on an input's `requires_grad` during compilation.

A compiled program calls the real kernel on tensors that do not require grad, even if the fake
kernel saw tensors that do. If the fake kernel returns, for example, a different number of outputs
in the two cases, PyTorch fails later, with an error that names neither the operator nor the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from torchop._compat import fake_tensors
from torchop._core.call import named_outputs, replace_all, tensors_in
from torchop._core.definition import Definition
from torchop._errors import FakeKernelError

# Attributes that depend on whether autograd tracks a tensor, with their values for untracked
# tensors.
_ATTRIBUTES = {"requires_grad": False, "grad_fn": None, "is_leaf": True}
_GETTERS: dict[Any, str] = {getattr(Tensor, name).__get__: name for name in _ATTRIBUTES}


def call_watched(
    definition: Definition,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    """Call a fake kernel, and raise FakeKernelError if its outputs depend on `requires_grad`."""
    inputs = list(tensors_in((*args, *kwargs.values())))
    mode = fake_tensors.active_fake_mode()
    if mode is None or not any(tensor.requires_grad for tensor in inputs):
        return function(*args, **kwargs)
    watch = _Watch(inputs)
    with watch:
        result = function(*args, **kwargs)
    if watch.attribute is not None:
        with fake_tensors.without_new_symbols(mode):
            args, detached = replace_all(args, kwargs, Tensor, Tensor.detach)
            try:
                other = function(*args, **detached)
            except Exception:
                other = None
            if _metadata(result) != _metadata(other):
                raise FakeKernelError(
                    f"{definition}: the outputs of the fake kernel depend on {watch.attribute} of "
                    "an input. A compiled program calls the kernel on tensors that do not require "
                    "grad, so the kernel would return other outputs than the fake kernel. Return "
                    "the same outputs in both cases, or add an argument to the operator, such as "
                    "needs_grad: bool."
                )
    return result


class _Watch(TorchFunctionMode):
    """Detect reads of autograd attributes that would differ if `inputs` did not require grad."""

    def __init__(self, inputs: list[Tensor]) -> None:
        super().__init__()
        self._inputs = {id(tensor) for tensor in inputs}
        self.attribute: str | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = _GETTERS.get(func)
        if name is not None and id(args[0]) in self._inputs and result is not _ATTRIBUTES[name]:
            self.attribute = name
        return result


def _metadata(result: Any) -> list[tuple[object, ...]]:
    """Return the metadata of a result, to compare two fake calls.

    Data-dependent sizes are left out, because they differ from call to call.
    """
    return [
        (
            place,
            tensor.dtype,
            tensor.device,
            *(None if fake_tensors.is_unbacked(size) else str(size) for size in tensor.shape),
        )
        for place, tensor in named_outputs(result)
    ]

"""Where the body of an operator leaves autograd: what came out no longer knows where it is from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name

# What hands out the data of a tensor to others than PyTorch.
_HANDS_OUT = {"numpy", "__array__", "__dlpack__", "data_ptr", "untyped_storage", "storage"}
# What makes tensors of data of others.
_TAKES_IN = {"from_numpy", "as_tensor", "tensor", "asarray", "frombuffer", "from_dlpack"}


class Watching(TorchFunctionMode):
    """Follows what a function computes from tensors that require grad without autograd knowing.

    A number that is read, `x.item()`, is not followed: most of them decide what is computed, not
    its value.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # so in PyTorch
        # By identity; the tensors are kept, so that none takes the place of another.
        self._found: dict[int, tuple[Tensor, str]] = {}
        self._handed_out: str | None = None

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", str(func))
        inputs = list(_tensors((*args, *(kwargs or {}).values())))
        origin = next((self._found[id(t)][1] for t in inputs if id(t) in self._found), None)
        requires_grad = any(tensor.requires_grad for tensor in inputs)
        if name in _HANDS_OUT and (requires_grad or origin is not None):
            self._handed_out = origin or _readable(func, name)
        elif name in _TAKES_IN and not inputs:
            origin = self._handed_out
        elif origin is None and requires_grad and not _describes(name):
            origin = _readable(func, name)
        if origin is not None and not _describes(name):
            for tensor in _tensors((result,)):
                if not tensor.requires_grad and _has_gradients(tensor):
                    self._found[id(tensor)] = tensor, origin
        return result

    def left(self, output: Any) -> str | None:
        """The function in which the value of an output left autograd; None if it did not."""
        found = self._found.get(id(output))
        return None if found is None else found[1]


def _describes(name: str) -> bool:
    """Whether a function only takes the shape and type of a tensor, not its values."""
    return name.endswith("_like") or name.startswith("new_")


def _readable(func: Any, name: str) -> str:
    return resolve_name(func) or name


def _has_gradients(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)

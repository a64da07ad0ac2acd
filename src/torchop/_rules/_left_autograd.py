"""Where the body of an operator leaves autograd: what came out no longer knows where it is from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name

# What hands out the data of a tensor to others than PyTorch.
_HANDS_OUT = {"numpy", "__array__", "__dlpack__", "data_ptr", "untyped_storage", "storage"}


class Watching(TorchFunctionMode):
    """Follows what a function computes from tensors that require grad without autograd knowing.

    A number that is read, `x.item()`, is not followed: most of them decide what is computed, not
    its value. What comes back from others, `torch.from_numpy`, is not seen coming; so a tensor that
    nobody has seen before is taken for that, once data was handed out.
    """

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        # By identity; the tensors are kept, so that none takes the place of another. Beside each,
        # where it left autograd.
        self._seen: dict[int, tuple[Tensor, str | None]] = {id(t): (t, None) for t in inputs}
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
        origin = next(filter(None, map(self.left, inputs)), None)
        if origin is None and any(tensor.requires_grad for tensor in inputs):
            origin = resolve_name(func) or name
        if name in _HANDS_OUT:
            self._handed_out = self._handed_out or origin
        for tensor in _tensors((result,)):
            has_left = _can_require_grad(tensor) and not _describes(name)
            self._seen.setdefault(id(tensor), (tensor, origin if has_left else None))
        return result

    def left(self, tensor: Any) -> str | None:
        """The function in which the value of a tensor left autograd; None if it did not."""
        if not isinstance(tensor, Tensor) or tensor.requires_grad:
            return None
        return self._seen.get(id(tensor), (tensor, self._handed_out))[1]


def _describes(name: str) -> bool:
    """Whether a function only takes the shape and type of a tensor, not its values."""
    return name.endswith("_like") or name.startswith("new_")


def _can_require_grad(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)

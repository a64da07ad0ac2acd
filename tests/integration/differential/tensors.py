"""Specifications of generated tensors, from which each run creates equal tensors."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from torch import Tensor
from torch.utils._pytree import tree_map

from tests._support.devices import DEVICE
from tests.integration.differential.chance import one_in
from tests.integration.differential.scripts import OurTensor


class Loud(Tensor):
    """A subclass with `__torch_dispatch__`."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    calls: list[str] = []  # noqa: RUF012  (cleared by each run)

    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        made = Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.calls.append(str(func))
        args, kwargs = tree_map(
            lambda value: value.inner if isinstance(value, Loud) else value, (args, kwargs or {})
        )
        return func(*args, **kwargs)


class Overriding(Tensor):
    """A subclass with `__torch_function__`."""

    calls: list[str] = []  # noqa: RUF012  (cleared by each run)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.calls.append(getattr(func, "__name__", str(func)))
        return super().__torch_function__(func, types, args, kwargs or {})


class TensorSpec(NamedTuple):
    """The dtype and shape of a tensor, its memory layout, its role in autograd, and its kind."""

    dtype: torch.dtype = torch.float32
    shape: tuple[int, ...] = (2, 3)
    memory: str = "plain"
    autograd: str = "no grad"
    flavour: str = "plain"

    def __repr__(self) -> str:
        words = [str(self.dtype).removeprefix("torch."), str(list(self.shape)), *self[2:]]
        return f"<{', '.join(w for w in words if w not in ('plain', 'no grad'))}>"

    def make(self) -> Tensor:
        """Create the tensor. Each call creates a new tensor with the same values."""
        tensor = _MEMORIES[self.memory](self.dtype, self.shape)
        tensor = _FLAVOURS_BEFORE.get(self.flavour, lambda t: t)(tensor)
        if tensor.is_floating_point() or tensor.is_complex():
            tensor = _AUTOGRAD[self.autograd](tensor)
        return _FLAVOURS_AFTER.get(self.flavour, lambda t: t)(tensor)


def _numbers(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    count = 1
    for size in shape:
        count *= size
    numbers = torch.arange(count, dtype=torch.float32) - 1
    if dtype.is_floating_point and count > 1:
        numbers[0] = -0.0
    return numbers.to(DEVICE, dtype).reshape(shape)


def _transposed(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return _numbers(dtype, shape[::-1]).permute(tuple(reversed(range(len(shape)))))


def _stepped(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return _numbers(dtype, (*shape, 2))[..., 1]


def _offset(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return _numbers(dtype, (2, *shape))[1]


def _expanded(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return _numbers(dtype, ()).expand(shape)


_MEMORIES: dict[str, Callable[[torch.dtype, tuple[int, ...]], Tensor]] = {
    "plain": _numbers,
    "transposed": _transposed,
    "stepped": _stepped,
    "offset": _offset,
    "expanded": _expanded,
}


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.requires_grad_()


def _view_made_without_grad(tensor: Tensor) -> Tensor:
    base = tensor.requires_grad_()
    with torch.no_grad():
        return base.view_as(base)


def _view_that_came_to_require(tensor: Tensor) -> Tensor:
    """Return a view that requires grad only since an in-place operation on its base."""
    base = tensor.detach().clone()
    view = base.view_as(base)
    base.mul_(torch.ones((), requires_grad=True))
    return view


_AUTOGRAD: dict[str, Callable[[Tensor], Tensor]] = {
    "no grad": lambda t: t,
    "leaf": _leaf,
    "non-leaf": lambda t: _leaf(t) * 1,
    "view of leaf": lambda t: _leaf(t).view_as(t),
    "view of non-leaf": lambda t: (_leaf(t) * 1).view_as(t),
    "part of non-leaf": lambda t: torch.split(_leaf(t) * 1, 2)[0] if t.dim() else _leaf(t) * 1,
    "view made without grad": _view_made_without_grad,
    "view that came to require grad": _view_that_came_to_require,
    "detached": lambda t: _leaf(t).detach(),
    "parameter": lambda t: torch.nn.Parameter(t),
    "frozen parameter": lambda t: torch.nn.Parameter(t, requires_grad=False),
    "leaf with hook": lambda t: _with_hook(_leaf(t) * 1),
}
AUTOGRAD = tuple(_AUTOGRAD)


def _with_hook(tensor: Tensor) -> Tensor:
    tensor.register_hook(lambda grad: grad * 2)
    return tensor


def _inference(tensor: Tensor) -> Tensor:
    with torch.inference_mode():
        return tensor.clone()


def _complex(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex64)


def _quantized(tensor: Tensor) -> Tensor:
    return torch.quantize_per_tensor(tensor.float().contiguous(), 0.5, 1, torch.quint8)


_FLAVOURS_BEFORE: dict[str, Callable[[Tensor], Tensor]] = {
    "inference": _inference,
    "meta": lambda t: t.to("meta"),
    "sparse": lambda t: t.contiguous().to_sparse(),
    "sparse CSR": lambda t: t.to_sparse_csr() if t.dim() == 2 and not t.is_complex() else t,
    "quantized": _quantized,
    "conjugated": lambda t: _complex(t).conj(),
    "negative": lambda t: _complex(t).conj().imag,
}
_FLAVOURS_AFTER: dict[str, Callable[[Tensor], Tensor]] = {
    "OurTensor": lambda t: t.as_subclass(OurTensor),
    "Overriding": lambda t: t.as_subclass(Overriding),
    "Loud": lambda t: Loud(t.detach()).requires_grad_(t.requires_grad),
    "zero tensor": lambda t: torch._efficientzerotensor(t.shape),
    "with attribute": lambda t: _with_attribute(t),
}
SUBCLASSES = ("OurTensor", "Overriding", "Loud")
FLAVOURS = (*_FLAVOURS_BEFORE, "zero tensor", "with attribute")
if DEVICE.type != "cpu":  # other devices may not support sparse and quantized tensors
    FLAVOURS = tuple(name for name in FLAVOURS if not re.match("sparse|quantized", name))


def _with_attribute(tensor: Tensor) -> Tensor:
    tensor.note = 3  # type: ignore[attr-defined]
    return tensor


_DTYPES = (
    *[torch.float32] * 5,
    *(torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8),
    *(torch.bool, torch.complex64),
)
_SHAPES = ((2, 3), (2, 3), (3,), (1,), (), (0,), (2, 0, 3), (2, 1, 2))


@st.composite
def tensors(draw: DrawFn, focus: str = "plain") -> TensorSpec:
    spec = TensorSpec(
        dtype=draw(st.sampled_from(_DTYPES)),
        shape=draw(st.sampled_from(_SHAPES)),
        memory=draw(st.sampled_from(["plain", "plain", *_MEMORIES])),
    )
    if focus in ("gradient", "anomaly"):
        spec = spec._replace(dtype=torch.float32, memory="plain")
    if focus == "anomaly":
        spec = spec._replace(autograd=draw(st.sampled_from(["leaf", "non-leaf"])))
    elif focus == "gradient" or draw(one_in(3)):
        spec = spec._replace(autograd=draw(st.sampled_from(AUTOGRAD)))
    if focus == "subclass":
        spec = spec._replace(flavour=draw(st.sampled_from(["plain", *SUBCLASSES])))
    elif focus == "keys":
        spec = spec._replace(flavour=draw(st.sampled_from(["plain", *FLAVOURS])))
    elif focus == "mutation" and draw(one_in(4)):
        spec = spec._replace(flavour="inference")
    if spec.flavour not in ("plain", "with attribute", "inference", "OurTensor", "Overriding"):
        spec = spec._replace(memory="plain")
    if spec.flavour in ("sparse", "sparse CSR", "quantized") and spec.autograd != "no grad":
        spec = spec._replace(autograd="leaf")  # sparse and quantized tensors have no views
    if spec.flavour == "inference":
        spec = spec._replace(autograd="no grad")  # inference tensors cannot require grad
    return spec

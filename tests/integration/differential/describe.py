"""Describe values so that descriptions are equal only for indistinguishable values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests._support.devices import DEVICE

Described = Any


class Names:
    """Gives names to tensors, which are recognized by identity."""

    def __init__(self) -> None:
        # Keep a reference to the tensor, so that its id is not reused.
        self._names: dict[int, tuple[str, Tensor]] = {}
        self._storages: dict[int, str] = {}

    def add(self, tensor: Tensor, name: str) -> None:
        self._names.setdefault(id(tensor), (name, tensor))
        storage = _storage(tensor)
        if storage is not None:
            self._storages.setdefault(storage, name)

    def of(self, tensor: Tensor) -> str | None:
        found = self._names.get(id(tensor))
        return found[0] if found else None

    def of_storage(self, tensor: Tensor) -> str | None:
        storage = _storage(tensor)
        return None if storage is None else self._storages.get(storage)


def _storage(tensor: Tensor) -> int | None:
    try:
        return tensor.untyped_storage()._cdata
    except Exception:  # sparse, functional and wrapper tensors may have no storage
        return None


def thread_state() -> Described:
    return {
        "grad": torch.is_grad_enabled(),
        "forward grad": torch._C._is_fwd_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled(DEVICE.type),
        "anomaly": torch.is_anomaly_enabled(),
        "excluded": str(torch._C._dispatch_tls_local_exclude_set()),
        "included": str(torch._C._dispatch_tls_local_include_set()),
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
    }


def describe(value: Any, names: Names) -> Described:
    if isinstance(value, Tensor):
        # The example may use modes and subclasses, which must not see the operations of this
        # function.
        with torch._C.DisableTorchFunction():
            return _describe_tensor(value, names)
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *(describe(item, names) for item in value)]
    if isinstance(value, dict):
        return {key: describe(item, names) for key, item in value.items()}
    if isinstance(value, BaseException):
        return describe_error(value)
    # The type distinguishes True from 1, and `repr` distinguishes -0.0 from 0.0.
    return f"{type(value).__name__}: {value!r}"


def describe_error(error: BaseException) -> Described:
    cause = error.__cause__
    return {
        "type": type(error).__name__,
        # pybind11 appends the Python frames to the message. Remove them, because they are frames of
        # the test and differ between the runs.
        "message": str(error).partition("\n\nAt:\n")[0],
        "cause": None if cause is None else describe_error(cause),
    }


def _describe_tensor(tensor: Tensor, names: Names) -> Described:
    layout = tensor.layout
    described = {
        "type": type(tensor).__name__,
        "same as": names.of(tensor),
        "memory of": names.of_storage(tensor),
        "dtype": str(tensor.dtype),
        "shape": list(tensor.shape),
        "device": str(tensor.device),
        "layout": str(layout),
        "requires_grad": _or_error(lambda: tensor.requires_grad),
        # Reading `is_leaf` raises if an in-place operation has made the view invalid.
        "is_leaf": _or_error(lambda: tensor.is_leaf),
        "is_inference": tensor.is_inference(),
        "keys": str(torch._C._dispatch_keys(tensor)),
    }
    described["version"] = None if described["is_inference"] else tensor._version
    if layout is torch.strided:
        described["strides"] = _or_error(lambda: list(tensor.stride()))
        described["offset"] = _or_error(tensor.storage_offset)
    described["node"] = _or_error(lambda: describe_node(tensor.grad_fn))
    described["output_nr"] = _or_error(lambda: tensor.output_nr)
    described["is view"] = _or_error(tensor._is_view)
    described["contents"] = _or_error(lambda: _contents(tensor))
    return described


def _or_error(read: Any) -> Any:
    try:
        return read()
    except Exception as error:
        return f"cannot be read: {type(error).__name__}"


def describe_node(node: Any) -> Described:
    """Describe an autograd node, and list the types of the nodes to which it passes gradients."""
    if node is None:
        return None
    described = {
        "type": type(node).__name__,
        "name": node.name(),
        "next": [
            (None if after is None else type(after).__name__, number)
            for after, number in node.next_functions
        ],
        "inputs": [_or_error(lambda m=m: str((m.shape, m.dtype, m.device))) for m in _inputs(node)],
        "metadata": sorted(node.metadata),
    }
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        described["needs_input_grad"] = _or_error(lambda: repr(node.needs_input_grad))
        described["saved"] = _or_error(
            lambda: [None if t is None else _contents(t) for t in node.saved_tensors]
        )
        for name in ("to_save", "non_differentiable", "dirty_tensors", "materialize_grads"):
            described[name] = _or_error(lambda name=name: repr(getattr(node, name)))
        # Include only attributes that the user's functions have set, and not torchop's own ones.
        described["attributes"] = {
            key: repr(value) for key, value in vars(node).items() if not key.startswith("_torchop")
        }
    return described


def _inputs(node: Any) -> Any:
    return getattr(node, "_input_metadata", ())


def _contents(tensor: Tensor) -> Any:
    """Return the bits of a tensor, which differ even for equal values such as 0.0 and -0.0."""
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        tensor = tensor.coalesce() if tensor.layout is torch.sparse_coo else tensor
        return [_contents(part) for part in (tensor.indices(), tensor.values())]
    if tensor.is_meta:
        return None
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    flat = tensor.resolve_conj().resolve_neg().reshape(-1)
    bits = flat.contiguous().view(torch.uint8)
    return (bits if bits.is_cpu else bits.cpu()).numpy().tobytes().hex()

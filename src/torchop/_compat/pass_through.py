"""A subclass of Tensor that passes every operator on, and changes nothing."""

from __future__ import annotations

from typing import Any

import torch

from torchop._compat.classes import tree_map_only


class PassingTensor(torch.Tensor):
    """Wraps a tensor, and passes every operator on to it."""

    wrapped: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> PassingTensor:
        wrapper: PassingTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=inner.device,
        )
        wrapper.wrapped = inner
        return wrapper

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __repr__(self) -> str:  # type: ignore[override]  # which has an argument nobody passes
        return f"PassingTensor({self.wrapped!r})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # declared as the function that disables it
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        wrappers = {}

        def unwrap(wrapper: PassingTensor) -> torch.Tensor:
            wrappers[id(wrapper.wrapped)] = wrapper
            return wrapper.wrapped

        plain_args, plain_kwargs = tree_map_only(cls, unwrap, (args, kwargs or {}))
        result = func(*plain_args, **plain_kwargs)
        # What is returned of the arguments is the wrapper that was passed, as in-place calls need.
        return tree_map_only(
            torch.Tensor,
            lambda t: t if isinstance(t, cls) else wrappers[id(t)] if id(t) in wrappers else cls(t),
            result,
        )

"""triton_op: an operator of Triton kernels that compilers can trace."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar, overload

from torchop._compat import compilers
from torchop._define.custom_op import MISSING, check_call, custom_op
from torchop._define.handle import CustomOp

P = ParamSpec("P")
R = TypeVar("R")


@overload
def triton_op(
    name: str,
    fn: None = None,
    /,
    *,
    mutates_args: str | Iterable[str],
    schema: str | None = None,
) -> Callable[[Callable[P, R]], CustomOp[P, R]]: ...


@overload
def triton_op(
    name: str,
    fn: Callable[P, R],
    /,
    *,
    mutates_args: str | Iterable[str],
    schema: str | None = None,
) -> CustomOp[P, R]: ...


def triton_op(
    name: str = MISSING,
    fn: Callable[P, R] | None = None,
    /,
    *,
    mutates_args: str | Iterable[str] = MISSING,
    schema: str | None = None,
) -> Callable[[Callable[P, R]], CustomOp[P, R]] | CustomOp[P, R]:
    """Turns a function that launches Triton kernels into an operator.

    It is `custom_op(..., compile="inline")`. `torch.compile` traces the function, so that Inductor
    sees the kernels and the code around them. Exported programs hold the operator. Wrap each kernel
    in the function, `wrap_triton(kernel)[grid](...)`, so that compilers can trace it. Without a
    compiler, the wrapped kernel is launched directly.

    Args:
        name: `"namespace::name"` or `"namespace::name.overload"`.
        fn: the function, of Triton kernels and PyTorch's operators. It is the kernel for all
            devices and the fake kernel.
        mutates_args: the names of the tensor arguments that the function writes into, or
            `"unknown"` for all of them.
        schema: a schema instead of the annotations, as in `custom_op`.

    Returns:
        The handle, a `CustomOp` with all its registrations.

    Raises:
        ValueError: as `custom_op`.

    Example:
        >>> import torch, torchop
        >>> @torchop.triton_op("docs::add_one", mutates_args=())
        ... def add_one(x: torch.Tensor) -> torch.Tensor:
        ...     return x + 1  # or torchop.wrap_triton(kernel)[grid](x, ...)
        >>> add_one(torch.zeros(2))
        tensor([1., 1.])

    The idea is `torch.library.triton_op`.
    """
    check_call("triton_op", name, mutates_args)

    def define(function: Callable[P, R]) -> CustomOp[P, R]:
        # First: it runs code of PyTorch's that may fail.
        kernels = compilers.triton_kernels(function)
        handle = custom_op(
            name, function, mutates_args=mutates_args, schema=schema, compile="inline"
        )

        # Launches what the function wraps, without the detour by which tracing sees it.
        @functools.wraps(function)
        def launch(*args: Any, **kwargs: Any) -> Any:
            with compilers.launching_triton():
                return function(*args, **kwargs)

        handle.register_kernel(None, launch)
        compilers.note_triton_kernels(handle.name, kernels)
        return handle

    return define if fn is None else define(fn)

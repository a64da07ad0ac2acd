"""OperatorFamily: the handle of all forms of one operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchop._core.lock import registration_lock
from torchop._define.forms.kernels import WritingKernels
from torchop._define.handle import CustomOp
from torchop._define.maybe_out import maybe_out
from torchop._rules.autograd.checks import SetupContext
from torchop._rules.kernels.rule import DeviceTypes, fitted_kernel
from torchop._schema.callables import Function, decorator_or_call


class OperatorFamily:
    """The forms of one operator, made from one kernel by `torchop.out_op`.

    A call runs the functional operator or, with `out=`, the operator that writes into `out`.

    Attributes:
        functional: the operator that allocates its results, a `CustomOp`.
        out: the operator that writes them into its keyword-only outputs.
        inplace: the operator that overwrites its first argument; None without `inplace=True`.

    Example:
        >>> import torch, torchop
        >>> @torchop.out_op("docs::cube", like="x", inplace=True)
        ... def cube(x: torch.Tensor, *, out: torch.Tensor) -> None:
        ...     out.copy_(x**3)
        >>> cube
        <torchop.OperatorFamily docs::cube, docs::cube.out, docs::cube_>
        >>> x, buffer = torch.tensor([2.0]), torch.empty(1)
        >>> cube(x), cube(x, out=buffer) is buffer, cube.inplace(x)
        (tensor([8.]), True, tensor([8.]))
    """

    def __init__(
        self,
        functional: CustomOp[..., Any],
        out: CustomOp[..., Any],
        inplace: CustomOp[..., Any] | None,
        kernels: WritingKernels,
    ) -> None:
        self.functional = functional
        self.out = out
        self.inplace = inplace
        self._kernels = kernels
        self._function = maybe_out(functional, out)
        for attribute in ("__name__", "__qualname__", "__module__", "__doc__", "__signature__"):
            setattr(self, attribute, getattr(self._function, attribute))

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __repr__(self) -> str:
        members = (self.functional, self.out, self.inplace)
        names = ", ".join(member.name for member in members if member is not None)
        return f"<torchop.OperatorFamily {names}>"

    def register_kernel(self, device_types: DeviceTypes, fn: Function | None = None, /) -> Function:
        """Registers a kernel that writes into its outputs, for all forms on some device types.

        A form can have a kernel of its own: `family.functional.register_kernel("cuda", ...)`.
        """
        return decorator_or_call(lambda kernel: self._register_kernel(device_types, kernel), fn)

    def _register_kernel(self, device_types: DeviceTypes, kernel: Callable[..., Any]) -> None:
        kernels, inplace = self._kernels, self.inplace
        kernel = fitted_kernel(self.out._live(), kernel)
        with registration_lock:
            self.functional.register_kernel(device_types, kernels.functional(kernel))
            self.out.register_kernel(device_types, kernels.out(kernel))
            if inplace is not None:
                definition = inplace._live()
                inplace.register_kernel(
                    device_types, kernels.inplace(kernel, definition.name, definition.schema)
                )

    def register_autograd(
        self, backward: Function | None = None, /, *, setup_context: SetupContext | None = None
    ) -> Function:
        """Registers the backward formula; see `torchop.register_autograd`.

        The functional operator and the in-place one use it. Like PyTorch's own, the operator with
        `out=` refuses tensors that require grad.
        """
        return self.functional.register_autograd(backward, setup_context=setup_context)

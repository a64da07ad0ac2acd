"""`get_kernel`: return the kernel that the dispatcher would run for a dispatch key."""

from __future__ import annotations

from typing import Any

import torch.library

from torchop import OperatorGoneError
from torchop._compat import torch_ops
from torchop._compat.classes import DispatchKey, DispatchKeySet
from torchop._errors import short_errors
from torchop.extend import Operator, OpLike, OpName, short_repr


def get_kernel(op: OpLike, dispatch_key: str | DispatchKey) -> Kernel:
    """Return an operator's kernel for a dispatch key, so that you can call the kernel directly.

    Args:
        op: the operator: a handle, `"ns::name"`, `"ns::name.overload"`, an `OpOverload`, or a
            packet with one overload.
        dispatch_key: the name of a dispatch key, such as `"CPU"`, or a `torch.DispatchKey`.

    Returns:
        The kernel. Its method `call_boxed(keyset, *args, **kwargs)` calls it.

    Raises:
        OperatorNotFoundError: the operator does not exist.
        RuntimeError: the operator has no kernel for the key.
        ValueError: `op` or `dispatch_key` has another type or value.

    Example:
        >>> import torch, torchop
        >>> kernel = torchop.get_kernel("aten::sin", "CPU")
        >>> keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
        >>> kernel.call_boxed(keys, torch.zeros(1))
        tensor([0.])

    Based on `torch.library.get_kernel`.
    """
    operator = Operator(op, "get_kernel")
    operator.schema  # noqa: B018  # raises if the operator does not exist
    name = operator.name
    if not isinstance(dispatch_key, (str, DispatchKey)):
        raise ValueError(
            f"get_kernel({name}): expected a dispatch key, such as 'CPU'; got "
            f"{short_repr(dispatch_key)} of type {type(dispatch_key).__name__}."
        )
    with short_errors:
        return Kernel(name, torch.library.get_kernel(str(name), dispatch_key))


class Kernel:
    """The result of `get_kernel`. Calling it raises an error once the operator is deregistered.

    PyTorch's own kernel object raises an error if the kernel was replaced, but it crashes the
    process if the operator was deregistered. So this wrapper checks that the operator still exists.
    """

    def __init__(self, name: OpName, kernel: Any) -> None:
        self._name = name
        self._kernel = kernel
        self._overload = torch_ops.lookup_overload(*name)

    def call_boxed(self, keyset: DispatchKeySet, /, *args: Any, **kwargs: Any) -> Any:
        """Call the kernel with these dispatch keys.

        Raises:
            OperatorGoneError: the operator was deregistered.
            RuntimeError: the kernel was removed.
        """
        self._check_alive()
        return self._kernel.call_boxed(keyset, *args, **kwargs)

    @property
    def op_handle(self) -> Any:
        self._check_alive()
        return self._kernel.op_handle

    def _check_alive(self) -> None:
        if torch_ops.existing_overload(*self._name) is not self._overload:
            raise OperatorGoneError(
                f"This kernel belongs to the operator {self._name}, which was deregistered."
            )

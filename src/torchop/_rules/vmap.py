"""vmap rules: an operator over a batch, without a loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, overload

import torch.library

from torchop import _compat
from torchop._definition import Definition, registration_lock
from torchop._plan import Rule
from torchop._resolve import OpLike, resolve
from torchop._rules._callables import check_signature
from torchop._rules._shapes import Function, decorator_or_call
from torchop._schema.defaults import bind

_LEADING = ("info", "in_dims")


class VmapRule(Rule["Callable[..., Any] | None"]):
    """How an operator handles one more dimension on some of its inputs."""

    __slots__ = ("function", "installed")

    def __init__(self, definition: Definition) -> None:
        super().__init__(definition)
        self.function: Callable[..., Any] | None = None
        self.installed = False

    def compile(self) -> Callable[..., Any] | None:
        if self.function is None:
            return None
        return bind(self.function, self.definition.schema, leading=len(_LEADING))

    def describe(self) -> str | None:
        return None if self.function is None else "vmap"

    def register(self, function: Callable[..., Any]) -> None:
        """Makes `function` the vmap rule.

        Raises:
            NotImplementedError: the operator takes tensors by keyword only.
            RuleSignatureError: `function` does not take `(info, in_dims, *args)`.
        """
        definition = self.definition
        schema = definition.schema
        if any(argument.holds_tensors for argument in schema.keyword_only):
            raise NotImplementedError(
                f"{definition}: register_vmap does not support kwarg-only Tensor args, because "
                f"in_dims has no entry for them. Make the tensors positional. Got {schema}."
            )
        check_signature(
            f"{definition}: a vmap rule",
            function,
            (*_LEADING, *(a.name for a in schema.positional)),
            (a.name for a in schema.keyword_only),
        )
        with registration_lock:
            if not self.installed:
                definition.implement("FuncTorchBatched", _batched_kernel(definition))
                self.installed = True
            self.function = function
            definition.recompile()


def _batched_kernel(definition: Definition) -> Callable[..., Any]:
    @_compat.never_traced
    def kernel(*args: Any, **kwargs: Any) -> Any:
        rule = definition.plan[VmapRule]
        assert rule is not None  # the kernel is installed with the first rule
        return _compat.call_vmap_rule(rule, definition.overload, args, kwargs)

    return kernel


@overload
def register_vmap(
    op: OpLike,
    func: None = None,
    /,
    *,
    lib: torch.library.Library | None = None,
) -> Callable[[Function], Function]: ...


@overload
def register_vmap(
    op: OpLike,
    func: Function,
    /,
    *,
    lib: torch.library.Library | None = None,
) -> Function: ...


def register_vmap(
    op: OpLike,
    func: Function | None = None,
    /,
    *,
    lib: torch.library.Library | None = None,
) -> Function | Callable[[Function], Function]:
    """Registers how `torch.vmap` maps an operator over a batch.

    Without a rule, PyTorch calls the operator once for each element, and warns.

    Args:
        op: the operator: a handle, `"ns::name"`, `"ns::name.overload"`, an `OpOverload`, or a
            packet with one overload.
        func: `func(info, in_dims, *args, **kwargs) -> (output, out_dims)`. `in_dims` holds, for
            each positional argument, the dimension that is mapped over, or None; `out_dims` says
            the same of the outputs. `info.batch_size` is the size of the dimension and
            `info.randomness` what the caller of `vmap` asked for. Without `func`, a decorator is
            returned.
        lib: the library whose lifetime the registration shares; by default it stays for good.

    Returns:
        `func`.

    Raises:
        NotImplementedError: the operator takes tensors by keyword only.
        OperatorNotFoundError: nobody defined the operator.
        RuleSignatureError: `func` does not take these arguments.

    Example:
        >>> import torch, torchop
        >>> @torchop.custom_op("docs::cube", mutates_args=())
        ... def cube(x: torch.Tensor) -> torch.Tensor:
        ...     return x**3
        >>> @torchop.register_vmap("docs::cube")
        ... def _(info, in_dims, x):
        ...     return cube(x), in_dims[0]
        >>> torch.vmap(cube)(torch.tensor([1.0, 2.0]))
        tensor([1., 8.])

    The idea is `torch.library.register_vmap`.
    """
    rule = resolve(op, "register_vmap", lib).rule(VmapRule)
    return decorator_or_call(rule.register, func)

"""The torch_dispatch rule: how an operator behaves in dispatch modes and on Tensor subclasses."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.library

from torchop._compat import compilers, registries
from torchop._compat.classes import FunctionalTensorMode, TorchDispatchMode
from torchop._core.contract import result_check
from torchop._core.definition import NOTHING, CompiledRule, Definition
from torchop._core.lock import registration_lock
from torchop._core.registry import OpLike, resolve
from torchop._errors import short_repr
from torchop._rules.inlining import InliningRule
from torchop._schema.callables import Function, Lambda, check_signature, decorator_or_call

_PARAMETERS = ("mode_or_cls", "func", "types", "args", "kwargs")


class TorchDispatchRule(CompiledRule["Mapping[type, Callable[..., Any]]"]):
    """The user's torch_dispatch rules, by dispatch mode or Tensor subclass."""

    functions: Mapping[type, Callable[..., Any]] = NOTHING

    def compile(self) -> Mapping[type, Callable[..., Any]]:
        return self.functions

    def cache_parts(self) -> Iterator[object]:
        for cls, function in sorted(self.functions.items(), key=lambda item: item[0].__qualname__):
            yield from (cls.__qualname__, function)

    def repr_text(self) -> str | None:
        names = [cls.__name__ for cls in self.functions]
        return "torch_dispatch for " + ", ".join(names) if names else None

    def register(self, cls: type, function: Callable[..., Any]) -> None:
        definition = self.definition
        if not (isinstance(cls, type) and issubclass(cls, (torch.Tensor, TorchDispatchMode))):
            raise ValueError(
                f"{definition}: register_torch_dispatch expects a subclass of torch.Tensor with "
                f"__torch_dispatch__, or of TorchDispatchMode, got {short_repr(cls)}."
            )
        check_signature(f"{definition}: a torch_dispatch rule", function, _PARAMETERS)
        function = definition.convention.torch_dispatch(function)

        name, hook = str(definition), _hook(definition, cls)
        withdraw = functools.partial(registries.withdraw_torch_dispatch, name, cls, hook)

        def install() -> None:
            if cls is FunctionalTensorMode:
                definition.rule(InliningRule).disable()
            registries.register_torch_dispatch(name, cls, hook)
            definition.registered.add(cls, hook, withdraw)

        what = f"torch_dispatch rule for {cls.__qualname__}"
        with definition.registered.registering(what), registration_lock:
            self.update(
                None if cls in self.functions else install,
                functions={**self.functions, cls: function},
            )


def _hook(definition: Definition, cls: type) -> Callable[..., Any]:
    check_result = result_check(definition.schema.returns)

    def call(*args: Any, **kwargs: Any) -> Any:
        result = definition.plan[TorchDispatchRule][cls](*args, **kwargs)
        if result is NotImplemented:
            return result  # another Tensor subclass may handle the call
        # Check the results here, because PyTorch converts them to the schema's return types without
        # checking their number.
        return check_result(result, definition, f"torch_dispatch rule for {cls.__name__}")

    return call


@compilers.eager_only
def register_torch_dispatch(
    op: OpLike,
    torch_dispatch_class: type,
    func: Function | Lambda | None = None,
    /,
    *,
    lib: torch.library.Library | None = None,
) -> Function:
    """Register the behavior of an operator under a `TorchDispatchMode` or on a Tensor subclass.

    Args:
        op: the operator, as its handle (the object that `custom_op` returned), `"ns::name"`,
            `"ns::name.overload"`, an `OpOverload`, or a packet with one overload.
        torch_dispatch_class: the mode, or the subclass with `__torch_dispatch__`.
        func: the rule, called as `func(mode_or_cls, func, types, args, kwargs)`. Inside the rule,
            `func` is the `OpOverload`, and the other parameters are the arguments of
            `__torch_dispatch__`. If `func` is omitted, a decorator is returned.
        lib: the library that owns the registration, so that closing it removes the registration. By
            default, the registration is permanent.

    Returns:
        `func`, or a decorator if `func` is omitted.

    Raises:
        OperatorNotFoundError: the operator is not defined.
        RuleSignatureError: `func` does not accept these arguments.
        ValueError: the class is neither a `TorchDispatchMode` nor a subclass of `torch.Tensor`.

    Example:
        >>> import torch, torchop
        >>> from torch.utils._python_dispatch import TorchDispatchMode
        >>> class Zeros(TorchDispatchMode):
        ...     def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        ...         return func(*args, **(kwargs or {}))
        >>> @torchop.custom_op("docs::negate", mutates_args=())
        ... def negate(x: torch.Tensor) -> torch.Tensor:
        ...     return -x
        >>> @torchop.register_torch_dispatch("docs::negate", Zeros)
        ... def _(mode, func, types, args, kwargs):
        ...     return torch.zeros_like(args[0])
        >>> with Zeros():
        ...     negate(torch.ones(2))
        tensor([0., 0.])

    Based on `torch.library.register_torch_dispatch`.
    """
    rule = resolve(op, "register_torch_dispatch", lib).rule(TorchDispatchRule)
    return decorator_or_call(lambda function: rule.register(torch_dispatch_class, function), func)

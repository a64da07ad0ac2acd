"""Effects: what tells compilers that an operator must neither disappear nor change places."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch.library

from torchop import _compat
from torchop._definition import Definition
from torchop._errors import MissingEffectError
from torchop._plan import Rule, registration_lock
from torchop._resolve import OpLike, resolve


class EffectRule(Rule["_compat.EffectType | None"]):
    """Which kind of side effect an operator has."""

    __slots__ = ("effect", "take_back")

    def __init__(self, definition: Definition) -> None:
        super().__init__(definition)
        self.effect: _compat.EffectType | None = None
        self.take_back: Callable[[], None] | None = None

    def install(self) -> None:
        definition = self.definition
        if definition.schema.returns or definition.schema.is_mutable:
            return
        mode = _compat.functional_tensor_mode()
        hook = _removal_guard(definition)
        _compat.on_close(
            definition.library, _compat.register_torch_dispatch(str(definition), mode, hook)
        )

    def compile(self) -> _compat.EffectType | None:
        return self.effect

    def baked(self) -> Iterator[object]:
        yield str(self.effect)

    def describe(self) -> str | None:
        return None if self.effect is None else f"effect {self.effect.name}"

    def register(self, effect: _compat.EffectType | None) -> None:
        """Declares the effect, in place of what was declared before; None takes it back.

        Raises:
            ValueError: not an `EffectType`, or the operator's schema mutates or aliases, which
                functionalization handles in another way and would put before the effect.
        """
        definition = self.definition
        if effect is not None and not isinstance(effect, _compat.EffectType):
            raise ValueError(
                f"{definition}: register_effect expects an EffectType or None, got {effect!r}."
            )
        if effect is not None and (definition.schema.is_mutable or definition.schema.is_view):
            raise ValueError(
                f"{definition}: PyTorch ignores the effect of an operator whose schema mutates or "
                f"aliases an argument, as {definition.schema} does; the mutation already keeps it "
                "in the graph and in order."
            )
        with registration_lock:
            take_back = _compat.register_effect(str(definition), effect)
            if self.take_back is None:
                _compat.on_close(definition.library, take_back)
            self.take_back = take_back
            self.update(effect=effect)


def _removal_guard(definition: Definition) -> Callable[..., Any]:
    """Speaks up where compilers would silently drop an operator that returns nothing."""

    def functionalize(mode: Any, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if definition.plan[EffectRule] is None:
            raise MissingEffectError(
                f"{definition} returns nothing and mutates nothing, so a compiler would remove it. "
                f"If its side effect matters, declare it: torchop.register_effect("
                f"{str(definition)!r}, torchop.EffectType.ORDERED). If it writes into an argument, "
                "name that in mutates_args."
            )
        return mode.__torch_dispatch__(op, types, args, kwargs)

    return functionalize


def register_effect(
    op: OpLike,
    effect: _compat.EffectType | None,
    *,
    lib: torch.library.Library | None = None,
) -> None:
    """Declares that an operator has a side effect that its schema does not show.

    Compilers then keep every call, and keep the calls with the same effect in order.

    Args:
        op: the operator: a handle, `"ns::name"`, `"ns::name.overload"`, an `OpOverload`, or a
            packet with one overload.
        effect: `EffectType.ORDERED`, or None for an operator without effect.
        lib: the library whose lifetime the registration shares; by default it stays for good.

    Raises:
        OperatorNotFoundError: nobody defined the operator.
        ValueError: not an effect, or an operator that mutates or aliases an argument.

    Example:
        >>> import torch, torchop
        >>> @torchop.custom_op("docs::log_mean", mutates_args=())
        ... def log_mean(x: torch.Tensor) -> None:
        ...     print(x.mean())
        >>> _ = log_mean.register_fake(lambda x: None)
        >>> torchop.register_effect("docs::log_mean", torchop.EffectType.ORDERED)

    The idea is `torch.library`'s `_register_effectful_op`.
    """
    resolve(op, "register_effect", lib).rule(EffectRule).register(effect)

"""Functionalization: how compilers turn an operator that mutates into one that does not.

PyTorch does it by itself for an operator that returns fresh tensors, and the trace keeps that form.
The other forms are described to it in a way that it compiles right:

- An operator with `torch.Tag.inplace` or `torch.Tag.out` is traced as one that returns nothing, and
  the trace goes on with its arguments. Inductor 2.13 takes a returned argument for fresh memory,
  and puts later results where it is; and PyTorch gives an operator with `out=` other memory than
  the caller's, of which it must not read what it did not write.
- An operator that mutates a list with None in it is traced as one that gets a list without.
- An operator that returns lists is traced as a functional one, which writes into copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from torchop import _compat
from torchop._contract import returned_arguments, tensors_in
from torchop._definition import Definition
from torchop._errors import FunctionalizationError
from torchop._plan import Rule
from torchop._rules import _counterparts, _hidden_aliases
from torchop._schema.forms import Form
from torchop._schema.schema import Schema

# `(mode, types, args, kwargs)`, as in `__torch_dispatch__`.
Strategy = Callable[[Any, Any, tuple[Any, ...], dict[str, Any]], Any]


class FunctionalizationRule(Rule["Strategy | None"]):
    """What a compiler's functional trace makes of an operator that mutates."""

    __slots__ = ("counterparts", "take_back")

    def __init__(self, definition: Definition) -> None:
        super().__init__(definition)
        # By kind, the operators that stand for this one where PyTorch cannot take it as it is.
        self.counterparts: Mapping[str, _counterparts.Counterpart] = {}
        self.take_back: Callable[[], None] | None = None

    def install(self) -> None:
        definition = self.definition
        if not definition.schema.is_mutable:
            return
        self.take_back = _compat.register_torch_dispatch(
            str(definition), _compat.functional_tensor_mode(), _hook(definition)
        )
        _compat.on_close(definition.library, self.give_way)

    def install_on_defined(self) -> None:
        # From birth, not when a trace needs them: a cached or exported graph names them, and is
        # loaded in a process that traces nothing.
        if self.definition.schema.is_mutable:
            self.counterparts = {
                kind: _counterparts.define(self.definition, kind)
                for kind in _needed(self.definition.schema)
            }

    def give_way(self) -> None:
        """Leaves the functional trace to whoever has a rule of their own for it."""
        take_back, self.take_back = self.take_back, None
        if take_back is not None:
            take_back()

    def compile(self) -> Strategy | None:
        return _strategy(self.definition, self.counterparts)


def _needed(schema: Schema) -> Iterator[str]:
    if _returns_lists(schema):
        yield _counterparts.FUNCTIONAL
    elif schema.form is not Form.PLAIN or _counterparts.lists_with_none(schema):
        yield _counterparts.MUTABLE


def _hook(definition: Definition) -> Callable[..., Any]:
    def functionalize(mode: Any, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
        strategy = definition.plan[FunctionalizationRule]
        assert strategy is not None  # the hook is there for operators that mutate
        args, kwargs = _hidden_aliases.broken(mode, definition.schema, args, kwargs or {})
        return strategy(mode, types, args, kwargs)

    return functionalize


def _strategy(
    definition: Definition, counterparts: Mapping[str, _counterparts.Counterpart]
) -> Strategy | None:
    schema = definition.schema
    if not schema.is_mutable:
        return None
    if schema.form is Form.PLAIN and not set(schema.returns) <= {"Tensor", "List[Tensor]"}:
        return _refused(definition)
    functional = counterparts.get(_counterparts.FUNCTIONAL)
    if functional is not None:
        return _through_copies(definition, functional)
    mutable = counterparts.get(_counterparts.MUTABLE)
    if mutable is not None:
        return _through_mutable(definition, mutable)
    return _as_it_is(definition)


def _returns_lists(schema: Schema) -> bool:
    return schema.form is Form.PLAIN and "List[Tensor]" in schema.returns


def _as_it_is(definition: Definition) -> Strategy:
    def functionalize(
        mode: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        return mode.__torch_dispatch__(definition.overload, types, args, kwargs)

    return functionalize


def _through_mutable(definition: Definition, mutable: _counterparts.Counterpart) -> Strategy:
    schema = definition.schema
    as_it_is = _as_it_is(definition)
    lists = [a.name for a in _counterparts.lists_with_none(schema)]

    def functionalize(
        mode: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        values = _by_name(schema, args, kwargs)
        if schema.form is Form.PLAIN and not any(None in (values[name] or ()) for name in lists):
            return as_it_is(mode, types, args, kwargs)
        passed = mutable.arguments(args, kwargs)
        result = mode.__torch_dispatch__(mutable.overload, types, *passed)
        if schema.form is Form.PLAIN or result is NotImplemented:
            return result
        returned = returned_arguments(schema, args, kwargs)
        return returned if len(returned) > 1 else returned[0]

    return functionalize


def _through_copies(definition: Definition, functional: _counterparts.Counterpart) -> Strategy:
    schema = definition.schema

    def functionalize(
        mode: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        mutated = _mutated_tensors(schema, args, kwargs)
        bases = [_compat.view_base(tensor) for _, tensor in mutated]
        owners = [id(t if b is None else b) for (_, t), b in zip(mutated, bases, strict=True)]
        if len(set(owners)) < len(owners):
            raise FunctionalizationError(
                f"{definition} was called with mutated arguments that share memory "
                f"({', '.join(dict.fromkeys(name for name, _ in mutated))}). An operator that "
                "mutates and returns a list is compiled into one that writes into copies, which "
                "would not share it. Pass tensors of their own, or return a tuple of tensors "
                "instead of a list."
            )
        passed = functional.arguments(args, kwargs)
        result = mode.__torch_dispatch__(functional.overload, types, *passed)
        if result is NotImplemented:
            return result
        *returned, written = result
        with mode:
            for (_, tensor), value in zip(mutated, written, strict=True):
                tensor.copy_(value)
        return tuple(returned) if len(returned) > 1 else returned[0]

    return functionalize


def _refused(definition: Definition) -> Strategy:
    schema = definition.schema
    others = [kind for kind in schema.returns if kind not in ("Tensor", "List[Tensor]")]

    def functionalize(
        mode: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        raise FunctionalizationError(
            f"{definition} mutates an argument and returns {', '.join(others)}, which a compiler "
            "cannot follow: it would keep the value that the fake kernel returned. Return a "
            f"tensor, of no dimensions for a number. Got {schema}."
        )

    return functionalize


def _by_name(
    schema: Schema, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    args, kwargs = schema.fill_defaults(args, kwargs)
    return {**{a.name: v for a, v in zip(schema.positional, args, strict=True)}, **kwargs}


def _mutated_tensors(
    schema: Schema, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[tuple[str, Tensor]]:
    values = _by_name(schema, args, kwargs)
    return [(name, tensor) for name in schema.mutated for tensor in tensors_in((values[name],))]

"""FLOP formulas: what `torch.utils.flop_counter.FlopCounterMode` counts for a call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from torchop._compat import classes, flop_counter
from torchop._compat.classes import OpOverload, OpOverloadPacket
from torchop._core.registry import op_name, own_definition
from torchop._core.user_rule import Rule, check_arguments
from torchop._errors import ResultError
from torchop._schema.callables import accepts
from torchop._schema.schema import Schema


class Formula:
    """A formula, and whether it sees tensors (PyTorch's `get_raw`) or their shapes."""

    __slots__ = ("function", "get_raw", "takes_result")

    def __init__(
        self, function: Callable[..., Any], get_raw: bool, takes_result: bool = False
    ) -> None:
        self.function = function
        self.get_raw = get_raw
        self.takes_result = takes_result

    @property
    def result_name(self) -> str:
        return "out_val" if self.get_raw else "out_shape"


class _FlopFormulaRule(Rule[Formula]):
    """PyTorch keeps one formula for all overloads of a name; what it is given here chooses."""

    def validate(self, op: OpOverload, value: Any) -> Formula:
        formula = value if isinstance(value, Formula) else Formula(value, get_raw=False)
        definition = own_definition(op, op_name(op, "flop_formula"))
        if definition is not None:
            what = f"{op.name()}: a FLOP formula"
            flat = definition.convention.observer(what, formula.function, ())
            if flat is not None:
                return Formula(flat, formula.get_raw)
        names = [argument.name for argument in op._schema.arguments if not argument.kwarg_only]
        keywords = [argument.name for argument in op._schema.arguments if argument.kwarg_only]
        takes_result = callable(formula.function) and accepts(
            formula.function, names, [*keywords, formula.result_name]
        )
        if not takes_result:
            check_arguments(f"{op.name()}: a FLOP formula", op, formula.function)
        return Formula(formula.function, formula.get_raw, takes_result)

    def attach(self, op: OpOverload) -> None:
        packet, registry = op._overloadpacket, flop_counter.registry()
        known = registry.get(packet)
        if known is None:
            registry[packet] = _Counter(packet)
        elif not isinstance(known, _Counter):
            raise RuntimeError(
                f"{op.name()} has a FLOP formula already, registered with "
                "torch.utils.flop_counter. For one count, pass another one to "
                "FlopCounterMode(custom_mapping=...)."
            )

    def detach(self, op: OpOverload) -> None:
        packet, registry = op._overloadpacket, flop_counter.registry()
        if isinstance(registry.get(packet), _Counter) and not self.overloads(packet):
            del registry[packet]

    def overloads(self, packet: OpOverloadPacket) -> list[OpOverload]:
        """The overloads of a packet that have a formula."""
        return [
            entries[-1].op
            for entries in list(self._entries.values())
            if entries and entries[-1].op._overloadpacket is packet
        ]


FLOP_FORMULA = _FlopFormulaRule("flop_formula")


class _Counter:
    """What stands in PyTorch's registry: chooses among formulas, and checks what they say."""

    def __init__(self, packet: OpOverloadPacket) -> None:
        self._packet = packet

    def __call__(self, *args: Any, out_val: Any = None, **kwargs: Any) -> int:
        candidates = FLOP_FORMULA.overloads(self._packet)
        if not candidates:
            return 0  # a mode copied the registry before the operator went
        op, keywords = _called(candidates, args, kwargs)
        formula = FLOP_FORMULA.lookup(op)
        filled, keywords = Schema(op._schema).fill_defaults(args, keywords)
        if formula.takes_result:
            keywords[formula.result_name] = out_val
        if not formula.get_raw:
            filled, keywords = classes.tree_map(_shape, (filled, keywords))
        count = formula.function(*filled, **keywords)
        if isinstance(count, bool) or not isinstance(count, (int, torch.SymInt)):
            raise ResultError(
                f"{op.name()}: the FLOP formula returns the number of operations as an int, got "
                f"{count!r} of type {type(count).__name__}."
            )
        return count  # type: ignore[return-value]  # a SymInt counts as an int


def _called(
    candidates: Sequence[OpOverload], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[OpOverload, dict[str, Any]]:
    """Which overload these are the arguments of: PyTorch does not say."""
    for op in candidates:
        schema = Schema(op._schema)
        named = {a.name for a in schema.positional[len(args) :]}
        named.update(a.name for a in schema.keyword_only)
        required = {a.name for a in schema.arguments[len(args) :] if not a.has_default}
        if len(args) <= len(schema.positional) and required <= kwargs.keys() <= named:
            return op, dict(kwargs)
    # Another form, such as the one with out=, does the work of the one that has a formula.
    op = candidates[0]
    names = {argument.name for argument in op._schema.arguments}
    return op, {name: value for name, value in kwargs.items() if name in names}


def _shape(value: Any) -> Any:
    return value.shape if isinstance(value, torch.Tensor) else value

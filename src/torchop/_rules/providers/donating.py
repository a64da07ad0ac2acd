"""Donating: kernels that may write their results over arguments.

Calls of the operator mean the same as with any other kernel, so such a kernel gets copies. No copy
is made where the caller wants the argument to be overwritten: in the in-place form, and in the
operator `f__donating`, which writes the results over the arguments. Inductor's graphs contain that,
with a copy in front of it that Inductor leaves out where it finds no later reader.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from torchop._compat import compilers, registries, tracing
from torchop._compat.classes import FunctionalTensorMode, Tag
from torchop._core.call import map_tensors, tensors_in, values_by_name
from torchop._core.contract import alias_error, storage_of
from torchop._core.definition import CallPlan, Definition
from torchop._errors import ResultError, nearest, short_repr
from torchop._rules.companions import define_companion
from torchop._rules.effect import functionalize_unless_dropped
from torchop._rules.kernels.rule import KernelRule
from torchop._schema.schema import Argument, Schema
from torchop._schema.text import lettered_alias, results_of, with_write, write, write_results

Function = Callable[..., Any]


def checked_donates(what: str, schema: Schema, names: object) -> tuple[str, ...]:
    """The arguments that a kernel may write over, the first with its first result, and so on."""
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise TypeError(
            f"{what}: donates expects a list of names of arguments, such as ('x',), got "
            f"{short_repr(names)}."
        )
    if names and (not schema.is_functional or set(schema.returns) != {"Tensor"}):
        raise ValueError(
            f"{what}: donates is for kernels of an operator that mutates nothing and returns fresh "
            f"tensors. Got {schema}."
        )
    known = [argument.name for argument in schema.arguments if argument.kind == "Tensor"]
    for name in names:
        if name not in known:
            raise ValueError(
                f"{what}: donates names {short_repr(name)}, but the operator has these arguments "
                f"that a result could be written over: {', '.join(known)}{nearest(name, known)}."
            )
    if len(set(names)) < len(names) or len(names) > len(schema.returns):
        raise ValueError(
            f"{what}: donates names {len(names)} arguments for {len(schema.returns)} results. Each "
            "result may be written over one argument: the first result over the first one that "
            "donates names, and so on."
        )
    return tuple(names)


class Donating:
    """A kernel that may write over arguments, and gets copies of those that are not given up."""

    def __init__(self, kernel: Function, schema: Schema, names: Sequence[str]) -> None:
        functools.update_wrapper(self, kernel)
        self._kernel, self._schema, self._names = kernel, schema, names
        self._given_up = threading.local()

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        given_up = self._given_up.__dict__.pop("names", ())  # a call of this in the kernel has none

        def private(argument: Argument, tensor: Tensor) -> Tensor:
            is_copied = argument.name in self._names and argument.name not in given_up
            return tensor.clone() if is_copied else tensor

        args, kwargs = map_tensors(self._schema, args, kwargs, private)
        return self._kernel(*args, **kwargs)

    def call(self, given_up: Collection[str], function: Function, args: Any, kwargs: Any) -> Any:
        """Calls `function`, which calls this at once, so that it copies no argument given up."""
        self._given_up.names = given_up
        try:
            return function(*args, **kwargs)
        finally:
            self._given_up.__dict__.pop("names", None)


def define_donating(definition: Definition, names: tuple[str, ...]) -> Function:
    """Defines the operator that writes results over these arguments; returns what calls do.

    That takes the names of arguments that a call gives up, and the arguments of the call. It
    returns the results, and those that are in place of an argument are the argument itself.
    """
    schema = definition.schema
    choices = _Choices(definition)
    count = len(names)

    def donated(given: Collection[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        arguments = schema.fill_defaults(tuple(args), dict(kwargs))
        values = values_by_name(schema, *arguments)
        memory = Counter(storage_of(tensor) for tensor in tensors_in(values.values()))
        # A kernel that writes over one argument while it reads another one of the same memory would
        # be wrong, and so gets a copy.
        given = [n for n in given if n in names and memory[storage_of(values[n])] == 1]
        function = choices.function(values[names[0]].device.type, *arguments)
        kernel = function
        while kernel is not None and not isinstance(kernel, Donating):
            kernel = getattr(kernel, "__wrapped__", None)
        if function is None or kernel is None or not given:
            returned = definition.overload(*arguments[0], **arguments[1])
            return returned if isinstance(returned, tuple) else (returned,)
        returned = kernel.call(given, function, *arguments)
        others = map_tensors(
            schema, *arguments, lambda argument, tensor: None if argument.name in given else tensor
        )
        returned = definition.plan[KernelRule].finish(definition, *others, returned)
        results = list(returned) if isinstance(returned, tuple) else [returned]
        for place, result in enumerate(results):
            owner = next((n for n in given if storage_of(values[n]) == storage_of(result)), None)
            if owner is None:
                continue
            if place >= count or names[place] != owner:
                raise alias_error(str(definition), schema, *arguments, returned)
            target = values[owner]
            results[place] = target if _has_place_of(result, target) else result.clone()
        return tuple(results)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        values = values_by_name(schema, args, kwargs)
        results = donated(names, args, kwargs)
        pairs = [(name, values[name], results[place]) for place, name in enumerate(names)]
        for name, target, result in pairs:
            if (result.shape, result.dtype) != (target.shape, target.dtype):
                raise ResultError(
                    f"{definition}: a result of shape {list(result.shape)} and {result.dtype} "
                    f"cannot be written over {name!r}, which has {list(target.shape)} and "
                    f"{target.dtype}. Call {definition} instead."
                )
        for _, target, result in pairs:
            if result is not target:
                target.copy_(result)
        return _as_returned(results[count:])

    def fake(*args: Any, **kwargs: Any) -> Any:
        returned = definition.overload(*args, **kwargs)
        return _as_returned(returned[count:] if isinstance(returned, tuple) else ())

    named = iter(schema.arguments)
    arguments = []
    for text in schema.written_arguments:
        name = "" if text == "*" else next(named).name
        alias = lettered_alias(names.index(name)) if name in names else None
        arguments.append(text if alias is None else with_write(text, alias))
    text = write(arguments, write_results(results_of(schema.written)[count:]))
    companion = define_companion(definition, "donating", text, kernel, fake)
    # What an inlined operator has there traces the kernel itself, with its copies.
    registries.withdraw_offer(str(definition), FunctionalTensorMode, functionalize_unless_dropped)
    hook = _functionalizing(definition, companion, names, choices)
    registries.offer_torch_dispatch(str(definition), FunctionalTensorMode, hook)
    donated.names = names  # type: ignore[attr-defined]
    return donated


def _as_returned(results: Sequence[Any]) -> Any:
    return tuple(results) if len(results) > 1 else next(iter(results), None)


def _has_place_of(result: Tensor, target: Tensor) -> bool:
    # Sparse tensors have no pointer, and share memory only if they are one.
    return result is target or (result.data_ptr(), result.shape, result.stride(), result.dtype) == (
        *(target.data_ptr(), target.shape, target.stride(), target.dtype),
    )


class _Choices:
    """What chooses for calls that give arguments up, kept for as long as the plan is."""

    def __init__(self, definition: Definition) -> None:
        self._definition = definition
        self._kept: tuple[CallPlan | None, dict[str, Any]] = None, {}

    def _of(self, device: str) -> Any:
        plan, kept = self._kept
        if plan is not (current := self._definition.plan):
            self._kept = _, kept = current, {}
        if device not in kept:
            kept[device] = self._definition.rule(KernelRule).choice(device)
        return kept[device]

    def function(self, device: str, args: Any, kwargs: Any) -> Function | None:
        """The function that runs a call; None where nothing is chosen."""
        choice = self._of(device)
        return None if choice is None else choice.find(args, kwargs)

    def may_donate(self, device: str) -> bool:
        """Whether a call on a device may run a kernel that writes over arguments."""
        choice = self._of(device)
        return choice is not None and choice.may_donate()


def _functionalizing(
    definition: Definition, companion: Definition, names: Sequence[str], choices: _Choices
) -> Function:
    """The rule for a functional trace, which lets Inductor leave copies out."""
    name, schema = str(definition), definition.schema
    is_random = Tag.nondeterministic_seeded in definition.declaration.tags

    def functionalize(mode: Any, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
        # It tells what the results look like, and is dead code if the other operator takes over.
        returned = functionalize_unless_dropped(mode, op, types, args, kwargs)
        args, kwargs = schema.fill_defaults(args, kwargs or {})
        values = values_by_name(schema, args, kwargs)
        if (
            returned is NotImplemented
            or is_random
            or registries.effect_of(name) is not None
            or not all(map(tracing.is_traceable_type, types))
            or compilers.compiling_backend() != "inductor"
            or not compilers.decomposes_for_backends()
            or not choices.may_donate(values[names[0]].device.type)
        ):
            return returned
        memory = Counter(tracing.functional_storage(t) for t in tensors_in(values.values()))
        results = returned if isinstance(returned, tuple) else (returned,)
        with mode:
            copies = {n: values[n].clone() for n in names}
            if any(memory[tracing.functional_storage(values[n])] > 1 for n in names) or not all(
                tracing.look_alike(copies[n], result)
                for n, result in zip(names, results, strict=False)
            ):
                return returned
            args, kwargs = map_tensors(
                schema, args, kwargs, lambda argument, t: copies.get(argument.name, t)
            )
            others = companion.overload(*args, **kwargs)
        others = others if isinstance(others, tuple) else () if others is None else (others,)
        results = (*copies.values(), *others)
        return results if len(results) > 1 else results[0]

    return functionalize

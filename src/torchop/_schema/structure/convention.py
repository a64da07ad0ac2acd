"""Rules of users, who write them for objects, as the rules of a flat operator."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torchop._errors import GradientError, OperatorGoneError, RuleSignatureError
from torchop._schema.callables import accepts, check_signature
from torchop._schema.convention import Convention
from torchop._schema.structure.structure import Structure
from torchop._schema.structure.values import last_values


def flat_kernel(definition: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel for one or several device types."""
    structure: Structure = definition.structure
    if function is definition.function:
        return definition.function
    check_signature(f"{definition}: a kernel", function, *_names(structure))
    return structure.kernel(function)


def flat_fake(definition: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """A fake kernel."""
    structure: Structure = definition.structure
    if getattr(function, "is_declared", False):  # by the arguments of the schema
        if structure.value_places:
            raise RuleSignatureError(
                f"{definition} returns more than tensors, which only a function can describe, not "
                "a declaration. Register a function that returns what the kernel returns."
            )
        return function
    check_signature(f"{definition}: a fake kernel", function, *_names(structure))
    return structure.kernel(function, is_fake=True)


def flat_vmap(definition: Any, function: Any) -> Any:
    """A vmap rule: `in_dims` has mappings by the names of fields, and so may `out_dims`."""
    structure: Structure = definition.structure
    if not callable(function):
        return function
    positional, keywords = _names(structure)
    check_signature(
        f"{definition}: a vmap rule", function, ("info", "in_dims", *positional), keywords
    )

    def rule(info: Any, in_dims: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        objects, keyword_objects = structure.objects(*args, **kwargs)
        flat_dims = dict(zip((leaf.name for leaf in structure.positional), in_dims, strict=False))
        dims = tuple(
            parameter.node.gathered(flat_dims)
            for parameter in structure.parameters
            if not parameter.keyword_only
        )
        returned = function(info, dims, *objects, **keyword_objects)
        if structure.result is None or not isinstance(returned, tuple) or len(returned) != 2:
            return returned  # type: ignore[no-any-return]  # the rule says what is wrong with it
        output, out_dims = returned
        spread = structure.result.spread(out_dims)
        flat = structure.flat_result(output)
        return flat, spread[0] if len(spread) == 1 else tuple(spread)

    return _in_place_of(function, rule)


def flat_torch_dispatch(definition: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """A rule for a mode or subclass: it gets objects, and a `func` that takes them."""
    structure: Structure = definition.structure
    check_signature(
        f"{definition}: a torch_dispatch rule",
        function,
        ("mode_or_cls", "func", "types", "args", "kwargs"),
    )

    def rule(mode_or_cls: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        objects, keyword_objects = structure.objects(*args, **(kwargs or {}))
        call = StructuredCall(structure, func)
        result = function(mode_or_cls, call, types, objects, keyword_objects)
        return result if result is NotImplemented else structure.flat_result(result)

    return _in_place_of(function, rule)


class StructuredCall:
    """An `OpOverload` that is called with objects: all else is that of the overload."""

    def __init__(self, structure: Structure, overload: Any) -> None:
        self._structure = structure
        self._overload = overload

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._structure.call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._overload, name)

    def __eq__(self, other: object) -> bool:
        mine = self._overload
        return bool(mine == (other._overload if isinstance(other, StructuredCall) else other))

    def __hash__(self) -> int:
        return hash(self._overload)

    def __repr__(self) -> str:
        return repr(self._overload)


def flat_formula(
    definition: Any,
    backward: Callable[..., Any],
    setup_context: Callable[..., Any] | None,
) -> tuple[Callable[..., Any], Callable[..., Any] | None]:
    """A backward formula, which returns structures with gradients in the places of tensors."""
    structure: Structure = definition.structure
    results = structure.results
    count = len(definition.schema.returns) if results is None else len(results)
    check_signature(
        f"{definition}: backward", backward, ("ctx", *(f"grad_{i}" for i in range(count)))
    )
    differentiated = [p for p in structure.parameters if not p.keyword_only]

    def flat_backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        if results is not None:
            rest = iter(grads)
            grads = tuple(result.gather(rest) for result in results)
        returned = backward(Context(ctx, structure), *grads)
        # A NamedTuple is one gradient, of one argument.
        gradients = returned if type(returned) is tuple else (returned,)
        if len(gradients) > len(differentiated) or any(
            parameter.node.holds_tensors and parameter.declared.default is parameter.declared.empty
            for parameter in differentiated[len(gradients) :]
        ):
            raise GradientError(
                f"{definition}: backward returned an incorrect number of gradients (expected "
                f"{len(differentiated)}, got {len(gradients)}). It must return one for each "
                f"input: {', '.join(p.name for p in differentiated)}."
            )
        flat: dict[str, Any] = {}
        for parameter, gradient in zip(differentiated, gradients, strict=False):
            flat |= parameter.node.spread(gradient, refuse)
        return tuple(flat.get(leaf.name) for leaf in structure.positional)

    def refuse(path: str, expected: str, value: Any) -> Exception:
        return GradientError(
            f"{definition}: backward returned the wrong gradient for input {path!r}: expected "
            f"{expected}, got a {type(value).__name__}."
        )

    return _in_place_of(backward, flat_backward), _flat_setup_context(
        definition, structure, setup_context
    )


def _flat_setup_context(
    definition: Any, structure: Structure, setup_context: Callable[..., Any] | None
) -> Callable[..., Any] | None:
    if setup_context is None:
        return None
    has_keywords = any(parameter.keyword_only for parameter in structure.parameters)
    names = ("ctx", "inputs", *(("keyword_only_inputs",) if has_keywords else ()), "output")
    by_keyword = callable(setup_context) and accepts(setup_context, (), names)
    if not by_keyword:
        check_signature(f"{definition}: setup_context", setup_context, names)

    def called(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
        objects, keyword_objects = structure.objects(*inputs, **keyword_only_inputs)
        values = last_values(structure, len(structure.value_places))
        given = [Context(ctx, structure), objects, structure.rebuilt_result(output, values)]
        if has_keywords:
            given.insert(2, keyword_objects)
        if by_keyword:
            setup_context(**dict(zip(names, given, strict=True)))
        else:
            setup_context(*given)

    if structure.keyword_only:
        flat: Callable[..., Any] = called
    else:

        def flat(ctx: Any, inputs: Any, output: Any) -> None:
            called(ctx, inputs, {}, output)

    return _in_place_of(setup_context, flat)


def flat_jvp(
    definition: Any,
    jvp: Callable[..., Any],
    setup_context: Callable[..., Any] | None,
) -> tuple[Callable[..., Any], Callable[..., Any] | None]:
    """A formula of forward mode: its tangents have mappings, as in the other direction."""
    structure: Structure = definition.structure
    followed = [p for p in structure.parameters if not p.keyword_only]
    check_signature(f"{definition}: jvp", jvp, ("ctx", *(f"tangent_of_{p.name}" for p in followed)))

    def flat(ctx: Any, *tangents: Any) -> Any:
        named = dict(zip((leaf.name for leaf in structure.positional), tangents, strict=False))
        given = (parameter.node.gathered(named) for parameter in followed)
        returned = jvp(Context(ctx, structure), *given)
        if structure.result is None:
            return returned
        spread = structure.result.spread(returned)
        return spread[0] if len(spread) == 1 else tuple(spread)

    return (
        _in_place_of(jvp, flat),
        _flat_setup_context(definition, structure, setup_context),
    )


class Context:
    """The context of a formula, with `needs_input_grad` in the structure of the arguments."""

    __slots__ = ("_context", "_structure")

    def __init__(self, context: Any, structure: Structure) -> None:
        object.__setattr__(self, "_context", context)
        object.__setattr__(self, "_structure", structure)

    @property
    def needs_input_grad(self) -> tuple[Any, ...]:
        structure = self._structure
        names = (leaf.name for leaf in structure.positional)
        needed = dict(zip(names, self._context.needs_input_grad, strict=False))
        return tuple(
            parameter.node.gathered(needed)
            for parameter in structure.parameters
            if not parameter.keyword_only
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._context, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._context, name)


def _in_place_of(function: Callable[..., Any], flat: Callable[..., Any]) -> Callable[..., Any]:
    """Lets whoever looks for the user's function find it, and for a signature, that of the rule."""
    signature = inspect.signature(flat)
    flat.__wrapped__ = function  # type: ignore[attr-defined]
    flat.__signature__ = signature  # type: ignore[attr-defined]
    return flat


def _names(structure: Structure) -> tuple[tuple[str, ...], tuple[str, ...]]:
    positional = tuple(p.name for p in structure.parameters if not p.keyword_only)
    return positional, tuple(p.name for p in structure.parameters if p.keyword_only)


class StructuredConvention(Convention):
    """Functions of the author are called with objects, which the structure makes."""

    __slots__ = ("structure",)

    kernel = staticmethod(flat_kernel)
    fake = staticmethod(flat_fake)
    vmap = staticmethod(flat_vmap)
    torch_dispatch = staticmethod(flat_torch_dispatch)
    formula = staticmethod(flat_formula)
    jvp = staticmethod(flat_jvp)

    def __init__(self, structure: Structure) -> None:
        self.structure = structure

    def arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], /
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        objects: tuple[tuple[Any, ...], dict[str, Any]] = self.structure.objects(*args, **kwargs)
        return objects

    def ended(self, reason: str) -> None:
        def refuse(*args: Any, **kwargs: Any) -> Any:
            raise OperatorGoneError(reason)

        self.structure.retire(refuse)

"""The calling convention for operators with structured arguments or results.

Authors write kernels and rules that take and return structures, such as dataclasses, but PyTorch
calls them with the values of a flat schema, which has one argument per field. This module wraps the
authors' functions in code that converts between structures and flat values.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torchop._errors import OperatorGoneError
from torchop._schema.callables import check_setup_context, check_signature, setup_caller
from torchop._schema.convention import Convention, Formula, Function
from torchop._schema.structure import saved
from torchop._schema.structure.structure import Structure
from torchop._schema.tree import FunctionTree

# This attribute of `ctx` stores the call's non-tensor values, such as dict keys. The backward pass
# needs them to give gradients the same structure as the arguments and results.
_STATICS = "_torchop_statics"


class StructuredConvention(Convention):
    __slots__ = ("_keywords", "_positional", "mutates_objects", "structure")
    structure: Structure

    def __init__(self, op: object, tree: FunctionTree) -> None:
        self.structure = structure = Structure(op, tree)
        self.mutates_objects = tree.mutates_objects
        self._positional = tuple(p.name for p in structure.positional_parameters)
        self._keywords = tuple(p.name for p in structure.parameters if p.keyword_only)

    def kernel(self, function: Function, /) -> Function:
        structure = self.structure
        if function is structure.flat_function:
            return function
        self._check(f"{structure.op}: a kernel", function)
        return structure.kernel(function)

    def of_tensors(self, values: Mapping[str, Any], /) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for parameter in self.structure.parameters:
            if parameter.name in values:
                leaves = [leaf for leaf in parameter.node.leaves() if leaf.is_tensor]
                names = [leaf.name for leaf in leaves] or [parameter.name]
                found.update(dict.fromkeys(names, values[parameter.name]))
        return found

    def fake(self, function: Function, /) -> Function:
        if getattr(function, "is_declared", False):  # from register_fake(like=...), so already flat
            return function
        self._check(f"{self.structure.op}: a fake kernel", function)
        return self.structure.fake(function)

    def vmap(self, function: Any, /) -> Any:
        """Wrap a vmap rule so that it can be called with the schema's flat arguments.

        The author's rule receives structured arguments, such as dataclasses. For each of them,
        `in_dims` holds a mapping from field names to dimensions, as `out_dims` does for results.
        """
        structure = self.structure
        if not callable(function):
            return function
        self._check(f"{structure.op}: a vmap rule", function, ("info", "in_dims"))

        def rule(info: Any, in_dims: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
            objects, keyword_objects = structure.objects(*args, **kwargs)
            dims = structure.gather(in_dims, structure.keys_of_call(kwargs))
            returned = function(info, dims, *objects, **keyword_objects)
            if not isinstance(returned, tuple) or len(returned) != 2:
                return returned  # the caller checks this and raises
            output, out_dims = returned
            return structure.flat_result(output), structure.spread_result(out_dims)

        return _wrapping(function, rule)

    def torch_dispatch(self, function: Function, /) -> Function:
        """Wrap a torch_dispatch rule so that it can be called with the schema's flat arguments.

        The author's rule receives structured arguments, such as dataclasses. The `func` that is
        passed to the rule takes structured arguments too.
        """
        structure = self.structure

        def rule(mode_or_cls: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
            objects, keyword_objects = structure.objects(*args, **(kwargs or {}))
            call = StructuredCall(structure, func)
            result = function(mode_or_cls, call, types, objects, keyword_objects)
            return result if result is NotImplemented else structure.flat_result(result)

        return _wrapping(function, rule)

    def formula(self, backward: Function, setup_context: Function | None, /) -> Formula:
        """Wrap a backward formula so that PyTorch can call it with one gradient per flat result.

        The author's `backward` receives the gradients of a structure, such as a dataclass, as one
        object. For a structured argument, it returns a mapping from field names to gradients, or an
        object of any class with the same field names.
        """
        structure = self.structure
        names = ("ctx", *(f"grad_{index}" for index in range(structure.result_count)))
        check_signature(f"{structure.op}: backward", backward, names)

        def flat_backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
            statics = getattr(ctx, _STATICS, {})
            each = structure.gather_each_result(grads, statics)
            returned = backward(Context(ctx, structure), *each)
            flat = structure.spread_gradients(returned, statics)
            return tuple(flat.get(leaf.name) for leaf in structure.positional)

        return _wrapping(backward, flat_backward), self._setup_context(setup_context)

    def jvp(self, jvp: Function, setup_context: Function | None, /) -> Formula:
        """Wrap a forward-mode formula so that PyTorch can call it with flat tangents.

        The author's formula receives the tangents of a structure, such as a dataclass, as a mapping
        from field names to tangents.
        """
        structure = self.structure
        names = ("ctx", *(f"tangent_of_{name}" for name in self._positional))
        check_signature(f"{structure.op}: jvp", jvp, names)

        def flat_jvp(ctx: Any, *tangents: Any) -> Any:
            returned = jvp(
                Context(ctx, structure), *structure.gather(tangents, getattr(ctx, _STATICS, {}))
            )
            return structure.spread_result(returned)

        return _wrapping(jvp, flat_jvp), self._setup_context(setup_context)

    def _setup_context(self, setup_context: Function | None) -> Function | None:
        structure = self.structure
        has_statics = structure.layouts is not None or bool(structure.keys)
        if setup_context is None and not has_statics:
            return None
        has_keywords = bool(self._keywords)
        if setup_context is None:
            setup_context, has_keywords = _save_nothing, False
        check_setup_context(structure.op, setup_context, has_keywords)
        call = setup_caller(setup_context, has_keywords)
        assert call is not None  # for mypy

        def with_keywords(
            ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any, **residuals: Any
        ) -> None:
            objects, keyword_objects = structure.objects(*inputs, **keyword_only_inputs)
            result = structure.rebuilt_result(output)
            if has_statics:
                statics = structure.statics_of_call(keyword_only_inputs, output)
                setattr(ctx, _STATICS, statics)
            call(Context(ctx, structure), objects, keyword_objects, result, **residuals)

        def without_keywords(ctx: Any, inputs: Any, output: Any, **residuals: Any) -> None:
            with_keywords(ctx, inputs, {}, output, **residuals)

        return _wrapping(
            setup_context, with_keywords if structure.keyword_only else without_keywords
        )

    def arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], /
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return self.structure.objects(*args, **kwargs)

    def result(self, result: Any, /) -> Any:
        return self.structure.gather_result(result)

    def deregistered(self, reason: str) -> None:
        def raise_error(*args: Any, **kwargs: Any) -> Any:
            raise OperatorGoneError(reason)

        self.structure.invalidate(raise_error)

    def _check(self, what: str, function: Function, leading: tuple[str, ...] = ()) -> None:
        check_signature(what, function, (*leading, *self._positional), self._keywords)


def _save_nothing(ctx: Any, inputs: Any, output: Any) -> None:
    """Save nothing. Used as `setup_context` for formulas that only need incoming gradients."""


class StructuredCall:
    """A proxy for an `OpOverload` that accepts structured arguments, such as dataclasses."""

    def __init__(self, structure: Structure, overload: Any) -> None:
        self._structure = structure
        self._overload = overload

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._structure.call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._overload, name)

    def __eq__(self, other: object) -> bool:
        overload = other._overload if isinstance(other, StructuredCall) else other
        return bool(self._overload == overload)

    def __hash__(self) -> int:
        return hash(self._overload)

    def __repr__(self) -> str:
        return repr(self._overload)


class Context:
    """A proxy for the `ctx` of a backward or forward-mode formula.

    For a structured argument, `needs_input_grad` holds a mapping from field names to bools.
    """

    __slots__ = ("_context", "_structure")
    _structure: Structure

    def __init__(self, context: Any, structure: Structure) -> None:
        object.__setattr__(self, "_context", context)
        object.__setattr__(self, "_structure", structure)

    def save_for_backward(self, *values: Any) -> None:
        """Save tensors and structures, such as dataclasses, which `saved_tensors` later returns."""
        saved.save(self._context, values)

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        return saved.saved(self._context)

    @property
    def needs_input_grad(self) -> tuple[Any, ...]:
        statics = getattr(self._context, _STATICS, {})
        return self._structure.gather(self._context.needs_input_grad, statics)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._context, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._context, name)


def _wrapping(function: Callable[..., Any], flat: Callable[..., Any]) -> Callable[..., Any]:
    """Point `flat.__wrapped__` to the author's function, but keep the signature of `flat`."""
    signature = inspect.signature(flat)
    flat.__wrapped__ = function  # type: ignore[attr-defined]
    flat.__signature__ = signature  # type: ignore[attr-defined]
    return flat

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, overload

from torch import Tensor

from torchop._compat import compilers, torch_ops
from torchop._core.registry import OpLike, find_schema, op_name
from torchop._define.forms.schemas import with_outputs
from torchop._define.handle import CustomOp
from torchop._errors import ArgumentError, SchemaError
from torchop._schema.schema import Argument, Schema

P = ParamSpec("P")
R = TypeVar("R")


@overload
def maybe_out(functional: CustomOp[P, R], out: OpLike, /) -> Callable[..., R]: ...
@overload
def maybe_out(functional: OpLike, out: OpLike, /) -> Callable[..., Any]: ...


@compilers.eager_only
def maybe_out(functional: OpLike, out: OpLike, /) -> Callable[..., Any]:
    """Combine a functional operator and an out= operator into one function with `out=None`.

    A single operator cannot have an optional `out` argument, because a schema cannot express that
    the result is either a fresh tensor or `out`. So this returns a Python function that calls one
    of two operators, depending on whether `out` is passed. `torch.compile` and `torch.export` trace
    into the function.

    Args:
        functional: the operator that allocates the results: a handle, `"ns::name"`, an
            `OpOverload`, or a packet with one overload.
        out: the operator that writes the results into output arguments, and returns these or None.
            It must take the same arguments as `functional`, followed by the outputs.

    Returns:
        A function with the parameters of `functional` and an additional keyword-only parameter for
        each output, with the default None. Callers must pass either all outputs or none.

    Raises:
        OperatorNotFoundError: one of the operators is not defined.
        SchemaError: the schemas do not match. SchemaError is a subclass of `ValueError`.

    Example:
        >>> import torch, torchop
        >>> @torchop.custom_op("docs::tangent", mutates_args=())
        ... def tangent(x: torch.Tensor) -> torch.Tensor:
        ...     return torch.tan(x)
        >>> _ = tangent.register_fake(torch.empty_like)
        >>> tan = torchop.maybe_out(tangent, tangent.derive_out())
        >>> tan(torch.zeros(2))
        tensor([0., 0.])
        >>> buffer = torch.ones(2)
        >>> tan(torch.zeros(2), out=buffer) is buffer
        True

    Modeled after `torch.sin(x, out=None)`, which calls `aten::sin` or `aten::sin.out`.
    """
    names = op_name(functional, "maybe_out"), op_name(out, "maybe_out")
    allocating, writing = (find_schema(name) for name in names)
    if (problem := _difference(allocating, writing)) is not None:
        raise SchemaError(
            f"maybe_out({names[0]}, {names[1]}): {problem}. Got {allocating} and {writing}."
        )
    outputs = writing.mutated
    returns_outputs = bool(writing.returns)
    call_functional, call_out = (
        op if isinstance(op, CustomOp) else torch_ops.lookup_overload(*name)
        for op, name in zip((functional, out), names, strict=True)
    )

    def function(*args: Any, **kwargs: Any) -> Any:
        present = [name for name in outputs if kwargs.get(name) is not None]
        if not present:
            inputs = {name: value for name, value in kwargs.items() if name not in outputs}
            return call_functional(*args, **inputs)
        if len(present) < len(outputs):
            missing = ", ".join(name for name in outputs if name not in present)
            raise ArgumentError(
                f"{names[0]}: pass all of {', '.join(outputs)} or none; {missing} is missing."
            )
        result = call_out(*args, **kwargs)
        if returns_outputs:
            return result
        tensors = tuple(kwargs[name] for name in outputs)
        return tensors if len(tensors) > 1 else tensors[0]

    function.__name__ = function.__qualname__ = names[0].name
    if isinstance(functional, CustomOp):
        function.__name__, function.__qualname__ = functional.__name__, functional.__qualname__
        function.__module__ = functional.__module__
        function.__signature__ = with_outputs(  # type: ignore[attr-defined]
            inspect.signature(functional), outputs, Tensor | None, None
        )
    function.__doc__ = _doc(functional, outputs)
    return function


def _doc(functional: OpLike, outputs: tuple[str, ...]) -> str:
    doc = inspect.getdoc(functional) if isinstance(functional, CustomOp) else None
    into = f"Writes the result into {', '.join(outputs)} and returns that, if given."
    return f"{doc or f'Calls {functional}.'}\n\n{into}"


def _difference(functional: Schema, out: Schema) -> str | None:
    """Return why the operators `functional` and `out` cannot be combined, or None if they can."""
    if not functional.is_functional or set(functional.returns) != {"Tensor"}:
        return "the first operator must mutate nothing and return fresh tensors only"
    outputs = [a for a in out.arguments if a.is_mutated]
    if not outputs:
        return "the second operator must mutate its outputs, but it mutates no argument"
    if [a.kind for a in outputs] != ["Tensor"] * len(functional.returns):
        return (
            f"the first operator returns {len(functional.returns)} tensors, so the second must "
            f"mutate as many Tensor arguments; it mutates {', '.join(out.mutated)}"
        )
    if out.returns and not _returns_outputs(out):
        return "the second operator must return its mutated arguments, in order, or nothing"
    inputs = [a for a in out.arguments if not a.is_mutated]
    mutated_places = [i for i, a in enumerate(out.positional) if a.is_mutated]
    if mutated_places and mutated_places[0] < len(out.positional) - len(mutated_places):
        return "the arguments that the second operator mutates must come after the others"
    if [a.name for a in inputs] != [a.name for a in functional.arguments]:
        return (
            f"the first operator takes ({', '.join(a.name for a in functional.arguments)}), and "
            f"the second ({', '.join(a.name for a in inputs)}) in addition to its outputs"
        )
    for one, other in zip(functional.arguments, inputs, strict=True):
        for what, attribute in _COMPARED.items():
            first, second = attribute(one), attribute(other)
            if first != second:
                return (
                    f"argument {one.name!r} has the {what} {first} in the first operator and "
                    f"{second} in the second"
                )
    return None


_COMPARED: dict[str, Callable[[Argument], Any]] = {
    "type": lambda argument: argument.kind,
    "default": lambda argument: argument.default if argument.has_default else "none at all",
    "kind": lambda argument: "keyword-only" if argument.keyword_only else "positional",
}


def _returns_outputs(out: Schema) -> bool:
    returns, arguments = out._parsed.returns, out._parsed.arguments
    written = [a.alias_info.before_set for a in arguments if a.alias_info and a.alias_info.is_write]
    returned = [r.alias_info.before_set if r.alias_info else None for r in returns]
    return written == returned

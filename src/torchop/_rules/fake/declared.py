"""Create fake kernels from a declaration of each output's shape, dtype and memory format."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchop._compat import fake_tensors
from torchop._core.definition import Definition
from torchop._errors import FakeKernelError, RuleSignatureError, short_repr
from torchop._schema.callables import check_callable
from torchop._schema.schema import Argument

# The types of the options of `register_fake`. For an operator with one output, each option is a
# single value. For several outputs, it is a sequence with one entry per output.
Like = str | Sequence["str | None"] | None
Shape = Callable[..., Any] | Sequence["Callable[..., Any] | None"] | None
DType = str | torch.dtype | Sequence["str | torch.dtype | None"] | None
Format = torch.memory_format | Sequence["torch.memory_format | None"] | None


class _Output(NamedTuple):
    like: str
    is_list: bool
    shape: Callable[..., Any] | None
    parameters: tuple[str, ...]
    dtype: str | torch.dtype | None
    memory_format: torch.memory_format | None


def declared(
    definition: Definition, like: Like, shape: Shape, dtype: DType, memory_format: Format
) -> Callable[..., Any]:
    options = {"like": like, "shape": shape, "dtype": dtype, "memory_format": memory_format}
    try:
        outputs = tuple(_outputs(definition, options))
    except _MisfitError as error:
        raise RuleSignatureError(
            f"{definition}: a fake kernel by declaration does not fit {definition.schema}: "
            f'{error}. Write register_fake(like="x"), register_fake(shape=lambda x: (x.shape[0],), '
            "dtype=torch.float32), or, with several outputs, a tuple with an entry for each: "
            'like=("x", "y"). Otherwise register a function.'
        ) from None
    names = tuple(argument.name for argument in definition.schema.positional)
    return DeclaredFake(_fake_kernel, str(definition), names, outputs)


class _MisfitError(Exception):
    """Raised if a declaration does not fit the schema."""


def _outputs(definition: Definition, options: Mapping[str, Any]) -> Iterator[_Output]:
    kinds = definition.schema.returns
    if not kinds:
        raise _MisfitError("the operator returns nothing")
    each = [_for_each_output(len(kinds), name, value) for name, value in options.items()]
    for index, (kind, *described) in enumerate(zip(kinds, *each, strict=True)):
        yield _output(definition, index, kind, *described)


class DeclaredFake(functools.partial[Any]):
    """A fake kernel created from the options of `register_fake`, such as `like` and `shape`.

    The options are stored as arguments of the `functools.partial`. The cache keys of compiled
    graphs include these arguments, so a graph is not reused after an option changes.
    """

    is_declared = True

    @property
    def shapes(self) -> tuple[Callable[..., Any], ...]:
        """The user's functions that compute shapes."""
        return tuple(output.shape for output in self.args[2] if output.shape is not None)

    def __repr__(self) -> str:
        return f"the declared outputs of {self.args[0]}"


def _for_each_output(count: int, option: str, value: Any) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        if value is not None and count > 1:
            raise _MisfitError(
                f"{option} must be a tuple with an entry for each of the {count} outputs, got "
                f"{short_repr(value)}"
            )
        return [value] * count
    if len(value) != count:
        raise _MisfitError(
            f"{option} has {len(value)} entries, but the operator has {count} "
            f"output{'s' * (count > 1)}"
        )
    return list(value)


def _output(
    definition: Definition,
    index: int,
    kind: str,
    like: Any,
    shape: Any,
    dtype: Any,
    memory_format: Any,
) -> _Output:
    where = f"output {index}"
    if kind not in ("Tensor", "Optional[Tensor]", "List[Tensor]"):
        raise _MisfitError(f"{where} is of type {kind}, so a declaration cannot describe it")
    is_list = kind == "List[Tensor]"
    if is_list and shape is not None:
        raise _MisfitError(f"{where} is a list, so shape= cannot describe it")
    arguments = {argument.name: argument for argument in definition.schema.arguments}
    if like is None and shape is None:
        raise _MisfitError(f"{where} has neither like= nor shape=")
    if like is None:
        tensors = [a.name for a in definition.schema.arguments if a.kind == "Tensor"]
        if not tensors:
            raise _MisfitError(f"{where} has no device, because no argument is a Tensor")
        like = tensors[0]
    reference = _argument(arguments, f"like for {where}", like)
    expected = "List[Tensor]" if is_list else "Tensor"
    if reference.kind != expected:
        raise _MisfitError(
            f"{where} is a {expected}, but like={short_repr(like)} is of type {reference.kind}"
        )
    if isinstance(dtype, str):
        source = _argument(arguments, f"dtype for {where}", dtype)
        if source.kind not in ("Tensor", "ScalarType"):
            raise _MisfitError(
                f"dtype={short_repr(dtype)} for {where} must name a Tensor or a torch.dtype, "
                f"but it is of type {source.kind}"
            )
    elif not isinstance(dtype, (torch.dtype, type(None))):
        raise _MisfitError(
            f"dtype for {where} must be an argument or a dtype, got {short_repr(dtype)}"
        )
    if not isinstance(memory_format, (torch.memory_format, type(None))):
        raise _MisfitError(
            f"memory_format for {where} must be a torch.memory_format, such as "
            f"torch.contiguous_format, got {short_repr(memory_format)}"
        )
    if memory_format is torch.preserve_format:
        memory_format = None
    parameters = _parameters(definition, where, shape, arguments)
    return _Output(like, is_list, shape, parameters, dtype, memory_format)


def _argument(arguments: dict[str, Argument], option: str, name: Any) -> Argument:
    if not isinstance(name, str) or name not in arguments:
        raise _MisfitError(
            f"{option} must be one of the arguments {', '.join(arguments)}, got {short_repr(name)}"
        )
    return arguments[name]


def _parameters(
    definition: Definition, where: str, shape: Any, arguments: dict[str, Argument]
) -> tuple[str, ...]:
    if shape is None:
        return ()
    check_callable(f"{definition}: shape for {where}", shape)
    try:
        parameters = inspect.signature(shape).parameters
    except ValueError:  # some builtins have no signature
        raise _MisfitError(
            f"shape for {where} must name arguments of the operator, but {short_repr(shape)} "
            f"has no signature"
        ) from None
    names = tuple(parameters)
    if any(parameter.kind is parameter.KEYWORD_ONLY for parameter in parameters.values()):
        raise _MisfitError(f"shape for {where} takes arguments by keyword only")
    unknown = [name for name in names if name not in arguments]
    if unknown:
        raise _MisfitError(
            f"shape for {where} takes {', '.join(unknown)}, but the arguments are "
            f"{', '.join(arguments)}"
        )
    return names


def _fake_kernel(
    name: str, names: Sequence[str], outputs: Sequence[_Output], /, *args: Any, **kwargs: Any
) -> Any:
    arguments = {**dict(zip(names, args, strict=True)), **kwargs}
    results = tuple(_fake_output(name, i, output, arguments) for i, output in enumerate(outputs))
    return results if len(results) > 1 else results[0]


def _fake_output(name: str, index: int, output: _Output, arguments: dict[str, Any]) -> Any:
    like, dtype, memory_format = arguments[output.like], output.dtype, output.memory_format
    if isinstance(dtype, str):
        source = arguments[dtype]
        dtype = source.dtype if isinstance(source, Tensor) else source
    if output.is_list:
        return [fake_tensors.new_empty_like(tensor, None, dtype, memory_format) for tensor in like]
    if output.shape is None:
        return fake_tensors.new_empty_like(like, None, dtype, memory_format)
    shape = output.shape(*(arguments[parameter] for parameter in output.parameters))
    if not isinstance(shape, (tuple, list)) or not all(
        isinstance(size, (int, torch.SymInt)) for size in shape
    ):
        raise FakeKernelError(
            f"{name}: shape for output {index} must return a tuple of ints, such as "
            f"(x.shape[0], 3), got {short_repr(shape)}."
        )
    return fake_tensors.new_empty_like(like, shape, dtype, memory_format)

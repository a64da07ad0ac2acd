"""Check that a kernel's results match the schema, and share no memory with inputs or each other."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence, ValuesView
from typing import Any

import torch
from torch import Tensor

from torchop import _hooks
from torchop._compat import aliasing, dispatch, functorch
from torchop._core.call import named_inputs, named_outputs, returned_arguments, tensors_in
from torchop._errors import AliasError, ResultError
from torchop._schema.forms import Form
from torchop._schema.optional_out import WHY_AND_FIX as MAYBE_OUT
from torchop._schema.schema import Schema


class ResultCheck:
    """Checks that a kernel's results match the return types of the schema.

    PyTorch does not check how many results a kernel returns, and may read out of bounds if there
    are too many. If a result has the wrong type, PyTorch's error only mentions a failed C++ cast.
    """

    __slots__ = ("_checks", "_finish", "_returns")

    def __init__(self, returns: Sequence[str], *, returns_arguments: bool = False) -> None:
        self._returns = kinds = returns
        # An operator that returns its argument must return the same tensor object, so do not
        # replace it even if it is an inference tensor.
        self._finish: Callable[[Any], Any] = _same if returns_arguments else without_inference
        if len(returns) > 1:
            # If there are several results, accept None for a tensor, because C++ kernels may return
            # undefined tensors too. Reject None as the only result, where it usually means that the
            # kernel lacks a `return`.
            kinds = ["Optional[Tensor]" if kind == "Tensor" else kind for kind in returns]
        self._checks = [_CHECKS.get(kind, lambda value: True) for kind in kinds]

    def __call__(self, result: Any, name: object, what: str = "kernel") -> Any:
        """Return a valid result, as a tuple if the schema declares several. Raise otherwise."""
        checks = self._checks
        if len(checks) == 1:
            if checks[0](result):
                return self._finish(result)
            if self._returns[0] == "List[Tensor]" and isinstance(result, (Iterator, ValuesView)):
                return self(list(result), name, what)  # PyTorch accepts iterators too
        elif not checks:
            if result is None:
                return None
        elif (
            isinstance(result, (tuple, list))
            and len(result) == len(checks)
            and all(check(item) for check, item in zip(checks, result, strict=True))
        ):
            return tuple(map(self._finish, result))
        raise ResultError(
            f"{name}: the {what} must return {_spell_returns(self._returns)}, as its schema says, "
            f"but returned {spell_result(result)}.{_fix_of_result(self._returns, result)}"
        )


def _same(result: Any) -> Any:
    return result


def without_inference(result: Any) -> Any:
    """Replace inference tensors in a result by normal tensors with the same memory.

    A kernel that runs under `torch.inference_mode()` returns inference tensors. Since autograd
    silently ignores these, the caller would get no gradient for any tensor that it combines with
    the result.
    """
    if isinstance(result, list):
        return list(map(without_inference, result))
    if not isinstance(result, Tensor) or torch.is_inference_mode_enabled():
        return result
    with dispatch.plain_tensors():  # bypass Tensor subclasses and modes
        is_inference = result.is_inference()
    if not is_inference:
        return result
    # An active TorchFunctionMode may be tracking dependencies, for example to derive a backward
    # formula. It would see that `result.clone()` depends on `result`, but not that a tensor created
    # with `set_` does.
    is_followed = dispatch.function_modes_are_active()
    if type(result) is not Tensor or result.layout is not torch.strided or is_followed:
        return result.clone()
    with dispatch.plain_tensors():
        normal = torch.empty(0, dtype=result.dtype, device=result.device)
        place = result.storage_offset(), result.shape, result.stride()
        return normal.set_(result.untyped_storage(), *place)


@functools.cache
def result_check(returns: tuple[str, ...], *, returns_arguments: bool = False) -> ResultCheck:
    return ResultCheck(returns, returns_arguments=returns_arguments)


def _tensors(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(item, Tensor) for item in value)


def _scalar(classes: tuple[type, ...], read: Callable[[Any], object]) -> Callable[[Any], bool]:
    """Return a check for numbers, which also accepts NumPy numbers and one-element tensors."""

    def check(value: Any) -> bool:
        if isinstance(value, Tensor):
            return value.layout is torch.strided and value.numel() == 1
        try:
            return isinstance(value, classes) or bool(read(value))
        except Exception:  # conversion methods written by users may raise anything
            return False

    return check


# Require `__float__`, because `float` alone would also accept strings such as "1.5".
_float = _scalar(
    (float, torch.SymFloat, torch.SymInt),
    lambda value: hasattr(value, "__float__") and isinstance(float(value), float),
)
_index = _scalar((torch.SymInt,), lambda value: -(2**63) <= operator.index(value) < 2**63)
# Strings and None have a truth value too, but reject them, because a kernel that returns one of
# them for a bool is almost certainly wrong.
_boolean = _scalar(
    (bool, torch.SymBool),
    lambda value: (
        not isinstance(value, (str, type(None))) and isinstance(type(value).__bool__(value), bool)
    ),
)


def _integer(value: Any) -> bool:
    is_fraction = isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
    return not is_fraction and _index(value)


def _string(value: Any) -> bool:
    if not isinstance(value, str):
        return False
    try:
        return str.encode(value) is not None
    except UnicodeEncodeError:  # a lone surrogate cannot be converted to UTF-8 for C++
        return False


_CHECKS: dict[str, Callable[[Any], bool]] = {
    "Tensor": lambda value: isinstance(value, Tensor),
    "Optional[Tensor]": lambda value: value is None or isinstance(value, Tensor),
    "List[Tensor]": _tensors,
    "Tuple[Tensor]": lambda value: _tensors(value) and len(value) == 1,
    "int": _integer,
    "float": _float,
    "bool": _boolean,
    "str": _string,
}


def _spell_returns(returns: Sequence[str]) -> str:
    if not returns:
        return "None"
    if len(returns) == 1:
        return f"a {returns[0]}" if returns[0] != "int" else "an int"
    return f"{len(returns)} values ({', '.join(returns)})"


def spell_result(result: Any) -> str:
    """Describe a result for error messages, such as "a tuple of 2 (torch.Tensor, int)"."""
    if isinstance(result, (tuple, list)):
        kinds = ", ".join(_type_name(item) for item in result[:8]) + ", ..." * (len(result) > 8)
        return f"a {type(result).__name__} of {len(result)} ({kinds})"
    return "None" if result is None else f"a {_type_name(result)}".replace("a int", "an int")


def _fix_of_result(returns: Sequence[str], result: Any) -> str:
    if result is None:
        return " Is a return statement missing?"
    if not returns:
        return " Remove the return statement, or add a return annotation."
    if type(result).__module__ == "numpy" and "Tensor" in returns[0]:
        return " Convert it to a tensor: torch.from_numpy(...)."
    if returns[0] == "Tensor" and isinstance(result, (tuple, list)) and len(returns) == 1:
        if len(result) == 1:
            return f" Return the tensor alone, without the {type(result).__name__}."
        return " Return one tensor, or annotate all of them, such as -> tuple[Tensor, Tensor]."
    if len(returns) > 1:
        return f" Return a tuple of {len(returns)}."
    return str(getattr(type(result), "_torchop_fix", ""))


def _type_name(value: Any) -> str:
    cls = type(value)
    return cls.__name__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__name__}"


def check_returned_arguments(
    name: object, schema: Schema, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
) -> None:
    expected = returned_arguments(schema, args, kwargs)
    returned = result if isinstance(result, tuple) else (result,)
    if list(map(id, returned)) != list(map(id, expected)):
        rule = (
            "an in-place operator (torch.Tag.inplace) must return its first argument"
            if schema.form is Form.INPLACE
            else "an out= operator (torch.Tag.out) must return its mutable keyword-only arguments "
            f"({', '.join(schema.mutated)})"
        )
        raise AliasError(f"{name}: {rule}, but the kernel returned something else.")


def alias_error(
    name: str, schema: Schema, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
) -> AliasError:
    """Return the error for outputs that share memory with an input or with each other."""
    tensors = list(named_inputs(schema, args, kwargs))
    maybe_out = {a.name for a in schema.arguments if a.is_mutated and a.kind == "Optional[Tensor]"}
    outputs = {id(tensor) for argument, _, tensor in tensors if argument in maybe_out}
    mutated = {id(tensor) for argument, _, tensor in tensors if argument in schema.mutated}
    # If a tensor is passed as several arguments, the error should name the first one. Iterate in
    # reverse, so that the first argument overwrites the later ones in the dict.
    inputs = {id(tensor): where for _, where, tensor in reversed(tensors)}
    others = [(tensor, where) for _, where, tensor in tensors]
    fault = "two outputs share memory, or an output and an input do"
    for where, tensor in named_outputs(result, schema.result_places):
        owner = next((place for other, place in others if share_memory(tensor, other)), None)
        if id(tensor) in inputs:
            fault = f"{where} is {inputs[id(tensor)]} itself"
            if id(tensor) in outputs:
                return AliasError(f"{name}: {fault}, and the operator mutates it. {MAYBE_OUT}")
            if id(tensor) in mutated:
                return AliasError(
                    f"{name}: {fault}, and the operator mutates it. An output may not alias "
                    "an input unless the schema says so. Return None, or add a tag: "
                    "torch.Tag.inplace if the operator mutates only its first argument and returns "
                    "it, torch.Tag.out if it mutates an out= argument."
                )
            break
        if owner is not None:
            fault = f"{where} shares memory with {owner}"
            break
        others.append((tensor, where))
    return AliasError(
        f"{name}: {fault}{_shapes(tensors)}. Every output of an operator must be a fresh tensor: "
        "it may not alias an input or another output, because compilers rely on it. Return a copy, "
        ".clone(). If the operator writes into an argument, name it in mutates_args and return "
        "None."
    )


def _shapes(tensors: Sequence[tuple[str, str, Tensor]]) -> str:
    """Describe the input shapes, since some kernels return aliases only for certain shapes."""
    shown = [
        f"{where.removeprefix('input ')} of shape {list(tensor.shape)}"
        f"{'' if tensor.numel() else ' (empty)'}"
        for _, where, tensor in tensors[:4]
    ]
    return f", in a call with {' and '.join(shown)}" if shown else ""


def storage_of(tensor: Tensor) -> int:
    """Return a number that identifies a tensor's storage.

    Sparse tensors, lazy tensors and functorch wrappers have no storage, so return the `id` of the
    tensor for these.
    """
    is_strided = tensor.layout is torch.strided and aliasing.has_storage(tensor)
    if not is_strided or functorch.is_wrapped(tensor):
        return id(tensor)
    return int(tensor.untyped_storage()._cdata)


def share_memory(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors share a storage, or have storages with overlapping memory.

    Separate storages can overlap if their memory is shared outside of PyTorch, for example through
    `torch.from_numpy` or DLPack.
    """
    if storage_of(one) == storage_of(other):
        return True
    memory, others = aliasing.memory_of(one), aliasing.memory_of(other)
    if memory is None or others is None:
        return False
    return memory[0] < others[1] and others[0] < memory[1]


_COMPRESSED = {torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}


def version_of(tensor: Tensor) -> int | None:
    """Return a tensor's version counter, or None if the counter does not reflect writes exactly."""
    # Under no_grad, merely reading a compressed sparse tensor increments its version counter, so a
    # higher counter does not mean that the tensor was written to.
    is_uncounted = tensor.layout in _COMPRESSED or tensor.is_inference()
    return None if is_uncounted else tensor._version


def shares_memory(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> bool:
    if _hooks.extension.is_evidently_fresh(args, kwargs, result):
        return False
    outputs = result if isinstance(result, tuple) else (result,)
    if aliasing.any_alias(args, kwargs, outputs):
        return True
    inputs, made = list(tensors_in((*args, *kwargs.values()))), list(tensors_in(outputs))
    # Some tensors, such as sparse tensors, have no storage that `any_alias` could compare, so
    # compare these tensors by identity (see `storage_of`).
    unstored = [id(tensor) for tensor in made if storage_of(tensor) == id(tensor)]
    if len(set(unstored)) < len(unstored) or not set(map(id, inputs)).isdisjoint(unstored):
        return True
    return _memory_overlaps(inputs, made)


def _memory_overlaps(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> bool:
    """Return whether an output overlaps an input or another output in memory.

    Calls may pass hundreds of tensors in lists, so comparing every pair would be too slow. Instead,
    sort the memory ranges by their start: if two ranges overlap, the second one starts before the
    first one ends.
    """
    ranges = [(aliasing.memory_of(tensor), False) for tensor in inputs]
    ranges += [(aliasing.memory_of(tensor), True) for tensor in outputs]
    end = end_of_outputs = 0
    for (start, stop), is_output in sorted((each, is_out) for each, is_out in ranges if each):
        if start < (end if is_output else end_of_outputs):
            return True
        end = max(end, stop)
        if is_output:
            end_of_outputs = max(end_of_outputs, stop)
    return False

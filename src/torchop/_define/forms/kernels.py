"""Create the kernels of the functional, out= and in-place forms from one kernel.

The author's kernel writes its results into output arguments, which are checked before the kernel
runs. If PyTorch's own operators reject such an output, the error has the same message as PyTorch's.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchop import _hooks
from torchop._core.call import named_inputs, returned_arguments, tensors_in
from torchop._core.contract import alias_error, shares_memory, spell_result
from torchop._core.declaration import Guard
from torchop._define.forms.schemas import without_outputs
from torchop._errors import ArgumentError, MutationError, ResultError
from torchop._rules.mutation.writable import check_overlap
from torchop._schema.defaults import bind
from torchop._schema.forms import Form
from torchop._schema.naming import OpName
from torchop._schema.schema import Schema


class Metadata(NamedTuple):
    """The metadata that a result and the output it is written into must have in common."""

    shape: list[Any]
    dtype: torch.dtype
    layout: torch.layout
    device: torch.device


def metadata(tensor: Tensor) -> Metadata:
    return Metadata(list(tensor.shape), tensor.dtype, tensor.layout, tensor.device)


def described_results(
    allocate: Callable[..., tuple[Tensor, ...]], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[Metadata]:
    """Run `allocate` on meta tensors to compute the metadata of the results."""
    meta_kwargs = {name: _to_meta(value) for name, value in kwargs.items()}
    results = allocate(*map(_to_meta, args), **meta_kwargs)
    first = next(tensors_in((*args, *kwargs.values())), None)
    return [
        # A result is on the meta device only because `allocate` received meta tensors. Assume that
        # it would otherwise be on the same device as the inputs.
        metadata(result)._replace(device=result.device if first is None else first.device)
        if result.is_meta
        else metadata(result)
        for result in results
    ]


def _to_meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        if value.layout is not torch.strided:
            return value.to("meta")
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return [_to_meta(item) for item in value] if isinstance(value, list) else value


def check_fits(
    name: object, schema: Schema, argument: str, expected: Metadata, tensor: Tensor
) -> None:
    """Raise an error unless `tensor` has the metadata of the result to be written into it."""
    actual = metadata(tensor)
    if actual == expected:
        return
    inplace = schema.form is Form.INPLACE
    for field, required, got in zip(Metadata._fields, expected, actual, strict=True):
        if required == got:
            continue
        fix = (
            f"An in-place operator cannot change the {field}; use the functional operator."
            if inplace
            else "The operator does not resize or convert outputs; "
            f"pass torch.empty({expected.shape}, dtype={expected.dtype}, "
            f"device={str(expected.device)!r})."
        )
        raise MutationError(
            f"{name}: Expected {'in-place' if inplace else 'out'} tensor {argument!r} to have "
            f"{field} {required}, but got {got} instead. {fix}"
        )


def check_outputs(
    name: object,
    schema: Schema,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    may_be_an_input: bool,
) -> None:
    """Raise an error if an output is None, or overlaps an input (unless `may_be_an_input`).

    Outputs that no operator may mutate, such as expanded tensors, need no check here, because every
    operator that mutates arguments has already rejected them before this check runs.
    """
    outputs = returned_arguments(schema, args, kwargs)
    written = [(f"argument {n!r}", t) for n, t in zip(schema.mutated, outputs, strict=True)]
    for where, tensor in written:
        if tensor is None:
            raise ArgumentError(f"{name}: {where} is None, but the schema says Tensor: {schema}.")
    if not may_be_an_input:
        tensors = named_inputs(schema, args, kwargs)
        read = [(where, tensor) for n, where, tensor in tensors if n not in schema.mutated]
        check_overlap(name, written, read, may_be_the_same=False)


def _call_key(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Build a cache key from the metadata of a call's tensors and from its other arguments."""
    key: list[Any] = [*kwargs]
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            key += value.shape, value.stride(), value.dtype, value.layout, value.device
        elif isinstance(value, (list, tuple)):
            key.append(_call_key(value, {}))
        elif isinstance(value, (int, float, str, type(None), torch.dtype, torch.device)):
            key += type(value), value  # with the type, because 1 == True
        else:
            key.append(object())  # a new object equals no other, so such a call is never cached
    return key


def _same_metadata(one: Tensor, other: Tensor) -> bool:
    """Return `metadata(one) == metadata(other)`, but faster."""
    if one.dtype is not other.dtype or one.layout is not other.layout:
        return False
    return one.shape == other.shape and one.device == other.device


Kernel = Callable[..., Any]


class WritingKernels:
    """Creates the functional, in-place and out= kernels from one kernel with output arguments."""

    def __init__(
        self,
        name: OpName,
        functional: Schema,
        allocate: Callable[..., Any],
        outputs: tuple[str, ...],
        *,
        elementwise: bool,
        like: int | None,
    ) -> None:
        self.name = name
        self.outputs = outputs
        # `itemgetter` returns a tuple only for several names, so put a single value into a tuple
        # here.
        get: Callable[..., Any] = operator.itemgetter(*outputs)
        self._outputs_in = get if len(outputs) > 1 else lambda kwargs: (get(kwargs),)
        self.elementwise = elementwise  # then an output may also be an input
        self._schema = functional
        self._allocate = bind(allocate, functional)
        self._like = like  # the position of the argument `like` of `out_op`, or None

    def out(self, kernel: Kernel) -> Kernel:
        outputs_in, check = self._outputs_in, self._check_written
        name = self.outputs[0]

        def write(*args: Any, **kwargs: Any) -> Any:
            outputs = outputs_in(kwargs)
            shapes = [output.shape for output in outputs]
            check(outputs, shapes, kernel(*args, **kwargs))
            return outputs

        def write_one(*args: Any, **kwargs: Any) -> Any:
            output = kwargs[name]
            shape = output.shape
            returned = kernel(*args, **kwargs)
            if (returned is not None and returned is not output) or output.shape != shape:
                check((output,), (shape,), returned)
            return output

        return functools.wraps(kernel)(write_one if len(self.outputs) == 1 else write)

    def _check_written(
        self, outputs: Sequence[Tensor], shapes: Sequence[torch.Size], returned: Any
    ) -> None:
        for name, shape, output in zip(self.outputs, shapes, outputs, strict=True):
            if output.shape != shape:
                raise ResultError(
                    f"{self.name}: the kernel must write into {name} without resizing it, but "
                    f"changed the shape from {list(shape)} to {list(output.shape)}. Return "
                    "the final shape from allocate."
                )
        if returned is not None:
            tensors = returned if isinstance(returned, (tuple, list)) else (returned,)
            if [*map(id, tensors)] != [*map(id, outputs)]:
                raise ResultError(
                    f"{self.name}: the kernel must write into {', '.join(self.outputs)} and "
                    f"return that, or None, but returned {spell_result(returned)}, which is "
                    "discarded. Copy the result into the output."
                )

    def functional(self, kernel: Kernel) -> Kernel:
        write = self.out(kernel)

        @functools.wraps(kernel)
        def allocate_and_write(*args: Any, **kwargs: Any) -> Any:
            results = self._allocated(args, kwargs)
            return write(*args, **kwargs, **dict(zip(self.outputs, results, strict=True)))

        return without_outputs(allocate_and_write, kernel, self.outputs)

    def inplace(self, kernel: Kernel, name: OpName, schema: Schema) -> Kernel:
        write, (output,) = self.out(kernel), self.outputs

        @functools.wraps(kernel)
        def overwrite(*args: Any, **kwargs: Any) -> Any:
            if self.elementwise:
                kwargs[output] = args[0]
                return write(*args, **kwargs)
            (result,) = self._allocated(args, kwargs)
            check_fits(name, schema, schema.mutated[0], metadata(result), args[0])
            return args[0].copy_(write(*args, **kwargs, **{output: result}))

        return without_outputs(overwrite, kernel, self.outputs)

    def guard(self, name: OpName, schema: Schema) -> Guard | None:
        """Return a function that checks the outputs of a call, or None if no check is needed."""
        is_inplace, place = schema.form is Form.INPLACE, self._like
        may_be_an_input, outputs_in = self.elementwise, self._outputs_in
        # The in-place form needs no guard if it copies the result, because `overwrite` then checks
        # the metadata. It also needs no guard if the result is allocated like the first argument
        # (`place == 0`), because then the metadata always matches.
        if is_inplace and (not may_be_an_input or place == 0):
            return None
        # The `_call_key` of the last valid call. A call with the same key can skip `allocate`,
        # which takes longer than most kernels. The list is only ever replaced, never modified, so
        # no lock is needed.
        accepted: list[Any] | None = None

        def guard(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            nonlocal accepted
            outputs = (args[0],) if is_inplace else outputs_in(kwargs)
            read, fits = args, place is not None
            like: Any = None if place is None else args[place]
            is_fresh = _hooks.extension.is_evidently_fresh
            for output in outputs:
                # `is_fresh` gets no keyword arguments, because all keyword-only tensors are
                # outputs, so `read` already contains every input tensor.
                if not fits or not is_fresh(read, {}, output, like):
                    is_fine = may_be_an_input or is_fresh(read, {}, output)
                    if output is None or not is_fine:
                        check_outputs(name, schema, args, kwargs, may_be_an_input=may_be_an_input)
                    fits = fits and _same_metadata(like, output)
                read = (*read, output)
            key = _call_key(args, kwargs) if place is None else None
            if fits or (key is not None and key == accepted):
                return
            if place is None:
                inputs = {n: value for n, value in kwargs.items() if n not in self.outputs}
                expected = described_results(self._results, args, inputs)
            else:
                expected = [metadata(like)] * len(outputs)
            for argument, output, required in zip(schema.mutated, outputs, expected, strict=True):
                check_fits(name, schema, argument, required, output)
            accepted = key

        return guard

    def _results(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        result = self._allocate(*args, **kwargs)
        results = tuple(result) if isinstance(result, (tuple, list)) else (result,)
        count = len(self.outputs)
        if len(results) != count or not all(isinstance(r, Tensor) for r in results):
            raise ResultError(
                f"{self.name}: allocate must return "
                f"{'a Tensor' if count == 1 else f'{count} tensors'}, for "
                f"{', '.join(self.outputs)}, but returned {spell_result(result)}."
            )
        return results

    def _allocated(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, ...]:
        results = self._results(*args, **kwargs)
        if shares_memory(args, kwargs, results):  # the kernel would overwrite an input
            raise alias_error(str(self.name), self._schema, args, kwargs, results)
        return results


def empty_like(place: int, count: int, /, *args: Any, **kwargs: Any) -> Any:
    """Allocate `count` results with the same metadata as the argument `args[place]`."""
    results = tuple(torch.empty_like(args[place]) for _ in range(count))
    return results if count > 1 else results[0]

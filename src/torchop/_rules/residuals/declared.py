from __future__ import annotations

import functools
from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from types import GenericAlias
from typing import Any

from torchop import _hooks
from torchop._core import checking
from torchop._core.call import as_tuple, named_inputs, named_outputs, tensors_in
from torchop._core.contract import result_check, share_memory
from torchop._errors import AliasError, ResultError, SchemaError, mistake, short_repr
from torchop._rules.residuals.handover import (
    Request,
    author_of,
    in_native_calls,
    wrap_kernel,
)
from torchop._rules.residuals.training import WithResiduals
from torchop._schema.declared import inferred_schema
from torchop._schema.naming import OpName
from torchop._schema.schema import Schema
from torchop._schema.tree import FunctionTree

_class_named: Callable[[str, Mapping[str, Any]], Any] = namedtuple


class Declared:
    """An operator's declared residuals, i.e. kernel outputs that only the backward pass uses.

    Attributes:
        named: the namedtuple class in which `setup_context` receives the residuals.
        schema: a schema without arguments whose results are the residuals. A residual that is a
            structure, such as a tuple, is flattened, so each of its tensors is a separate result.
    """

    def __init__(self, name: OpName, types: Mapping[str, Any]) -> None:
        if not isinstance(types, Mapping) or not types:
            raise mistake(
                "residuals expects the types of the residuals by their names, such as "
                f'{{"lse": Tensor, "mask": Tensor | None}}; got {short_repr(types)}.'
            )
        self.op = str(name)
        try:
            self.named = _class_named("residuals", types)
            each = tuple(types.values())

            def saved() -> Any: ...

            returned = GenericAlias(tuple, each) if len(each) > 1 else each[0]
            saved.__annotations__["return"] = returned
            self.schema, _, declared = inferred_schema(name, FunctionTree(saved, ()), ())
        except (SchemaError, TypeError, ValueError) as error:
            raise mistake(f"residuals={short_repr(types)}: {error}") from None
        self.structure = declared.structure
        self._check = result_check(self.schema.returns)
        self._what = f"kernel, for the residuals in {self.spelled},"
        self._are_tensors = set(self.schema.returns) == {"Tensor"} and self.structure is None

    def check_operator(self, schema: Schema) -> None:
        if not schema.is_functional or not schema.returns:
            raise mistake(
                "residuals require a functional operator: one that returns fresh tensors and "
                f"mutates nothing; got {schema}. Define a functional operator, and derive the "
                "mutable forms with derive_inplace() and derive_out() of the handle."
            )

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return wrap_kernel(function, self) if callable(function) else function

    def author_of(self, kernel: Callable[..., Any]) -> Callable[..., Any] | None:
        return author_of(kernel, self)

    def in_plan(self, native: Any, formula: Any) -> tuple[Any, ...]:
        """Return the fields of the C++ struct `Residuals`, for calls that C++ code runs."""
        count = len(self.named._fields) * self._are_tensors
        training = formula.training
        # Inside a `torchop.testing.checking` block, a wrapper of `formula.save`, the function that
        # calls `setup_context`, runs the checks. C++ code would bypass this wrapper by calling
        # `setup_context` directly, so do not pass `setup_context` to C++ while checks run.
        is_checked = checking.checker is not None
        setup = (
            training and not is_checked and (formula.setup_context, training.guard, training.mark)
        )
        fields = self.named, functools.partial(Request, self), count
        return *in_native_calls(native), *fields, *(setup or [None] * 3)

    training_form = WithResiduals.of

    @property
    def spelled(self) -> str:
        return f"torchop.residuals(output, {', '.join(self.named._fields)})"

    def flat(self, request: Request) -> tuple[Any, ...]:
        """Check the number and types of the residuals in `request`, and return them as a tuple.

        Residuals are extra kernel outputs for the backward pass. If a residual is a structure, such
        as a dataclass, each tensor in it becomes a separate item of the tuple.
        """
        saved = request.saved or ()
        if len(saved) != len(self.named._fields):
            raise ResultError(
                f"{self.op}: the kernel returned {len(saved)} of {len(self.named._fields)} "
                f"residuals. If torchop.records_gradient() is True, every kernel and fake kernel "
                f"must return {self.spelled}. A declared fake kernel, register_fake(like=...), "
                "returns none; register a function instead."
            )
        values: Any = saved if len(saved) > 1 else saved[0]
        if self.structure is not None:
            values = self.structure.flat_result(values)
        else:
            values = self._check(values, self.op, self._what)
        return as_tuple(self.schema, values)

    def rebuilt(self, flat: Sequence[Any]) -> Any:
        """Convert the tuple of residuals from `flat` to the object for `setup_context`."""
        values: Any = tuple(flat) if len(flat) > 1 else flat[0] if flat else None
        if self.structure is not None:
            values = self.structure.rebuilt_result(values)
        return self.named(*values) if len(self.named._fields) > 1 else self.named(values)

    def check_fresh(
        self, of: Schema, args: Sequence[Any], kwargs: dict[str, Any], output: Any, flat: Any
    ) -> None:
        tensors = list(tensors_in(flat))
        others = list(tensors_in(output if isinstance(output, tuple) else (output,)))
        if len(set(map(id, tensors))) == len(tensors) and all(
            _hooks.extension.is_evidently_fresh((*args, others), kwargs, tensor)
            for tensor in tensors
        ):
            return
        taken = [(tensor, where) for _, where, tensor in named_inputs(of, args, kwargs)]
        taken += [(tensor, where) for where, tensor in named_outputs(output, of.result_places)]
        for tensor in tensors:
            where = next((place for other, place in taken if share_memory(tensor, other)), None)
            if where is not None:
                raise AliasError(
                    f"{self.op}: a residual shares memory with {where}, but compilers rely on "
                    "fresh tensors. Return a copy, .clone(), or drop the residual: setup_context "
                    "receives the inputs and the output anyway."
                )
            taken.append((tensor, "another one"))

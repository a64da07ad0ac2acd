"""The declaration of an operator's residuals, and the checks of residuals against it."""

from __future__ import annotations

import functools
from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from types import GenericAlias
from typing import Any

from torchop import _hooks
from torchop._core import checking
from torchop._core.call import named_inputs, named_outputs, tensors_in
from torchop._core.contract import result_check, storage_of
from torchop._errors import AliasError, ResultError, SchemaError, short_repr
from torchop._rules.residuals.handover import (
    Request,
    as_tuple,
    author_of,
    handing_over,
    in_native_calls,
)
from torchop._rules.residuals.training import follow_rule, training_form
from torchop._schema.declared import declared_schema
from torchop._schema.naming import OpName
from torchop._schema.schema import Schema

_class_named: Callable[[str, Mapping[str, Any]], Any] = namedtuple


class Declared:
    """The declared residuals of one operator.

    Attributes:
        named: the class of the object that `setup_context` gets.
        schema: a schema without arguments that returns the residuals as they are in graphs.
    """

    def __init__(self, name: OpName, types: Mapping[str, Any]) -> None:
        if not isinstance(types, Mapping) or not types:
            raise SchemaError(
                f"{name}: residuals expects the types of the residuals by their names, such as "
                f'{{"lse": Tensor, "mask": Tensor | None}}; got {short_repr(types)}.'
            )
        self.op = str(name)
        try:
            self.named = _class_named("residuals", types)
            each = tuple(types.values())

            def saved() -> Any: ...

            returned = GenericAlias(tuple, each) if len(each) > 1 else each[0]
            saved.__annotations__["return"] = returned
            self.schema, _, declared = declared_schema(name, saved, None, (), ())
        except (SchemaError, TypeError, ValueError) as error:
            raise SchemaError(f"{name}: residuals={short_repr(types)}: {error}") from None
        self.structure = declared.structure
        self._check = result_check(self.schema.returns)
        self._what = f"kernel, among its residuals ({self.spelled}),"
        self._are_tensors = set(self.schema.returns) == {"Tensor"} and self.structure is None

    def check_operator(self, schema: Schema) -> None:
        """Reject operators that cannot have residuals."""
        if not schema.is_functional or not schema.returns:
            raise SchemaError(
                f"{self.op}: residuals are for functional operators, which return fresh tensors "
                f"and mutate nothing; got {schema}. Define such an operator; derive_inplace() and "
                "derive_out() of its handle make the forms that write."
            )

    def handing_over(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a kernel or rule, so that it returns the result and stores the residuals."""
        return handing_over(function, self) if callable(function) else function

    def author_of(self, kernel: Callable[..., Any]) -> Callable[..., Any] | None:
        """Return the author's function if `handing_over` made the kernel from it, else None."""
        return author_of(kernel, self)

    def in_plan(self, native: Any, formula: Any) -> tuple[Any, ...]:
        """Return the `Residuals` of a plan (residuals.h), with which the author's function runs."""
        count = len(self.named._fields) * self._are_tensors
        training = formula.training
        # In a native call, `checking` would not see the call of `setup_context`.
        is_checked = checking.is_watching()
        asks = (
            training and not is_checked and (formula.setup_context, training.guard, training.mark)
        )
        handed = self.named, functools.partial(Request, self), count
        return *in_native_calls(native), *handed, *(asks or [None] * 3)

    training_form = staticmethod(training_form)
    follow_rule = staticmethod(follow_rule)

    @property
    def spelled(self) -> str:
        """The return statement of a kernel, for messages."""
        return f"torchop.residuals(output, {', '.join(self.named._fields)})"

    def flat(self, request: Request) -> tuple[Any, ...]:
        """Return the residuals that a kernel stored, checked and flattened."""
        saved = request.saved or ()
        if len(saved) != len(self.named._fields):
            raise ResultError(
                f"{self.op}: where torchop.records_gradient() is True, every kernel and fake "
                f"kernel must return {self.spelled}, but the one that ran returned "
                f"{len(saved)} of its {len(self.named._fields)} residuals. A declared "
                "fake kernel, register_fake(like=...), has none; register a function."
            )
        values: Any = saved if len(saved) > 1 else saved[0]
        if self.structure is not None:
            values = self.structure.flat_result(values)
        else:
            values = self._check(values, self.op, self._what)
        return as_tuple(self.schema, values)

    def rebuilt(self, flat: Sequence[Any]) -> Any:
        """Return the object that `setup_context` gets, from flat residuals."""
        values: Any = tuple(flat) if len(flat) > 1 else flat[0] if flat else None
        if self.structure is not None:
            values = self.structure.rebuilt_result(values)
        return self.named(*values) if len(self.named._fields) > 1 else self.named(values)

    def check_fresh(
        self, of: Schema, args: Sequence[Any], kwargs: dict[str, Any], output: Any, flat: Any
    ) -> None:
        """Reject residuals that share memory: compilers assume that they do not."""
        tensors = list(tensors_in(flat))
        others = list(tensors_in(output if isinstance(output, tuple) else (output,)))
        if len(set(map(id, tensors))) == len(tensors) and all(
            _hooks.extension.is_evidently_fresh((*args, others), kwargs, tensor)
            for tensor in tensors
        ):
            return
        taken = {storage_of(tensor): where for _, where, tensor in named_inputs(of, args, kwargs)}
        taken |= {storage_of(tensor): where for where, tensor in named_outputs(output)}
        for tensor in tensors:
            where = taken.get(storage_of(tensor))
            if where is not None:
                raise AliasError(
                    f"{self.op}: a residual shares memory with {where}. It must be a fresh tensor, "
                    "because compilers rely on it: return a copy, .clone(). A setup_context gets "
                    "the inputs and the output anyway."
                )
            taken[storage_of(tensor)] = "another one"

"""What is checked: an operator that somebody names, and samples as a caller could pass them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from torchop._compat import fake_tensors, torch_ops
from torchop._compat.classes import CustomOpDef
from torchop._core.call import named_inputs
from torchop._core.registry import OpLike, find_schema, op_name, own_definition
from torchop._schema.forms import Form
from torchop._schema.schema import Schema
from torchop.testing.probes import with_tensors

Sample = tuple[tuple[Any, ...], dict[str, Any]]


class Operator:
    """An operator, and how arguments for it become those of its schema."""

    def __init__(self, op: OpLike, caller: str) -> None:
        self.name, self.caller = op_name(op, caller), caller
        self.definition = own_definition(op, self.name)
        if self.definition is not None:
            self.definition.check_defined()
        # The schema of a definition knows the operator's form.
        self.schema: Schema = (
            find_schema(self.name) if self.definition is None else self.definition.schema
        )
        self.overload = torch_ops.lookup_overload(*self.name)
        # A handle is called with the structures of the function.
        is_handle = self.definition is not None and isinstance(op, CustomOpDef)
        self.structure = self.definition.structure if is_handle and self.definition else None

    def sample(self, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Sample:
        """The arguments as the schema has them.

        Raises:
            ValueError: a tensor has no data.
        """
        positional, keywords = tuple(args), dict(kwargs or {})
        if self.structure is not None:
            positional, keywords = self.structure.flat_arguments(*positional, **keywords)
        for _, where, tensor in named_inputs(self.schema, positional, keywords):
            if fake_tensors.is_fake(tensor):
                raise ValueError(
                    f"{self.caller}(op, ...): {where} has no data (it is fake, or on the meta "
                    f"device), but {self.caller} runs the kernel. Pass real tensors."
                )
        return positional, keywords


def without_refused_gradients(
    schema: Schema, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Sample:
    """The sample, detached where a call that records gradients would be refused.

    A tensor that requires grad is written by operators in the in-place form only; one with `out=`
    takes none at all.
    """
    names = {a.name for a in schema.arguments} if schema.form is Form.OUT else set(schema.mutated)
    return _changed(schema, args, kwargs, names, Tensor.detach)


def inside_a_graph(schema: Schema, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sample:
    """The sample of an in-place operator, with copies of leaves, which it must not write."""
    return _changed(schema, args, kwargs, set(schema.mutated), Tensor.clone)


def _changed(
    schema: Schema, args: Sequence[Any], kwargs: Mapping[str, Any], names: set[str], change: Any
) -> Sample:
    tensors = [
        change(tensor) if argument in names and tensor.requires_grad else tensor
        for argument, _, tensor in named_inputs(schema, args, kwargs)
    ]
    changed: Sample = with_tensors((tuple(args), dict(kwargs)), tensors)
    return changed

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torchop._compat import dispatch, operators, registries, torch_ops
from torchop._compat.classes import CustomOpDef, EffectType, OpOverload
from torchop._core.call import Call
from torchop._core.declaration import Site
from torchop._core.observers import call_signature
from torchop._core.registry import OpLike, find_schema, op_name, own_definition
from torchop._core.user_rule import registered_rules
from torchop._schema.naming import OpName
from torchop._schema.schema import Schema


class Operator:
    """The properties of an operator from any package, for use by tools.

    Args:
        op: the operator: a handle, `"ns::name"`, `"ns::name.overload"`, an `OpOverload`, or a
            packet with one overload.
        caller: the name of the calling function, which error messages start with.

    Attributes:
        name: an `OpName`.
        exists: whether the operator is registered. If not, reading most other attributes raises.
        schema: a `Schema`.
        overload: the `torch._ops.OpOverload`.
        handle: the `CustomOp` that `torchop.custom_op` returned; None for other operators.
        function: the function that was passed to `custom_op` of torchop or PyTorch, with the
            schema's arguments as parameters; None for other operators.
        site: the place where `torchop.custom_op` was called, with the attributes `module`, `file`
            and `line`; None for other operators.
        effect: the declared side effect, an `EffectType`, or None.
        kernels: the device types that have a kernel registered through torchop.
        rules: a short description of each other rule that was registered through torchop.
        signature: the `inspect.Signature` of a call.
        takes_structures: whether the function takes or returns objects that the schema cannot
            express, such as dataclasses.

    Raises:
        ValueError: `op` is not an operator.
        OperatorGoneError: the operator was deregistered.
        OperatorNotFoundError: the operator is not registered. Only reading an attribute raises
            this.

    Example:
        >>> import torch
        >>> from torchop.extend import Operator
        >>> operator = Operator("aten::add.Tensor", "my_tool")
        >>> operator.name.overload, [argument.name for argument in operator.schema.arguments]
        ('Tensor', ['self', 'other', 'alpha'])
        >>> operator.overload is torch.ops.aten.add.Tensor
        True
    """

    def __init__(self, op: OpLike | OpName, caller: str) -> None:
        self.name = op if isinstance(op, OpName) else op_name(op, caller)
        self._definition = own_definition(op, self.name)
        if self._definition is not None:
            self._definition.check_defined()
        self._structure = None if self._definition is None else self._definition.structure
        self.takes_structures = self._structure is not None
        self._is_handle = isinstance(op, CustomOpDef)

    def __str__(self) -> str:
        return str(self.name)

    @property
    def exists(self) -> bool:
        return operators.is_registered(self.name.packet, self.name.overload)

    @functools.cached_property
    def schema(self) -> Schema:
        return find_schema(self.name) if self._definition is None else self._definition.schema

    @property
    def overload(self) -> OpOverload:
        if self._definition is None:
            find_schema(self.name)  # raises if the operator does not exist
        return torch_ops.lookup_overload(*self.name)

    @property
    def handle(self) -> Any:
        return None if self._definition is None else self._definition.handle

    @property
    def function(self) -> Callable[..., Any] | None:
        if self._definition is None:
            return registries.published_function(str(self.name))
        return self._definition.function

    @property
    def site(self) -> Site | None:
        return None if self._definition is None else self._definition.declaration.site

    @property
    def effect(self) -> EffectType | None:
        return registries.effect_of(str(self.name))

    @property
    def kernels(self) -> list[str]:
        if self._definition is None:
            return []
        rules = self._definition.rules.values()
        return [device or "every device" for rule in rules for device in rule.kernels()]

    @property
    def rules(self) -> list[str]:
        if self._definition is None:
            return []
        rules = self._definition.rules.values()
        texts = [rule.repr_text() for rule in rules if not rule.kernels()]
        return [*filter(None, texts), *registered_rules(self._definition)]

    @property
    def signature(self) -> inspect.Signature:
        return call_signature(self.overload)

    def has_kernel(self, key: str) -> bool:
        """Return whether the operator has a kernel at a dispatch key.

        Args:
            key: a dispatch key, such as `"CPU"` or `"CompositeImplicitAutograd"`.
        """
        return dispatch.has_kernel(str(self.name), key)

    def flat_arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        """Return the schema's arguments for a call, with structured arguments flattened.

        If this object was created from an `OpOverload` or a name rather than from the operator's
        handle, the arguments are flat already and are returned unchanged.

        Args:
            args: the positional arguments of the call.
            kwargs: the keyword arguments of the call.
        """
        if self._structure is None or not self._is_handle:
            return tuple(args), dict(kwargs)
        flat: Call = self._structure.flat_arguments(*args, **kwargs)
        return flat

    def flat_function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function that takes structures, so that it takes the schema's flat arguments."""
        if self._definition is None:
            return function
        return self._definition.convention.kernel(function)

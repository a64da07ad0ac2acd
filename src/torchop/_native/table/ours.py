"""Find kernels and backward formulas of operators that `torchop.custom_op` did not create.

This module only finds functions that were registered with torchop. `Library.impl` registers a
wrapper, so find the user's function in the wrapper. `register_kernel` and `register_autograd` store
the user's function in a `Definition`, which registers its own kernels, so find the definition that
registered a kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torchop._compat import torch_ops
from torchop._core.checking import checked
from torchop._core.contract import result_check
from torchop._core.definition import Definition
from torchop._native.plan import Finish, Gradient, converting, gradient_of, is_returnable
from torchop._rules.autograd.rule import AutogradRule
from torchop._rules.kernels.rule import KernelRule, place_of
from torchop._schema.forms import Form
from torchop._schema.naming import OpName
from torchop._schema.schema import Schema

# A call ends at the dispatch key of a backend, such as "CPU". If the kernel at the backend's
# Autograd key, such as "AutogradCPU", does not redispatch, the call ends there instead. Each key
# consists of one of these prefixes and the name of the backend.
BACKEND, AUTOGRAD = "", "Autograd"

# The attribute in which the wrapper of `Library.impl` stores the user's function.
KERNEL_ATTRIBUTE = "_torchop_kernel"


class Kernels(NamedTuple):
    """An operator's kernels for calls without the dispatcher, and how to check and convert results.

    For each kernel, `pairs` contains the function in the dispatcher's table, and the function that
    C++ calls instead. The other fields are arguments of the class `Plan` in `_call_path.pyi`.
    """

    pairs: tuple[tuple[Callable[..., Any], Callable[..., Any]], ...]
    finish: Finish
    convert: Callable[[Any], Any] | None = None
    sources: tuple[tuple[Any, Any, Any], ...] = ()
    returned_parameters: tuple[int, ...] = ()
    are_fresh: bool = False
    as_dispatched: bool = True


def find_kernels(native: Any, name: OpName, schema: Schema) -> Kernels:
    kernels = registered_kernels(native, name) if is_returnable(schema) else {}
    places = {kernel: place for kernel in kernels if (place := place_of(kernel)) is not None}
    definitions = {rule.definition for rule, _ in places.values()}
    if len(places) == len(kernels) and len(definitions) == 1:
        (definition,) = definitions
        compiled = definition.plan[KernelRule]
        is_plain = schema.form is Form.PLAIN
        return Kernels(
            tuple((kernel, compiled.functions[device]) for kernel, (_, device) in places.items()),
            converting(functools.partial(compiled.finish, definition), schema),
            returned_parameters=() if is_plain else tuple(i for i, _ in schema.mutated_places),
            as_dispatched=False,
        )
    check = result_check(schema.returns)
    # Leave `as_dispatched` at True, so C++ drops arguments that equal their defaults. The
    # dispatcher drops these arguments too, so kernels registered with `Library.impl` must not
    # receive them. Kernels registered with `register_kernel` fill in the defaults themselves.
    return Kernels(
        tuple(
            (kernel, function if kernel in places else checked(name, schema, function))
            for kernel, function in kernels.items()
        ),
        converting(lambda args, kwargs, result: check(result, name), schema),
    )


def registered_kernels(
    native: Any, name: OpName, prefixes: Iterable[str] = (BACKEND, AUTOGRAD)
) -> dict[Any, Callable[..., Any]]:
    """Map each kernel that torchop registered to the function that the C++ extension calls instead.

    If the kernel was registered with `Library.impl`, it is a wrapper, and the extension calls the
    user's function inside it. If a `Definition` registered the kernel, the extension calls the
    kernel itself.
    """
    keys = (f"{prefix}{backend}" for prefix in prefixes for backend in native.backends)
    kernels = (native.python_kernel(name.packet, name.overload, key) for key in keys)
    is_defined = name.packet in torch_ops.defined
    return {
        kernel: getattr(kernel, KERNEL_ATTRIBUTE, kernel)
        for kernel in kernels
        if hasattr(kernel, KERNEL_ATTRIBUTE) or (is_defined and _is_of_definition(kernel))
    }


def _is_of_definition(kernel: Any) -> bool:
    place = place_of(kernel)
    return place is not None and place[0].definition.deregistration_reason is None


def registered_gradient(native: Any, name: OpName) -> tuple[Callable[..., Any] | None, Gradient]:
    """Return the Autograd kernel that `register_autograd` installed, and how to record gradients.

    The second value is the argument `gradient` of `Plan`. Both values are None if no backward
    formula was registered with torchop.
    """
    for backend in native.backends:
        kernel = native.python_kernel(name.packet, name.overload, f"{AUTOGRAD}{backend}")
        definition = definition_of_gradient(kernel)
        if definition is not None:
            return kernel, gradient_of(definition, definition.plan)
    return None, None


def definition_of_gradient(kernel: Any) -> Definition | None:
    rule = getattr(kernel, "__self__", None)
    if not isinstance(rule, AutogradRule) or rule.definition.deregistration_reason is not None:
        return None
    return rule.definition

"""Providers of operators that others registered: a kernel that chooses, in front of theirs.

It stands at BackendSelect, which every call passes after autograd, autocast, `vmap` and the modes,
and before the kernel of its device. So all of these stay as they are, and the reference is whatever
the package has for the device at the time of the call, also where it registers that later, replaces
it or takes it back. A kernel in the place of the package's own would have to notice all of that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import Tensor

from torchop._compat import (
    compilers,
    dispatch,
    foreign_operators,
    libraries,
    registries,
)
from torchop._compat.classes import DispatchKeySet, OpOverload
from torchop._core.call import tensors_in
from torchop._core.contract import alias_error, shares_memory
from torchop._core.declaration import Declaration
from torchop._core.definition import Definition
from torchop._core.library import OwnLibrary
from torchop._core.lock import registration_lock
from torchop._core.registry import find_schema
from torchop._rules.kernels.devices import device_key
from torchop._rules.kernels.rule import KernelRule
from torchop._rules.mutation.rule import MutationRule
from torchop._rules.providers.choice import choice_by_device
from torchop._schema.forms import Form
from torchop._schema.naming import RESERVED_NAMESPACES
from torchop._schema.schema import Argument, Schema
from torchop.extend import OpName

KEY = "BackendSelect"
Function = Callable[..., Any]

# Called with the name of an operator whose choice may be another one from now on. Native calls of
# accelerated operators put their function here.
when_outdated: list[Callable[[OpName], None]] = []

# The operators of others that have providers, each with the library that holds the kernel.
_operators: dict[OpName, tuple[Definition, OwnLibrary]] = {}


def definition_of(name: OpName) -> Definition | None:
    """What holds the providers of an operator of somebody else's; None without any."""
    found = _operators.get(name)
    return found and found[0]


def definition_for(name: OpName, devices: Sequence[str | None]) -> Definition:
    """What is to hold a provider for these devices; refuses operators that cannot have one."""
    schema = find_schema(name)  # raises where there is no operator
    known = definition_of(name)
    for device in devices:
        if device is not None:
            device_key(f"register_kernel({name})", device)
    if known is not None:
        return known
    what = f"register_kernel({name}): a provider cannot be registered, because"
    if name.namespace in RESERVED_NAMESPACES:
        raise NotImplementedError(
            f"{what} the operator is PyTorch's own, and compilers replace those by code of their "
            "own, which would not ask for it. Define an operator that calls this one, and give it "
            "the providers."
        )
    if dispatch.has_kernel(str(name), KEY):
        raise NotImplementedError(
            f"{what} the operator has a kernel of its own at {KEY}, where providers are chosen."
        )
    if dispatch.has_kernel(str(name), "CompositeImplicitAutograd") and not all(
        device is not None and dispatch.has_kernel(str(name), dispatch.kernel_key(device))
        for device in devices
    ):
        raise NotImplementedError(
            f"{what} the operator is a composition of others (CompositeImplicitAutograd), of which "
            "PyTorch records the gradients, so a kernel in its place would have none. Register "
            "providers for the operators that it calls."
        )
    library = OwnLibrary(name.namespace, "FRAGMENT")  # type: ignore[no-untyped-call]  # PyTorch's
    definition = Definition(Declaration(name, schema), library)
    _operators[name] = definition, library
    return definition


def references(definition: Definition, devices: Sequence[str | None]) -> dict[str | None, Function]:
    """The functions that call the kernels of the package, by device type."""
    return {device: _reference(definition.overload, device) for device in devices}


def install(definition: Definition) -> None:
    """Puts the kernel that chooses in front of those of the package."""
    if KEY in definition.dispatcher_kernels:
        return
    definition.implement(KEY, _choosing(definition), with_keyset=True)
    definition.follower = _Follower(definition.name)
    name = str(definition)
    library = registries.published_library(name) or foreign_operators.defining_libraries().get(name)
    if library is not None:  # it was not defined in C++, which keeps its operators
        libraries.on_close(library, functools.partial(end, definition))


def native_kernel(definition: Definition, function: Function, devices: Collection[str]) -> Function:
    """What a native call runs in place of a kernel of the package, which is that of some devices.

    Native calls of such an operator leave out arguments that equal their defaults, as the
    dispatcher does. A provider gets all of them, and the package's kernel those that it got before.
    """
    rule, schema = definition.rule(KernelRule), definition.schema
    table: Any = rule.providers
    known = [device for device in devices if not {device, None}.isdisjoint(rule.functions)]
    if table is None or not known:
        return function
    reference = _without_defaults(schema, function) if schema.has_defaults else function
    choices = {
        device: table.choice(definition.name, device, {device: reference}, lambda f: f).function()
        for device in known
    }
    if all(each is reference for each in choices.values()):
        return function
    chosen = choices[known[0]] if len(devices) == 1 else choice_by_device(choices, reference)
    if not schema.has_defaults:
        return chosen

    def filled(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = schema.fill_defaults(args, kwargs)
        return chosen(*args, **kwargs)

    return filled


def end(definition: Definition) -> None:
    """Ends what holds the providers of an operator, whose calls are then as without them."""
    with registration_lock:
        known, library = _operators.get(definition.name, (None, None))
        if known is definition and library is not None:
            del _operators[definition.name]
            library._destroy()
            definition.library_closed()


def checked_kernel(definition: Definition, function: Function) -> Function:
    """A kernel of a provider with the checks that the kernels of our own operators have.

    The reference has none, so that calls of it stay as they were.
    """
    schema = definition.schema

    @functools.wraps(function)
    def kernel(*args: Any, **kwargs: Any) -> Any:
        plan = definition.plan
        kernels, mutated = plan[KernelRule], plan[MutationRule]
        if mutated is not None:
            mutated.check_memory(args, kwargs)
        result = kernels.finish(definition, args, kwargs, function(*args, **kwargs))
        is_fresh = schema.form is Form.PLAIN and not schema.is_view
        if is_fresh and shares_memory(args, kwargs, result):
            raise alias_error(str(definition), schema, args, kwargs, result)
        return result

    return kernel


def _choosing(definition: Definition) -> Function:
    overload, schema = definition.overload, definition.schema

    @compilers.never_traced
    def kernel(keyset: DispatchKeySet, /, *args: Any, **kwargs: Any) -> Any:
        keyset = dispatch.below_backend_select(keyset)
        device = _device(dispatch.first_key(keyset))
        functions = definition.plan[KernelRule].functions
        function = None if device is None else functions.get(device, functions.get(None))
        if function is None:
            return dispatch.redispatch(overload, keyset, args, kwargs)
        if schema.has_defaults:
            args, kwargs = schema.fill_defaults(args, kwargs)
        return function(*args, **kwargs)

    return kernel


def _without_defaults(schema: Schema, function: Function) -> Function:
    """Calls a function as the dispatcher does: without what equals a default."""
    named = {argument.name: argument for argument in schema.keyword_only}

    def called(*args: Any, **kwargs: Any) -> Any:
        given = {n: v for n, v in kwargs.items() if not is_dropped(v, named[n], schema)}
        return function(*args[: count_passed(args, schema)], **given)

    return called


def count_passed(args: Sequence[Any], schema: Schema) -> int:
    """How many of all positional arguments the dispatcher would pass."""
    end = len(args)
    while end > 0 and is_dropped(args[end - 1], schema.positional[end - 1], schema):
        end -= 1
    return end


def is_dropped(value: Any, argument: Argument, schema: Schema) -> bool:
    """Whether the dispatcher passes nothing for an argument, because it equals its default."""
    if not argument.has_default:
        return False
    if value is argument.default:
        return True
    # The dispatcher keeps the default of a device as a str, and no device equals a str.
    return argument.name not in schema.spelled_devices and _is_equal(value, argument.default)


def _is_equal(value: Any, default: Any) -> bool:
    if type(value) is not type(default):
        return False
    if isinstance(value, list):
        return len(value) == len(default) and all(map(_is_equal, value, default))
    return not isinstance(value, Tensor) and bool(value == default)


@functools.cache
def _device(key: str) -> str | None:
    """The device type of dense tensors with data whose backend key this is."""
    device = dispatch.device_of_key(key)
    return None if device == "meta" else device


def _reference(overload: OpOverload, device: str | None) -> Function:
    if device is not None:
        keyset = dispatch.backend_keyset(device)
        return lambda *args, **kwargs: dispatch.redispatch(overload, keyset, args, kwargs)

    def reference(*args: Any, **kwargs: Any) -> Any:
        keys = dispatch.keyset_of_call(tensors_in((*args, *kwargs.values())))
        return dispatch.redispatch(overload, dispatch.from_backend(keys), args, kwargs)

    return reference


class _Follower:
    """Tells whoever calls the operator natively that the choice may be another one."""

    def __init__(self, name: OpName) -> None:
        self._name = name

    def attach(self) -> None:
        pass  # these calls compile a plan when they find none

    def outdate(self) -> None:
        for outdate in when_outdated:
            outdate(self._name)

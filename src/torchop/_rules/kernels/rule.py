from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torchop import _hooks
from torchop._compat import compilers, dispatch, fake_tensors, registries
from torchop._core.call import tensors_in
from torchop._core.checking import checked
from torchop._core.contract import (
    ResultCheck,
    alias_error,
    check_returned_arguments,
    result_check,
    shares_memory,
)
from torchop._core.declaration import Guard
from torchop._core.definition import NOTHING, CompiledRule, Definition
from torchop._core.lock import registration_lock
from torchop._core.registered import Key
from torchop._errors import AliasError, ArgumentError, naming, warn
from torchop._rules.fake.rule import FakeRule
from torchop._rules.kernels import backend_select
from torchop._rules.kernels.devices import DeviceTypes, device_key, device_list
from torchop._rules.kernels.missing import EVERY_DEVICE, RaisingKernels, raise_missing_kernel
from torchop._rules.layout import Arrange, LayoutRule, arranged
from torchop._rules.mutation import kernels as mutation
from torchop._rules.residuals.handover import not_recording
from torchop._schema.callables import check_no_generator
from torchop._schema.defaults import fitted
from torchop._schema.forms import Form

log = logging.getLogger(registries.LOGGER_NAME)


class Kernels(NamedTuple):
    """The kernels in an operator's call plan, which is compiled from the operator's rules.

    The mappings contain kernels by device type. The key None stands for all device types that are
    not in the mapping.
    """

    functions: Mapping[str | None, Callable[..., Any]]
    references: Mapping[str | None, Callable[..., Any]]
    check_result: ResultCheck
    outputs_are_fresh: bool
    accept_alias: Callable[[AliasError], None] | None
    returns_arguments: bool
    required_tensors: tuple[int, ...]
    required_lists: tuple[int | str, ...]
    arrange: Arrange | None = None

    def finish(
        self, definition: Definition, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> Any:
        result = self.check_result(result, definition)
        if self.returns_arguments:
            check_returned_arguments(definition, definition.schema, args, kwargs, result)
        elif self.outputs_are_fresh and shares_memory(args, kwargs, result):
            error = alias_error(str(definition), definition.schema, args, kwargs, result)
            if self.accept_alias is None:
                raise error
            self.accept_alias(error)
        return result


class ProviderTable(Protocol):
    """The interface of an operator's table of providers, i.e. named alternatives to its kernels.

    `_rules.providers.table.ProviderTable` implements it. This module cannot import that class,
    because the package `_rules.providers` imports this module.
    """

    names: list[str]
    functions: Callable[..., Mapping[str | None, Callable[..., Any]]]
    choice: Callable[..., Any]
    cache_parts: Callable[..., Iterator[object]]


class KernelRule(CompiledRule[Kernels]):
    """An operator's kernels by device type, and the dispatcher kernels that run them.

    On every call, a dispatcher kernel looks up the kernel to run in the operator's call plan, which
    is compiled from all rules. So if a kernel is registered, replaced or disabled, only the plan is
    compiled again, and a new dispatcher kernel is needed only for the first kernel of a device
    type.
    """

    # The reference kernels by device type, or None if the operator was defined for every device and
    # no other kernel has been registered so far.
    registered: Mapping[str | None, Callable[..., Any]] | None = None
    # The open `set_enabled` blocks, in the order in which they were entered. Each block maps to a
    # device type, and to whether the block enables or disables the kernel of this device type.
    switches: Mapping[object, tuple[str, bool]] = NOTHING
    providers: ProviderTable | None = None
    # Whether the user was already warned that a result shares memory with an input. Only lenient
    # operators (from `torchop.compat`) warn, while other operators raise an error.
    has_aliases = False
    # The dispatcher kernels that raise an error on all devices without a kernel, or None if the
    # operator was defined for every device.
    raising_kernels: RaisingKernels | None = None

    def install(self) -> None:
        if self._is_for_every_device:
            self._install(EVERY_DEVICE, None)
        else:
            self.raising_kernels = RaisingKernels(self.definition, self._run_on_every_device)
            definition = self.definition
            assert definition.function is not None
            self.register(definition.declaration.devices, definition.function)

    @property
    def functions(self) -> Mapping[str | None, Callable[..., Any]]:
        if self.registered is not None:
            return self.registered
        definition = self.definition
        function = definition.function if self._is_for_every_device else None
        if function is None:
            return NOTHING
        launch = definition.declaration.launch
        return {None: launch or definition.convention.kernel(function)}

    @property
    def _is_for_every_device(self) -> bool:
        return self.definition.declaration.devices == (None,)

    def compile(self) -> Kernels:
        definition = self.definition
        is_helper = definition.declaration.is_helper

        def each_checked(
            functions: Mapping[str | None, Callable[..., Any]],
        ) -> Mapping[str | None, Callable[..., Any]]:
            return {
                device: checked(definition, definition.schema, function, is_helper=is_helper)
                for device, function in functions.items()
            }

        functions = each_checked(self._chosen())
        returns_arguments = definition.schema.form is not Form.PLAIN
        return Kernels(
            functions=functions,
            references=functions if self.providers is None else each_checked(self._active()),
            check_result=result_check(
                definition.schema.returns,
                returns_arguments=returns_arguments,
            ),
            # Do not check operators of other packages, because they may return views that their
            # schema does not declare.
            outputs_are_fresh=definition.is_ours
            and not definition.schema.is_view
            and not self.has_aliases,
            accept_alias=self._accept_alias if definition.declaration.is_lenient else None,
            returns_arguments=returns_arguments,
            required_tensors=definition.schema.required_tensors if definition.is_ours else (),
            required_lists=definition.schema.required_lists,
            arrange=definition.rule(LayoutRule).compile(),
        )

    def _accept_alias(self, error: AliasError) -> None:
        warn(
            f"{error} This operator returns such results anyway, like the helpers of engines, "
            "but torch.compile may produce wrong values from them.",
            UserWarning,
        )
        self.update(has_aliases=True)

    def kernels(self) -> Collection[str | None]:
        return self.functions

    def repr_text(self) -> str | None:
        devices = [device or "every device" for device in self.functions]
        parts = ["kernels for " + ", ".join(devices)] if devices else []
        parts += ["providers " + ", ".join(self.provider_names)] if self.provider_names else []
        return "; ".join(parts) or None

    def register(self, device_types: DeviceTypes, function: Callable[..., Any]) -> None:
        devices = device_list(device_types)
        definition = self.definition
        function = definition.convention.kernel(definition.authored(function))
        function = fitted_kernel(definition, function)
        rules = [f"kernel at {self._key(device)}" for device in devices]
        with definition.registered.registering(*rules), registration_lock:
            names, install = self.places(devices)
            functions = {**self.functions, **dict.fromkeys(names, function)}
            self.update(install, registered=functions)

    def places(self, devices: Sequence[str | None]) -> tuple[list[str | None], Callable[[], None]]:
        """Return each device's key in `registered`, and a function to install the kernels.

        The function skips devices for which a dispatcher kernel is already installed.
        """
        keys: dict[str, str | None] = {}
        for device in devices:
            keys.setdefault(self._key(device), device)

        def install() -> None:
            if any(device is not None for device in devices):
                backend_select.install_for_factory(self.definition)
            for key, device in keys.items():
                self._install(key, device)

        # "cpu" and its dispatch key "CPU" share one kernel, which is stored under the name that was
        # registered first.
        installed = self.installed()
        return [installed.get(key, device) for key, device in keys.items()], install

    def installed(self) -> dict[Key, str | None]:
        """Map each dispatch key with a kernel of this rule to the device type of the kernel."""
        registered = self.definition.registered
        places = {key: place_of(registered.kernel(key)) for key in registered}
        return {key: place[1] for key, place in places.items() if place is not None}

    @property
    def provider_names(self) -> list[str]:
        return [] if self.providers is None else self.providers.names

    def choice(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.providers is None:
            return None
        definition = self.definition
        device = backend_select.requested_device(definition.schema, args, kwargs)
        tensors = tensors_in((*args, *kwargs.values()))
        device = device or next((tensor.device.type for tensor in tensors), "cpu")
        if device in self.disabled:
            return None
        return self.providers.choice(definition.name, device, self._active(), self._prepared)

    def _chosen(self) -> Mapping[str | None, Callable[..., Any]]:
        """Return the function to run on each device type.

        If the operator has providers (named alternatives to its kernel), the function may choose
        one.
        """
        active = self._active()
        if self.providers is None:
            return active
        return self.providers.functions(self.definition.name, active, self.disabled, self._prepared)

    def _prepared(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return _guarded(function, self.definition.declaration.guard)

    @contextlib.contextmanager
    def set_enabled(self, device_type: str, enabled: bool) -> Iterator[None]:
        action, state = ("enable", "enabled") if enabled else ("disable", "disabled")
        problems = []
        if device_type not in self.functions:
            problems.append("no kernel was registered for this device type")
        if enabled is not (device_type in self.disabled):
            problems.append(f"it was already {state}")
        for problem in problems:
            message = "%s: attempted to %s the kernel for %r, but %s."
            log.warning(message, self.definition, action, device_type, problem)
        block = object()  # identifies this block, because blocks may be exited in any order
        with registration_lock:
            self.update(switches={**self.switches, block: (device_type, enabled)})
        try:
            yield
        finally:
            with registration_lock:
                others = {b: state for b, state in self.switches.items() if b is not block}
                self.update(switches=others)

    @property
    def disabled(self) -> frozenset[str]:
        """The device types whose most recently entered `set_enabled` block disables the kernel."""
        return frozenset(device for device, on in dict(self.switches.values()).items() if not on)

    def _active(self) -> Mapping[str | None, Callable[..., Any]]:
        """Return the reference kernel of each device type.

        For a disabled device type, this is the function passed to `custom_op` instead.
        """
        functions, guard = self.functions, self.definition.declaration.guard
        if guard is None and not self.switches:
            return functions
        declared = self.definition.declaration
        disabled, original = self.disabled, declared.launch or declared.function
        if original is not None:
            functions = {**functions, **dict.fromkeys(functions.keys() & disabled, original)}
        return {device: _guarded(function, guard) for device, function in functions.items()}

    def _key(self, device: str | None) -> str:
        if device is None:
            return EVERY_DEVICE
        # For operators of other packages, `device` may also be a dispatch key.
        if self.definition.is_ours:
            with naming(self.definition):
                return device_key(device)
        return dispatch.kernel_key(device)

    def _install(self, key: str, device: str | None) -> None:
        if place_of(self.definition.registered.kernel(key)) is None:
            self.definition.implement(key, self._dispatcher_kernel(device))
            if key == EVERY_DEVICE and self.raising_kernels is not None:
                self.raising_kernels.remove_all()
            if key == "Meta":
                self.definition.rule(FakeRule).leave_to_kernel()

    def _dispatcher_kernel(self, device: str | None) -> Callable[..., Any]:
        if device is None:
            return self._run_on_every_device

        @compilers.never_traced
        def kernel(*args: Any, **kwargs: Any) -> Any:
            return self._run(device, args, kwargs)

        vars(kernel)[_PLACE] = self, device
        return kernel

    @compilers.never_traced
    def _run_on_every_device(self, /, *args: Any, **kwargs: Any) -> Any:
        if fake_tensors.is_calling_kernels():
            self.definition.rule(FakeRule).reject_data_access()
        return self._run(None, args, kwargs)

    def run_reference(self, key: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the reference kernel at a dispatch key, even if a provider has another kernel."""
        place = place_of(self.definition.registered.kernel(key))
        return self._run(place and place[1], args, kwargs, is_reference=True)

    @compilers.never_traced
    def _run(
        self,
        device: str | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        is_reference: bool = False,
    ) -> Any:
        definition = self.definition
        kernels = definition.plan[KernelRule]
        if _hooks.count_call is not None:
            _hooks.count_call()
        functions = kernels.references if is_reference else kernels.functions
        function = functions.get(device)
        if function is None and is_reference:  # all kernels for this device are from providers
            function = functions.get(None)
        if function is None:
            if self.raising_kernels is not None:
                keyset = self.raising_kernels.expose_fallback_of_call(args, kwargs)
                if keyset is not None:
                    return dispatch.redispatch(definition.overload, keyset, args, kwargs)
            raise_missing_kernel(definition, self.functions, args, kwargs)
        for position in kernels.required_tensors:
            if args[position] is None:
                raise _missing_tensor(definition, position)
        if definition.schema.has_defaults:  # pass default values, as calls that run in C++ do
            args, kwargs = definition.schema.fill_defaults(args, kwargs)
        if kernels.required_lists:
            args, kwargs = _with_empty_lists(kernels.required_lists, args, kwargs)
        # The layout rule's kernel does not run in inference mode, so arguments may not have the
        # declared layouts yet. Copy them here if necessary.
        args, kwargs = arranged(kernels.arrange, args, kwargs)
        if definition.schema.is_mutable:
            mutation.check_arguments(definition, args, kwargs)
        function = not_recording(definition, function)
        # Pass copies of list arguments, because the kernel may modify them, and `finish` needs the
        # original lists.
        passed = _with_lists_copied(args) if definition.schema.has_lists else args
        if dispatch.is_handled_by_mode():
            with dispatch.with_transforms():
                result = function(*passed, **kwargs)
        else:
            result = function(*passed, **kwargs)
        return kernels.finish(definition, args, kwargs, result)


def install(definition: Definition) -> Callable[[], None]:
    definition.rule(KernelRule).install()
    return functools.partial(backend_select.install_for_optional_lists, definition)


_PLACE = "_torchop_place"


def place_of(kernel: Any) -> tuple[KernelRule, str | None] | None:
    """Return the rule and the device type of a kernel that `_dispatcher_kernel` returned.

    Return None for other kernels.
    """
    rule = getattr(kernel, "__self__", None)
    place: tuple[KernelRule, str | None] | None = getattr(kernel, _PLACE, None)
    return (rule, None) if isinstance(rule, KernelRule) else place


def _guarded(function: Callable[..., Any], guard: Guard | None) -> Callable[..., Any]:
    if guard is None:
        return function

    def guarded(*args: Any, **kwargs: Any) -> Any:
        guard(args, kwargs)
        return function(*args, **kwargs)

    guarded.__wrapped__ = function  # type: ignore[attr-defined]
    return guarded


def fitted_kernel(definition: Definition, function: Callable[..., Any]) -> Callable[..., Any]:
    if function is definition.function:
        return function  # it was already checked when the operator was defined
    check_no_generator(f"{definition}: a kernel", function, definition.schema)
    return fitted(f"{definition}: a kernel", function, definition.schema)


def _with_lists_copied(args: tuple[Any, ...]) -> Iterator[Any]:
    return (list(value) if isinstance(value, list) else value for value in args)


def _with_empty_lists(
    places: tuple[int | str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Replace None by an empty list.

    Workaround: packages of AOTInductor pass None for an empty list of ints or tensors
    (torch/csrc/inductor/aoti_torch/oss_proxy_executor.cpp).
    """
    for place in places:
        if isinstance(place, str):
            if kwargs.get(place, ()) is None:
                kwargs = {**kwargs, place: []}
        elif args[place] is None:
            args = (*args[:place], [], *args[place + 1 :])
    return args, kwargs


def _missing_tensor(definition: Definition, position: int) -> ArgumentError:
    # The dispatcher accepts None for a required tensor, so without this error, the kernel would
    # receive an undefined tensor, which is None in Python.
    name = definition.schema.positional[position].name
    return ArgumentError(
        f"{definition}: argument {name!r} is None, but the schema says Tensor: "
        f"{definition.schema}. Pass a tensor, or annotate it as Optional[Tensor]."
    )

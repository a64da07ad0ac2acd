"""Kernels: the implementations of an operator, by device type or for all of them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torchop._compat import compilers, dispatch, fake_tensors, registries
from torchop._core.checking import checked
from torchop._core.contract import (
    ResultCheck,
    alias_error,
    check_returned_arguments,
    result_check,
    shares_memory,
)
from torchop._core.declaration import Declaration, Guard
from torchop._core.definition import NOTHING, CompiledRule, Definition
from torchop._core.lock import registration_lock
from torchop._core.snapshot import COMPANION, KERNEL
from torchop._errors import AliasError, ArgumentError, warn
from torchop._rules.fake.rule import FakeRule
from torchop._rules.kernels import backend_select
from torchop._rules.kernels.devices import DeviceTypes, device_key, device_list
from torchop._rules.kernels.refusal import EVERY_DEVICE, Refusals, refuse
from torchop._rules.mutation import kernels as mutation
from torchop._rules.residuals.handover import not_recording
from torchop._schema.callables import check_no_generator
from torchop._schema.defaults import fitted
from torchop._schema.forms import Form

log = logging.getLogger(registries.LOGGER_NAME)

# What most operators have installed, which they share.
_ON_EVERY_DEVICE: Mapping[str, str | None] = {EVERY_DEVICE: None}


class Kernels(NamedTuple):
    """The compiled rule: the kernel of each device type; None stands for all other devices."""

    functions: Mapping[str | None, Callable[..., Any]]
    # The same without the kernels of providers.
    references: Mapping[str | None, Callable[..., Any]]
    check_result: ResultCheck
    outputs_are_fresh: bool
    accept_alias: Callable[[AliasError], None] | None
    returns_arguments: bool
    required_tensors: tuple[int, ...]

    def finish(
        self, definition: Definition, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> Any:
        """Checks the result of a kernel, and brings it into the form of the schema."""
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
    """The kernels of providers, which stand beside those of an operator's own; immutable.

    Attributes:
        names: the providers.
        functions: what a plan runs for each device type, given the operator's name, its own
            kernels, the device types for which nothing else is to run, and what a plan does to
            every kernel.
        choice: what chooses for one device type, given the same.
        cache_parts: what a compiler that traces kernels bakes into a graph, given the name.
    """

    names: list[str]
    functions: Callable[..., Mapping[str | None, Callable[..., Any]]]
    choice: Callable[..., Any]
    cache_parts: Callable[..., Iterator[object]]


class KernelRule(CompiledRule[Kernels]):
    """Which function computes the operator, on which device."""

    # By device type. None until one is registered for an operator whose definition came with a
    # kernel for every device.
    registered: Mapping[str | None, Callable[..., Any]] | None = None
    # By `set_enabled` block that is open, in the order in which they were opened: its device type,
    # and whether it enables.
    switches: Mapping[object, tuple[str, bool]] = NOTHING
    # What chooses between those and the kernels of providers; None without providers.
    providers: ProviderTable | None = None
    # Whether a result of a lenient operator shared memory, of which its user was warned.
    has_aliases = False
    # Where calls end that no kernel serves, for an operator that had none for every device.
    refusals: Refusals | None = None
    # By dispatch key, the device type of its kernel in the other mappings: "cpu" and "CPU" name the
    # same kernel.
    installed: Mapping[str, str | None] = NOTHING

    @classmethod
    def is_installed_on(cls, declaration: Declaration) -> bool:
        return True

    def install(self) -> None:
        if self._is_for_every_device:
            self._install(EVERY_DEVICE, None)
        else:
            # A call without a kernel ends here, and the error names the devices that have one.
            self.refusals = Refusals(self.definition, self._run_on_every_device)
            definition = self.definition
            assert definition.function is not None
            self.register(definition.declaration.devices, definition.function)

    @property
    def functions(self) -> Mapping[str | None, Callable[..., Any]]:
        """The kernels by device type."""
        if self.registered is not None:
            return self.registered
        definition = self.definition
        function = definition.function if self._is_for_every_device else None
        return NOTHING if function is None else {None: definition.convention.kernel(function)}

    @property
    def _is_for_every_device(self) -> bool:
        return self.definition.declaration.devices == (None,)

    def install_on_defined(self) -> None:
        backend_select.install_for_optional_lists(self.definition)

    def compile(self) -> Kernels:
        definition = self.definition
        words = COMPANION if definition.declaration.is_companion else KERNEL

        def each_checked(
            functions: Mapping[str | None, Callable[..., Any]],
        ) -> Mapping[str | None, Callable[..., Any]]:
            return {
                device: checked(definition, definition.schema, function, words=words)
                for device, function in functions.items()
            }

        functions = each_checked(self._chosen())
        return Kernels(
            functions=functions,
            references=functions if self.providers is None else each_checked(self._active()),
            check_result=result_check(definition.schema.returns),
            # An operator of another library may return views that its schema does not declare.
            outputs_are_fresh=definition.is_ours
            and not definition.schema.is_view
            and not self.has_aliases,
            accept_alias=self._accept_alias if definition.declaration.is_lenient else None,
            returns_arguments=definition.schema.form is not Form.PLAIN,
            required_tensors=definition.schema.required_tensors if definition.is_ours else (),
        )

    def _accept_alias(self, error: AliasError) -> None:
        warn(
            f"{error} This operator passes such results on, as the helpers of engines do, but what "
            "torch.compile makes of them can be wrong.",
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
        """Makes `function` the kernel of these device types."""
        devices = device_list(device_types)
        definition = self.definition
        function = definition.convention.kernel(definition.authored(function))
        function = fitted_kernel(definition, function)
        with registration_lock:
            names, install = self.places(devices)
            functions = {**self.functions, **dict.fromkeys(names, function)}
            self.update(install, registered=functions)

    def places(self, devices: Sequence[str | None]) -> tuple[list[str | None], Callable[[], None]]:
        """The names under which kernels for these devices are kept, and what installs them."""
        keys: dict[str, str | None] = {}
        for device in devices:
            keys.setdefault(self._key(device), device)

        def install() -> None:
            if any(device is not None for device in devices):
                backend_select.install_for_factory(self.definition)
            for key, device in keys.items():
                self._install(key, device)

        # A device type and its dispatch key share a kernel, under the name that came first.
        return [self.installed.get(key, device) for key, device in keys.items()], install

    @property
    def provider_names(self) -> list[str]:
        """The providers that the operator has kernels of, beside its own."""
        return [] if self.providers is None else self.providers.names

    def choice(self, device: str) -> Any:
        """What chooses for calls on one device; None if there is nothing to choose from."""
        if self.providers is None or device in self.disabled:
            return None
        return self.providers.choice(self.definition.name, device, self._active(), self._prepared)

    def _chosen(self) -> Mapping[str | None, Callable[..., Any]]:
        """The function that runs for each device, or that chooses it."""
        active = self._active()
        if self.providers is None:
            return active
        return self.providers.functions(self.definition.name, active, self.disabled, self._prepared)

    def _prepared(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return _guarded(function, self.definition.declaration.guard)

    @contextlib.contextmanager
    def set_enabled(self, device_type: str, enabled: bool) -> Iterator[None]:
        """Switches one device's kernel on or off for as long as the context lasts."""
        action, state = ("enable", "enabled") if enabled else ("disable", "disabled")
        problems = []
        if device_type not in self.functions:
            problems.append("no kernel was registered for this device type")
        if enabled is not (device_type in self.disabled):
            problems.append(f"it was already {state}")
        for problem in problems:
            message = "%s: attempted to %s the kernel for %r, but %s."
            log.warning(message, self.definition, action, device_type, problem)
        block = object()  # blocks may be left in another order than they were entered
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
        """The device types whose kernel is off, which the last block for each decides."""
        return frozenset(device for device, on in dict(self.switches.values()).items() if not on)

    def _active(self) -> Mapping[str | None, Callable[..., Any]]:
        """The function that runs for each device."""
        functions, guard = self.functions, self.definition.declaration.guard
        if guard is None and not self.switches:
            return functions
        disabled, original = self.disabled, self.definition.function
        if original is not None:
            functions = {**functions, **dict.fromkeys(functions.keys() & disabled, original)}
        return {device: _guarded(function, guard) for device, function in functions.items()}

    def _key(self, device: str | None) -> str:
        if device is None:
            return EVERY_DEVICE
        # An operator of ours has kernels by device type, and a dispatch key may not name one.
        if self.definition.is_ours:
            return device_key(self.definition, device)
        return dispatch.kernel_key(device)

    def _install(self, key: str, device: str | None) -> None:
        if key not in self.installed:
            self.definition.implement(key, self._dispatcher_kernel(device))
            every = not self.installed and key == EVERY_DEVICE
            self.installed = _ON_EVERY_DEVICE if every else {**self.installed, key: device}
            if key == EVERY_DEVICE and self.refusals is not None:
                self.refusals.give_way()
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
            self.definition.rule(FakeRule).refuse_data()
        return self._run(None, args, kwargs)

    def run_reference(self, key: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the kernel of a dispatch key that is what the operator means, and no provider's."""
        return self._run(self.installed.get(key), args, kwargs, is_reference=True)

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
        functions = kernels.references if is_reference else kernels.functions
        function = functions.get(device)
        if function is None and is_reference:  # a device that only providers have a kernel for
            function = functions.get(None)
        if function is None:
            if self.refusals is not None:
                keyset = self.refusals.keys_of_fallback(args, kwargs)
                if keyset is not None:
                    return dispatch.redispatch(definition.overload, keyset, args, kwargs)
            refuse(definition, self.functions, args, kwargs)
        for position in kernels.required_tensors:
            if args[position] is None:
                raise _missing_tensor(definition, position)
        if definition.schema.has_defaults:  # a native call passes them, too
            args, kwargs = definition.schema.fill_defaults(args, kwargs)
        if definition.schema.is_mutable:
            mutation.check_arguments(definition, args, kwargs)
        function = not_recording(definition, function)
        # The kernel may change its lists; the checks that follow need those of the caller.
        passed = _with_lists_copied(args) if definition.schema.has_lists else args
        if dispatch.is_handled_by_mode():
            with dispatch.with_transforms():
                result = function(*passed, **kwargs)
        else:
            result = function(*passed, **kwargs)
        return kernels.finish(definition, args, kwargs, result)


_PLACE = "_torchop_place"


def place_of(kernel: Any) -> tuple[KernelRule, str | None] | None:
    """The rule that registered a kernel with the dispatcher, and the device type for which."""
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
    """A kernel that takes the operator's arguments; refuses one that cannot."""
    if function is definition.function:
        return function  # the definition compared it with the schema, or inferred it from that
    check_no_generator(f"{definition}: a kernel", function, definition.schema)
    return fitted(f"{definition}: a kernel", function, definition.schema)


def _with_lists_copied(args: tuple[Any, ...]) -> Iterator[Any]:
    return (list(value) if isinstance(value, list) else value for value in args)


def _missing_tensor(definition: Definition, position: int) -> ArgumentError:
    # The dispatcher accepts None for any tensor, as an undefined tensor.
    name = definition.schema.positional[position].name
    return ArgumentError(
        f"{definition}: argument {name!r} is None, but the schema says Tensor: "
        f"{definition.schema}. Pass a tensor, or annotate it as Optional[Tensor]."
    )

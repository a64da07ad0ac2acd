"""Create operators from generated specifications. Their functions report their arguments.

The kernels and formulas do not have fixed behaviour, but follow the script of the current call. So
an operator can be reused for all calls with the same schema.

Uses private names.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

import torchop
from tests._support.devices import AUTOGRAD, BACKEND, DEVICE, OTHER
from tests.integration.differential.describe import describe
from tests.integration.differential.scripts import (
    current,
    run_backward,
    run_kernel,
    run_setup_context,
)
from tests.integration.differential.spec import RETURNS, OperatorSpec, Override, Parameter
from torchop._native.reasons import Reason
from torchop._native.table.calls import entry_of
from torchop._rules.autograd.rule import AutogradRule
from torchop.extend import OpName


class Operator:
    """A generated operator, and the ways to call it.

    `function` is the kernel without decorators. `fills_defaults` is True if the library passes the
    schema's defaults to the kernel. `register` registers the kernel again at another dispatch key,
    and is None for operators of `custom_op`.
    """

    def __init__(
        self,
        spec: OperatorSpec,
        name: str,
        handle: Any,
        function: Any,
        *,
        library: Any = None,
        fills_defaults: bool = False,
        register: Callable[[str, bool], None] | None = None,
    ) -> None:
        self.spec = spec
        self.name = name
        self.handle = handle
        self.library = library
        self.function = function
        self.fills_defaults = fills_defaults
        self.register = register
        self.overriding: torch.library.Library | None = None

    @property
    def overload(self) -> Any:
        return self.packet.default

    @property
    def packet(self) -> Any:
        namespace, _, name = self.name.partition("::")
        return getattr(getattr(torch.ops, namespace), name)

    def counters(self) -> tuple[int, ...]:
        if self.spec.registration == "custom_op":
            entry = self.handle._definition.entry
        else:
            entry = entry_of(OpName.parse(self.name))
        return (0,) * len(Reason) if entry is None else entry.counters

    def restore_defaults(self) -> None:
        """Replace the default values with new objects, because calls may have mutated the old."""
        _set_defaults(self.spec, self.function, lambda parameter: parameter.default_value)

    @contextlib.contextmanager
    def changed(self) -> Iterator[None]:
        """Change the kernel's defaults or registration for the block. torchop is not notified."""
        self.restore_defaults()
        if self.spec.kernel == "replaced defaults":
            _set_defaults(self.spec, self.function, _other_default)
        if self.register is not None and self.spec.registration == "keys later":
            self.register(BACKEND, True)
        try:
            yield
        finally:
            if self.register is not None and self.spec.registration == "keys later":
                self.register(BACKEND, False)
            self.restore_defaults()

    def close(self) -> None:
        if self.overriding is not None:
            self.overriding._destroy()
        if self.library is not None:
            self.library._destroy()


def _function(spec: OperatorSpec, origin: str, *, annotated: bool, defaults: bool) -> Any:
    """Generate the source of a function with an operator's parameters, and return the function."""
    written, names = [], []
    for parameter in spec.parameters:
        text = parameter.name
        if annotated:
            text += f": {parameter.kind.annotation}"
        if defaults and parameter.has_default:
            text += f" = default_{parameter.name}"
        if parameter.keyword_only and "*" not in written:
            written.append("*")
        written.append(text)
        names.append(f"{parameter.name!r}: {parameter.name}")
    returns = RETURNS[spec.returns]
    source = f"def f({', '.join(written)}){f' -> {returns}' if annotated else ''}:\n"
    source += f"    return run(spec, origin, {{{', '.join(names)}}})\n"
    module: dict[str, Any] = {"run": run_kernel, "spec": spec, "origin": origin}
    module |= {f"default_{p.name}": _new(p.default_value) for p in spec.parameters if p.has_default}
    # `dont_inherit` keeps this file's __future__ import from turning every annotation into a
    # string.
    exec(compile(_HEADER + source, "<generated operator>", "exec", dont_inherit=True), module)
    return module["f"]


def _new(value: Any) -> Any:
    return list(value) if isinstance(value, list) else value


def _other_default(parameter: Parameter) -> Any:
    defaults = parameter.kind.defaults
    assert parameter.default is not None
    return defaults[(parameter.default + 1) % len(defaults)][1]


def _set_defaults(spec: OperatorSpec, function: Any, default: Callable[[Parameter], Any]) -> None:
    having = [p for p in spec.parameters if p.has_default]
    if function.__defaults__ is not None:
        function.__defaults__ = tuple(_new(default(p)) for p in having if not p.keyword_only)
    if function.__kwdefaults__ is not None:
        function.__kwdefaults__ = {p.name: _new(default(p)) for p in having if p.keyword_only}


def _dressed(spec: OperatorSpec, function: Any) -> Any:
    """Return the function to register: `function`, or a wrapper that shows the same signature."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], torch._C.DispatchKeySet):
            current().report("with keys")
            args = args[1:]
        current().report("passed", describe([args, kwargs], current().names))
        return function(*args, **kwargs)

    if spec.kernel == "signed":
        kernel.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
        kernel.__annotations__ = function.__annotations__
        return kernel
    if spec.kernel == "wrapped" or "key" in spec.registration:
        return functools.wraps(function)(kernel)
    return function


def _supports(*args: Any, **kwargs: Any) -> bool:
    odd = 0
    for value in (*args, *kwargs.values()):
        for item in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(item, torch.Tensor):
                odd += item.ndim + (item.dtype is torch.float32) + sum(item.shape)
            elif isinstance(item, (int, float, str, type(None))):
                odd += bool(item)
    return odd % 2 == 1


_HEADER = """\
import torch
from torch import Tensor
from typing import List, Optional, Union
from tests._support.opaque_types import Reference
"""
_numbers = itertools.count()


def make(spec: OperatorSpec, library: Any, stock: bool = False) -> Operator:
    maker: Any = torch.library if stock else torchop
    name = f"differential::op{next(_numbers)}"
    if spec.registration != "custom_op":
        return _implemented(spec, name, maker)
    # Pass the schema to torch.library, because it cannot infer all types and defaults that schemas
    # support.
    inferred = spec.style == "inferred" and not stock
    # torch.library does not pass the schema's defaults to a kernel, so the function needs its own
    # defaults.
    defaults = stock or spec.style != "kernel without defaults"
    function = _function(spec, "kernel", annotated=inferred, defaults=defaults)
    options = {} if inferred else {"schema": spec.schema}
    if not stock:
        options["lib"] = library
    if spec.tags:
        options["tags"] = spec.tags
    if spec.formula == "derived" and not stock:
        options["effects"] = "none"  # an operator that takes an object has an effect by default
    handle = maker.custom_op(
        name,
        _dressed(spec, function),
        mutates_args=spec.mutates_args,
        device_types=spec.devices,
        **options,
    )
    if spec.fake and spec.form != "inplace":  # in-place operators reject a fake kernel
        handle.register_fake(_function(spec, "fake", annotated=False, defaults=True))
    if spec.formula == "derived":
        handle.derive_autograd()
    else:
        _differentiate(spec, handle.register_autograd)
    if spec.autocast:
        handle.register_autocast(DEVICE.type, torch.bfloat16)
    if spec.provider != "none":
        handle.register_kernel(
            spec.devices,
            _function(spec, "provider", annotated=False, defaults=True),
            provider="other",
            supports=_supports if spec.provider == "supports" else None,
        )
        handle.set_priority(["other", "reference"])
    operator = Operator(spec, name, handle, function, fills_defaults=not stock)
    if spec.called_before and not stock:
        _prepare(handle)
    # The new defaults must not change the results.
    if spec.kernel == "replaced defaults" and not stock:
        _set_defaults(spec, function, _other_default)
    if spec.override is not None:
        _override(operator, spec.override)
    return operator


def _implemented(spec: OperatorSpec, name: str, maker: Any) -> Operator:
    library = maker.Library("differential", "FRAGMENT")
    local = name.partition("::")[2]
    library.define(local + spec.schema)
    function = _function(spec, "kernel", annotated=False, defaults=True)
    kernel = _dressed(spec, function)

    def register(key: str, with_keyset: bool) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch warns if this replaces another kernel
            library.impl(local, kernel, key, with_keyset=with_keyset, allow_override=True)

    by_definition = spec.registration.startswith("register_kernel")
    if by_definition:
        devices = "default" if spec.registration.endswith("for all") else DEVICE.type
        maker.register_kernel(name, devices, kernel, lib=library)
    else:
        register(BACKEND, spec.registration == "impl with keys")
    if spec.registration == "two keys":
        register(AUTOGRAD, True)
    if spec.registration == "impl beside register_kernel":
        maker.register_kernel(name, OTHER, kernel, lib=library)
    _differentiate(spec, functools.partial(maker.register_autograd, name, lib=library))
    operator = Operator(
        spec,
        name,
        None,
        function,
        library=library,
        fills_defaults=by_definition and maker is torchop,
        register=register,
    )
    operator.handle = operator.overload
    return operator


def _differentiate(spec: OperatorSpec, register: Callable[..., Any]) -> None:
    if spec.formula != "none":
        setup = _setup_context(spec) if spec.formula == "setup_context" else None
        register(functools.partial(_backward, spec), setup_context=setup)


def _prepare(handle: Any) -> None:
    """Prepare everything that torchop otherwise prepares in the first calls of an operator."""
    definition = handle._definition
    assert definition.rule(AutogradRule).function is not None
    assert definition.plan is not None
    assert definition.entry is not None


def _backward(spec: OperatorSpec, ctx: Any, *grads: Any) -> Any:
    return run_backward(spec, ctx, grads)


def _setup_context(spec: OperatorSpec) -> Callable[..., None]:
    if any(p.keyword_only for p in spec.parameters):

        def with_keywords(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
            run_setup_context(spec, ctx, inputs, keyword_only_inputs, output)

        return with_keywords

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        run_setup_context(spec, ctx, inputs, {}, output)

    return setup_context


def _override(operator: Operator, override: Override) -> None:
    operator.overriding = torch.library.Library("differential", "IMPL")
    if override.falls_through:
        function = torch.library.fallthrough_kernel
    elif override.key in ("Autograd", AUTOGRAD, "ADInplaceOrView"):
        function = _passing_on(operator, override.key)
    else:
        function = _function(operator.spec, override.key, annotated=False, defaults=True)
    operator.overriding.impl(operator.overload, function, override.key, allow_override=True)


def _passing_on(operator: Operator, key: str) -> Callable[..., Any]:
    """Return a kernel for an autograd key that reports its arguments and calls the next kernel."""
    below: Any = {
        "Autograd": torch._C._AutoDispatchBelowAutograd,
        AUTOGRAD: torch._C._AutoDispatchBelowAutograd,
        "ADInplaceOrView": lambda: torch._C._ExcludeDispatchKeyGuard(
            torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
            | torch._C._dispatch_tls_local_exclude_set()
        ),
    }[key]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        run_kernel(operator.spec, key, {"args": args, "kwargs": kwargs})
        with below():
            return operator.overload(*args, **kwargs)

    return kernel


class Workshop:
    """Creates operators, and caches the operators that calls do not change."""

    def __init__(self, limit: int = 2000) -> None:
        self._limit = limit
        self._library = torchop.Library("differential", "FRAGMENT")
        self._kept: dict[tuple[OperatorSpec, bool], Operator] = {}

    def operator(self, spec: OperatorSpec, stock: bool = False) -> Operator:
        if spec.override is not None or not spec.called_before or spec.registration != "custom_op":
            return make(spec, self._library, stock)
        if len(self._kept) >= self._limit:
            self.close()
        # The cache key is the text of the specification, because specifications that differ only in
        # the defaults 1, True and 1.0 are equal.
        key = (repr(spec), stock)
        if key not in self._kept:
            self._kept[key] = make(spec, self._library, stock)
        return self._kept[key]

    def release(self, operator: Operator) -> None:
        operator.close()

    def close(self) -> None:
        for (_, stock), operator in self._kept.items():
            if stock:
                operator.handle._lib._destroy()
        self._library._destroy()
        self._kept.clear()
        self._library = torchop.Library("differential", "FRAGMENT")

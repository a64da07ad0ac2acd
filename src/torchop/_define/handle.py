from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

import torch.library

from torchop._compat import compilers, dynamo_variables, registries, torch_ops
from torchop._compat.classes import FunctionSchema, OpOverload, Tag
from torchop._core.argument_errors import argument_error, tensor_for_number
from torchop._core.definition import CompiledRule, Definition
from torchop._core.user_rule import get_rule, registered_rules, rule_names
from torchop._define.forms.derive import derive_form
from torchop._define.registrations import Registrations
from torchop._errors import ArgumentError, OperatorNotFoundError, short_repr
from torchop._native import switch
from torchop._rules.autocast import AutocastRule
from torchop._rules.autograd.errors import note_if_autograd_was_used
from torchop._rules.autograd.rule import AutogradRule
from torchop._rules.fake.rule import FakeRule
from torchop._rules.kernels.rule import KernelRule
from torchop._rules.torch_dispatch import TorchDispatchRule
from torchop._rules.vmap.rule import VmapRule, missing_rule_error
from torchop._schema.callables import Lambda, Registered
from torchop._schema.forms import Form
from torchop._schema.signatures import annotations_of
from torchop._schema.structure import described

P = ParamSpec("P")
R = TypeVar("R")


class _FunctionSignature:
    def __get__(self, handle: Any, owner: type) -> inspect.Signature:
        if handle is not None:
            if compilers.torchscript_is_inspecting():
                # TorchScript would compare a signature that we return with the parameters of
                # `__call__`, which are just `*args` and `**kwargs`.
                raise ValueError("TorchScript must not inspect the signature of a handle.")
            return inspect.signature(handle.__wrapped__)
        signature = inspect.signature(CustomOp.__init__)
        return signature.replace(parameters=list(signature.parameters.values())[1:])


def _of_rule(kind: type[CompiledRule[Any]], read: Callable[[Any], Any]) -> property:
    return property(lambda self: read(self._definition.rule(kind)))


class CustomOp(Registrations, Generic[P, R]):
    """The handle of an operator: call it like the function, and register rules with its methods.

    `torchop.custom_op` and the other functions that define operators return a handle. `CustomOp`
    subclasses `torch._library.custom_ops.CustomOpDef`, so Dynamo, Inductor's autotuning and
    `torch.library.register_*` accept handles as well.

    The `register_*` methods work like the functions of the same name in `torch.library`, and can be
    used as decorators too.

    Attributes:
        overload: the `torch._ops.OpOverload` of the operator.
        schema: the schema, a `torch.FunctionSchema`.
        name: the qualified name, `"ns::name"`.
        tags: the `torch.Tag` members of the operator, including `pt2_compliant_tag`.
        inplace: the in-place form, a `CustomOp`. None until `derive_inplace` has defined it.
        out: the out= form, a `CustomOp`. None until `derive_out` has defined it.
        source: the source code of the generated function that flattens structured arguments, such
            as dataclasses; None if there are no structured arguments.

    Example:
        >>> import torch, torchop
        >>> @torchop.custom_op("docs::halve", mutates_args=())
        ... def halve(x: torch.Tensor) -> torch.Tensor:
        ...     return x / 2
        >>> halve
        <torchop.CustomOp docs::halve(Tensor x) -> Tensor; kernels for every device>
        >>> halve(torch.ones(2))
        tensor([0.5000, 0.5000])
    """

    # In these slots, the C++ extension (csrc/handle.cpp) stores a vectorcall function and an
    # `Entry`, the object that runs calls without the dispatcher. Never read `_native_call` from
    # Python, because this slot holds a raw pointer instead of a Python object.
    __slots__ = ("_native_call", "_native_entry")

    inplace: CustomOp[..., Any] | None = None
    out: CustomOp[..., Any] | None = None

    def __init__(self, definition: Definition) -> None:
        # Skip CustomOpDef.__init__, which would define the operator a second time.
        function = definition.authors_function
        self._definition = definition
        # functools.wraps would fail for partials and callable objects, which have no `__name__`.
        self._init_fn = self.__wrapped__ = function
        self.__name__: str = getattr(function, "__name__", definition.name.name)
        self.__qualname__: str = getattr(function, "__qualname__", self.__name__)
        assert definition.declaration.site is not None
        self.__module__: str = definition.declaration.site.module
        self.__doc__ = getattr(function, "__doc__", None)
        self.__annotations__ = annotations_of(function)

    __signature__: Any = _FunctionSignature()

    if TYPE_CHECKING:
        # Declare `__call__` as an attribute, because for a method with a ParamSpec, Jedi shows the
        # parameters as (*args, **kwargs).
        __call__: Callable[P, R]
    else:

        def __call__(self, /, *args, **kwargs):
            # Skip this check while tracing, because Dynamo cannot trace the lock of a cached
            # property. `HandleVariable` checks the arguments of traced calls instead
            # (_compat/dynamo_variables.py).
            if not torch.compiler.is_compiling():
                refused = self._refusal_of_tensors(args, kwargs)
                if refused is not None:
                    raise refused
            try:
                return self._opoverload(*args, **kwargs)
            except RuntimeError as error:
                explained = self._explain_refusal(error, kwargs)
                if explained is None:
                    raise
                raise explained from None

    def _refusal_of_tensors(self, args: Any, kwargs: Any) -> ArgumentError | None:
        definition = self._definition
        schema = definition.schema
        return tensor_for_number(definition.name, schema, args, kwargs) if schema.numbers else None

    def _explain_refusal(
        self, error: RuntimeError, keywords: Iterable[str] | None = None
    ) -> RuntimeError | None:
        # `explain_refusal` in csrc/entry.cpp calls this method too.
        note_if_autograd_was_used(self._definition, error)
        return argument_error(self._definition.name, error, keywords or ()) or missing_rule_error(
            self.name, error
        )

    def __repr__(self) -> str:
        definition = self._definition
        if definition.deregistration_reason is not None:
            return f"<torchop.CustomOp {definition}, deregistered>"
        return f"<torchop.CustomOp {'; '.join([self._written_signature(), *self._registered()])}>"

    def _written_signature(self) -> str:
        """Return the schema, or the author's signature if the schema has flattened arguments."""
        definition = self._definition
        if definition.structure is None:
            return definition.schema.text
        return f"{definition}{inspect.signature(self)}"

    def _registered(self) -> list[str]:
        parts = [rule.repr_text() for rule in self._definition.rules.values()]
        return list(filter(None, (*parts, *registered_rules(self._definition))))

    def _repr_html_(self) -> str:
        import html  # imported here to keep `import torchop` fast

        if self._definition.deregistration_reason is not None:
            return f"<p><code>{html.escape(repr(self))}</code></p>"
        rows = [html.escape(part) for part in (self.__doc__ or "", *self._registered()) if part]
        items = "".join(f"<li>{row}</li>" for row in rows)
        return f"<p><code>{html.escape(self._written_signature())}</code></p><ul>{items}</ul>"

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        raise TypeError(
            f"{self.name} is an operator, not a class to inherit from. To share rules between "
            "operators in the class form, put them into a plain class that both inherit from."
        )

    # Handles are copied and pickled by reference, like functions: a pickle contains only the names
    # of the operator and of the module that defines it.

    def __copy__(self) -> CustomOp[P, R]:
        return self

    def __deepcopy__(self, memo: Mapping[int, Any]) -> CustomOp[P, R]:
        return self

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str]]:
        return _unpickle, (self.name, self.__module__)

    def __prepare_scriptable__(self) -> None:  # called by torch.jit.script
        name = self._definition.name
        raise TypeError(
            f"{name}: TorchScript cannot compile the handle of an operator. In the scripted "
            f"function, call torch.ops.{name.namespace}.{name.name}, with all arguments."
        )

    def _live(self) -> Definition:
        self._definition.check_defined()
        return self._definition

    @property
    def overload(self) -> OpOverload:
        # Do not cache the overload here: Dynamo would guard on the cache, and recompile once the
        # first call has filled it. There is no need to, because torch.ops caches the overload.
        definition = self._live()
        try:
            return torch_ops.lookup_overload(*definition.name)
        finally:
            # Check again, in case another thread has redefined the operator during the lookup.
            definition.check_defined()

    _opoverload: Any = overload

    @property
    def schema(self) -> FunctionSchema:
        return self.overload._schema

    @property
    def name(self) -> str:
        return str(self._definition.name)

    @property
    def tags(self) -> tuple[Tag, ...]:
        return tuple(self.overload.tags)

    source: str | None = None

    @compilers.eager_only
    def register(
        self, rule: str, value: Registered | Lambda | None = None, /, **options: Any
    ) -> Registered:
        """Register a value, usually a function, for a `torchop.Rule`.

        `op.register_cost(fn)` is short for `op.register("cost", fn)`.

        Args:
            rule: the name of a rule of torchop or of another package.
            value: the value to register. Omit it to use `register` as a decorator.
            options: see `torchop.Rule.register`.

        Returns:
            `value`.

        Raises:
            ValueError: no rule has this name.
            TypeError, ValueError: the rule rejects the value.
        """
        return get_rule(rule).register(self, value, **options)

    if not typing.TYPE_CHECKING:  # with `__getattr__`, type checkers would accept any attribute

        def __getattr__(self, name: str) -> Any:
            kind, _, rule = name.partition("register_")
            if kind or rule not in rule_names():
                # Pass no `name` and `obj` to AttributeError, because Dynamo does not support them.
                # Python sets both anyway when `__getattr__` raises.
                raise AttributeError(
                    f"{type(self).__name__!r} object has no attribute {short_repr(name)}"
                )
            return functools.partial(self.register, rule)

    def set_kernel_enabled(  # type: ignore[override]  # the base class returns a private type
        self, device_type: str, enabled: bool = True
    ) -> AbstractContextManager[None]:
        """Enable or disable a device type's kernel inside a `with` block, for all threads.

        While a kernel is disabled, calls fall back to the function that was passed to `custom_op`.
        If the device type has no kernel, or if the state does not change, this only logs a message.

        Args:
            device_type: a device type such as `"cpu"`.
            enabled: whether calls use the kernel.
        """
        return self._live().rule(KernelRule).set_enabled(device_type, enabled)

    # In-place and out= forms

    @compilers.eager_only
    def derive_inplace(
        self, name: str | None = None, /, *, lib: torch.library.Library | None = None
    ) -> CustomOp[..., Any]:
        """Define the in-place form of this operator, which overwrites the first argument.

        The in-place form calls this operator and copies the result into the argument, so you need
        not register a kernel, a fake kernel or a backward formula for it.

        Args:
            name: the name of the new operator. The default is `"ns::name_"`.
            lib: the library that owns the new operator. The default is the library of this
                operator.

        Returns:
            The handle of the new operator. If the result has a different shape or dtype than the
            first argument, a call raises `MutationError` and leaves the argument unchanged.

        Raises:
            SchemaError: this operator is not functional, has several results, or does not take a
                Tensor as its first argument. SchemaError is a subclass of `ValueError`.

        Example:
            >>> import torch, torchop
            >>> @torchop.custom_op("docs::negative", mutates_args=())
            ... def negative(x: torch.Tensor) -> torch.Tensor:
            ...     return -x
            >>> negative_ = negative.derive_inplace()
            >>> x = torch.ones(2)
            >>> negative_(x) is x, x
            (True, tensor([-1., -1.]))
        """
        self.inplace = derive_form(self._live(), Form.INPLACE, name, lib).handle
        return self.inplace

    @compilers.eager_only
    def derive_out(
        self,
        name: str | None = None,
        /,
        *,
        outputs: Sequence[str] | None = None,
        lib: torch.library.Library | None = None,
    ) -> CustomOp[..., Any]:
        """Define the out= form of this operator, which writes the results into `out=`.

        The out= form calls this operator and copies the results into the outputs. If your kernel
        can write into the outputs itself, use `torchop.out_op` instead, which avoids the copies.

        Args:
            name: the name of the new operator. The default is `"ns::name.out"`.
            outputs: the names of the output arguments. The default is `out`, or `out0`, `out1` and
                so on if there are several results.
            lib: the library that owns the new operator. The default is the library of this
                operator.

        Returns:
            The handle of the new operator. If an output differs from the result in shape, dtype or
            device, a call raises `MutationError` and leaves the outputs unchanged.

        Raises:
            SchemaError: this operator is not functional, or `outputs` is invalid. SchemaError is a
                subclass of `ValueError`.

        Example:
            >>> import torch, torchop
            >>> @torchop.custom_op("docs::opposite", mutates_args=())
            ... def opposite(x: torch.Tensor) -> torch.Tensor:
            ...     return -x
            >>> opposite_out = opposite.derive_out()
            >>> buffer = torch.empty(2)
            >>> opposite_out(torch.ones(2), out=buffer) is buffer, buffer
            (True, tensor([-1., -1.]))
        """
        self.out = derive_form(self._live(), Form.OUT, name, lib, outputs).handle
        return self.out

    # Private attributes of CustomOpDef that PyTorch itself and other packages rely on.

    _namespace: Any = property(lambda self: self._definition.name.namespace)
    _name: Any = property(lambda self: self._definition.name.local)
    _qualname: Any = property(lambda self: self.name)
    _schema: Any = property(lambda self: "(" + self._definition.schema.written.partition("(")[2])
    _tags: Any = property(lambda self: self._definition.declaration.tags)
    _lib: Any = property(lambda self: self._definition.library)
    _backend_fns: Any = _of_rule(KernelRule, lambda rule: dict(rule.functions))
    _disabled_kernel: Any = _of_rule(KernelRule, lambda rule: rule.disabled)
    _abstract_fn: Any = _of_rule(FakeRule, lambda rule: rule.function)
    _backward_fn: Any = _of_rule(AutogradRule, lambda rule: rule.formula.backward)
    _setup_context_fn: Any = _of_rule(AutogradRule, lambda rule: rule.formula.setup_context)
    _vmap_fn: Any = _of_rule(VmapRule, lambda rule: rule.function)
    _autocast_dtype: Any = _of_rule(AutocastRule, lambda rule: dict(rule.dtypes))
    _torch_dispatch_fns: Any = _of_rule(TorchDispatchRule, lambda rule: dict(rule.functions))
    _is_inplace: Any = property(lambda self: self._definition.schema.form is Form.INPLACE)
    _is_out: Any = property(lambda self: self._definition.schema.form is Form.OUT)
    _out_kwarg_names: Any = property(lambda self: self._definition.schema.mutated * self._is_out)


def _unpickle(name: str, module: str) -> CustomOp[..., Any]:
    """Return an operator's handle. If the operator is not defined yet, import `module` first."""
    if registries.published_handle(name) is None:
        try:
            __import__(module)
        except ImportError as error:
            raise OperatorNotFoundError(
                f"cannot load the operator {name}: the module {short_repr(module)} that defines it "
                f"cannot be imported ({error})."
            ) from error
    handle = registries.published_handle(name)
    if not isinstance(handle, CustomOp):
        raise OperatorNotFoundError(
            f"cannot load the operator {name}: importing {short_repr(module)} did not define it."
        )
    return handle


_unpickle.__module__ = "torchop"  # so pickles stay loadable if this module moves


def make_handle(definition: Definition) -> CustomOp[..., Any]:
    make = switch.new_handle_type() if definition.structure is None else _structured
    handle: CustomOp[..., Any] = make(definition)
    definition.handle = handle
    switch.make_native(definition)
    return handle


class StructuredOp(CustomOp[P, R]):
    """The handle of an operator with structured arguments, such as dataclasses.

    Each call flattens the structures into the arguments of the schema and passes these to
    `overload`.
    """

    @property
    def source(self) -> str | None:  # type: ignore[override]  # None for the other operators
        return inspect.getsource(vars(type(self))["__call__"])


def _structured(definition: Definition) -> StructuredOp[..., Any]:
    """Create a class for the operator, with a generated `__call__`, and return an instance.

    One `__call__` that forwards `*args` and `**kwargs` would work for all operators, but forwarding
    would take a fifth of the time of a call.
    """
    structure = definition.structure
    overload = structure.overload = torch_ops.lookup_overload(*definition.name)
    function = getattr(structure.function, "__name__", definition.name.name)
    call = structure.caller(overload, function, is_method=True)
    members = {"__call__": call, "__module__": CustomOp.__module__, "__slots__": ()}
    cls = type(StructuredOp.__name__, (StructuredOp,), members)
    handle: StructuredOp[..., Any] = cls(definition)
    dynamo_variables.trace_as_overload(cls, _flatten)
    # When the operator is deregistered, remove the class from Dynamo's global table, which would
    # otherwise keep the class alive forever.
    structure.on_deregister = lambda: dynamo_variables.forget(cls)
    return handle


def _flatten(handle: StructuredOp[..., Any], args: Any, kwargs: Any, compiler: Any) -> Any:
    return described.flat_call(handle._definition.structure, args, kwargs, compiler)

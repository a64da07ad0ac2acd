"""The handle of an operator: called like the function, with the methods of `torch.library`."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

import torch.library

from torchop._compat import compilers, dynamo_variables, registries, torch_ops
from torchop._compat.classes import FunctionSchema, OpOverload, Tag
from torchop._core.argument_errors import argument_error
from torchop._core.definition import CompiledRule, Definition
from torchop._core.user_rule import get_rule, registered_rules, rule_names
from torchop._define.forms.derive import derive_form
from torchop._define.registrations import Registrations
from torchop._errors import ArgumentError, OperatorNotFoundError, short_repr
from torchop._native import switch
from torchop._rules.autocast import AutocastRule
from torchop._rules.autograd.rule import AutogradRule
from torchop._rules.fake.rule import FakeRule
from torchop._rules.kernels.rule import KernelRule
from torchop._rules.torch_dispatch import TorchDispatchRule
from torchop._rules.vmap.rule import VmapRule
from torchop._schema.callables import Lambda, Registered
from torchop._schema.forms import Form
from torchop._schema.signatures import annotations_of
from torchop._schema.structure import described

P = ParamSpec("P")
R = TypeVar("R")


class _FunctionSignature:
    """Makes `inspect.signature` of a handle return that of its function, not that of `__call__`."""

    def __get__(self, handle: Any, owner: type) -> inspect.Signature:
        if handle is not None:
            if compilers.torchscript_is_inspecting():
                # It counts the parameters of `__call__`, and compares with those of a signature.
                raise ValueError("TorchScript passes on what it is given, as to any object.")
            return inspect.signature(handle.__wrapped__)
        signature = inspect.signature(CustomOp.__init__)
        return signature.replace(parameters=list(signature.parameters.values())[1:])


def _of_rule(kind: type[CompiledRule[Any]], read: Callable[[Any], Any]) -> property:
    return property(lambda self: read(self._definition.rule(kind)))


class CustomOp(Registrations, Generic[P, R]):
    """An operator: call it like its function, and register rules on it.

    Made by `torchop.custom_op`. It is a `torch._library.custom_ops.CustomOpDef`, so everything that
    accepts those accepts it too: Dynamo, Inductor's autotuning, `torch.library.register_*`.

    The registration methods are those of `torch.library`; each can be used as a decorator or called
    with the function, which it returns.

    Attributes:
        overload: the `torch._ops.OpOverload` behind the handle.
        schema: the schema, a `torch.FunctionSchema`.
        name: the qualified name, `"ns::name"`.
        tags: its `torch.Tag` members, `pt2_compliant_tag` among them.
        inplace: the in-place form that was derived last, a `CustomOp`; None if there is none.
        out: the form with `out=` that was derived last, a `CustomOp`; None if there is none.
        source: the text of the function that takes structured arguments apart; None for an operator
            that is called with the arguments of its schema.

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

    # Where a native handle keeps the function that is called and the entry of its operator. The
    # first holds no Python object: nothing but the extension may touch it.
    __slots__ = ("_native_call", "_native_entry")

    inplace: CustomOp[..., Any] | None = None
    out: CustomOp[..., Any] | None = None

    def __init__(self, definition: Definition) -> None:
        # Not CustomOpDef.__init__: that would define the operator, by its own rules.
        function = definition.authors_function
        self._definition = definition
        # The identity of the function. It may be a partial or a callable object, without a name.
        self._init_fn = self.__wrapped__ = function
        self.__name__: str = getattr(function, "__name__", definition.name.name)
        self.__qualname__: str = getattr(function, "__qualname__", self.__name__)
        assert definition.declaration.site is not None
        self.__module__: str = definition.declaration.site.module
        self.__doc__ = getattr(function, "__doc__", None)
        self.__annotations__ = annotations_of(function)

    __signature__: Any = _FunctionSignature()

    if TYPE_CHECKING:
        # Jedi, which does not know ParamSpec, shows the parameters of a method as they stand here.
        __call__: Callable[P, R]
    else:

        def __call__(self, /, *args, **kwargs):
            try:
                return self._opoverload(*args, **kwargs)
            except RuntimeError as error:
                explained = self._explain_refusal(error)
                if explained is None:
                    raise
                raise explained from None

    def _explain_refusal(self, error: RuntimeError) -> ArgumentError | None:
        # Native calls ask it too, of what the dispatcher raises for them.
        return argument_error(self._definition.name, error)

    def __repr__(self) -> str:
        definition = self._definition
        if definition.deregistration_reason is not None:
            return f"<torchop.CustomOp {definition}, gone>"
        return f"<torchop.CustomOp {'; '.join([definition.schema.text, *self._registered()])}>"

    def _registered(self) -> list[str]:
        """The registrations, as text."""
        parts = [rule.repr_text() for rule in self._definition.rules.values()]
        return list(filter(None, (*parts, *registered_rules(self._definition))))

    def _repr_html_(self) -> str:
        """A list for notebooks."""
        import html  # late, for start-up time

        if self._definition.deregistration_reason is not None:
            return f"<p><code>{html.escape(repr(self))}</code></p>"
        rows = [html.escape(part) for part in (self.__doc__ or "", *self._registered()) if part]
        items = "".join(f"<li>{row}</li>" for row in rows)
        return f"<p><code>{html.escape(self._definition.schema.text)}</code></p><ul>{items}</ul>"

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        raise TypeError(
            f"{self.name} is an operator, not a class to inherit from. To share rules between "
            "operators in the class form, put them into a plain class that both inherit from."
        )

    # An operator is a name in the process: copies are the operator itself, and a pickle holds the
    # name and the module that defines it.

    def __copy__(self) -> CustomOp[P, R]:
        return self

    def __deepcopy__(self, memo: Mapping[int, Any]) -> CustomOp[P, R]:
        return self

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str]]:
        return _unpickle, (self.name, self.__module__)

    def __prepare_scriptable__(self) -> None:  # what torch.jit.script asks for
        name = self._definition.name
        raise TypeError(
            f"{name}: TorchScript cannot compile the handle of an operator. In the function that "
            f"it compiles, call torch.ops.{name.namespace}.{name.name}, with all arguments."
        )

    def _live(self) -> Definition:
        self._definition.check_defined()
        return self._definition

    @property
    def overload(self) -> OpOverload:
        # Looked up for each call, and kept nowhere here: Dynamo traces this, and would compile
        # again when a cache that it saw empty was filled. torch.ops keeps it anyway.
        definition = self._live()
        try:
            return torch_ops.lookup_overload(*definition.name)
        finally:
            # Another thread may have ended the operator meanwhile, and given its name to another.
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

    def register(
        self, rule: str, value: Registered | Lambda | None = None, /, **options: Any
    ) -> Registered:
        """Registers a value under a `torchop.Rule`.

        `op.register("cost", fn)` is also written `op.register_cost(fn)`.

        Args:
            rule: the name of a rule of torchop or of another package.
            value: what the rule accepts, usually a function; without it, a decorator is returned.
            options: as for `torchop.Rule.register`.

        Returns:
            `value`.

        Raises:
            ValueError: there is no such rule.
            TypeError, ValueError: the rule refuses the value.
        """
        return get_rule(rule).register(self, value, **options)

    if not typing.TYPE_CHECKING:  # a checker would accept every name

        def __getattr__(self, name: str) -> Any:
            """The method `register_<name>` of a rule that another package made."""
            kind, _, rule = name.partition("register_")
            if kind or rule not in rule_names():
                # Python adds the name and the object, which Dynamo would not let us pass.
                raise AttributeError(
                    f"{type(self).__name__!r} object has no attribute {short_repr(name)}"
                )
            return functools.partial(self.register, rule)

    def set_kernel_enabled(  # type: ignore[override]  # the base promises its helper's type
        self, device_type: str, enabled: bool = True
    ) -> AbstractContextManager[None]:
        """Switches the kernel of one device type on or off inside a `with` block.

        While it is off, the function of the operator runs. The switch is for the whole process. A
        device type without a kernel, or one that is in that state already, is logged.

        Args:
            device_type: such as `"cpu"`.
            enabled: whether the kernel runs.
        """
        return self._live().rule(KernelRule).set_enabled(device_type, enabled)

    # Other forms of the operator

    def derive_inplace(
        self, name: str | None = None, /, *, lib: torch.library.Library | None = None
    ) -> CustomOp[..., Any]:
        """Defines the in-place form of a functional operator, which overwrites its first argument.

        It calls the functional operator and copies the result. So it needs no kernel, fake kernel
        or formula of its own.

        Args:
            name: the name of the new operator; by default `"ns::name_"`.
            lib: the library that it lives in; by default that of the functional operator.

        Returns:
            The handle of the new operator. A call raises `MutationError` if the result does not
            have the shape and dtype of the first argument. That argument is then unchanged.

        Raises:
            SchemaError: a `ValueError`: the operator is not functional, has several results, or
                does not take a Tensor first.

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

    def derive_out(
        self,
        name: str | None = None,
        /,
        *,
        outputs: Sequence[str] | None = None,
        lib: torch.library.Library | None = None,
    ) -> CustomOp[..., Any]:
        """Defines the form of a functional operator that writes into `out=`.

        It calls the functional operator and copies the results. If the kernel can write into a
        buffer itself, use `torchop.out_op`.

        Args:
            name: the name of the new operator; by default `"ns::name.out"`.
            outputs: the names of the outputs; by default `out`, or `out0`, `out1` and so on.
            lib: the library that it lives in; by default that of the functional operator.

        Returns:
            The handle of the new operator. A call raises `MutationError` if an output does not have
            the shape, dtype and device of the result. That output is then unchanged.

        Raises:
            SchemaError: a `ValueError`: the operator is not functional, or `outputs` does not fit.

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

    # What others read of a CustomOpDef, where these are plain attributes

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
    """Finds an operator by name, in the process that loads a pickle of its handle."""
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


_unpickle.__module__ = "torchop"  # which pickles of all versions name


def make_handle(definition: Definition) -> CustomOp[..., Any]:
    """Makes the handle, and stores it in the definition."""
    make = switch.new_handle_type() if definition.structure is None else _structured
    handle: CustomOp[..., Any] = make(definition)
    definition.handle = handle
    switch.make_native(definition)
    return handle


class StructuredOp(CustomOp[P, R]):
    """A handle that is called with objects; `overload` is the flat operator underneath."""

    @property
    def source(self) -> str | None:  # type: ignore[override]  # None for the other operators
        return inspect.getsource(vars(type(self))["__call__"])


def _structured(definition: Definition) -> StructuredOp[..., Any]:
    """Makes a structured handle, of a class of its own: its `__call__` is written for the operator.

    A shared `__call__` would have to pass the arguments on, which takes a fifth of a call.
    """
    structure = definition.structure
    overload = structure.overload = torch_ops.lookup_overload(*definition.name)
    function = getattr(structure.function, "__name__", definition.name.name)
    call = structure.caller(overload, function, is_method=True)
    members = {"__call__": call, "__module__": CustomOp.__module__, "__slots__": ()}
    cls = type(StructuredOp.__name__, (StructuredOp,), members)
    handle: StructuredOp[..., Any] = cls(definition)
    dynamo_variables.trace_as_overload(cls, _take_apart)
    structure.at_end = lambda: dynamo_variables.forget(cls)  # its table would keep the class alive
    return handle


def _take_apart(handle: StructuredOp[..., Any], args: Any, kwargs: Any, compiler: Any) -> Any:
    return described.flat_call(handle._definition.structure, args, kwargs, compiler)

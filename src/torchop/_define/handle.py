"""The handle of an operator: called like the function, with the methods of `torch.library`."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

import torch.library

from torchop._compat import compilers, registries, torch_ops
from torchop._compat.classes import FunctionSchema, OpOverload, Tag
from torchop._core.argument_errors import argument_error
from torchop._core.definition import CompiledRule, Definition
from torchop._core.user_rule import registered_rules
from torchop._define.forms.derive import derive_form
from torchop._define.handle_rules import RuleMethods
from torchop._errors import ArgumentError, OperatorNotFoundError, short_repr
from torchop._rules.autocast import AutocastRule
from torchop._rules.autograd import register
from torchop._rules.autograd.checks import SetupContext
from torchop._rules.autograd.formula import Strategy
from torchop._rules.autograd.rule import AutogradRule
from torchop._rules.effect import Effect, EffectRule
from torchop._rules.fake import rule as fake_rule
from torchop._rules.fake.rule import FakeRule
from torchop._rules.kernels.rule import DeviceTypes, KernelRule, device_list
from torchop._rules.torch_dispatch import TorchDispatchRule
from torchop._rules.user.sharding.rule import mixed_error
from torchop._rules.vmap import rule as vmap_rule
from torchop._rules.vmap.rule import VmapRule
from torchop._schema.callables import Function, decorator_or_call, keyword_only
from torchop._schema.forms import Form
from torchop._schema.signatures import annotations_of

if TYPE_CHECKING:
    from torchop._rules.fake.declared import DType, Like, Shape

P = ParamSpec("P")
R = TypeVar("R")


class _FunctionSignature:
    """Makes `inspect.signature` of a handle return that of its function, not that of `__call__`."""

    def __get__(self, handle: Any, owner: type) -> inspect.Signature:
        if handle is not None:
            if compilers.torchscript_asks():
                # It counts the parameters of `__call__`, and compares with those of a signature.
                raise ValueError("TorchScript passes on what it is given, as to any object.")
            return inspect.signature(handle.__wrapped__)
        signature = inspect.signature(CustomOp.__init__)
        return signature.replace(parameters=list(signature.parameters.values())[1:])


def _of_rule(kind: type[CompiledRule[Any]], attribute: str) -> property:
    return property(lambda self: getattr(self._definition.rule(kind), attribute))


class CustomOp(RuleMethods, Generic[P, R]):
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

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return self._opoverload(*args, **kwargs)  # type: ignore[no-any-return]
        except RuntimeError as error:
            explained = self._explain_refusal(error)
            if explained is None:
                raise
            raise explained from None

    def _explain_refusal(self, error: RuntimeError) -> ArgumentError | None:
        # Native calls ask it too, of what the dispatcher raises for them.
        name = self._definition.name
        return argument_error(name, error) or mixed_error(name, error)

    def __repr__(self) -> str:
        definition = self._definition
        if definition.reason_gone is not None:
            return f"<torchop.CustomOp {definition}, gone>"
        return f"<torchop.CustomOp {'; '.join([definition.schema.text, *self._registered()])}>"

    def _registered(self) -> list[str]:
        """The registrations, as text."""
        parts = [rule.repr_text() for rule in self._definition.rules.values()]
        return list(filter(None, (*parts, *registered_rules(self._definition))))

    def _repr_html_(self) -> str:
        """A list for notebooks."""
        import html  # late, for start-up time

        if self._definition.reason_gone is not None:
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

    @property
    def overload(self) -> OpOverload:
        # Looked up for each call, and kept nowhere here: Dynamo traces this, and would compile
        # again when a cache that it saw empty was filled. torch.ops keeps it anyway.
        definition = self._live()
        try:
            return torch_ops.lookup_overload(*definition.name)
        except AttributeError:
            definition.check_defined()  # another thread may have ended the operator meanwhile
            raise

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

    # Registration

    def register_kernel(self, device_types: DeviceTypes, fn: Function | None = None, /) -> Function:
        """Registers the implementation for some device types; see `torchop.register_kernel`."""
        rule = self._live().rule(KernelRule)
        device_list(device_types)  # also where the function comes later, if it is not this
        return decorator_or_call(lambda function: rule.register(device_types, function), fn)

    @typing.overload
    def register_fake(self, fn: Function | None = None, /) -> Function: ...
    @typing.overload
    def register_fake(
        self, /, *, like: Like = None, shape: Shape = None, dtype: DType = None
    ) -> None: ...

    def register_fake(
        self,
        fn: Function | None = None,
        /,
        *,
        like: Like = None,
        shape: Shape = None,
        dtype: DType = None,
    ) -> Function | None:
        """Registers what the outputs look like; see `torchop.register_fake`."""
        return fake_rule.register(self._live().rule(FakeRule), fn, like, shape, dtype)

    @keyword_only
    def register_autograd(  # type: ignore[override]  # PyTorch's returns None
        self,
        backward: Function | None = None,
        /,
        *,
        setup_context: SetupContext | None = None,
        jvp: Callable[..., Any] | None = None,
        opaque: bool = False,
    ) -> Function:
        """Registers the backward formula; see `torchop.register_autograd`."""
        rule = self._live().rule(AutogradRule)
        return decorator_or_call(
            lambda function: register.register(rule, function, setup_context, jvp, opaque=opaque),
            backward,
        )

    @keyword_only
    def register_jvp(
        self, jvp: Function | None = None, /, *, setup_context: SetupContext | None = None
    ) -> Function:
        """Registers the formula for forward mode; see `torchop.register_jvp`."""
        rule = self._live().rule(AutogradRule)
        return decorator_or_call(lambda function: rule.register_jvp(function, setup_context), jvp)

    def derive_autograd(self, strategy: Strategy = "recompute") -> None:
        """Derives the backward formula from the body, with PyTorch's autograd.

        In eager mode, `backward` differentiates the kernel of the device, also more than once.
        A compiled graph has one operator for the forward, `name__training`, and one for the
        backward, `name__backward`. Both use the same random numbers and the same dtypes of
        autocast.

        Args:
            strategy: `"recompute"` saves the inputs of a call, and runs the body again in the
                backward. `"save"` keeps the graph of the body, and runs the body once. Compiled
                graphs, transforms of `torch.func`, modes and Tensor subclasses see the operator, so
                they recompute.

        Raises:
            DerivedFormulaError: a `RuntimeError`: the operator mutates, aliases or has an effect;
                or operators with these two names exist already.
            NotImplementedError: it takes or returns tensors in places that autograd cannot follow.
            ValueError: an unknown strategy.

        An input on which no output depends has a gradient of zeros. If autograd cannot follow the
        body, because it uses NumPy or detaches tensors, the backward raises `DerivedFormulaError`.
        Numbers that the body reads, as in `x.item()`, have no gradient.

        Example:
            >>> import torch, torchop
            >>> @torchop.custom_op("docs::wave", mutates_args=())
            ... def wave(x: torch.Tensor) -> torch.Tensor:
            ...     return x.sin() if x.mean() > 0 else x.cos()
            >>> wave.derive_autograd()
            >>> x = torch.zeros(2, requires_grad=True)
            >>> wave(x).sum().backward()
            >>> x.grad
            tensor([-0., -0.])

        The idea is `torch.utils.checkpoint.checkpoint`.
        """
        register.derive(self._live().rule(AutogradRule), strategy)

    @typing.overload
    def register_vmap(self, func: typing.Literal["sequential"]) -> None: ...
    @typing.overload
    def register_vmap(self, func: Function | None = None) -> Function: ...

    def register_vmap(
        self, func: Function | typing.Literal["sequential"] | None = None
    ) -> Function | None:
        """Registers how `torch.vmap` maps the operator; see `torchop.register_vmap`."""
        return vmap_rule.register(self._live().rule(VmapRule), func)

    def register_autocast(self, device_type: str, cast_inputs: torch.dtype) -> None:
        """Registers the dtype in autocast regions; see `torchop.register_autocast`."""
        self._live().rule(AutocastRule).register(device_type, cast_inputs)

    def register_torch_dispatch(
        self, torch_dispatch_class: type, fn: Function | None = None, /
    ) -> Function:
        """Registers what a mode or a subclass does; see `torchop.register_torch_dispatch`."""
        rule = self._live().rule(TorchDispatchRule)
        return decorator_or_call(lambda function: rule.register(torch_dispatch_class, function), fn)

    def register_effect(self, effect: Effect) -> None:
        """Declares a side effect; see `torchop.register_effect`."""
        self._live().rule(EffectRule).register(effect)

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
    _backend_fns: Any = property(lambda self: dict(self._definition.rule(KernelRule).functions))
    _disabled_kernel: Any = _of_rule(KernelRule, "disabled")
    _abstract_fn: Any = _of_rule(FakeRule, "function")
    _backward_fn: Any = _of_rule(AutogradRule, "backward")
    _setup_context_fn: Any = _of_rule(AutogradRule, "setup_context")
    _vmap_fn: Any = _of_rule(VmapRule, "function")
    _autocast_dtype: Any = property(lambda self: dict(self._definition.rule(AutocastRule).dtypes))
    _torch_dispatch_fns: Any = property(
        lambda self: dict(self._definition.rule(TorchDispatchRule).functions)
    )
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


_unpickle.__module__ = "torchop._operator"  # which pickles of all versions name

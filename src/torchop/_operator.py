"""The handle that a user holds: callable like the function, registered on like `torch.library`'s."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Generic, ParamSpec, TypeVar

import torch

from torchop import _compat
from torchop._definition import Definition
from torchop._errors import OperatorGoneError, OperatorNotFoundError
from torchop._rules._shapes import Function, decorator_or_call
from torchop._rules.autocast import AutocastRule
from torchop._rules.autograd import AutogradRule, SetupContext
from torchop._rules.effect import EffectRule
from torchop._rules.fake import FakeRule
from torchop._rules.kernels import DeviceTypes, KernelRule
from torchop._rules.torch_dispatch import TorchDispatchRule
from torchop._rules.vmap import VmapRule

P = ParamSpec("P")
R = TypeVar("R")


class CustomOp(_compat.CustomOpDef, Generic[P, R]):
    """An operator: call it like the function it was made from, and register rules on it.

    Made by `torchop.custom_op`. It is a `torch._library.custom_ops.CustomOpDef`, so whatever knows
    how to treat those (Dynamo, Inductor's autotuning, `torch.library.register_*`) treats it so.

    The registration methods are those of `torch.library`; each can be used as a decorator or called
    with the function, which it returns.

    Attributes:
        overload: the `torch._ops.OpOverload` behind the handle.
        schema: the schema, a `torch.FunctionSchema`.
        name: the qualified name, `"ns::name"`.
        tags: the `torch.Tag`s, `pt2_compliant_tag` among them.

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

    def __init__(self, definition: Definition) -> None:
        # Not CustomOpDef.__init__: that would define the operator, by its own rules.
        function = definition.function
        assert function is not None  # only operators of ours have a handle
        self._definition = definition
        self._init_fn = function
        self._used_triton_kernels: list[Any] = []
        self._opoverload = definition.overload
        # The identity of the function. It may be a partial or a callable object, without a name.
        self.__wrapped__ = function
        self.__name__: str = getattr(function, "__name__", definition.name.name)
        self.__qualname__: str = getattr(function, "__qualname__", self.__name__)
        self.__module__: str = getattr(function, "__module__", None) or "__main__"
        self.__doc__ = getattr(function, "__doc__", None)

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        # One attribute, so that Dynamo can trace it: what it records is the OpOverload.
        return self._opoverload(*args, **kwargs)  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        definition = self._definition
        if definition.gone is not None:
            return f"<torchop.CustomOp {definition}, gone>"
        described = (rule.describe() for rule in definition.rules.values())
        return f"<torchop.CustomOp {'; '.join([definition.schema.text, *filter(None, described)])}>"

    # An operator is a name in the process: copies are the operator itself, and a pickle holds the
    # name and the module that defines it.

    def __copy__(self) -> CustomOp[P, R]:
        return self

    def __deepcopy__(self, memo: Mapping[int, Any]) -> CustomOp[P, R]:
        return self

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str]]:
        return _unpickle, (self.name, self.__module__)

    @property
    def overload(self) -> _compat.OpOverload:
        return self._opoverload

    @property
    def schema(self) -> _compat.FunctionSchema:
        return self._opoverload._schema

    @property
    def name(self) -> str:
        return str(self._definition.name)

    @property
    def tags(self) -> tuple[_compat.Tag, ...]:
        return tuple(self._opoverload.tags)

    # ----------------------------------------------------------------------------------------------
    # Registration

    def register_kernel(
        self, device_types: DeviceTypes, fn: Function | None = None, /
    ) -> Function | Callable[[Function], Function]:
        """Registers the implementation for some device types; see `torchop.register_kernel`."""
        rule = self._live().rule(KernelRule)
        return decorator_or_call(lambda function: rule.register(device_types, function), fn)

    def register_fake(
        self, fn: Function | None = None, /
    ) -> Function | Callable[[Function], Function]:
        """Registers what the outputs look like; see `torchop.register_fake`."""
        return decorator_or_call(self._live().rule(FakeRule).register, fn)

    def register_autograd(
        self, backward: Function | None = None, /, *, setup_context: SetupContext | None = None
    ) -> Function | Callable[[Function], Function]:
        """Registers the backward formula; see `torchop.register_autograd`."""
        rule = self._live().rule(AutogradRule)
        return decorator_or_call(lambda function: rule.register(function, setup_context), backward)

    def register_vmap(
        self, func: Function | None = None, /
    ) -> Function | Callable[[Function], Function]:
        """Registers how `torch.vmap` maps the operator; see `torchop.register_vmap`."""
        return decorator_or_call(self._live().rule(VmapRule).register, func)

    def register_autocast(self, device_type: str, cast_inputs: torch.dtype) -> None:
        """Registers the dtype in autocast regions; see `torchop.register_autocast`."""
        self._live().rule(AutocastRule).register(device_type, cast_inputs)

    def register_torch_dispatch(
        self, torch_dispatch_class: type, fn: Function | None = None, /
    ) -> Function | Callable[[Function], Function]:
        """Registers what happens under a mode or on a subclass.

        See `torchop.register_torch_dispatch`.
        """
        rule = self._live().rule(TorchDispatchRule)
        return decorator_or_call(lambda function: rule.register(torch_dispatch_class, function), fn)

    def register_effect(self, effect: _compat.EffectType | None) -> None:
        """Declares a side effect; see `torchop.register_effect`."""
        self._live().rule(EffectRule).register(effect)

    def set_kernel_enabled(
        self, device_type: str, enabled: bool = True
    ) -> AbstractContextManager[None]:
        """Switches the kernel of one device type on or off inside a `with` block.

        Where it is off, the function that the operator was made from runs. The switch is for the
        whole process. A device type without a kernel, or in that state already, is logged.

        Args:
            device_type: such as `"cpu"`.
            enabled: whether the kernel is to run.
        """
        return self._live().rule(KernelRule).set_enabled(device_type, enabled)

    def _live(self) -> Definition:
        if self._definition.gone is not None:
            raise OperatorGoneError(self._definition.gone)
        return self._definition

    def _retire(self, reason: str) -> None:
        """Called by the definition when it ends."""
        self._opoverload = _compat.gone_overload(self._opoverload, reason)

    # ----------------------------------------------------------------------------------------------
    # What others read of a CustomOpDef

    @property
    def _namespace(self) -> str:
        return self._definition.name.namespace

    @property
    def _name(self) -> str:
        return self._definition.name.local

    @property
    def _qualname(self) -> str:
        return self.name

    @property
    def _schema(self) -> str:
        text = self._definition.schema.written
        return text[text.index("(") :]

    @property
    def _tags(self) -> tuple[_compat.Tag, ...]:
        return self._definition.tags

    @property
    def _lib(self) -> torch.library.Library:
        return self._definition.library

    @property
    def _backend_fns(self) -> dict[str | None, Callable[..., Any]]:
        return dict(self._definition.plan[KernelRule].functions)

    @property
    def _disabled_kernel(self) -> set[str | None]:
        return self._definition.rule(KernelRule).disabled

    @property
    def _abstract_fn(self) -> Callable[..., Any] | None:
        return self._definition.rule(FakeRule).function

    @property
    def _backward_fn(self) -> Callable[..., Any] | None:
        return self._definition.rule(AutogradRule).backward

    @property
    def _setup_context_fn(self) -> Callable[..., Any] | None:
        return self._definition.rule(AutogradRule).setup_context

    @property
    def _vmap_fn(self) -> Callable[..., Any] | None:
        return self._definition.rule(VmapRule).function

    @property
    def _autocast_dtype(self) -> dict[str, torch.dtype]:
        return dict(self._definition.rule(AutocastRule).dtypes)

    @property
    def _torch_dispatch_fns(self) -> dict[type, Callable[..., Any]]:
        return dict(self._definition.rule(TorchDispatchRule).functions)


# `inspect.signature` of a class instance looks at its `__call__`; this makes it follow the function.
CustomOp.__signature__ = property(  # type: ignore[attr-defined]
    lambda self: inspect.signature(self.__wrapped__)
)


def _unpickle(name: str, module: str) -> CustomOp[..., Any]:
    """Finds an operator by name, in the process that loads a pickle of its handle."""
    handle = _compat.definition_source(name)
    if handle is None:
        try:
            __import__(module)
        except ImportError as error:
            raise OperatorNotFoundError(
                f"cannot load the operator {name}: the module {module!r} that defines it cannot be "
                f"imported ({error})."
            ) from error
        handle = _compat.definition_source(name)
    if not isinstance(handle, CustomOp):
        raise OperatorNotFoundError(
            f"cannot load the operator {name}: importing {module!r} did not define it."
        )
    return handle

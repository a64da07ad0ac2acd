"""`FakeRule`: an operator's fake kernel, which computes the metadata of outputs without data."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

import torch.library

from torchop._compat import (
    autocasting,
    compilers,
    dispatch,
    fake_tensors,
    registries,
    traced_objects,
    tracing,
)
from torchop._compat.classes import FakeImplCtx, FakeTensorMode, tree_leaves
from torchop._compat.fake_tensors import reads_data
from torchop._core.call import returned_result, tensors_in
from torchop._core.contract import result_check
from torchop._core.definition import CompiledRule, Definition
from torchop._core.lock import registration_lock
from torchop._core.registry import OpLike, resolve
from torchop._errors import FakeKernelError, RuleSignatureError, TracingError, add_note, warn
from torchop._rules import in_autocast
from torchop._rules.effect import EffectRule
from torchop._rules.fake.cache import FakeCache, cache_for
from torchop._rules.fake.context import NoContext, innermost, running
from torchop._rules.fake.errors import attribute_was_read, data_was_read, missing_fake, source_of
from torchop._rules.fake.gradient_reads import call_watched
from torchop._rules.fake.outputs import check_outputs, fresh, outputs
from torchop._rules.fake.specialization import symbolic_arguments, warn_of_guards
from torchop._rules.layout import LayoutRule, arranged
from torchop._rules.residuals.handover import not_recording
from torchop._schema.callables import Function, Lambda, decorator_or_call
from torchop._schema.defaults import bind, fitted
from torchop._schema.forms import Form

if TYPE_CHECKING:
    from torchop._rules.fake.declared import DType, Format, Like, Shape


# PyTorch stores the source location of each fake kernel and shows it in messages. This is the
# location of fake kernels that torchop itself provides.
NO_FUNCTION = "torchop"
_KIND = "fake kernel"  # the key in the table of registrations


class FakeRule(CompiledRule["Callable[..., Any] | None"]):
    """The fake kernel of an operator, and the kernel for the Meta dispatch key that calls it."""

    function: Callable[..., Any] | None = None
    cache: FakeCache | None = None  # None if the fake kernel must run in each call
    warned: tuple[str, ...] = ()

    @property
    def is_installed(self) -> bool:
        """Whether the operator has a kernel at the Meta dispatch key.

        This is either `FakeRule.kernel` or a meta kernel written by the operator's author.
        """
        return "Meta" in self.definition.registered

    def install(self) -> None:
        definition = self.definition
        if self.is_installed:
            return  # FakeTensor runs the author's meta kernel instead
        # Install `FakeRule.kernel` even if no fake kernel is registered yet, because otherwise a
        # kernel registered for every device would run on meta tensors too.
        definition.implement("Meta", self.kernel)
        if definition.schema.form is not Form.PLAIN or definition.schema.returns_nothing:
            # In-place operators, out= operators and operators that return nothing need no fake
            # kernel from the user. Register `fake_kernel` for them anyway, because otherwise
            # FakeTensor would run the kernel at the Meta key and reject calls with tensors on
            # several devices.
            self._push(NO_FUNCTION)

    def reject_data_access(self) -> None:
        """Raise MissingFakeError if FakeTensor runs a real kernel instead of the Meta kernel.

        This happens for sparse tensors, because the dispatcher skips the kernel at the Meta key for
        them and selects the kernel registered for every device instead.
        """
        if self.is_installed:
            raise missing_fake(self.definition)

    def leave_to_kernel(self) -> None:
        """If the user registered no fake kernel, make FakeTensor run the author's new meta kernel.

        For some operators, such as in-place operators, `install` has registered `fake_kernel` with
        FakeTensor. Remove it, because FakeTensor would prefer it to the meta kernel.
        """
        if self.function is None:
            self.definition.registered.remove(_KIND)

    def compile(self) -> Callable[..., Any] | None:
        return None if self.function is None else bind(self.function, self.definition.schema)

    def cache_parts(self) -> Iterator[object]:
        yield from (self.function, self.definition.declaration.is_lenient)

    def repr_text(self) -> str | None:
        return None if self.function is None else "fake"

    def register(
        self, function: Callable[..., Any], *, allow_override: bool = True, is_pure: bool = False
    ) -> None:
        definition, schema = self.definition, self.definition.schema
        cache = cache_for(definition, function, is_pure=is_pure)
        if not getattr(function, "is_declared", False):  # a declared fake kernel needs no wrapper
            function = definition.authored(function)
        function = definition.convention.fake(function)
        function = fitted(f"{definition}: a fake kernel", function, schema)
        if not allow_override:
            self._check_override()
        if schema.form is not Form.PLAIN and definition.is_ours:
            warn(
                f"{definition} is tagged with {schema.form.value}, so it returns arguments "
                "and needs no fake kernel. The registered fake kernel is used anyway.",
                UserWarning,
            )
        with definition.registered.registering(_KIND), registration_lock:
            if not self.is_installed:
                self._check_not_composite()
            self.replace(function, cache)

    def replace(self, function: Callable[..., Any], cache: FakeCache | None = None) -> None:
        self.update(self._install, function=function, cache=cache)

    def _install(self) -> None:
        if not self.is_installed:
            self.install()
        assert self.function is not None
        # Register with PyTorch again for each new function, because PyTorch's messages contain the
        # location of the function.
        self._push(source_of(self.function))
        # Compiled code must run the kernel in the same autocast state as the fake kernel. `watch`
        # installs a rule for FunctionalTensorMode that ensures this.
        self.definition.rule(EffectRule).watch()

    def _push(self, source: str) -> None:
        definition = self.definition
        registered = registries.register_fake(str(definition), self.fake_kernel, source)
        definition.registered.add(_KIND, *registered)
        if definition.is_ours:
            definition.registered.add_default_rule(FakeTensorMode, self.run_at_once)

    @compilers.never_traced
    def run_at_once(self, mode: Any, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run the fake kernel directly, because `FakeTensorMode.dispatch` is slow.

        `FakeTensorMode.dispatch` first checks for special cases and looks up the call in a cache
        that only contains calls to PyTorch's own operators. Together, this takes longer than a
        typical fake kernel.
        """
        definition, kwargs = self.definition, kwargs or {}
        tensors = tensors_in((*args, *kwargs.values()))
        is_active = registries.is_active_fake(str(definition), definition.registered.kernel(_KIND))
        if not is_active or not fake_tensors.only_runs_fake(mode, op, tensors):
            return mode.__torch_dispatch__(op, types, args, kwargs)

        def run() -> Any:
            with fake_tensors.stock_context(innermost), mode:
                return self.fake_kernel(*args, **kwargs)

        if (cache := self.cache) is None:
            return run()
        self._warn_of_symbolic_arguments(mode)
        return cache.outputs(mode, op, args, kwargs, run)

    @compilers.never_traced
    def fake_kernel(self, /, *args: Any, **kwargs: Any) -> Any:
        """Run the fake kernel on fake tensors. FakeTensor calls this method."""
        definition, mode = self.definition, fake_tensors.active_fake_mode()
        self._warn_of_symbolic_arguments(mode)
        context = None if mode is None else FakeImplCtx(mode, definition.overload)
        with running(context or NoContext(definition)), autocasting.in_state_of_kernel():
            return _run(definition, args, kwargs)

    def _warn_of_symbolic_arguments(self, mode: Any) -> None:
        definition = self.definition
        constants = definition.schema.constants
        if len(constants) > len(self.warned) and mode is not None and mode.shape_env is not None:
            symbolic = symbolic_arguments(definition, constants)
            new = [name for name in symbolic if name not in self.warned]
            self.warned += tuple(new)
            warn_of_guards(definition, new)

    def _check_override(self) -> None:
        definition, name = self.definition, str(self.definition)
        is_foreign = not definition.is_ours and definition.registered.kernel("Meta") != self.kernel
        source = registries.fake_source(name)
        if source not in (None, NO_FUNCTION):
            existing = f"fake impl registered at {source}"
        elif is_foreign and dispatch.has_kernel(name, "Meta"):
            existing = "DispatchKey::Meta implementation"
        else:
            return
        raise RuntimeError(
            f"register_fake: {name} already has a {existing}; pass allow_override=True to replace "
            "it."
        )

    def _check_not_composite(self) -> None:
        if dispatch.has_kernel(str(self.definition), "CompositeImplicitAutograd"):
            raise RuntimeError(
                f"register_fake: {self.definition} has a CompositeImplicitAutograd kernel, so it "
                "decomposes into other operators. Their fake kernels are used, so it needs none."
            )

    @compilers.never_traced
    def kernel(self, /, *args: Any, **kwargs: Any) -> Any:
        """Run the fake kernel on meta tensors. The dispatcher calls this method at the Meta key."""
        definition = self.definition
        with running(NoContext(definition)), fake_tensors.stock_context(innermost):
            result = _run(definition, args, kwargs)
        for tensor in outputs(result):
            if not fake_tensors.is_fake(tensor):
                inputs = tensors_in((*args, *kwargs.values()))
                advice = (
                    "Make it on the device of an input in the fake kernel, as x.new_empty() does."
                    if all(value.is_meta for value in inputs)
                    else "Put all tensors on one device."
                )
                raise FakeKernelError(
                    f"{definition}: a meta tensor among the inputs made the fake kernel run, but "
                    f"it returned a tensor on {tensor.device}, and nothing computes the values. "
                    f"{advice}"
                )
        return result


in_autocast.fake_kernel = FakeRule.fake_kernel


def install(definition: Definition) -> Callable[[], None] | None:
    rule, fake = definition.rule(FakeRule), definition.declaration.fake
    rule.install()
    return None if fake is None else functools.partial(rule.replace, fake)


def _run(definition: Definition, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    function, schema = definition.plan[FakeRule], definition.schema
    args, kwargs = arranged(definition.plan[LayoutRule], args, kwargs)
    if function is None:
        if schema.form is not Form.PLAIN:
            return returned_result(schema, args, kwargs)
        has_purpose = schema.is_mutable or definition.plan[EffectRule] is not None
        if has_purpose and definition.schema.returns_nothing:
            return None
        raise missing_fake(definition)
    run = not_recording(definition, function)
    if schema.object_types:
        given = tuple(tree_leaves((args, kwargs)))
        is_replaced = traced_objects.is_replaceable
        args, kwargs = tracing.without_attributes((args, dict(kwargs)), is_replaced)
    try:
        if dispatch.is_handled_by_mode():  # FakeTensorMode called the fake kernel
            with dispatch.with_func_transforms():
                result = call_watched(definition, run, args, kwargs)
        else:
            result = call_watched(definition, run, args, kwargs)
    except Exception as error:
        attribute = tracing.attribute_without_value(error)
        if attribute is not None:
            # Raise without a cause, because since PyTorch 2.15, Dynamo reports the cause of an
            # exception instead of the exception itself.
            raise attribute_was_read(definition, attribute) from None
        is_clear = isinstance(error, (FakeKernelError, TracingError))
        if is_clear or not reads_data(error, definition.overload):
            place = source_of(definition.rule(FakeRule).function or function)
            add_note(error, f"in the fake kernel of {definition}, {place}")
            raise
        raise data_was_read(definition, error) from error
    result = result_check(schema.returns)(result, definition, "fake kernel")
    if schema.object_types:
        result = tracing.with_traced_objects(result, given)
    if schema.is_view or schema.form is not Form.PLAIN or not definition.is_ours:
        return result
    if not definition.declaration.is_lenient:
        result = fresh(result, {id(tensor) for tensor in tensors_in((*args, *kwargs.values()))})
    check_outputs(definition, result)
    return result


@overload
def register_fake(
    op: OpLike,
    func: Function | Lambda | None = None,
    /,
    *,
    lib: torch.library.Library | None = None,
    _stacklevel: int = 1,
    allow_override: bool = True,
    pure: bool = False,
) -> Function: ...


@overload
def register_fake(
    op: OpLike,
    /,
    *,
    like: Like = None,
    shape: Function | Lambda | Sequence[Callable[..., Any] | None] | None = None,
    dtype: DType = None,
    memory_format: Format = None,
    lib: torch.library.Library | None = None,
    _stacklevel: int = 1,
    allow_override: bool = True,
    pure: bool = False,
) -> None: ...


@compilers.eager_only
def register_fake(
    op: OpLike,
    func: Function | Lambda | None = None,
    /,
    *,
    like: Like = None,
    shape: Shape = None,
    dtype: DType = None,
    memory_format: Format = None,
    lib: torch.library.Library | None = None,
    _stacklevel: int = 1,
    allow_override: bool = True,
    pure: bool = False,
) -> Function | None:
    """Register an operator's fake kernel, which computes the metadata of outputs without data.

    Args:
        op: the operator, as a handle, `"ns::name"`, `"ns::name.overload"`, an `OpOverload`, or a
            packet with one overload.
        func: the fake kernel. It takes the operator's arguments and returns tensors with the same
            shape, dtype, device, strides and storage offset as the results of the kernel. It must
            not read the data of tensors. Omit `func` to use `register_fake` as a decorator, or to
            declare the output with the options below.
        like: declares the output, in place of `func`. This is the name of an argument with the same
            metadata as the output, except for properties that the options below set. If the output
            is a list, name a list argument. If there are several outputs, pass a tuple of names. If
            only `shape` is given, the default is the first Tensor argument.
        shape: a function that returns the shape of the output as a tuple of ints. Its parameters
            are named after the operator's arguments that it needs. The output is then contiguous.
            Without `shape`, the output has the shape of `like` and the strides of
            `torch.empty_like`. If there are several outputs, pass a tuple of functions or None.
        dtype: the dtype of the output. This is a `torch.dtype`, or the name of an argument that is
            a dtype or a Tensor. If there are several outputs, pass a tuple of these or None.
        memory_format: the memory format of the output, as in `torch.empty_like`. Use
            `torch.contiguous_format` if the output is contiguous whatever the strides of `like`
            are. If there are several outputs, pass a tuple of memory formats or None.
        lib: the library that owns the registration, so that closing it removes the registration. By
            default, the registration is permanent.
        allow_override: whether to replace an existing fake kernel.
        pure: declares that the outputs depend only on the metadata of the tensors and on the other
            arguments, and not, for example, on a file or a counter. Compilers then call the fake
            kernel only once for equal arguments. This option is ignored for operators of other
            packages.

    Returns:
        `func`, a decorator if `func` is omitted, or None if the options declare the output.

    Raises:
        OperatorNotFoundError: the operator is not defined.
        RuleSignatureError: `func` does not accept the operator's arguments, or the declaration does
            not fit the schema.
        RuntimeError: a fake kernel exists and `allow_override` is False, or the operator decomposes
            into other operators.

    Example:
        >>> import torch, torchop
        >>> @torchop.custom_op("docs::row_sums", mutates_args=())
        ... def row_sums(x: torch.Tensor) -> torch.Tensor:
        ...     return x.sum(1)
        >>> @torchop.register_fake("docs::row_sums")
        ... def _(x):
        ...     return x.new_empty(x.shape[0])
        >>> row_sums(torch.empty(3, 2, device="meta")).shape
        torch.Size([3])
        >>> torchop.register_fake("docs::row_sums", shape=lambda x: (x.shape[0],))

    Based on `torch.library.register_fake`. `_stacklevel` is ignored, because messages contain the
    location of the function instead.
    """
    rule = resolve(op, "register_fake", lib).rule(FakeRule)
    if like is None and shape is None and dtype is None and memory_format is None:
        return decorator_or_call(
            lambda function: rule.register(function, allow_override=allow_override, is_pure=pure),
            func,
        )
    if func is not None:
        raise RuleSignatureError(
            f"{rule.definition}: register_fake takes a function or a declaration (like, shape, "
            "dtype, memory_format), not both. Move the declaration into the function."
        )
    from torchop._rules.fake.declared import declared  # rarely used

    rule.register(
        declared(rule.definition, like, shape, dtype, memory_format),
        allow_override=allow_override,
        is_pure=pure,
    )
    return None


@compilers.eager_only
def impl_abstract(
    qualname: OpLike,
    func: Function | Lambda | None = None,
    *,
    lib: torch.library.Library | None = None,
    _stacklevel: int = 1,
) -> Function:
    """Deprecated alias of `register_fake`.

    Warns:
        FutureWarning: use `register_fake`.

    Based on `torch.library.impl_abstract`.
    """
    warn("impl_abstract was renamed to register_fake; use that.", FutureWarning)
    return register_fake(qualname, func, lib=lib)

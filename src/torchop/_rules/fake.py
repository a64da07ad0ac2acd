"""Fake kernels: the metadata of the outputs, without their data."""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import torch.library

from torchop import _compat
from torchop._contract import ResultCheck, result_check, returned_result, tensors_in
from torchop._definition import Definition
from torchop._errors import (
    AliasError,
    FakeKernelError,
    InliningError,
    MissingFakeError,
    RuleSignatureError,
)
from torchop._plan import Rule, registration_lock
from torchop._resolve import OpLike, resolve
from torchop._rules._callables import check_signature
from torchop._rules._data_access import reads_data
from torchop._rules._shapes import Function, decorator_or_call
from torchop._rules.effect import EffectRule, how_to_declare
from torchop._schema.defaults import bind
from torchop._schema.forms import Form
from torchop._schema.schema import Schema
from torchop._schema.types import spell
from torchop._warn import warn

if TYPE_CHECKING:
    from torchop._rules._declared_fake import DType, Like, Shape


class Fake(NamedTuple):
    """The compiled rule."""

    function: Callable[..., Any] | None
    check_result: ResultCheck


class FakeRule(Rule[Fake]):
    """What an operator's outputs look like."""

    __slots__ = ("function", "in_meta", "take_back")

    def __init__(self, definition: Definition) -> None:
        super().__init__(definition)
        self.function: Callable[..., Any] | None = None
        self.in_meta = False
        self.take_back: Callable[[], None] | None = None

    def install(self) -> None:
        # Even without a fake kernel: a kernel for every device would otherwise run on meta tensors.
        self.definition.implement("Meta", _meta_kernel(self.definition))
        self.in_meta = True

    def compile(self) -> Fake:
        definition = self.definition
        return Fake(
            function=None if self.function is None else bind(self.function, definition.schema),
            check_result=result_check(definition.schema.returns),
        )

    def baked(self) -> Iterator[object]:
        yield self.function

    def describe(self) -> str | None:
        return None if self.function is None else "fake"

    def register(self, function: Callable[..., Any], *, allow_override: bool = True) -> None:
        """Makes `function` the fake kernel.

        Raises:
            RuleSignatureError: it does not take the operator's arguments.
            RuntimeError: there is one already and `allow_override` is false, or the operator
                decomposes into others, whose fake kernels are what counts.
        """
        definition = self.definition
        schema = definition.schema
        users_function = function
        if definition.structure is not None:
            from torchop._structure.rules import flat_fake

            function = flat_fake(definition, function)
        check_signature(
            f"{definition}: a fake kernel",
            function,
            (a.name for a in schema.positional),
            (a.name for a in schema.keyword_only),
        )
        if schema.form is not Form.PLAIN:
            warn(
                f"{definition} is tagged with {schema.form.value}, so it needs no fake kernel: "
                "what it returns is what it is given. The registered one is used all the same.",
                UserWarning,
            )
        with registration_lock:
            if not allow_override:
                self._refuse_override()
            if not self.in_meta:
                self._refuse_composite()
            self.replace(function)
            if definition.structure is not None:
                definition.structure.described_by(users_function)

    def replace(self, function: Callable[..., Any]) -> None:
        """Makes `function`, which is known to be right, the fake kernel."""
        self.update(self._install, function=function)

    def _install(self) -> None:
        definition = self.definition
        if not self.in_meta:
            self.install()
        # Pushed again each time, because PyTorch shows where the function stands.
        previous, hook = self.take_back, _fake_tensor_kernel(definition)
        assert self.function is not None
        self.take_back = _compat.push_fake(str(definition), hook, source_of(self.function))
        if previous is None:
            _compat.on_close(definition.library, self.retract)
            if definition.owned:
                definition.rule(EffectRule).watch()
        else:
            previous()

    def retract(self) -> None:
        if self.take_back is not None:
            self.take_back()
            self.take_back = None

    def _refuse_override(self) -> None:
        name = str(self.definition)
        source = _compat.fake_source(name)
        if source is not None:
            raise RuntimeError(
                f"register_fake: {name} already has a fake impl registered at {source}; pass "
                "allow_override=True to replace it."
            )
        if not self.in_meta and _compat.has_kernel(name, "Meta"):
            raise RuntimeError(
                f"register_fake: {name} already has a DispatchKey::Meta implementation; pass "
                "allow_override=True to replace it."
            )

    def _refuse_composite(self) -> None:
        if _compat.has_kernel(str(self.definition), "CompositeImplicitAutograd"):
            raise RuntimeError(
                f"register_fake: {self.definition} has a CompositeImplicitAutograd kernel, so it "
                "decomposes into other operators and needs no fake kernel; theirs are used."
            )


def source_of(function: Callable[..., Any]) -> str:
    """`file:line` of a function, for PyTorch's own messages."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else repr(function)


def _fake_tensor_kernel(definition: Definition) -> Callable[..., Any]:
    """What FakeTensor runs."""

    @_compat.never_traced
    def fake(*args: Any, **kwargs: Any) -> Any:
        mode = _compat.active_fake_mode()
        context = None if mode is None else _compat.FakeImplCtx(mode, definition.overload)
        with _entered(context or _NoContext(definition)):
            return _run(definition, args, kwargs)

    return fake


def _meta_kernel(definition: Definition) -> Callable[..., Any]:
    """What the dispatcher runs for meta tensors."""

    @_compat.never_traced
    def meta(*args: Any, **kwargs: Any) -> Any:
        with _entered(_NoContext(definition)):
            result = _run(definition, args, kwargs)
        for tensor in _outputs(result):
            if not _compat.is_fake(tensor):
                raise FakeKernelError(
                    f"{definition}: a meta tensor among the inputs made the fake kernel run, but "
                    f"it returned a tensor on {tensor.device}, which nothing ever computes. Put "
                    "all tensors on one device."
                )
        return result

    return meta


def _run(definition: Definition, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    fake = definition.plan[FakeRule]
    if fake.function is None:
        schema = definition.schema
        if schema.form is not Form.PLAIN:
            return returned_result(schema, args, kwargs)
        explained = schema.is_mutable or definition.plan[EffectRule] is not None
        if explained and _returns_nothing(definition):
            return None  # nothing is returned, so nothing has to be described
        raise _missing(definition)
    try:
        result = fake.function(*args, **kwargs)
    except Exception as error:
        if isinstance(error, InliningError) or not reads_data(error, definition.overload):
            raise
        raise _explain(definition, error) from error
    result = fake.check_result(result, definition, "fake kernel")
    _check_outputs(definition, args, kwargs, result)
    return result


def _check_outputs(
    definition: Definition, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
) -> None:
    schema = definition.schema
    if schema.is_view or schema.form is not Form.PLAIN or not definition.owned:
        return
    inputs = {id(tensor) for tensor in tensors_in((*args, *kwargs.values()))}
    traced = _compat.active_fake_mode() is not None
    for index, tensor in enumerate(_outputs(result)):
        if id(tensor) in inputs:
            # A compiler would take the output for the input and compute with the wrong one.
            raise AliasError(
                f"{definition}: output {index} of the fake kernel is one of its inputs. Every "
                "output must be a fresh tensor, it may not alias an input; describe it with "
                "torch.empty_like(x)."
            )
        if traced and not _compat.is_fake(tensor):
            raise FakeKernelError(
                f"{definition}: output {index} of the fake kernel is a real tensor, made outside "
                "it. Make the output inside the fake kernel, from the shapes of the inputs."
            )


def _outputs(result: Any) -> Iterator[torch.Tensor]:
    return tensors_in(result if isinstance(result, tuple) else (result,))


def _returns_nothing(definition: Definition) -> bool:
    structure = definition.structure
    return not definition.schema.returns and (structure is None or not structure.value_places)


def _missing(definition: Definition) -> MissingFakeError:
    missing = f"There was no fake impl registered for {definition}"
    if _returns_nothing(definition):
        return MissingFakeError(f"{missing}, nor an effect. {how_to_declare(definition)}")
    parameters, result = _suggested(definition)
    return MissingFakeError(
        f"{missing}. torch.compile, torch.export and FakeTensor need one, to know what the outputs "
        "look like without computing them:\n\n"
        f"    @torchop.register_fake({str(definition)!r})\n"
        f"    def _({parameters}):\n"
        f"        # with the shape, dtype, device and strides that the kernel returns\n"
        f"        return {result}\n"
    )


def _suggested(definition: Definition) -> tuple[str, str]:
    """The parameters of the fake kernel to write, and what it could return."""
    schema, structure = definition.schema, definition.structure
    paths: dict[str, str] = {}
    positional = [argument.name for argument in schema.positional]
    keyword_only = [argument.name for argument in schema.keyword_only]
    if structure is not None:  # the author knows objects, not the arguments they are taken apart to
        paths = {leaf.name: leaf.path for leaf in structure.leaves}
        positional = [p.name for p in structure.parameters if not p.keyword_only]
        keyword_only = [p.name for p in structure.parameters if p.keyword_only]
    parameters = ", ".join((*positional, *(["*", *keyword_only] if keyword_only else [])))
    if structure is not None and structure.result is not None:
        returned = inspect.signature(structure.function).return_annotation
        return parameters, f"...  # {spell(returned)}, as the kernel does"
    tensor = _suggested_tensor(schema, paths)
    outputs = {"Tensor": tensor, "List[Tensor]": f"[{tensor}]"}
    return parameters, ", ".join(outputs.get(kind, "...") for kind in schema.returns)


def _suggested_tensor(schema: Schema, paths: Mapping[str, str]) -> str:
    for argument in schema.arguments:
        name = paths.get(argument.name, argument.name)
        if argument.kind == "Tensor":
            return f"torch.empty_like({name})"
        if argument.is_tensor_list:
            return f"torch.empty_like({name}[0])"
    return "torch.empty(...)"


def _explain(definition: Definition, error: Exception) -> Exception:
    # What follows the first line is advice on PyTorch's own logs; it stays in the cause.
    reading = str(error).partition("\n")[0]
    message = (
        f"{definition}: the fake kernel read the data of a tensor ({reading}). It runs on tensors "
        "that have none: it may use shapes, dtypes and devices only. If the size of an output "
        "depends on data, make it with torchop.get_ctx().new_dynamic_size()."
    )
    data_dependent, dynamic_shape = _compat.data_dependent_errors()
    if isinstance(error, (data_dependent, dynamic_shape)):
        # Dynamo turns exactly these into a graph break, where one is allowed.
        return _compat.explained_tracing_error(type(error), definition.overload, message)
    return FakeKernelError(message)


# --------------------------------------------------------------------------------------------------
# The context that a fake kernel can ask for


class _NoContext:
    """The answer to `new_dynamic_size` where a size cannot depend on data."""

    def __init__(self, definition: Definition) -> None:
        self._definition = definition

    def new_dynamic_size(self, *, min: int = 0, max: int | None = None) -> Any:
        raise RuntimeError(
            f"{self._definition}: you're trying to run this operator with meta Tensors (as opposed "
            "to FakeTensors), but the size of its output depends on data. Use FakeTensorMode."
        )


class _Stack(threading.local):
    """The contexts of the fake kernels that run in this thread, the innermost last."""

    def __init__(self) -> None:
        self.contexts: list[Any] = []


_running = _Stack()


@contextlib.contextmanager
def _entered(context: Any) -> Iterator[None]:
    _running.contexts.append(context)
    try:
        yield
    finally:
        _running.contexts.pop()


def get_ctx() -> _compat.FakeImplCtx:
    """Returns the context of the fake kernel that is running in this thread.

    Its method `new_dynamic_size(*, min=0, max=None)` makes a size that depends on data, in
    elements.

    Raises:
        RuntimeError: no fake kernel is running.

    Example:
        >>> import torch, torchop
        >>> @torchop.custom_op("docs::nonzero", mutates_args=())
        ... def nonzero(x: torch.Tensor) -> torch.Tensor:
        ...     return torch.nonzero(x)
        >>> @nonzero.register_fake
        ... def _(x):
        ...     count = torchop.get_ctx().new_dynamic_size()
        ...     return x.new_empty([count, x.dim()], dtype=torch.int64)

    The idea is `torch.library.get_ctx`, whose context is one per process; this one is per thread.
    """
    if _running.contexts:
        context: _compat.FakeImplCtx = _running.contexts[-1]
        return context
    stock = _compat.stock_fake_context()
    if stock is None:
        raise RuntimeError(
            "get_ctx() was called outside a fake kernel; it is for functions that register_fake "
            "registered, while they run."
        )
    return stock


@overload
def register_fake(
    op: OpLike,
    func: None = None,
    /,
    *,
    lib: torch.library.Library | None = None,
    _stacklevel: int = 1,
    allow_override: bool = True,
) -> Callable[[Function], Function]: ...


@overload
def register_fake(
    op: OpLike,
    func: Function,
    /,
    *,
    lib: torch.library.Library | None = None,
    _stacklevel: int = 1,
    allow_override: bool = True,
) -> Function: ...


@overload
def register_fake(
    op: OpLike,
    /,
    *,
    like: Like = None,
    shape: Shape = None,
    dtype: DType = None,
    lib: torch.library.Library | None = None,
    _stacklevel: int = 1,
    allow_override: bool = True,
) -> None: ...


def register_fake(
    op: OpLike,
    func: Function | None = None,
    /,
    *,
    like: Like = None,
    shape: Shape = None,
    dtype: DType = None,
    lib: torch.library.Library | None = None,
    _stacklevel: int = 1,
    allow_override: bool = True,
) -> Function | Callable[[Function], Function] | None:
    """Registers the fake kernel of an operator: what its outputs look like.

    Args:
        op: the operator: a handle, `"ns::name"`, `"ns::name.overload"`, an `OpOverload`, or a
            packet with one overload.
        func: takes the operator's arguments and returns tensors with the shape, dtype, device,
            strides and storage offset that the kernel would return. It must not read data. Without
            it, and without a declaration, a decorator is returned.
        like: instead of `func`, the name of the argument that the output looks like, in everything
            that `shape` and `dtype` do not say; with several outputs, a tuple of names. For an
            output that is a list, the name of a list. By default the first Tensor.
        shape: a function that returns the shape of the output, a tuple of ints, from arguments of
            the operator, those that its parameters name. The output is contiguous then; otherwise
            it has the strides of `torch.empty_like`. With several outputs, a tuple of functions or
            None.
        dtype: of the output: a `torch.dtype`, or the name of an argument that is one or has one.
            With several outputs, a tuple of these or None.
        lib: the library whose lifetime the registration shares; by default it stays for good.
        allow_override: whether an existing fake kernel may be replaced.

    Returns:
        `func`, if there is one.

    Raises:
        OperatorNotFoundError: nobody defined the operator.
        RuleSignatureError: `func` does not take the operator's arguments, or the declaration does
            not fit its schema.
        RuntimeError: a fake kernel exists and may not be replaced, or the operator decomposes.

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

    The idea is `torch.library.register_fake`. `_stacklevel` is accepted and not needed: the source
    of a fake kernel is where its function stands.
    """
    rule = resolve(op, "register_fake", lib).rule(FakeRule)
    return register(rule, func, like, shape, dtype, allow_override=allow_override)


def register(
    rule: FakeRule,
    func: Function | None,
    like: Like,
    shape: Shape,
    dtype: DType,
    *,
    allow_override: bool = True,
) -> Function | Callable[[Function], Function] | None:
    """The shapes in which handles and `torchop.register_fake` take a fake kernel."""
    if like is None and shape is None and dtype is None:
        return decorator_or_call(
            lambda function: rule.register(function, allow_override=allow_override), func
        )
    if func is not None:
        raise RuleSignatureError(
            f"{rule.definition}: register_fake takes a function or a declaration (like, shape, "
            "dtype), not both. Let the function return what you declared."
        )
    from torchop._rules._declared_fake import declared  # which many programs do not need

    rule.register(declared(rule.definition, like, shape, dtype), allow_override=allow_override)
    return None


def impl_abstract(
    qualname: OpLike,
    func: Function | None = None,
    *,
    lib: torch.library.Library | None = None,
    _stacklevel: int = 1,
) -> Function | Callable[[Function], Function]:
    """The older name of `register_fake`, which PyTorch has deprecated.

    Warns:
        FutureWarning: use `register_fake`.

    The idea is `torch.library.impl_abstract`.
    """
    warn("impl_abstract was renamed to register_fake; use that.", FutureWarning)
    return register_fake(qualname, func, lib=lib)

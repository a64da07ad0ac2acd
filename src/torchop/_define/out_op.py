from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any, Generic, overload

import torch.library
from torch import Tensor
from typing_extensions import ParamSpec, TypedDict, TypeVar, Unpack  # Python 3.12 lacks some

from torchop._compat import compilers
from torchop._compat.classes import OpOverload
from torchop._core.declaration import Declaration, Site
from torchop._core.define import all_or_nothing, define
from torchop._core.definition import Definition
from torchop._core.lock import registration_lock
from torchop._core.registry import find_replaceable
from torchop._define.forms import schemas
from torchop._define.forms.derive import check_derivable, define_member
from torchop._define.forms.kernels import WritingKernels, empty_like
from torchop._define.handle import CustomOp
from torchop._define.maybe_out import maybe_out
from torchop._errors import SchemaError, naming, short_repr, users_place
from torchop._rules.autograd.formula import SetupContext
from torchop._rules.kernels.devices import DeviceTypes, known_devices
from torchop._rules.kernels.rule import KernelRule, fitted_kernel
from torchop._schema import kinds, signatures, types
from torchop._schema.callables import (
    Function,
    Lambda,
    check_callable,
    check_no_generator,
    check_signature,
    decorator_or_call,
)
from torchop._schema.declared import Tags, checked_tags, parsed_schema
from torchop._schema.forms import Form, form_of, returns_tensors
from torchop._schema.infer import infer_schema
from torchop._schema.naming import OpName
from torchop._schema.schema import Schema

Kernel = Callable[..., Any]
P = ParamSpec("P", default=...)
R = TypeVar("R", default=Any)  # the result of a kernel: a Tensor or a tuple of tensors


class Options(TypedDict, Generic[Function], total=False):
    like: str | None
    allocate: Function | Lambda | None
    inplace: bool
    elementwise: bool
    device_types: DeviceTypes
    tags: Tags
    lib: torch.library.Library | None


@overload
def out_op(
    name: str, fn: None = None, /, **options: Unpack[Options[Function]]
) -> Callable[[Callable[P, R | None]], OperatorFamily[P, R]]: ...


@overload
def out_op(
    name: str, fn: Callable[P, R | None], /, **options: Unpack[Options[Function]]
) -> OperatorFamily[P, R]: ...


@compilers.eager_only
def out_op(
    name: str,
    fn: Kernel | None = None,
    /,
    *,
    like: str | None = None,
    allocate: Function | Lambda | None = None,
    inplace: bool = False,
    elementwise: bool = False,
    device_types: DeviceTypes = None,
    tags: Tags = None,
    lib: torch.library.Library | None = None,
) -> Callable[[Kernel], OperatorFamily] | OperatorFamily:
    """Define the functional, out= and in-place forms of an operator from one kernel.

    The functional form `ns::name` allocates the results, the out= form `ns::name.out` writes them
    into tensors from the caller, and with `inplace=True`, the in-place form `ns::name_` overwrites
    the first argument. All forms share the same kernels, fake kernel and backward formula.

    Args:
        name: the name of the functional operator, `"namespace::name"` or
            `"namespace::name.overload"`.
        fn: the kernel. Its keyword-only parameters of type Tensor are the outputs: the kernel must
            write into all of them without reading them, and return either these tensors or None.
            The schema is inferred from the other parameters. An output may have any strides, but
            its shape, dtype and device are checked.
        like: the name of an argument with the same shape, dtype and device as all results. The
            results are allocated with `torch.empty_like` of this argument.
        allocate: a function that allocates the results, as an alternative to `like`. It takes the
            arguments without the outputs, and returns an empty tensor for each output. Since it is
            also the fake kernel, it must not read the data of tensors.
        inplace: whether to define the in-place form too.
        elementwise: whether the kernel reads each input element before it writes the output element
            at the same position. If so, callers may pass an input as an output, and the in-place
            form needs no temporary memory.
        device_types: the device types that the kernel supports. None means all.
        tags: a `torch.Tag` or several. All forms get these tags in addition to their own.
        lib: the library that owns the operators. By default, the operators live as long as the
            process.

    Returns:
        An `OperatorFamily` with the handles of the operators. Calling it runs the functional
        operator, or the out= operator if `out=` is given.

    Raises:
        ValueError: a name, an annotation, `like` or `allocate` is invalid. Nothing is defined.
        RuntimeError: an operator with one of the names exists, but torchop did not define it.

    Example:
        >>> import numpy as np, torch, torchop
        >>> @torchop.out_op("docs::sin", like="x", inplace=True, elementwise=True)
        ... def sin(x: torch.Tensor, *, out: torch.Tensor) -> None:
        ...     np.sin(x.numpy(), out=out.numpy())
        >>> x, buffer = torch.zeros(2), torch.ones(2)
        >>> sin(x)
        tensor([0., 0.])
        >>> sin(x, out=buffer) is buffer, buffer
        (True, tensor([0., 0.]))
        >>> sin.inplace(x) is x
        True
        >>> sin.out.schema
        docs::sin.out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)

    Modeled after PyTorch's structured kernels.
    """
    place = users_place()
    op_name = OpName.parse_new(name)
    with naming(op_name):
        all_tags = checked_tags(tags)
    if form_of(all_tags) is not Form.PLAIN:
        raise SchemaError(
            f"{op_name}: out_op adds the tags of the forms. Remove torch.Tag.inplace and "
            "torch.Tag.out."
        )
    if (like is None) is (allocate is None):
        raise SchemaError(
            f"{op_name}: out_op needs either like, the name of an argument for torch.empty_like, "
            "or allocate, a function that returns an empty tensor for each result."
        )

    if like is not None and not isinstance(like, str):
        raise SchemaError(
            f"{op_name}: like expects the name of an argument, got {short_repr(like)}."
        )

    def decorate(kernel: Kernel) -> OperatorFamily:
        check_callable(f"out_op({name!r})", kernel)
        check_no_generator(f"out_op({name!r})", kernel, None)
        with naming(op_name):
            devices = known_devices(device_types)
            signature, outputs = _split(op_name, kernel)
            text = infer_schema(_prototype(kernel, signature), mutates_args=(), tags=all_tags)
            schema = parsed_schema(op_name, text, all_tags)
        check_derivable(op_name, schema, Form.INPLACE if inplace else Form.OUT)
        like_index: Any = None if like is None else _like_index(op_name, schema, like)
        rule = allocate or functools.partial(empty_like, like_index, len(outputs))
        check_signature(f"{op_name}: allocate", rule, *schema.parameters)
        kernels = WritingKernels(
            op_name, schema, rule, outputs, elementwise=elementwise, like=like_index
        )
        site = Site.of(kernel, place)
        declaration = Declaration(
            op_name,
            schema,
            _with_signature(kernels.functional(kernel), signature),
            site,
            devices,
            all_tags,
            fake=rule,
        )
        forms = (Form.OUT, Form.INPLACE) if inplace else (Form.OUT,)
        names = {form: schemas.form_name(op_name, form) for form in forms}
        for member in (op_name, *names.values()):
            find_replaceable(OpName.parse_new(str(member)), site)

        def build() -> OperatorFamily:
            functional = define(declaration, lib)
            handles = {
                form: _define_form(functional, form, member, kernel, kernels, lib)
                for form, member in names.items()
            }
            # Let Inductor replace the functional form with a form that saves an allocation. The
            # out= form always saves an allocation. The in-place form does so only if the kernel is
            # elementwise, because otherwise it allocates a temporary result.
            for form in (Form.OUT, *[Form.INPLACE] * (inplace and elementwise)):
                _plan_outputs(functional, handles[form]._live())
            return OperatorFamily(
                functional.handle, handles[Form.OUT], handles.get(Form.INPLACE), kernels
            )

        return all_or_nothing(f"the family {op_name}", build)

    return decorate if fn is None else decorate(fn)


def _define_form(
    functional: Definition,
    form: Form,
    name: OpName,
    kernel: Kernel,
    kernels: WritingKernels,
    lib: torch.library.Library | None,
) -> Any:
    if form is Form.OUT:
        schema = schemas.out_schema(name, functional.schema, kernels.outputs)
        function = kernels.out(kernel)
    else:
        schema = schemas.inplace_schema(name, functional.schema)
        function = kernels.inplace(kernel, name, schema)
    guard = kernels.guard(name, schema)
    devices, tags = functional.declaration.devices, functional.declaration.tags
    return define_member(
        functional, name, schema, function, guard, lib, devices=devices, tags=tags
    ).handle


# `torchop/__init__.py` sets this hook to the function `plan` of `_compat/planned_outputs.py`, which
# registers the in-place and out= forms of an operator with Inductor. This package must not import
# that module.
plan_outputs: Callable[[str, str, Callable[[], Any]], Callable[[], None]] | None = None


def _plan_outputs(functional: Definition, form: Definition) -> None:
    """Let Inductor replace the functional operator with its out= or in-place form."""
    # Inductor's table of replacements stores the function `overload` below. Hold only weak
    # references in it, because strong references would keep the operators alive forever.
    members = weakref.ref(functional), weakref.ref(form)

    def overload() -> OpOverload | None:
        alive = [
            member for ref in members if (member := ref()) and member.deregistration_reason is None
        ]
        if len(alive) < 2 or _kernels_of(alive[0]) != _kernels_of(alive[1]):
            return None  # different kernels might compute different results
        return alive[1].overload

    if plan_outputs is not None:
        remove = plan_outputs(str(functional), str(form), overload)
        with registration_lock:
            functional.registered.add(f"planned outputs of {form}", None, remove)


def _kernels_of(form: Definition) -> object:
    """Return the kernels of an operator by device, to compare them with another form's kernels."""
    rule = form.rule(KernelRule)
    if rule.providers is not None or rule.switches:
        # Each call chooses one of several kernels, so two forms may run different kernels. Return
        # the form itself, which never compares equal to the result for another form.
        return form
    return {device: inspect.unwrap(kernel) for device, kernel in rule.functions.items()}


def _split(name: OpName, kernel: Kernel) -> tuple[inspect.Signature, tuple[str, ...]]:
    signature = signatures.signature(kernel)
    where = f"{name}: {signatures.spell_function(kernel)}"
    outputs = []
    for parameter in signature.parameters.values():
        if parameter.kind is not parameter.KEYWORD_ONLY or "Tensor" not in (
            kinds.argument_type(parameter.annotation) or ""
        ):
            continue
        if parameter.annotation is not Tensor or parameter.default is not parameter.empty:
            raise SchemaError(
                f"{where}: the keyword-only parameter {parameter.name!r} is an output, so it must "
                "be a Tensor without default. If the caller passes no output, the family allocates "
                "one."
            )
        outputs.append(parameter.name)
    if not outputs:
        raise SchemaError(
            f"{where} has no output: the kernel of out_op writes into keyword-only parameters of "
            f"type Tensor, such as (x: Tensor, *, out: Tensor) -> None. It has {signature}."
        )
    returned = signature.return_annotation
    if returned not in (None, type(None)) and not returns_tensors(returned, len(outputs)):
        raise SchemaError(
            f"{where}: the return annotation must be None, or "
            f"{'Tensor' if len(outputs) == 1 else 'a tuple with one Tensor each'} for the outputs "
            f"{', '.join(outputs)}; got {types.spell(returned)}."
        )
    inputs = [p for p in signature.parameters.values() if p.name not in outputs]
    results = Tensor if len(outputs) == 1 else tuple[(Tensor,) * len(outputs)]  # type: ignore[misc]
    return signature.replace(parameters=inputs, return_annotation=results), tuple(outputs)


def _prototype(kernel: Kernel, signature: inspect.Signature) -> Kernel:
    """Return a stub function with the given signature and the kernel's name.

    The stub is never called. torchop only reads its signature, and error messages contain its name.
    """

    @functools.wraps(kernel)
    def prototype() -> None: ...

    return _with_signature(prototype, signature)


def _with_signature(function: Kernel, signature: inspect.Signature) -> Kernel:
    function.__signature__ = signature  # type: ignore[attr-defined]
    return function


def _like_index(name: OpName, schema: Schema, like: str) -> int:
    places = {a.name: place for place, a in enumerate(schema.positional) if a.kind == "Tensor"}
    if like not in places:
        raise SchemaError(
            f"{name}: like={short_repr(like)} is not a Tensor argument; the Tensor arguments are "
            f"{', '.join(places) or 'none'}. Use allocate for other results."
        )
    return places[like]


class OperatorFamily(Generic[P, R]):
    """The functional, out= and in-place forms of an operator that `torchop.out_op` defined.

    Calling the family runs the functional operator, or the out= operator if `out=` is given.

    Attributes:
        functional: the operator that allocates the results, a `CustomOp`.
        out: the operator that writes the results into the caller's tensors, a `CustomOp`.
        inplace: the operator that overwrites its first argument, a `CustomOp`. None if `out_op` was
            called without `inplace=True`.

    Example:
        >>> import torch, torchop
        >>> @torchop.out_op("docs::cube", like="x", inplace=True)
        ... def cube(x: torch.Tensor, *, out: torch.Tensor) -> None:
        ...     out.copy_(x**3)
        >>> cube
        <torchop.OperatorFamily docs::cube, docs::cube.out, docs::cube_>
        >>> x, buffer = torch.tensor([2.0]), torch.empty(1)
        >>> cube(x), cube(x, out=buffer) is buffer, cube.inplace(x)
        (tensor([8.]), True, tensor([8.]))
    """

    def __init__(
        self,
        functional: CustomOp[..., R],
        out: CustomOp[P, R],
        inplace: CustomOp[..., Any] | None,
        kernels: WritingKernels,
    ) -> None:
        self.functional = functional
        self.out = out
        # The annotation includes `Any`. With `CustomOp | None`, type checkers would make users
        # check for None even if they passed inplace=True.
        self.inplace: CustomOp[..., Any] | Any = inplace
        self._kernels = kernels
        vars(functional)["_family"] = self  # read by `__reduce__`
        self._function: Callable[..., R] = maybe_out(functional, out)
        for attribute in ("__name__", "__qualname__", "__module__", "__doc__", "__signature__"):
            setattr(self, attribute, getattr(self._function, attribute))

    @overload
    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R: ...
    @overload
    def __call__(self, /, *args: Any, **kwargs: Any) -> R: ...
    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.functional, "_family")

    def __repr__(self) -> str:
        members = (self.functional, self.out, self.inplace)
        names = ", ".join(member.name for member in members if member is not None)
        return f"<torchop.OperatorFamily {names}>"

    @compilers.eager_only
    def register_kernel(
        self, device_types: DeviceTypes, fn: Function | Lambda | None = None, /
    ) -> Function:
        """Register a kernel for all forms. As in `out_op`, it must write into the outputs.

        To register a kernel for just one form, use the handle of that form, as in
        `family.functional.register_kernel("cuda", ...)`.

        Args:
            device_types: the device types that the kernel supports. None means all.
            fn: the kernel. Omit it to use `register_kernel` as a decorator.

        Returns:
            `fn`.
        """
        return decorator_or_call(lambda kernel: self._register_kernel(device_types, kernel), fn)

    def _register_kernel(self, device_types: DeviceTypes, kernel: Callable[..., Any]) -> None:
        kernels, inplace = self._kernels, self.inplace
        kernel = fitted_kernel(self.out._live(), kernel)
        with registration_lock:
            self.functional.register_kernel(device_types, kernels.functional(kernel))
            self.out.register_kernel(device_types, kernels.out(kernel))
            if inplace is not None:
                own = inplace._live()
                inplace.register_kernel(device_types, kernels.inplace(kernel, own.name, own.schema))

    @compilers.eager_only
    def register_autograd(
        self,
        backward: Function | Lambda | None = None,
        /,
        *,
        setup_context: SetupContext | None = None,
    ) -> Function:
        """Register the backward formula of the functional and the in-place operator.

        As in PyTorch, the out= operator does not support autograd: it raises an error for tensors
        that require grad.

        Args:
            backward: see `torchop.register_autograd`. Omit it to use this method as a decorator.
            setup_context: see `torchop.register_autograd`.

        Returns:
            `backward`.
        """
        return self.functional.register_autograd(backward, setup_context=setup_context)

"""operator: an operator described by a class, all its rules in one place.

A thin front. The class is read and checked first; then `custom_op` defines the operator, and the
methods of the handle register its rules, as a user would call them.
"""

from __future__ import annotations

import contextlib
import typing
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

import torch.library

from torchop import _naming
from torchop._define import custom_op
from torchop._define_operator import check_home
from torchop._operator import CustomOp
from torchop._plan import registration_lock

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

if TYPE_CHECKING:  # for checkers alone: a Protocol takes a while to make
    from torchop._class_plan import ClassPlan

    class _WithForward(Protocol[P, R_co]):
        @staticmethod
        def forward(*args: P.args, **kwargs: P.kwargs) -> R_co: ...

    class _WithSignature(Protocol[P, R_co]):
        @staticmethod
        def signature(*args: P.args, **kwargs: P.kwargs) -> R_co: ...

    class OperatorDecorator(Protocol):
        """What `operator` returns: for type checkers, who see the signature of the handle in it."""

        # The overloads overlap: a checker takes the first that fits, as we mean it.
        @typing.overload
        def __call__(self, cls: type[_WithForward[P, R]], /) -> CustomOp[P, R]: ...  # type: ignore[overload-overlap]
        @typing.overload
        def __call__(self, cls: type[_WithSignature[P, R]], /) -> CustomOp[P, R]: ...  # type: ignore[overload-overlap]
        @typing.overload
        def __call__(self, cls: type[object], /) -> CustomOp[..., Any]: ...


def operator(name: str, /, *, lib: torch.library.Library | None = None) -> OperatorDecorator:
    """Makes an operator of a class whose members are its kernels and rules.

    The result is the same handle that `custom_op` makes: the class is only read. Members whose
    names start with an underscore are the author's own. Base classes are read too, so that
    operators can share rules; None in place of a member takes back that of a base class.

    Args:
        name: `"namespace::name"` or `"namespace::name.overload"`.
        lib: the library that the operator lives in; by default it lives as long as the process.

    The members are static functions, if nothing else is said:

    - `forward`: the kernel for every device. Its annotations give the schema.
    - `cpu`, `cuda` and any other device type: the kernel for it. Without `forward`, the schema is
      that of the function `signature`, which is never run, or the string `schema`.
    - `fake`, `backward` and `jvp` with `setup_context`, `vmap`: as in the methods `register_...`.
      `fake` may be a dict with a declaration instead, `backward` may be `torchop.derived`, and
      `vmap` may be `"sequential"`.
    - `opaque`: True beside a `backward` that cannot be traced.
    - `autocast`: a dtype, or a dict of dtypes by device type; `torch_dispatch`: a dict of functions
      by mode or subclass.
    - `inplace`, `out`: True, or a name: also derives this form. It is an attribute of the handle.
    - `examples`: yields sample inputs, each a tuple of arguments or a dict by name, for `opcheck`.
    - `inverse`, `right_inverse`, `flop_formula`, `checkpoint_policy`, and every other
      `torchop.Rule`, by its name.
    - `mutates_args` (none by default), `schema`, `tags`, `effects`, `compile`: as in `custom_op`.

    Returns:
        A decorator, whose result is the `CustomOp`.

    Raises:
        OperatorClassError: a `TypeError`: a member that is no rule, is not static, or is missing.
            Nothing is defined.
        TypeError, ValueError: what `custom_op` and the registrations say. The name is free again.

    Example:
        >>> import torch, torchop
        >>> @torchop.operator("docs::halved")
        ... class halved:
        ...     '''Halves a tensor.'''
        ...
        ...     @staticmethod
        ...     def forward(x: torch.Tensor) -> torch.Tensor:
        ...         return x / 2
        ...
        ...     @staticmethod
        ...     def fake(x):
        ...         return torch.empty_like(x)
        ...
        ...     @staticmethod
        ...     def inverse(output):
        ...         return output * 2
        >>> halved(torch.ones(2))
        tensor([0.5000, 0.5000])
        >>> torchop.inverse(halved)(torch.ones(2))
        tensor([2., 2.])

    The idea is `torch.autograd.Function`.
    """
    op_name = _naming.check_new(name)
    check_home(op_name, lib)

    def define(cls: Any) -> CustomOp[..., Any]:
        from torchop._class_plan import read_class  # which only classes need

        plan = read_class(str(op_name), cls)
        with registration_lock:  # a class is defined as a whole
            return _execute(plan, lib)

    return typing.cast("OperatorDecorator", define)


def _execute(plan: ClassPlan, lib: torch.library.Library | None) -> CustomOp[..., Any]:
    from torchop._members import MEMBERS

    op: CustomOp[..., Any] = custom_op(
        plan.name,
        plan.function,
        device_types=None if plan.has_default_kernel else (),
        lib=lib,
        **{"mutates_args": (), **plan.attributes},
    )
    with _undone_on_failure(op):
        for device, kernel in plan.kernels.items():
            op.register_kernel(device, kernel)
        for rule, value in plan.rules.items():
            op.register(rule, value)
        for name, member in MEMBERS.items():
            if name in plan.members and member.registers is not None:
                member.registers(op, plan.members[name], plan.members)
    return op


@contextlib.contextmanager
def _undone_on_failure(op: CustomOp[..., Any]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        for form in (op.inplace, op.out, op):
            if form is not None:
                form._definition.close(f"The definition of {op.name} failed.")
        raise

"""The members that a class decorated with `torchop.operator` may have, such as `forward`.

To support another member, add an entry to `MEMBERS`. Kernels (`cpu`, `cuda` and so on) and
instances of `torchop.Rule` need no entry, because they are found by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from torchop._compat import autocasting, dispatch
from torchop._core.user_rule import reserved_names, rule_names
from torchop._define.handle import CustomOp
from torchop._errors import short_repr
from torchop._rules.autocast import POLICIES
from torchop._rules.autograd.formula import Derived

# A function that registers a member's value. It receives the operator's handle, the value, and all
# members of the class, because some registrations combine several members.
Registers = Callable[["CustomOp[..., Any]", Any, Mapping[str, Any]], object]


class Member(NamedTuple):
    """A member that a class decorated with `torchop.operator` may have.

    Attributes:
        registers: registers the member's value with the operator. None if the registration of
            another member uses the value.
        takes: a phrase for error messages that describes the valid values.
        accepts: returns whether a value is valid. It receives a static method as a plain function.
        needs: the class must have at least one of these other members. Empty if the member works
            alone.
    """

    registers: Registers | None = None
    takes: str = "a static function"
    accepts: Callable[[Any], bool] = callable
    needs: tuple[str, ...] = ()


def _register_fake(op: CustomOp[..., Any], fake: Any, members: Mapping[str, Any]) -> object:
    return op.register_fake(**fake) if isinstance(fake, Mapping) else op.register_fake(fake)


def _register_backward(op: CustomOp[..., Any], backward: Any, members: Mapping[str, Any]) -> object:
    if isinstance(backward, Derived):
        op.derive_autograd()
        return None
    return op.register_autograd(
        backward,
        setup_context=members.get("setup_context"),
        contiguous_grads=members.get("contiguous_grads", False),
    )


def _register_autocast(op: CustomOp[..., Any], dtypes: Any, members: Mapping[str, Any]) -> None:
    if isinstance(dtypes, (torch.dtype, str)):
        dtypes = dict.fromkeys(autocasting.device_types(), dtypes)
    for device, dtype in dtypes.items():
        op.register_autocast(device, dtype)


def _register_torch_dispatch(
    op: CustomOp[..., Any], functions: Any, members: Mapping[str, Any]
) -> None:
    for cls, function in functions.items():
        op.register_torch_dispatch(cls, getattr(function, "__func__", function))


def _register_providers(op: CustomOp[..., Any], providers: Any, members: Mapping[str, Any]) -> None:
    for name, options in providers.items():
        if not isinstance(options, Mapping) or not {"device_types", "function"} <= options.keys():
            raise TypeError(
                f"{op.name}: the member 'providers' must map each provider to a dict with "
                "device_types, function and other arguments of register_kernel, such as "
                "{'triton': {'device_types': 'cuda', 'function': kernel}}; got "
                f"{short_repr(options)} for {short_repr(name)}."
            )
        options = dict(options)
        devices, kernel = options.pop("device_types"), options.pop("function")
        op.register_kernel(devices, getattr(kernel, "__func__", kernel), provider=name, **options)


def _form(method: str, what: str) -> Member:
    def derive(op: CustomOp[..., Any], name: Any, members: Mapping[str, Any]) -> object:
        return name is False or getattr(op, method)(None if name is True else name)

    takes = f"True, or the name of the {what}"
    return Member(derive, takes, lambda value: isinstance(value, (bool, str)))


# Members are registered in this order.
MEMBERS: Mapping[str, Member] = {
    "forward": Member(),
    "signature": Member(),
    "fake": Member(
        _register_fake,
        "a static function, or a dict with a declaration: like, shape, dtype, memory_format",
        lambda value: callable(value) or isinstance(value, Mapping),
    ),
    "setup_context": Member(needs=("backward", "jvp")),
    "backward": Member(
        _register_backward,
        "a static function, or torchop.derived",
        lambda value: callable(value) or isinstance(value, Derived),
    ),
    "backward_kernel": Member(
        lambda op, kernel, rest: op.register_autograd(
            rest.get("backward"),
            backward_kernel=kernel,
            contiguous_grads=rest.get("contiguous_grads", False),
        )
    ),
    "contiguous_grads": Member(
        takes="True, for a backward that gets contiguous gradients, or False",
        accepts=lambda value: isinstance(value, bool),
        needs=("backward", "backward_kernel"),
    ),
    "jvp": Member(
        lambda op, jvp, members: op.register_jvp(jvp, setup_context=members.get("setup_context"))
    ),
    "vmap": Member(
        lambda op, vmap, members: op.register_vmap(vmap),
        'a static function, or "sequential"',
        lambda value: callable(value) or value == "sequential",
    ),
    "autocast": Member(
        _register_autocast,
        'a dtype, a policy such as "low_precision", or a dict of these by device type',
        lambda value: isinstance(value, (torch.dtype, Mapping)) or value in POLICIES,
    ),
    "layouts": Member(
        lambda op, layouts, members: op.register_layout(**layouts),
        "a dict of layouts by argument",
        lambda value: isinstance(value, Mapping),
    ),
    "providers": Member(
        _register_providers,
        "a dict with a dict of the arguments of register_kernel for each provider",
        lambda value: isinstance(value, Mapping),
    ),
    "torch_dispatch": Member(
        _register_torch_dispatch,
        "a dict of functions by mode or Tensor subclass",
        lambda value: isinstance(value, Mapping),
    ),
    "examples": Member(
        lambda op, examples, members: op.register_examples(examples, valid=members.get("valid"))
    ),
    "valid": Member(needs=("examples",)),
    "inplace": _form("derive_inplace", "in-place operator"),
    "out": _form("derive_out", "operator with out="),
}
# The attributes of an operator class that are passed to `custom_op` as options.
ATTRIBUTES = ("mutates_args", "schema", "tags", "effects", "compile", "priority", "residuals")


def is_device_type(name: str) -> bool:
    """Return whether a name is a device type, such as "cuda".

    In an operator class, a member with such a name is the kernel for that device type.
    """
    try:
        dispatch.dispatch_key_name(name)
    except RuntimeError:
        return False
    return True


def is_reserved(name: str) -> bool:
    """Return whether a member or method already uses this name, so no `torchop.Rule` may use it."""
    is_member = name in MEMBERS or name in ATTRIBUTES or is_device_type(name)
    return is_member or hasattr(CustomOp, f"register_{name}")


def known_names() -> list[str]:
    return [*MEMBERS, *ATTRIBUTES, *rule_names(), "cpu", "cuda", "mps", "xpu", "meta"]


reserved_names.append(is_reserved)

"""The layout rule: calls copy arguments whose strides the kernel does not support.

Copies are made above autograd, so backward formulas and fake kernels receive the copied arguments
too, and a compiler's trace contains the copies. Native calls (without the dispatcher) check their
arguments in C++, and fall back to `LayoutRule.kernel` if an argument must be copied.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch.library
from torch import Tensor

from torchop._compat import compilers, dispatch, functorch
from torchop._compat.classes import DispatchKey, DispatchKeySet
from torchop._core.call import Call, map_tensors
from torchop._core.definition import NOTHING, CompiledRule, Definition
from torchop._core.lock import registration_lock
from torchop._core.registry import OpLike, op_name, own_definition, resolve
from torchop._errors import ArgumentError
from torchop._schema.layouts import Layout, check_layouts
from torchop._schema.schema import Argument

# Copies the arguments of a call that do not have the declared layout. Returns all arguments, or
# None if nothing was copied.
Arrange = Callable[[tuple[Any, ...], Mapping[str, Any]], "Call | None"]


class LayoutRule(CompiledRule["Arrange | None"]):
    """The layouts that an operator declares for its arguments."""

    layouts: Mapping[str, Layout] = NOTHING

    def compile(self) -> Arrange | None:
        layouts = self.layouts
        return functools.partial(_arrange, self.definition, layouts) if layouts else None

    def cache_parts(self) -> Iterator[object]:
        yield sorted((name, layout.name) for name, layout in self.layouts.items())

    def repr_text(self) -> str | None:
        parts = [f"{name}: {layout.name}" for name, layout in self.layouts.items()]
        return "layouts " + ", ".join(parts) if parts else None

    def register(self, layouts: Mapping[str, Layout]) -> None:
        from torchop._rules.autograd.checks import check_replaces_no_gradient  # circular

        definition = self.definition
        check_layouts(definition.schema, layouts)
        if not definition.is_ours and "Autograd" not in definition.registered:
            check_replaces_no_gradient(definition)
        with registration_lock:
            self.update(self._install, layouts={**self.layouts, **layouts})

    def install(self) -> None:
        self.definition.implement("Autograd", self.kernel, with_keyset=True)

    def _install(self) -> None:
        # Install the kernel again on every registration, because `OwnCalls._bypass_kernels` may
        # have replaced it since the last one.
        self.install()
        definition = self.definition
        if not definition.is_ours and "BackendSelect" not in definition.registered:
            # The dispatcher skips the Autograd key in inference mode, so install a kernel at
            # BackendSelect too.
            definition.implement("BackendSelect", self._select, with_keyset=True)

    @compilers.never_traced
    def kernel(self, keyset: DispatchKeySet, /, *args: Any, **kwargs: Any) -> Any:
        from torchop._rules.autograd.rule import AutogradRule  # circular

        definition = self.definition
        arrange = definition.compiled(LayoutRule)
        if arrange is not None and (copied := arrange(args, kwargs)) is not None:
            args, kwargs = copied
            if arrange(args, kwargs) is None:
                # With the copies, the call may now run without the dispatcher, so call the operator
                # again. PyTorch's composite operators call other operators in the same way.
                return definition.overload(*args, **kwargs)
        return definition.rule(AutogradRule).kernel(keyset, *args, **kwargs)

    @compilers.never_traced
    def _select(self, keyset: DispatchKeySet, /, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = arranged(self.definition.compiled(LayoutRule), args, kwargs)
        keyset = keyset.remove(DispatchKey.BackendSelect)
        return dispatch.redispatch(self.definition.overload, keyset, args, kwargs)


def _arrange(
    definition: Definition,
    layouts: Mapping[str, Layout],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Call | None:
    is_changed = False

    def copied(argument: Argument, tensor: Tensor) -> Tensor:
        nonlocal is_changed
        layout = layouts.get(argument.name)
        # Skip wrapped tensors, because the innermost transform calls the operator again with
        # unwrapped ones.
        if layout is None or functorch.is_wrapped(tensor):
            return tensor
        try:
            if layout.fits(tensor):
                return tensor
            if not argument.is_mutated:
                is_changed = True
                return layout.copied(tensor)
        except ArgumentError as error:
            raise ArgumentError(f"{definition}: argument {argument.name!r}: {error}") from None
        raise _does_not_fit(definition, argument, layout, tensor)

    call = map_tensors(definition.schema, args, kwargs, copied)
    return call if is_changed else None


def _does_not_fit(
    definition: Definition, argument: Argument, layout: Layout, tensor: Tensor
) -> ArgumentError:
    return ArgumentError(
        f"{definition}: argument {argument.name!r} must be {layout.name}, because the kernel "
        f"writes into it, but it has the shape {tuple(tensor.shape)} and the strides "
        f"{tensor.stride()}. Write into a {layout.name} tensor, and copy the result back "
        "with copy_()."
    )


def arranged(arrange: Arrange | None, args: Any, kwargs: Any) -> Call:
    """Return the arguments of a call in the declared layouts, copying them if necessary."""
    return (arrange and arrange(args, kwargs)) or (args, kwargs)


def layouts_of(op: OpLike) -> Mapping[str, Layout]:
    found = own_definition(op, op_name(op, "layouts_of"))
    return NOTHING if found is None else found.rule(LayoutRule).layouts


def install(definition: Definition) -> None:
    """Install the layout kernel if a new operator declares layouts.

    This must run before the installer of the autograd rule, which installs no kernel if the
    Autograd key already has one. The layout kernel then calls the autograd rule's kernel itself.
    """
    layouts = definition.declaration.layouts
    if layouts:
        rule = definition.rule(LayoutRule)
        rule.layouts = layouts
        rule.install()


def register_layout(
    op: OpLike, /, *, lib: torch.library.Library | None = None, **layouts: Layout
) -> None:
    """Declare the memory layouts that an operator's kernels require for tensor arguments.

    If a call passes an argument with different strides, the kernels, the fake kernel and the
    backward formula receive a copy, which is also part of compiled graphs. If the operator mutates
    this argument, the call raises `ArgumentError` instead, because a kernel cannot write into the
    caller's tensor through a copy.

    For an operator defined with `custom_op`, annotate the parameter instead:
    `x: Annotated[Tensor, torchop.contiguous]`.

    Args:
        op: the operator, as its handle (the object that `custom_op` returned), `"ns::name"`,
            `"ns::name.overload"`, an `OpOverload`, or a packet with one overload.
        lib: the library that owns the registration, so that closing it removes the registration. By
            default, the registration is permanent.
        layouts: `torchop.contiguous` or `torchop.channels_last` for each argument, by name. For a
            list of tensors, the layout applies to all items.

    Raises:
        OperatorNotFoundError: the operator is not defined.
        RuntimeError: the operator has an autograd kernel of another library.
        SchemaError: an argument is not a tensor, or a value is not a layout.

    Example:
        >>> import torch, torchop
        >>> torchop.define("docs::flatten", "(Tensor x) -> Tensor")
        >>> _ = torchop.impl("docs::flatten", "default", lambda x: x.view(-1) + 0)
        >>> torchop.register_layout("docs::flatten", x=torchop.contiguous)
        >>> torch.ops.docs.flatten(torch.arange(4).view(2, 2).t())
        tensor([0, 2, 1, 3])
    """
    resolve(op, "register_layout", lib).rule(LayoutRule).register(layouts)

"""Apply an operator's vmap rule to its training form `name__with_residuals`.

The training form is a helper operator that also returns the operator's residuals (kernel outputs
that only the backward pass uses). The vmap rule calls the operator with the whole batch. If this
call records a gradient, this module collects the residuals, and the rule must return their batch
dimensions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from torchop._core.call import as_tuple
from torchop._errors import MissingFakeError, ResultError
from torchop._rules.residuals.handover import requested
from torchop._rules.vmap.rule import SEQUENTIAL, VmapRule
from torchop._rules.vmap.sequential import result_of_one, with_dims

# The default vmap rule of the helper operator `name__with_residuals`. It equals "sequential" but is
# a separate object, so that `follow` can distinguish it from a rule "sequential" that the user
# registered.
_BY_DEFAULT: Any = type("Default", (str,), {})(SEQUENTIAL)


def follow(form: Any) -> None:
    """Derive the vmap rule of `name__with_residuals` from the operator's own vmap rule.

    This helper operator also returns residuals (kernel outputs for the backward pass). Do nothing
    if the user has registered a vmap rule for it.
    """
    rule = form.helper.rule(VmapRule)
    if rule.function is form.vmap_rule:
        is_function = callable(form.definition.rule(VmapRule).function)
        rule.register(_rule(form) if is_function else _BY_DEFAULT)
        form.vmap_rule = rule.function


def _rule(form: Any) -> Callable[..., Any]:
    definition, declared = form.definition, form.declared
    # The calls whose batch dimensions were already checked. Each check runs the fake kernel, so the
    # same call is not checked twice.
    checked: set[Any] = set()

    def rule(info: Any, in_dims: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        of_operator: Any = definition.plan[VmapRule]
        calls = Calls(form)

        def call() -> Any:
            with calls:
                return of_operator(info, in_dims, *args, **kwargs)

        (output, dims), request = requested(declared, call)
        names, dims_of_saved = declared.named._fields, request.saved or ()
        if len(dims_of_saved) != len(names) or len(calls.saved) != 1:
            raise ResultError(
                f"{definition}: the vmap rule must call the operator once and return the batch "
                "dimensions of the residuals, because the call records a gradient. Return "
                f"torchop.residuals((output, out_dims), {', '.join(names)}), with a dimension or "
                f"None for each residual. The rule called the operator {len(calls.saved)} times "
                f"and returned {len(dims_of_saved)} of {len(names)} dimensions. Or register a vmap "
                f"rule for {str(form.helper)!r} that also returns the residuals, or "
                f"{SEQUENTIAL!r} to run the kernel for each element."
            )
        saved: Any = dims_of_saved if len(names) > 1 else dims_of_saved[0]
        if declared.structure is not None:
            saved = declared.structure.spread_result(saved)
        saved = as_tuple(declared.schema, saved)
        key = _shapes((definition.plan, args, in_dims, (*kwargs.items(),), calls.saved[0], saved))
        try:
            hash(key)
        except TypeError:  # for example, the key contains symbolic sizes
            key = None
        if key is None or key not in checked:
            _check_dims(form, [*map(with_dims, args, in_dims)], kwargs, calls.saved[0], saved)
            if len(checked) > 1000:
                checked.clear()
            checked.add(key)
        all_dims = (*as_tuple(definition.schema, dims), *saved)
        return (*as_tuple(definition.schema, output), *calls.saved[0]), all_dims

    return rule


def _check_dims(form: Any, args: Any, kwargs: Any, saved: Any, dims: Any) -> None:
    """Raise if the batch dimensions of residuals are wrong.

    Residuals are extra kernel outputs for the backward pass. If the vmap rule returned None as the
    batch dimension of a batched residual, autograd would sum gradients over the batch. To find this
    mistake, run the fake kernel on one element of the batch, and check that each batched residual
    has one more dimension than the fake kernel's residual.
    """
    op, names = form.definition, form.declared.named._fields
    try:
        elements = form.split(result_of_one(form.helper, args, kwargs))[1]
    except MissingFakeError:
        elements = (None,) * len(saved)
    for index, values in enumerate(zip(saved, dims, elements, strict=False)):
        name = repr(names[index]) if form.declared.structure is None else f"number {index}"
        value, dim, element = values
        lists = [x if isinstance(x, (list, tuple)) else [x] * _length(value) for x in values]
        for value, dim, element in zip(*lists, strict=False):
            if not isinstance(value, Tensor) or (element is None and dim is not None):
                continue
            if element is None:
                raise MissingFakeError(
                    f"{op}: the vmap rule returns None as the batch dimension of the residual "
                    f"{name}. Checking this requires a fake kernel: register one with "
                    f"torchop.register_fake({str(op)!r}, fake), or register the vmap rule "
                    f"{SEQUENTIAL!r}."
                )
            if value.dim() - element.dim() != (dim is not None):
                raise ResultError(
                    f"{op}: the vmap rule returns {dim} as the batch dimension of the residual "
                    f"{name} of shape {list(value.shape)}. For one element, the fake "
                    f"kernel returns shape {list(element.shape)}. Return None if both have the "
                    "same number of dimensions, and the batch dimension otherwise, in "
                    f"torchop.residuals((output, out_dims), {', '.join(names)}); or correct the "
                    "fake kernel."
                )


def _shapes(values: Any) -> Any:
    if isinstance(values, Tensor):
        return tuple(values.shape)
    return tuple(map(_shapes, values)) if isinstance(values, (list, tuple)) else values


def _length(value: Any) -> int:
    return len(value) if isinstance(value, (list, tuple)) else 1


class Calls(TorchFunctionMode):
    """A mode that calls `name__with_residuals` instead of `name` and collects the residuals.

    `name__with_residuals` is the helper operator that also returns the residuals, i.e. kernel
    outputs for the backward pass. A `TorchFunctionMode` intercepts a call before transforms, other
    modes and autograd, so all of these see a call to `name__with_residuals`.
    """

    def __init__(self, form: Any) -> None:
        super().__init__()
        self.form = form
        self.saved: list[tuple[Any, ...]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        overload = self.form.definition.overload
        packet = overload.overloadpacket
        if func is not overload and not (func is packet and len(packet.overloads()) == 1):
            return func(*args, **(kwargs or {}))
        output, saved = self.form(args, kwargs or {})
        self.saved.append(saved)
        return output

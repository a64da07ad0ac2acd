"""vmap: what the rule of an operator does with its training form.

A rule calls the operator with the whole batch. Where a gradient is recorded, that call is one of
the training form, whose residuals are mapped over too, in dimensions that only the author knows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from torchop._errors import MissingFakeError, ResultError
from torchop._rules.residuals.handover import as_tuple, requested
from torchop._rules.vmap.rule import SEQUENTIAL, VmapRule
from torchop._rules.vmap.sequential import result_of_one, with_dims

# "sequential", if the operator has no vmap function. A distinct object, so that it is not confused
# with a rule that an author registered for the training form.
_BY_DEFAULT: Any = type("Default", (str,), {})(SEQUENTIAL)


def follow(form: Any) -> None:
    """Register the operator's vmap rule for its training form, unless an author registered one."""
    rule = form.companion.rule(VmapRule)
    if rule.function is form.vmap_rule:
        is_function = callable(form.definition.rule(VmapRule).function)
        rule.register(_rule(form) if is_function else _BY_DEFAULT)
        form.vmap_rule = rule.function


def _rule(form: Any) -> Callable[..., Any]:
    definition, declared = form.definition, form.declared
    checked: set[Any] = set()  # calls with correct dimensions; a fake kernel takes milliseconds

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
                f"{definition}: a call in vmap records a gradient, so its vmap rule must call the "
                "operator once, and say which dimensions of the residuals of this call are mapped "
                f"over: return torchop.residuals((output, out_dims), {', '.join(names)}), with the "
                "dimension of each residual, or None, in the place of its name. Calls: 1 required, "
                f"got {len(calls.saved)}; dimensions of residuals: {len(names)} required, got "
                f"{len(dims_of_saved)}. Or register a vmap rule for {str(form.companion)!r}, which "
                f"also returns the residuals, or {SEQUENTIAL!r}, which runs the kernel for each "
                "element."
            )
        saved: Any = dims_of_saved if len(names) > 1 else dims_of_saved[0]
        if declared.structure is not None:
            saved = declared.structure.spread_result(saved)
        saved = as_tuple(declared.schema, saved)
        key = _shapes((definition.plan, args, in_dims, (*kwargs.items(),), calls.saved[0], saved))
        try:
            hash(key)
        except TypeError:  # it has symbols of a compiler, or other objects
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
    """Reject a residual that vmap maps over although the rule says that it does not.

    Autograd would sum over the batch what a formula makes of it, and the gradient would be wrong.
    The fake kernel tells how many dimensions a residual has for one element.
    """
    op, names = form.definition, form.declared.named._fields
    try:
        elements = form.split(result_of_one(form.companion, args, kwargs))[1]
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
                    f"{op}: a call in vmap records a gradient, and its vmap rule returns None for "
                    f"the residual {name}, which says that vmap does not map over it. "
                    "The fake kernel tells whether that is so, and the operator has none: register "
                    f"one with torchop.register_fake({str(op)!r}, fake). Or register the vmap rule "
                    f"{SEQUENTIAL!r}."
                )
            if value.dim() - element.dim() != (dim is not None):
                raise ResultError(
                    f"{op}: a call in vmap records a gradient, and its vmap rule returns {dim} as "
                    f"the dimension of the residual {name}. Required is the dimension that is "
                    "mapped over where the residual has one dimension more than for one element, "
                    f"and None where it has as many; got one of shape {list(value.shape)}, while "
                    f"the fake kernel returns {list(element.shape)} for one element. Correct what "
                    "the rule returns in torchop.residuals((output, out_dims), "
                    f"{', '.join(names)}), or the fake kernel."
                )


def _shapes(values: Any) -> Any:
    """Replace tensors by their shapes, and lists by tuples."""
    if isinstance(values, Tensor):
        return tuple(values.shape)
    return tuple(map(_shapes, values)) if isinstance(values, (list, tuple)) else values


def _length(value: Any) -> int:
    return len(value) if isinstance(value, (list, tuple)) else 1


class Calls(TorchFunctionMode):
    """Redirects calls of an operator to its training form, and collects their residuals.

    It sees a call before transforms, modes and autograd do, which go on with the training form.
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

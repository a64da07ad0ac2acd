"""vmap: what the rule of an operator does with its training form.

A rule calls the operator with the whole batch. Where a gradient is recorded, that call is one of
the training form, whose residuals are mapped over too, in dimensions that only the author knows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.overrides import TorchFunctionMode

from torchop._errors import ResultError
from torchop._rules.residuals.handover import as_tuple, requested
from torchop._rules.vmap.rule import SEQUENTIAL, VmapRule

# "sequential", where the operator has no function. It is an object of its own, which tells it from
# a rule that an author registered for the training form.
_BY_DEFAULT: Any = type("Default", (str,), {})(SEQUENTIAL)


def follow(form: Any) -> None:
    """Gives a training form the vmap rule of its operator, unless an author gave it another."""
    rule = form.companion.rule(VmapRule)
    if rule.function is form.vmap_rule:
        is_function = callable(form.definition.rule(VmapRule).function)
        rule.register(_rule(form) if is_function else _BY_DEFAULT)
        form.vmap_rule = rule.function


def _rule(form: Any) -> Callable[..., Any]:
    definition, declared = form.definition, form.declared

    def rule(info: Any, in_dims: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        of_operator: Any = definition.plan[VmapRule]
        calls = _Calls(form)

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
        all_dims = (*as_tuple(definition.schema, dims), *as_tuple(declared.schema, saved))
        return (*as_tuple(definition.schema, output), *calls.saved[0]), all_dims

    return rule


class _Calls(TorchFunctionMode):
    """Makes calls of an operator ones of its training form, and keeps their residuals.

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

"""`explain`: report whether a call is native or goes through the dispatcher, and why."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from torchop._accelerate import accelerate
from torchop._compat import dispatch, operators
from torchop._compat.classes import OpOverloadPacket
from torchop._core.registry import find_schema, op_name, own_definition
from torchop._inspect.providers import in_order
from torchop._inspect.reasons import Call, why_not_called
from torchop._native import switch
from torchop._native.extension import api
from torchop._native.reasons import Reason
from torchop._rules.kernels.rule import KernelRule
from torchop._rules.providers import choice_of_call
from torchop.extend import OpLike


class Explanation(NamedTuple):
    """The result of `explain`. Print it for a summary.

    Attributes:
        op: the name of the operator.
        native: whether the call is native, i.e. bypasses the dispatcher.
        reason: why the call is native or not.
        keys: the dispatch keys of the call in dispatch order. They depend on the arguments and on
            the thread's state.
        kernels: the steps of a native call. For other calls, the kernels at the dispatch keys in
            dispatch order, where each kernel decides whether to call the next one.
        provider: the name of the provider (an alternative source of kernels for the operator) whose
            kernel computes the result. `"reference"` stands for the kernels that were registered
            without a provider. None if the operator has no providers.
        providers: a line for each provider in priority order, with the device types, whether the
            kernel runs or why not, and the file and line of the registration. Providers that are
            not in the priority order come last, without a number.

    Example:
        >>> import torch, torchop
        >>> explanation = torchop.explain("aten::sin", torch.ones(2))
        >>> print(explanation)
        aten::sin: through the dispatcher, because it was defined in C++
        keys: AutogradCPU, ADInplaceOrView, BackendSelect, CPU
        1. AutogradCPU: registered at ...
        2. CPU: registered at ...
    """

    op: str
    native: bool
    reason: str
    keys: tuple[str, ...]
    kernels: tuple[str, ...]
    provider: str | None = None
    providers: tuple[str, ...] = ()

    def __str__(self) -> str:
        way = "native" if self.native else "through the dispatcher"
        lines = [f"{self.op}: {way}, because {self.reason}", f"keys: {', '.join(self.keys)}"]
        lines += [f"{index}. {kernel}" for index, kernel in enumerate(self.kernels, 1)]
        if self.providers:
            lines.append("providers (the first one that supports the call runs):")
            lines += [f"  {text}" for text in self.providers]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        import html  # slow import

        lines = list(map(html.escape, str(self).splitlines()))
        kernels = "".join(f"<li>{html.escape(kernel)}</li>" for kernel in self.kernels)
        rest = "<br>".join(lines[2 + len(self.kernels) :])
        return (
            f"<p><b>{lines[0]}</b><br>{lines[1]}</p><ol>{kernels}</ol>{rest and f'<p>{rest}</p>'}"
        )


def explain(op: OpLike, /, *args: Any, **kwargs: Any) -> Explanation:
    """Explain whether a call is native or goes through the dispatcher, without making it.

    Args:
        op: the operator: a handle, `"ns::name"`, `"ns::name.overload"`, an `OpOverload`, or a
            packet. A packet stands for the overload that PyTorch selects for the arguments.
        args: the arguments of the call.
        kwargs: the keyword arguments of the call.

    Returns:
        An `Explanation`: the reason, the dispatch keys, the kernels in the order in which they run,
        and the provider that computes the result.

    Raises:
        OperatorGoneError: the handle's operator was redefined or deregistered.
        OperatorNotFoundError: the operator is not defined.
        RuntimeError: no overload of a packet accepts the arguments; the message is PyTorch's.

    Example:
        >>> import torch, torchop
        >>> torchop.explain(torch.ops.aten.add, torch.ones(2), torch.ones(2)).op
        'aten::add.Tensor'
        >>> @torchop.custom_op("docs::increment", mutates_args=())
        ... def increment(x: torch.Tensor) -> torch.Tensor:
        ...     return x + 1
        >>> explanation = torchop.explain(increment, torch.ones(2).to_sparse())
        >>> explanation.native
        False
        >>> explanation.keys[-1]
        'SparseCPU'
    """
    if isinstance(op, OpOverloadPacket) and len(op.overloads()) > 1:
        op = operators.chosen_overload(op, args, kwargs)
    name = op_name(op, "explain")
    definition = own_definition(op, name)
    if definition is not None and definition.structure is not None and op is definition.handle:
        args, kwargs = definition.structure.flat_arguments(*args, **kwargs)
    schema = find_schema(name) if definition is None else definition.schema
    call = Call(name, definition, schema, args, kwargs)
    keys = dispatch.keys_of_call(call.tensors)
    provider, providers, chosen = _chosen(call)
    reason, kernels = _decision(call, chosen)
    native = kernels is not None
    if kernels is None:
        table = dispatch.kernel_table(str(name))
        kernels = tuple(f"{key}: {table[key]}" for key in keys if key in table)
    return Explanation(str(name), native, reason, tuple(keys), kernels, provider, providers)


def _chosen(call: Call) -> tuple[str | None, tuple[str, ...], Callable[..., Any] | None]:
    """Return the chosen provider's name, a line about each provider, and the chosen kernel."""
    definition = call.definition
    if definition is None:
        return None, (), None
    definition.check_defined()
    choice, (args, kwargs) = choice_of_call(str(definition), call.args, call.kwargs)
    if choice is None:
        return None, (), None
    provider, reasons, function = choice.explain(args, kwargs)
    return provider, in_order(definition, choice, reasons), function


def _decision(call: Call, chosen: Callable[..., Any] | None) -> tuple[str, tuple[str, ...] | None]:
    """Return why a call is native (without the dispatcher) or not, and the steps that it runs.

    The steps are one line each, or None if the call goes through the dispatcher. `chosen` is the
    kernel of the provider that was selected for this call, or None if the operator has no
    providers.
    """
    definition = call.definition
    if definition is not None:
        definition.check_defined()
        # Prepare the operator as an actual call would. First, load the C++ extension. For devices
        # without a kernel, torchop has registered a kernel that raises an error. If PyTorch has a
        # fallback for the device's backend, remove this kernel, so that calls reach the fallback.
        switch.obtain()
        raising_kernels = definition.rule(KernelRule).raising_kernels
        if raising_kernels is not None:
            raising_kernels.expose_fallback(dispatch.keyset_of_call(call.tensors))
    entry = call.entry
    if entry is None:
        if definition is None and (problem := accelerate.why_not(call.name)) is not None:
            return problem, None
        is_settled = not api.extension.is_deferred and api.status().state in ("idle", "ready")
        if definition is None and is_settled:
            return why_not_called(call), None
        return api.why_missing(), None
    number, steps, function, refused, key = entry.explain(*call.args, **call.kwargs)
    through_autograd, counts_versions, records = steps
    reason = list(Reason)[number]
    if reason is not Reason.NATIVE:
        return call._replace(refused=refused, key=key).describe(reason), None
    kernels = []
    if through_autograd:
        kernels.append("autograd: " + ("records the gradient" if records else "records nothing"))
    elif records:
        kernels.append(
            "autograd: PyTorch's fallback, which records that the operator has no formula"
        )
    if counts_versions:
        kernels.append(f"versions: bumps {', '.join(call.schema.mutated)}")
    kernels.append(f"kernel: {_where(chosen or function)}")
    return reason.text, tuple(kernels)


def _where(function: Callable[..., Any] | None) -> str:
    if function is not None:
        function = inspect.unwrap(function)  # the user's function, inside torchop's wrappers
    code = getattr(function, "__code__", None)
    name = getattr(function, "__qualname__", type(function).__name__)
    return name if code is None else f"{name} ({code.co_filename}:{code.co_firstlineno})"

"""Providers as choices of Inductor, which measures them where it compiles a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from torchop._compat import libraries, on_demand
from torchop._core.definition import Definition
from torchop._core.registry import resolve
from torchop._rules.kernels.rule import KernelRule
from torchop._rules.providers import every_argument, providers_of
from torchop._rules.providers.priority import checked_order, unknown_provider
from torchop._rules.providers.provider import Provider
from torchop.extend import OpLike


def autotune_in_inductor(op: OpLike, providers: Sequence[str], /, **options: Any) -> None:
    """Lets Inductor choose between kernels of providers where it compiles a graph.

    Inductor traces each kernel with each of its `configs`, measures what it compiles of them beside
    a call of the operator, and puts the fastest into the graph. So their functions must consist of
    operators that PyTorch knows, and orders do not count in such graphs. Where `supports` says no,
    the choice is a call of the operator.

    Args:
        op: the operator.
        providers: the names of its providers that Inductor may choose. Those that cannot run in
            this process are left out.
        options: others of `register_custom_op_autotuning`, such as `dispatch_on`.

    Raises:
        NotImplementedError: this release of PyTorch cannot do that, or not for an operator that
            mutates, or that does not take all of its tensors first.
        ProviderNameError: a `ValueError`: the operator does not have one of these providers.
        TypeError: `providers` is not a list of names.
        ValueError: none of them can run in this process.

    Example:
        >>> import torch, torchop
        >>> @torchop.custom_op("docs::eighth_power", mutates_args=())
        ... def eighth_power(x: torch.Tensor) -> torch.Tensor:
        ...     return x**8
        >>> @eighth_power.register_kernel(None, provider="squares")
        ... def _(x):
        ...     return x.square().square().square()
        >>> torchop.autotune_in_inductor(eighth_power, ["squares"])

    The idea is `torch._inductor`'s `register_custom_op_autotuning`.
    """
    definition = resolve(op, "autotune_in_inductor")
    names = checked_order("autotune_in_inductor", providers)
    known = definition.rule(KernelRule).provider_names
    for name in names:
        if name not in known:
            raise unknown_provider("autotune_in_inductor", definition, name, known)
    schema = definition.schema
    are_tensors = [argument.kind == "Tensor" for argument in schema.arguments]
    others = [a.kind for a in schema.arguments if a.kind != "Tensor"]
    if (
        schema.is_mutable
        or any("Tensor" in kind for kind in others)
        or are_tensors != sorted(are_tensors, reverse=True)
    ):
        raise NotImplementedError(
            f"autotune_in_inductor: Inductor hands tensors by position and all else by name, so it "
            f"can only call an operator that takes its tensors first, and does not mutate them. "
            f"Use torchop.tune, whose choice any operator follows. Got {schema}."
        )
    found = [each for each in providers_of(definition.handle or op) if each.name in names]
    choices = [
        _choice(definition, each, kernel, f"{each.name}_{number}")
        for each in found
        if each.why_unsupported() is None
        for number, kernel in enumerate(each.kernels)
    ]
    if not choices:
        reasons = "; ".join(f"{each.name}: {each.why_unsupported()}" for each in found)
        raise ValueError(
            f"autotune_in_inductor: {definition} has no kernel that can run here ({reasons})."
        )
    undo = on_demand.autotune_operator(definition.overload, choices, options)
    libraries.on_close(definition.library, undo)


def _choice(
    definition: Definition, provider: Provider, kernel: Callable[..., Any], name: str
) -> Callable[..., Any]:
    """A kernel as Inductor calls it: with tensors by position, and all else by name."""
    schema = definition.schema

    def choice(*tensors: Tensor, **named: Any) -> Any:
        args, kwargs = every_argument(schema, tensors, named)
        takes = provider.takes(args, kwargs, is_traced=True)
        return (kernel if takes else definition.overload)(*args, **kwargs)

    choice.__name__ = name  # by which Inductor tells choices apart
    return choice

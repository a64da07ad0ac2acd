"""Selective checkpointing: apply an operator's policy as well as the region's."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from torchop._compat import checkpointing, registries
from torchop._compat.classes import OpOverload, ProxyTorchDispatchMode, Tag
from torchop._core.definition import Definition
from torchop._core.user_rule import get_rule

# A member of `torch.utils.checkpoint.CheckpointPolicy`.
Policy: TypeAlias = Any


class Decision(NamedTuple):
    """A registered policy, as compile caches compare it, and its decision function."""

    registered: str | Callable[..., Any]
    decide: Callable[..., Policy]


def install(definition: Definition) -> None:
    """Prevent compilers from recomputing the operator in the backward if it is random.

    Mutating operators are handled by the rule for functional traces. Helpers have other tags, and
    get the rule from `register_for_checkpoints`.
    """
    declaration = definition.declaration
    if (
        Tag.nondeterministic_seeded in declaration.tags
        and not declaration.is_helper
        and not declaration.schema.is_mutable
    ):
        register_for_traces(definition)


def in_checkpoint(mode: Any, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """The rule for checkpointing modes, for operators with a policy or an effect."""
    if registries.effect_of(op._name) is not None:
        # A compiler would recompute a checkpointed call in the backward, together with all earlier
        # effectful calls, which PyTorch's pass against this does not cover.
        with checkpointing.saving_in_trace():
            return mode.__torch_dispatch__(op, types, args, kwargs)
    return _with_policies(op, "", mode, op, types, args, kwargs)


def register_for_checkpoints(called: object, op: OpOverload | None = None, extra: str = "") -> None:
    """Register the default rule for checkpointing modes, for calls of `called`.

    If `called` is a helper of `op`, policies see `op`, without the helper's keyword-only argument
    `extra`.
    """
    hook = in_checkpoint if op is None else functools.partial(_with_policies, op, extra)
    for mode in checkpointing.POLICY_MODES:
        registries.register_default_torch_dispatch(str(called), mode, hook)
    register_for_traces(called, op, extra)


def register_for_traces(called: object, op: OpOverload | None = None, extra: str = "") -> None:
    """Register the default rule that saves results under an activation memory budget."""
    hook = in_trace if op is None else functools.partial(_saving, op, extra)
    registries.register_default_torch_dispatch(str(called), ProxyTorchDispatchMode, hook)


def in_trace(mode: Any, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Trace a call, and save its results if the operator is random or its policy says so.

    Workaround for pytorch/pytorch#190758: under `activation_memory_budget` the partitioner
    recomputes any operator whose node is not marked MUST_SAVE.
    """
    return _saving(op, "", mode, op, types, args, kwargs)


def _saving(op: Any, extra: str, mode: Any, called: Any, types: Any, args: Any, kwargs: Any) -> Any:
    kwargs = kwargs or {}
    with saved_under_budget(op, args, {n: v for n, v in kwargs.items() if n != extra}, mode):
        return mode.__torch_dispatch__(called, types, args, kwargs)


def saved_under_budget(
    op: Any, args: Any, kwargs: Any, proxy_mode: Any = None
) -> contextlib.AbstractContextManager[None]:
    """Save traced results in a block, if the operator is random or its policy says so."""
    if Tag.nondeterministic_seeded not in op.tags:
        rule = get_rule("checkpoint_policy")
        if not rule.has(op):
            return contextlib.nullcontext()
        policy = rule.lookup(op).decide(checkpointing.new_context(), *args, **kwargs)
        if not policy.name.endswith("SAVE"):
            return contextlib.nullcontext()
    return checkpointing.saving_under_budget(proxy_mode)


def _with_policies(
    op: Any, extra: str, mode: Any, called: Any, types: Any, args: Any, kwargs: Any
) -> Any:
    """Call the operator with a mode that combines the policies of the region and of `op`."""
    rule = get_rule("checkpoint_policy")  # by name, because core code must not import it
    of_operator = rule.lookup(op).decide if rule.has(op) else None
    of_region = mode.policy_fn

    def policy(ctx: Any, _: Any, *args: Any, **kwargs: Any) -> Policy:
        kwargs.pop(extra, None)
        region = of_region(ctx, op, *args, **kwargs)
        if of_operator is None:
            return region
        return _stronger(of_operator(ctx, *args, **kwargs), region)

    mode.policy_fn = policy
    try:
        return mode.__torch_dispatch__(called, types, args, kwargs)
    finally:
        mode.policy_fn = of_region


def _stronger(operator: Policy, region: Policy | bool) -> Policy | bool:
    """Return the policy that is a MUST, or else the operator's; the operator's MUST wins."""
    # PyTorch treats True as MUST_SAVE and False as PREFER_RECOMPUTE.
    region_must = region if isinstance(region, bool) else region.name.startswith("MUST")
    return region if region_must and not operator.name.startswith("MUST") else operator

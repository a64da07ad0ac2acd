"""Rules for selective activation checkpointing.

The rules combine an operator's checkpoint policy with the checkpointed region's policy function,
and save the results of effectful and random operators.
"""

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
    """The checkpoint policy of an operator.

    Attributes:
        registered: the policy as the user registered it, for cache keys.
        decide: returns the policy for a call, given PyTorch's selective checkpoint context and the
            arguments of the call.
    """

    registered: str | Callable[..., Any]
    decide: Callable[..., Policy]


def install(definition: Definition) -> None:
    """Prevent compilers from recomputing the operator in the backward if it is random.

    For operators that mutate arguments, the functionalization rule does this, and for helper
    operators, `register_for_checkpoints` does.
    """
    declaration = definition.declaration
    if (
        Tag.nondeterministic_seeded in declaration.tags
        and not declaration.is_helper
        and not declaration.schema.is_mutable
    ):
        register_for_traces(definition)


def in_checkpoint(mode: Any, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Handle a call to an operator with a policy or an effect in a checkpointing mode."""
    if registries.effect_of(op._name) is not None:
        # Otherwise a compiler could recompute the call in the backward, together with all earlier
        # effectful calls. PyTorch's pass that prevents recomputation does not cover this case.
        with checkpointing.saving_in_trace():
            return mode.__torch_dispatch__(op, types, args, kwargs)
    return _with_policies(op, "", mode, op, types, args, kwargs)


def register_for_checkpoints(called: object, op: OpOverload | None = None, extra: str = "") -> None:
    """Register an operator's default rules for checkpointing modes and for traces.

    Args:
        called: the operator.
        op: if `called` is a helper operator, the operator that is passed to policy functions
            instead.
        extra: a keyword argument that only the helper operator has.
    """
    hook = in_checkpoint if op is None else functools.partial(_with_policies, op, extra)
    for mode in checkpointing.POLICY_MODES:
        registries.register_default_torch_dispatch(str(called), mode, hook)
    register_for_traces(called, op, extra)


def register_for_traces(called: object, op: OpOverload | None = None, extra: str = "") -> None:
    """Register the default rule for traces. The arguments are as in `register_for_checkpoints`."""
    hook = in_trace if op is None else functools.partial(_saving, op, extra)
    registries.register_default_torch_dispatch(str(called), ProxyTorchDispatchMode, hook)


def in_trace(mode: Any, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Trace a call, and mark its results as saved if the operator is random or has a `SAVE` policy.

    Workaround for pytorch/pytorch#190758: under `activation_memory_budget`, the partitioner may
    recompute any node that is not marked MUST_SAVE.
    """
    return _saving(op, "", mode, op, types, args, kwargs)


def _saving(op: Any, extra: str, mode: Any, called: Any, types: Any, args: Any, kwargs: Any) -> Any:
    kwargs = kwargs or {}
    with saved_under_budget(op, args, {n: v for n, v in kwargs.items() if n != extra}, mode):
        return mode.__torch_dispatch__(called, types, args, kwargs)


def saved_under_budget(
    op: Any, args: Any, kwargs: Any, proxy_mode: Any = None
) -> contextlib.AbstractContextManager[None]:
    """Return a context that marks traced results as saved, if the operator requires this.

    Return a null context if the operator is neither random nor has a `SAVE` policy.
    """
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
    """Call the operator in a mode whose policy function respects the policy of `op`."""
    rule = get_rule("checkpoint_policy")  # the core must not import the rule
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
    """Return the region's policy if only it is a `MUST` policy, otherwise the operator's policy."""
    # A region's policy function may return True for MUST_SAVE and False for PREFER_RECOMPUTE.
    region_must = region if isinstance(region, bool) else region.name.startswith("MUST")
    return region if region_must and not operator.name.startswith("MUST") else operator

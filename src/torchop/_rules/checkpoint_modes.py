"""Activation checkpointing: decide whether the results of a call are saved or recomputed.

An operator may have a checkpoint policy. This module combines it with the policy function of the
checkpointed region. The results of effectful and random operators are always saved, because running
these operators a second time would be wrong.
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

Policy: TypeAlias = Any


class Decision(NamedTuple):
    """The checkpoint policy of an operator.

    Attributes:
        registered: the string or function that the user registered. It becomes a part of the cache
            keys of compiled graphs.
        decide: returns the policy for a call, given PyTorch's `SelectiveCheckpointContext` and the
            arguments of the call.
    """

    registered: str | Callable[..., Any]
    decide: Callable[..., Policy]


def install(definition: Definition) -> None:
    """If the operator is random, prevent compilers from recomputing it in the backward.

    Do nothing for operators that mutate arguments, because their functionalization rule already
    prevents the recomputation. Do nothing for helper operators either, because the code that
    defines a helper operator calls `register_for_checkpoints`.
    """
    declaration = definition.declaration
    if (
        Tag.nondeterministic_seeded in declaration.tags
        and not declaration.is_helper
        and not declaration.schema.is_mutable
    ):
        register_for_traces(definition)


def in_checkpoint(mode: Any, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
    if registries.effect_of(op._name) is not None:
        # Save the results. Otherwise a compiler could recompute the call in the backward, together
        # with all earlier effectful calls. PyTorch's pass `force_save_effectful_ops`
        # (torch/_functorch/partitioners.py) does not cover this case.
        with checkpointing.saving_in_trace():
            return mode.__torch_dispatch__(op, types, args, kwargs)
    return _with_policies(op, "", mode, op, types, args, kwargs)


def register_for_checkpoints(called: object, op: OpOverload | None = None, extra: str = "") -> None:
    """Register how an operator behaves in checkpointing modes and in a compiler's trace.

    A torch_dispatch rule that the user registers takes precedence.

    If `called` is a helper operator, `op` is the original operator. Policy functions receive `op`
    instead of `called`, because users do not know the helper operator. `extra` is the name of a
    keyword argument that only `called` has. Policy functions do not receive this argument.
    """
    hook = in_checkpoint if op is None else functools.partial(_with_policies, op, extra)
    for mode in checkpointing.POLICY_MODES:
        registries.register_default_torch_dispatch(str(called), mode, hook)
    register_for_traces(called, op, extra)


def register_for_traces(called: object, op: OpOverload | None = None, extra: str = "") -> None:
    """Register how an operator behaves in a compiler's trace.

    The arguments have the same meaning as in `register_for_checkpoints`.
    """
    hook = in_trace if op is None else functools.partial(_saving, op, extra)
    registries.register_default_torch_dispatch(str(called), ProxyTorchDispatchMode, hook)


def in_trace(mode: Any, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Trace a call and mark its results as saved if the operator is random or has a `SAVE` policy.

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
    """Return a context manager that marks the results of traced calls as saved.

    It does nothing if the operator is not random and has no `SAVE` policy.
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
    # Look up the rule by name, because its module imports this module.
    rule = get_rule("checkpoint_policy")
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
    """Return the operator's policy, unless only the region's policy is a `MUST` policy."""
    # A region's policy function may return True for MUST_SAVE and False for PREFER_RECOMPUTE.
    region_must = region if isinstance(region, bool) else region.name.startswith("MUST")
    return region if region_must and not operator.name.startswith("MUST") else operator

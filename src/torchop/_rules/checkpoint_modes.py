"""Activation checkpointing: decide whether the results of a call are saved or recomputed.

An operator may have its own checkpoint policy, which this module combines with the policy function
of the checkpointed region. The results of effectful and random operators are always saved, because
it would be wrong to run these operators a second time.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

from torch.utils.checkpoint import CheckpointPolicy

from torchop._compat import autograd, checkpointing, registries
from torchop._compat.classes import OpOverload, ProxyTorchDispatchMode, Tag
from torchop._core.definition import Definition
from torchop._core.user_rule import get_rule

Policy: TypeAlias = Any


class Decision(NamedTuple):
    """The checkpoint policy of an operator.

    Attributes:
        registered: the string or function that the user registered. It is part of the cache keys of
            compiled graphs.
        decide: returns the policy for a call, given PyTorch's `SelectiveCheckpointContext` and the
            arguments of the call.
    """

    registered: str | Callable[..., Any]
    decide: Callable[..., Policy]


def install(definition: Definition) -> None:
    """Prevent compilers from recomputing a random operator in the backward pass.

    This is a no-op for operators that mutate arguments, because their functionalization rule
    already prevents the recomputation. It also skips helper operators (which replace others in
    compiled graphs), because the code that defines a helper operator calls
    `register_for_checkpoints` itself.
    """
    declaration = definition.declaration
    if (
        Tag.nondeterministic_seeded in declaration.tags
        and not declaration.is_helper
        and not declaration.schema.is_mutable
    ):
        definition.registered.add_default_rule(ProxyTorchDispatchMode, in_trace)


def in_checkpoint(mode: Any, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
    return _with_policies(op, "", mode, op, types, args, kwargs)


def register_for_checkpoints(
    definition: Definition, op: OpOverload | None = None, extra: str = ""
) -> None:
    """Register how an operator behaves in checkpointing modes and in a compiler's trace.

    These are only defaults: a torch_dispatch rule registered by the user takes precedence.

    For a helper operator, which replaces another operator in compiled graphs, pass the original
    operator as `op`. Policy functions then receive `op` instead of the helper operator, which users
    do not know. `extra` names a keyword argument that only the helper operator has, so it is not
    passed to policy functions either.
    """
    for mode, rule in rules_by_mode(op, extra).items():
        definition.registered.add_default_rule(mode, rule)


def rules_by_mode(op: OpOverload | None = None, extra: str = "") -> dict[type, Callable[..., Any]]:
    """Return the torch_dispatch rules that `register_for_checkpoints` registers, by mode class.

    See `register_for_checkpoints` for `op` and `extra`.
    """
    checkpoint = in_checkpoint if op is None else functools.partial(_with_policies, op, extra)
    trace = in_trace if op is None else functools.partial(_marking, op, extra)
    return {
        **dict.fromkeys(checkpointing.POLICY_MODES, checkpoint),
        ProxyTorchDispatchMode: trace,
    }


def in_trace(mode: Any, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Trace a call, and mark its results as saved or recomputed according to the operator's policy.

    Workaround for pytorch/pytorch#190758: under `activation_memory_budget`, the partitioner may
    recompute any node that is not marked MUST_SAVE.
    """
    return _marking(op, "", mode, op, types, args, kwargs)


def _marking(
    op: Any, extra: str, mode: Any, called: Any, types: Any, args: Any, kwargs: Any
) -> Any:
    kwargs = kwargs or {}
    with marked(op, args, {n: v for n, v in kwargs.items() if n != extra}, mode):
        return mode.__torch_dispatch__(called, types, args, kwargs)


@contextlib.contextmanager
def marked(op: Any, args: Any, kwargs: Any, proxy_mode: Any = None) -> Iterator[None]:
    """Mark the FX nodes traced in this block as saved or recomputed.

    This is how the operator's policy takes effect outside of checkpointed regions. The results of
    random operators are always saved, whatever the policy is.
    """
    policy = _policy(op, args, kwargs)
    if Tag.nondeterministic_seeded in op.tags:
        policy = CheckpointPolicy.MUST_SAVE
    # Nodes of the backward pass are never recomputed, so marking them for recomputation would only
    # make the partitioner save their inputs.
    if policy is None or (autograd.is_in_backward() and not _saves(policy)):
        yield
        return
    with checkpointing.traced_nodes(proxy_mode) as nodes:
        yield
    checkpointing.mark([node for node in nodes if node.meta.get("recompute") is None], policy)


@contextlib.contextmanager
def marked_as_one_call(op: Any, args: Any, kwargs: Any) -> Iterator[None]:
    """Mark the FX nodes of an operator's function as if they were a single call to `op`.

    The function is traced above autograd in this block, so checkpointing modes see only the
    operators in the function, and not `op`. All nodes therefore receive the mark that a call to
    `op` would receive.
    """
    region = checkpointing.policy_of_region(op, args, kwargs)
    if region is None:
        with marked(op, args, kwargs):
            yield
        return
    if isinstance(region, bool):
        region = CheckpointPolicy.MUST_SAVE if region else CheckpointPolicy.PREFER_RECOMPUTE
    own = _policy(op, args, kwargs)
    with checkpointing.traced_nodes() as nodes:
        yield
    checkpointing.mark(nodes, region if own is None else _stronger(own, region))


def _policy(op: Any, args: Any, kwargs: Any) -> Policy | None:
    # Look up the checkpoint policies by name, because importing their module here would be
    # circular.
    rule = get_rule("checkpoint_policy")
    if not rule.has(op):
        return None
    return rule.lookup(op).decide(checkpointing.new_context(), *args, **kwargs)


def _saves(policy: Policy) -> bool:
    return bool(policy.name.endswith("SAVE"))


def _with_policies(
    op: Any, extra: str, mode: Any, called: Any, types: Any, args: Any, kwargs: Any
) -> Any:
    rule = get_rule("checkpoint_policy")
    of_operator = rule.lookup(op).decide if rule.has(op) else None
    if registries.effect_of(op._name) is not None:
        # Save the results, so that the effect does not happen again in the backward pass. PyTorch's
        # `force_save_effectful_ops` (torch/_functorch/partitioners.py) does not cover this case.
        of_operator = _always_save
    of_region = mode.policy_fn
    of_call: Policy | bool = False

    def policy(ctx: Any, _: Any, *args: Any, **kwargs: Any) -> Policy:
        nonlocal of_call
        kwargs.pop(extra, None)
        of_call = of_region(ctx, op, *args, **kwargs)
        if of_operator is not None:
            of_call = _stronger(of_operator(ctx, *args, **kwargs), of_call)
        return of_call

    mode.policy_fn = policy
    try:
        with checkpointing.traced_nodes() as nodes:
            result = mode.__torch_dispatch__(called, types, args, kwargs)
    finally:
        mode.policy_fn = of_region
    if of_operator is not None and not isinstance(of_call, bool) and _saves(of_call):
        # Mark the nodes again, because the mode has marked them PREFER_SAVE, which the partitioner
        # ignores.
        checkpointing.mark(nodes, of_call)
    return result


def _always_save(*args: Any, **kwargs: Any) -> Policy:
    return CheckpointPolicy.MUST_SAVE


def _stronger(operator: Policy, region: Policy | bool) -> Any:
    """Return the operator's policy, unless only the region's policy is a `MUST` policy."""
    # A region's policy function may return True for MUST_SAVE and False for PREFER_RECOMPUTE.
    region_must = region if isinstance(region, bool) else region.name.startswith("MUST")
    return region if region_must and not operator.name.startswith("MUST") else operator

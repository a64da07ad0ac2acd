"""Calls in a region of selective checkpointing: its mode asks the policy of the operator, too."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from torchop._compat import checkpointing, registries
from torchop._compat.classes import OpOverload, ProxyTorchDispatchMode, Tag
from torchop._core.declaration import Declaration
from torchop._core.definition import CompiledRule
from torchop._core.user_rule import get_rule

# A member of `torch.utils.checkpoint.CheckpointPolicy`.
Policy: TypeAlias = Any


class Decision(NamedTuple):
    """A registered policy, in a form that compile caches can compare, and its decision."""

    registered: str | Callable[..., Any]
    decide: Callable[..., Policy]


class RecomputationRule(CompiledRule[None]):
    """Whether a compiler may compute the results again in the backward: not if they are random."""

    @classmethod
    def is_installed_on(cls, declaration: Declaration) -> bool:
        # The rule for functional traces handles operators that mutate. Companions get the rule from
        # `offer_to_checkpoints`, because their tags are not those of the operator.
        return (
            Tag.nondeterministic_seeded in declaration.tags
            and not declaration.is_companion
            and not declaration.schema.is_mutable
        )

    def install(self) -> None:
        offer_to_traces(self.definition)

    def compile(self) -> None:
        return None

    def repr_text(self) -> str | None:
        return None


def in_checkpoint(mode: Any, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """The rule for the modes of checkpointing, of operators with a policy or an effect."""
    if registries.effect_of(op._name) is not None:
        # A compiler would compute a checkpointed call again in the backward, and with it all calls
        # before it that have an effect; PyTorch's pass that prevents this leaves them out.
        with checkpointing.saving_in_trace():
            return mode.__torch_dispatch__(op, types, args, kwargs)
    return _with_policies(op, "", mode, op, types, args, kwargs)


def offer_to_checkpoints(called: object, op: OpOverload | None = None, extra: str = "") -> None:
    """Offers the rule for these modes, for calls of an operator, which may stand for `op`.

    Policies know `op` then, which does not have the keyword-only argument `extra`.
    """
    hook = in_checkpoint if op is None else functools.partial(_with_policies, op, extra)
    for mode in checkpointing.POLICY_MODES:
        registries.offer_torch_dispatch(str(called), mode, hook)
    offer_to_traces(called, op, extra)


def offer_to_traces(called: object, op: OpOverload | None = None, extra: str = "") -> None:
    """Offer the rule that saves results under an activation memory budget, as for checkpoints."""
    hook = in_trace if op is None else functools.partial(_saving, op, extra)
    registries.offer_torch_dispatch(str(called), ProxyTorchDispatchMode, hook)


def in_trace(mode: Any, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Trace a call so that its results are saved, if the operator is random or its policy says so.

    The partitioner (`choose_saved_values_set` in torch/_functorch/partitioners.py) recomputes any
    operator under `activation_memory_budget`, unless its node says MUST_SAVE.
    """
    return _saving(op, "", mode, op, types, args, kwargs)


def _saving(op: Any, extra: str, mode: Any, called: Any, types: Any, args: Any, kwargs: Any) -> Any:
    kwargs = kwargs or {}
    with saved_under_budget(op, args, {n: v for n, v in kwargs.items() if n != extra}, mode):
        return mode.__torch_dispatch__(called, types, args, kwargs)


def saved_under_budget(
    op: Any, args: Any, kwargs: Any, proxy_mode: Any = None
) -> contextlib.AbstractContextManager[None]:
    """Save the results of what is traced, if the operator is random or its policy says so."""
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
    """Makes the mode ask the policies of the region and of `op`."""
    rule = get_rule("checkpoint_policy")  # by name, because it is in the ring
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
    """The policy that is a `MUST`, the operator's first; without a `MUST`, the operator's."""
    # PyTorch takes True for MUST_SAVE, and False for PREFER_RECOMPUTE.
    region_must = region if isinstance(region, bool) else region.name.startswith("MUST")
    return region if region_must and not operator.name.startswith("MUST") else operator

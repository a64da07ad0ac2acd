"""Checkpoint policies: whether selective activation checkpointing saves an operator's results.

PyTorch asks the policy function of a checkpointed region. An operator's own policy decides if that
function has no opinion, or if the operator's policy is a `MUST`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import torch.library
from torch.utils.checkpoint import CheckpointPolicy

from torchop._compat import checkpointing, registries
from torchop._compat.classes import OpOverload
from torchop._core.observers import observer
from torchop._core.registry import OpLike
from torchop._core.user_rule import Rule
from torchop._errors import ResultError, RuleSignatureError, short_repr
from torchop._schema.callables import Registered

# A member of `torch.utils.checkpoint.CheckpointPolicy`.
Policy: TypeAlias = Any

_WORDS = {"save": "PREFER_SAVE", "recompute": "PREFER_RECOMPUTE"}


class Decision(NamedTuple):
    """A registered policy, in a form that compile caches can compare, and its decision."""

    registered: str | Callable[..., Any]
    decide: Callable[..., Policy]


class _CheckpointPolicyRule(Rule[Decision]):
    """A policy, or a function of the context and the arguments that returns one."""

    def validate(self, op: OpOverload, value: Any) -> Decision:
        what = f"{op.name()}: a checkpoint policy"
        if isinstance(value, str) and value in _WORDS:
            value = CheckpointPolicy[_WORDS[value]]
        if isinstance(value, CheckpointPolicy):
            return _always(value)
        if not callable(value):
            raise RuleSignatureError(
                f"{what} is 'save', 'recompute', a member of "
                "torch.utils.checkpoint.CheckpointPolicy, or a function (ctx, *arguments) that "
                f"returns one; got {short_repr(value)}."
            )
        decide = observer(what, op, value, leading=("ctx",))

        def policy(ctx: Any, *args: Any, **kwargs: Any) -> Policy:
            decision = decide(ctx, *args, **kwargs)
            if isinstance(decision, str) and decision in _WORDS:
                decision = CheckpointPolicy[_WORDS[decision]]
            if not isinstance(decision, CheckpointPolicy):
                raise ResultError(
                    f"{what} returned {short_repr(decision)}, which is not a CheckpointPolicy."
                )
            return decision

        return Decision(value, policy)

    def missing(self, op: OpOverload) -> Decision:
        return _always(CheckpointPolicy.PREFER_RECOMPUTE)  # as in PyTorch

    def attach(self, op: OpOverload) -> None:
        if not checkpointing.POLICY_MODES:
            raise RuntimeError(
                f"{op.name()}: selective checkpointing in this release of PyTorch does not ask "
                "operators for a policy."
            )
        for mode in checkpointing.POLICY_MODES:
            registries.offer_torch_dispatch(op.name(), mode, in_checkpoint)

    def detach(self, op: OpOverload) -> None:
        if registries.effect_of(op.name()) is None:
            for mode in checkpointing.POLICY_MODES:
                registries.withdraw_offer(op.name(), mode, in_checkpoint)

    def cache_parts(self, value: Decision) -> Iterator[object]:
        yield value.registered


CHECKPOINT_POLICY = _CheckpointPolicyRule("checkpoint_policy")


def register_checkpoint_policy(
    op: OpLike,
    policy: Registered | None = None,
    /,
    *,
    lib: torch.library.Library | None = None,
) -> Registered:
    """Registers whether selective activation checkpointing saves the operator's results.

    It applies in every region whose contexts come from
    `torch.utils.checkpoint.create_selective_checkpoint_contexts`. It wins over a region's policy
    that only prefers something. A `MUST` policy wins over others, the operator's before the
    region's.

    Args:
        op: the operator: a handle, `"ns::name"`, `"ns::name.overload"`, an `OpOverload`, or a
            packet with one overload.
        policy: `"save"`, `"recompute"`, a `torch.utils.checkpoint.CheckpointPolicy`, or a
            function `(ctx, *arguments)` that returns one of these. Without it, a decorator for
            such a function is returned.
        lib: the library whose lifetime the registration shares; by default it stays as long as
            the operator.

    Returns:
        `policy`; without it, a decorator.
    """
    return CHECKPOINT_POLICY.register(op, policy, lib=lib)


def in_checkpoint(mode: Any, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """The rule for the modes of checkpointing, of operators with a policy or an effect."""
    if registries.effect_of(op._name) is not None:
        # A compiler would compute a checkpointed call again in the backward, and with it all calls
        # before it that have an effect; PyTorch's pass that prevents this leaves them out.
        with checkpointing.saving_in_trace():
            return mode.__torch_dispatch__(op, types, args, kwargs)
    return _with_policies(mode, op, types, args, kwargs, op)


def standing_for(op: OpOverload, extra: str) -> Callable[..., Any]:
    """Makes the rule for these modes of an operator that is called in the place of `op`.

    Policies know `op`, which does not have the keyword-only argument `extra`.
    """

    def in_checkpoint(mode: Any, called: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return _with_policies(mode, called, types, args, kwargs, op, extra)

    return in_checkpoint


def _with_policies(
    mode: Any, called: Any, types: Any, args: Any, kwargs: Any, op: Any, extra: str = ""
) -> Any:
    """Makes the mode ask the policies of the region and of `op`."""
    of_operator = CHECKPOINT_POLICY.lookup(op).decide if CHECKPOINT_POLICY.has(op) else None
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


def _always(policy: Policy) -> Decision:
    return Decision(policy.name, lambda ctx, *args, **kwargs: policy)


def _stronger(operator: Policy, region: Policy | bool) -> Policy | bool:
    """The policy that is a `MUST`, the operator's first; without a `MUST`, the operator's."""
    # PyTorch takes True for MUST_SAVE, and False for PREFER_RECOMPUTE.
    region_must = region if isinstance(region, bool) else region.name.startswith("MUST")
    return region if region_must and not operator.name.startswith("MUST") else operator

"""Checkpoint policies: whether selective activation checkpointing saves what an operator returns.

PyTorch asks the policy function of a checkpointed region. An operator's own policy answers where
that function has no opinion, or where the operator's is a must.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from torchop._compat import checkpointing, effects, registries
from torchop._compat.classes import OpOverload
from torchop._core.registry import op_name, own_definition
from torchop._core.user_rule import Rule, check_arguments
from torchop._errors import ResultError, RuleSignatureError
from torchop._rules.torch_dispatch import OFFERED
from torchop._schema.defaults import bind
from torchop._schema.schema import Schema

# A member of `torch.utils.checkpoint.CheckpointPolicy`.
Policy: TypeAlias = Any

_WORDS = {"save": "PREFER_SAVE", "recompute": "PREFER_RECOMPUTE"}


class Decision:
    """What was registered, as compile caches can tell it apart, and what it comes to."""

    __slots__ = ("decide", "given")

    def __init__(self, given: str | Callable[..., Any], decide: Callable[..., Policy]) -> None:
        self.given = given
        self.decide = decide


class _CheckpointPolicyRule(Rule[Decision]):
    """A policy, or a function of the context and the arguments that returns one."""

    def validate(self, op: OpOverload, value: Any) -> Decision:
        policies = checkpointing.checkpoint_policies()
        what = f"{op.name()}: a checkpoint policy"
        if isinstance(value, str) and value in _WORDS:
            value = policies[_WORDS[value]]
        if isinstance(value, policies):
            return _always(value)
        if not callable(value):
            raise RuleSignatureError(
                f"{what} is 'save', 'recompute', a member of "
                "torch.utils.checkpoint.CheckpointPolicy, or a function (ctx, *arguments) that "
                f"returns one; got {value!r}."
            )
        definition = own_definition(op, op_name(op, "checkpoint_policy"))
        decide = None
        if definition is not None:
            decide = definition.convention.observer(what, value, ("ctx",))
        if decide is None:
            check_arguments(what, op, value, leading=("ctx",))
            decide = bind(value, Schema(op._schema), leading=1)

        def policy(ctx: Any, *args: Any, **kwargs: Any) -> Policy:
            found = decide(ctx, *args, **kwargs)
            if isinstance(found, str) and found in _WORDS:
                found = policies[_WORDS[found]]
            if not isinstance(found, policies):
                raise ResultError(f"{what} returned {found!r}, which is not a CheckpointPolicy.")
            return found

        return Decision(value, policy)

    def missing(self, op: OpOverload) -> Decision:
        return _always(checkpointing.checkpoint_policies()["PREFER_RECOMPUTE"])  # as in PyTorch

    def attach(self, op: OpOverload) -> None:
        mode = checkpointing.checkpoint_mode()
        if mode is None:
            raise RuntimeError(
                f"{op.name()}: this release of PyTorch has no selective checkpointing that asks "
                "operators."
            )
        OFFERED[mode] = in_checkpoint
        registries.offer_torch_dispatch(op.name(), mode, in_checkpoint)

    def detach(self, op: OpOverload) -> None:
        mode = checkpointing.checkpoint_mode()
        if mode is not None and effects.effect_of(op.name()) is None:
            registries.withdraw_torch_dispatch(op.name(), mode, in_checkpoint)


CHECKPOINT_POLICY = _CheckpointPolicyRule("checkpoint_policy")


def in_checkpoint(mode: Any, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """The rule for the mode of checkpointing, of operators with a policy or an effect."""
    if effects.effect_of(op._name) is not None:
        # A compiler would compute a checkpointed call again in the backward, and with it all calls
        # before it that have an effect; PyTorch's pass that prevents this leaves them out.
        with checkpointing.saving_in_trace():
            return mode.__torch_dispatch__(op, types, args, kwargs)
    if not CHECKPOINT_POLICY.has(op):
        return mode.__torch_dispatch__(op, types, args, kwargs)
    return _asking(mode, op, types, args, kwargs, op)


def standing_for(op: OpOverload, extra: str) -> Callable[..., Any]:
    """Makes the rule for that mode of an operator that is called in the place of another one.

    Args:
        op: the other one, which is what policies know.
        extra: an argument, by keyword only, that the other one does not have.
    """

    def in_checkpoint(mode: Any, called: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return _asking(mode, called, types, args, kwargs, op, extra)

    return in_checkpoint


def _asking(
    mode: Any, called: Any, types: Any, args: Any, kwargs: Any, op: Any, extra: str = ""
) -> Any:
    """Has the mode ask about `op`, and ask that itself."""
    own = CHECKPOINT_POLICY.lookup(op).decide if CHECKPOINT_POLICY.has(op) else None
    of_region = mode.policy_fn

    def policy(ctx: Any, _: Any, *args: Any, **kwargs: Any) -> Policy:
        kwargs.pop(extra, None)
        region = of_region(ctx, op, *args, **kwargs)
        return region if own is None else _decide(own(ctx, *args, **kwargs), region)

    mode.policy_fn = policy
    try:
        return mode.__torch_dispatch__(called, types, args, kwargs)
    finally:
        mode.policy_fn = of_region


def _always(policy: Policy) -> Decision:
    return Decision(policy.name, lambda ctx, *args, **kwargs: policy)


def _decide(own: Policy, region: Policy | bool) -> Policy | bool:
    """Whoever says must, the operator first; otherwise the operator, which knows what it costs."""
    # PyTorch takes True for MUST_SAVE, and False for PREFER_RECOMPUTE.
    region_must = region if isinstance(region, bool) else region.name.startswith("MUST")
    return region if region_must and not own.name.startswith("MUST") else own

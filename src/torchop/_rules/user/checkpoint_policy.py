"""Checkpoint policies: whether the results of an operator are saved or recomputed.

PyTorch itself has no policies for single operators: it only calls the policy function that the user
passed for the checkpointed region. In torchop, an operator's policy takes precedence over the
policy of the region, unless only the region's policy is a `MUST_...` policy.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.library
from torch.utils.checkpoint import CheckpointPolicy

from torchop._compat import checkpointing, registries
from torchop._core.user_rule import Rule
from torchop._errors import ResultError, RuleSignatureError
from torchop._rules.checkpoint_modes import Decision, Policy, rules_by_mode
from torchop._schema.callables import Lambda, Registered
from torchop.extend import OpLike, OpOverload, observer, short_repr

_WORDS = {"save": "PREFER_SAVE", "recompute": "PREFER_RECOMPUTE"}


class _CheckpointPolicyRule(Rule[Decision]):
    def validate(self, op: OpOverload, value: Any) -> Decision:
        what = f"{op.name()}: a checkpoint policy"
        if isinstance(value, str) and value in _WORDS:
            value = CheckpointPolicy[_WORDS[value]]
        if isinstance(value, CheckpointPolicy):
            return _always(value)
        if not callable(value):
            raise RuleSignatureError(
                f"{what} must be 'save', 'recompute', a member of "
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
                    f"{what} must return a CheckpointPolicy, but returned {short_repr(decision)}."
                )
            return decision

        return Decision(value, policy)

    def missing(self, op: OpOverload) -> Decision:
        return _always(CheckpointPolicy.PREFER_RECOMPUTE)  # PyTorch's default

    def attach(self, op: OpOverload) -> None:
        if not checkpointing.POLICY_MODES:
            raise RuntimeError(
                f"{op.name()}: selective checkpointing in this release of PyTorch does not "
                "support policies of operators."
            )
        for mode, rule in rules_by_mode().items():
            registries.add_default_torch_dispatch(op.name(), mode, rule)

    def detach(self, op: OpOverload) -> None:
        for mode, rule in rules_by_mode().items():
            registries.remove_default_torch_dispatch(op.name(), mode, rule)

    def cache_parts(self, value: Decision) -> Iterator[object]:
        yield value.registered


CHECKPOINT_POLICY = _CheckpointPolicyRule("checkpoint_policy")


def register_checkpoint_policy(
    op: OpLike,
    policy: Registered | Lambda | None = None,
    /,
    *,
    lib: torch.library.Library | None = None,
) -> Registered:
    """Register whether the operator's results are saved for the backward pass or recomputed.

    The policy applies in compiled code, and in all regions that use
    `torch.utils.checkpoint.create_selective_checkpoint_contexts`. If the region's own policy
    function returns a `MUST_...` policy, this overrides a `PREFER_...` policy of the operator.

    Args:
        op: the operator, as a handle, `"ns::name"`, `"ns::name.overload"`, an `OpOverload`, or a
            packet with one overload.
        policy: `"save"`, `"recompute"`, a `torch.utils.checkpoint.CheckpointPolicy`, or a function
            `(ctx, *arguments)` that returns one of these for each call.
        lib: the library that owns the registration: closing it removes the registration. By
            default, the registration lasts as long as the operator.

    Returns:
        `policy`, or a decorator if `policy` is omitted.
    """
    return CHECKPOINT_POLICY.register(op, policy, lib=lib)


def _always(policy: Policy) -> Decision:
    return Decision(policy.name, lambda ctx, *args, **kwargs: policy)

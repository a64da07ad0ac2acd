"""Sharding rules, which define how DTensor can run an operator on the shards of its arguments."""

from torchop._rules.user.sharding.notation import sharding
from torchop._rules.user.sharding.rule import SHARDING as SHARDING
from torchop._rules.user.sharding.rule import register_sharding

__all__ = ["register_sharding", "sharding"]  # public names

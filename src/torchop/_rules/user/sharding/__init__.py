"""Sharding rules, which define how DTensor runs an operator on shards."""

from torchop._rules.user.sharding.notation import sharding
from torchop._rules.user.sharding.rule import SHARDING as SHARDING
from torchop._rules.user.sharding.rule import register_sharding

__all__ = ["register_sharding", "sharding"]  # public names

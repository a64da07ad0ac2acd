"""Nested tuples, lists and dicts, and whatever else PyTorch flattens."""

from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_map_only as tree_map_only

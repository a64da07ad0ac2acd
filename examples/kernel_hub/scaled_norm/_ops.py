"""Compute the namespace of this build. The hub's builder generates a file like this one."""

import torch

# The hub loads the package as a module whose name ends with the build id.
NAMESPACE = f"_{__package__.rpartition('.')[2]}"
ops = getattr(torch.ops, NAMESPACE)


def add_op_namespace_prefix(op_name: str) -> str:
    return f"{NAMESPACE}::{op_name}"

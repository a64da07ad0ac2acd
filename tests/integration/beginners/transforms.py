from __future__ import annotations

import torch

from tests.integration.beginners.mistake import mistake, scale_of
from tests.rules.user.sharding import ranks


@mistake(TypeError, cause="to have two returns, an output and out_dims", fix="out_dims (the dim")
def vmap_rule_without_out_dims(n: str) -> None:
    scale = scale_of(n)
    scale.register_vmap(lambda info, in_dims, x, factor: scale(x, factor))
    torch.vmap(scale)(torch.ones(2, 3))


@mistake(NotImplementedError, cause="no jvp formula", fix="register_jvp('{n}::scale', jvp")
def forward_mode_without_a_rule(n: str) -> None:
    torch.func.jvp(scale_of(n), (torch.ones(1),), (torch.ones(1),))


@mistake(ValueError, cause="got 'float16'", fix="such as torch.float16")
def autocast_to_a_string(n: str) -> None:
    scale_of(n).register_autocast("cpu", "float16")


@mistake(NotImplementedError, cause="has no sharding rule", fix="'{n}::scale', 'pointwise')")
def dtensors_without_a_rule(n: str) -> None:
    scale = scale_of(n)
    scale.register_fake(lambda x, factor: torch.empty_like(x))
    with ranks.simulated_mesh((2,)) as mesh:
        from torch.distributed.tensor import Shard, distribute_tensor

        scale(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))

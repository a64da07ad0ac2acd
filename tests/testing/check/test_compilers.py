"""The checks of compilers: what Inductor compiles beside the program that is compared."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import config, cpu_vec_isa

import torchop
from torchop.testing import check


def test_inductor_compiles_nothing_but_the_program(
    namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs that find out about vector instructions would take ten seconds on a new machine."""
    monkeypatch.setattr(config.cpp, "vec_isa_ok", None)  # which the tests have set
    probed: list[str] = []
    picked: list[Any] = []
    pick = cpu_vec_isa.pick_vec_isa

    def picking() -> Any:
        picked.append(pick())
        return picked[-1]

    monkeypatch.setattr(cpu_vec_isa, "pick_vec_isa", picking)
    monkeypatch.setattr(cpu_vec_isa.VecISA, "check_build", lambda isa, _: probed.append(str(isa)))
    known = [*cpu_vec_isa.supported_vec_isa_list]

    @torchop.custom_op(f"{namespace}::plus_one", mutates_args=())
    def plus_one(x: Tensor) -> Tensor:
        return x + 1

    plus_one.register_fake(torch.empty_like)
    plus_one.register_autograd(lambda ctx, grad: grad.sin() + 1)  # a loop in C++
    with config.patch(force_disable_caches=True):
        check(plus_one, (torch.randn(3),), only="inductor")
    assert picked
    assert not any(picked)
    assert probed == []
    assert cpu_vec_isa.supported_vec_isa_list == known

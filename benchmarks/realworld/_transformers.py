"""Calls to operators of transformers: the experts in a mixture of experts, and their gradient."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import torch

from _case import Case, Package


def package() -> Package:
    importlib.import_module("transformers.integrations.moe")
    importlib.import_module("transformers.integrations.msa_attention")
    left_out = {"transformers_msa::sparse_atten": "its kernel is for CUDA"}
    return Package("transformers", ("transformers", "transformers_msa"), [*_cases()], left_out)


def _cases() -> Iterator[Case]:
    torch.manual_seed(0)
    x, weight = torch.randn(8, 16), torch.randn(2, 16, 16)
    ends = torch.tensor([4, 8], dtype=torch.int32)
    grad = torch.randn(8, 16)
    learnt, learnt_x = weight.clone().requires_grad_(), x.clone().requires_grad_()
    forward = "transformers::grouped_mm_fallback"
    yield Case(forward, lambda: (x, weight, ends))
    yield Case(forward, lambda: (x, learnt, ends), "learnt weights")
    yield Case(forward, lambda: (learnt_x, learnt, ends), "learnt weights and input")
    yield Case(f"{forward}_backward", lambda: (x, weight, ends, grad))

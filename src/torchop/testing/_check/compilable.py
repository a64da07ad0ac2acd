"""Which examples a compiler takes: PyTorch has no fake tensors, or no programs, of some layouts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torchop._compat import fake_tensors
from torchop.testing._check.kinds import Details
from torchop.testing._check.subject import CannotCheck, Subject, reason


def with_fake_tensors(subject: Subject, details: Details) -> Subject:
    """The subject with the examples of which PyTorch makes fake tensors in their mode.

    The details say which are left out.

    Raises:
        CannotCheck: there are none.
    """
    with fake_tensors.new_fake_mode() as mode:
        makes = "PyTorch's checks make no fake tensors of"
        return _taking(subject, details, makes, mode.from_tensor)


def with_fake_kernel(subject: Subject, details: Details) -> Subject:
    """The same, where a fake kernel runs on them, as compilers need."""
    subject = with_fake_tensors(subject, details)
    if subject.fake_problem is not None:
        raise CannotCheck(f"no fake kernel that runs: {subject.fake_problem}")
    return subject


def with_programs(subject: Subject, details: Details) -> Subject:
    """The same, with the examples for which `torch.compile` compiles anything."""
    subject = with_fake_kernel(subject, details)
    torch.compiler.reset()
    compiled = torch.compile(torch.clone, backend="eager", fullgraph=True)
    return _taking(subject, details, "torch.compile does not take", compiled)


def strided(subject: Subject, details: Details, why: str) -> Subject:
    """The subject with the examples whose tensors are all strided, which alone can be checked."""

    def refuse(tensor: Tensor) -> Tensor:
        raise NotImplementedError(why)

    return _taking(subject, details, "it cannot be asked of", refuse)


def _taking(
    subject: Subject, details: Details, what: str, takes: Callable[[Tensor], object]
) -> Subject:
    """The subject without the examples with tensors of a layout that a function refuses."""
    refused = {}
    for layout, tensor in {t.layout: t for e in subject.examples for t in e.tensors}.items():
        try:
            if layout is not torch.strided:
                takes(tensor)
        except Exception as error:
            refused[layout] = f"{what} {layout} tensors: {reason(error)}"
    kept = subject.limited(lambda each: all(t.layout not in refused for t in each.tensors))
    if not kept.examples:
        raise CannotCheck("; ".join(refused.values()))
    if refused:
        details["calls left out"] = "; ".join(refused.values())
    return kept

"""What the child processes do: they run checks, and say what calls come to."""

from __future__ import annotations

import contextlib
import hashlib
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch

from torchop.testing import probes
from torchop.testing._check.providers.checks import order_of, ordered
from torchop.testing._check.run import Check, kinds, plan_checks, run_check
from torchop.testing._check.subject import CannotCheck, Example, ForkError, Subject, reason
from torchop.testing._contents import digest
from torchop.testing._mutate.installing import installed
from torchop.testing.process_state import restored, seed_torch

# The families whose checks try inputs, and not uses.
_OF_INPUTS = {"memory", "dtypes", "values", "sharing"}


class Message(NamedTuple):
    """What a child says.

    Attributes:
        kind: that a check starts, its result, what calls came to, or which modules are imported.
        name: the name of the check.
        value: a `Result`, the digests of the calls, or the names of the modules.
    """

    kind: Literal["check", "result", "calls", "modules"]
    name: str
    value: Any = None


def judge(
    op: Any,
    examples: Sequence[Any],
    options: dict[str, Any],
    order: Sequence[str] | None = None,
    changed: tuple[types.FunctionType, types.CodeType] | None = None,
) -> Iterator[Message]:
    """Runs checks, and then the calls.

    Args:
        order: the names of the checks to run, up to the first that fails; None for all that are not
            costly, to their end, or for those that the options choose.
        changed: a function, and the code that it has meanwhile.
    """
    with contextlib.nullcontext() if changed is None else installed(*changed):
        checks = plan_checks(op, examples, **options)
        for check in _in_order(checks, order, options):
            yield Message("check", check.name)
            result = run_check(check)
            yield Message("result", check.name, result)
            if order is not None and result.outcome == "failed":
                return
        yield Message("check", "the calls that are compared to the bit")
        subjects = {id(check.subject): check.subject for check in checks}.values()
        yield Message("calls", "", {k: v for each in subjects for k, v in digests(each).items()})
        yield Message("modules", "", [name for name in sys.modules if name.startswith("torch.")])


def _in_order(
    checks: list[Check], order: Sequence[str] | None, options: dict[str, Any]
) -> list[Check]:
    if order is None:
        return [c for c in checks if options.get("only") is not None or not c.kind.is_costly]
    by_name = {check.name: check for check in checks}
    return [by_name[name] for name in order if name in by_name]


def digests(subject: Subject) -> dict[str, str]:
    """What each call of the checks of inputs comes to, to the bit, and its fake kernel, gradients.

    Returns:
        Digests by the name of the check, and the number of the call.
    """
    if subject.unsupported:
        return {}
    with ordered(subject):
        found = _digests(subject)
    order = order_of(subject)
    return {name if order is None else f"{order} {name}": text for name, text in found.items()}


def _digests(subject: Subject) -> dict[str, str]:
    found = {}
    for kind in kinds():
        if kind.is_costly or kind.on_request or kind.name.partition(".")[0] not in _OF_INPUTS:
            continue
        with contextlib.suppress(Exception):  # why there are no more cases
            for number, case in enumerate(kind.cases(subject, {})):
                try:
                    example, _ = case.arguments()
                except CannotCheck:
                    continue
                found[f"{kind.name} {number}"] = _digest(subject, example)
    for number, (example, refusal, _) in enumerate(subject.first_calls):
        if refusal is not None:
            continue  # also because it forks
        found[f"vmap {number}"] = _text(lambda each=example: _batched(subject, each))
    return found


def _digest(subject: Subject, example: Example) -> str:
    results: list[Any] = []
    # First, and in its guard against forks: each copy would go on, and make more of them.
    refusal = subject.refusal(example, results)
    if isinstance(refusal, ForkError):
        return reason(refusal)

    def gradients() -> Any:
        changed = probes.requiring_grad(tuple(example.copy()))
        function, inputs = probes.as_function(subject.op, *changed)
        return probes.gradients(function, inputs)

    # On meta tensors, because those of FakeTensor take ten times as long.
    described = example.map(
        lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
    )
    texts = [
        _text(lambda: results) if refusal is None else type(refusal).__name__,
        _text(lambda: subject.op(*described.args, **described.kwargs)),
    ]
    if subject.has_autograd_kernel and not subject.schema.is_mutable:
        texts.append(_text(gradients))
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()


def _batched(subject: Subject, example: Example) -> Any:
    subject.needs_vmap()
    function, tensors = probes.on_tensors(subject.op, *example.copy())
    batches = [torch.stack([t, t.flip(0) if t.dim() else t]) for t in tensors]
    together = torch.func.vmap(lambda *each: tuple(probes.tensors_of(function(*each))))(*batches)
    last = [batch.movedim(0, -1) for batch in batches]
    return together, torch.func.vmap(
        lambda *each: tuple(probes.tensors_of(function(*each))), in_dims=-1
    )(*last)


def _text(call: Any) -> str:
    """What a call comes to, as text that is another one if a bit of it is."""
    try:
        with restored():
            seed_torch(0)
            results = probes.leaves(call())
    except Exception as error:
        return type(error).__name__
    return "; ".join(map(_bits, results))


def _bits(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    layout = value.stride() if value.layout is torch.strided else value.layout
    return f"{value.dtype} {value.device} {list(value.shape)} {layout} {digest(value)}"

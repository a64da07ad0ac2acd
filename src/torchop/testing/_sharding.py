"""`check_sharding`, which compares calls on DTensors with calls on whole tensors."""

from __future__ import annotations

import contextlib
import itertools
import math
import random
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor

from torchop import ShardingError
from torchop._compat import dtensor, optests, simulated_ranks
from torchop._rules.user.sharding import SHARDING
from torchop.extend import Operator, OpLike, OpOverload, named_inputs, short_text
from torchop.testing._errors import OpCheckError
from torchop.testing._samples import Sample, sample_of
from torchop.testing.probes import tensors_of, with_tensors

# Maps element sizes in bytes to tolerances. Several ranks add numbers in a different order than a
# single device, so the results may differ by rounding.
_TOLERANCES = {8: 1e-7, 4: 1e-4, 2: 2e-2}


# Maps names such as "result 0" to the results, gradients and mutated arguments of a call.
_Outcome: TypeAlias = dict[str, Tensor | None]


class ShardingReport(NamedTuple):
    """The result of `check_sharding`.

    Attributes:
        placements: the number of combinations of placements for which a call on DTensors agrees
            with a call on whole tensors. A combination contains placements for all tensors.
        refused: the combinations that the operator rejects with `ShardingError`, because DTensor
            would need to redistribute a tensor that the operator writes to.
        skipped: the number of combinations that were not tried because of `limit`.

    Example:
        >>> from torchop.testing import ShardingReport
        >>> ShardingReport(placements=4, refused=[], skipped=0).placements
        4
    """

    placements: int
    refused: list[str]
    skipped: int


def check_sharding(
    op: OpLike,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    mesh: Sequence[int] = (2,),
    limit: int = 500,
    backend: str | None = None,
    atol: float | None = None,
    rtol: float | None = None,
) -> ShardingReport:
    """Check that calls on DTensors agree with a call on whole tensors, for many placements.

    `check_sharding` passes each tensor replicated, sharded along each of its dimensions and, if the
    tensor is floating-point, as a partial sum. It tries all combinations of these placements, for
    all tensors and all dimensions of the mesh. For each combination, it compares results, gradients
    and mutated arguments with a call on whole tensors.

    If the process belongs to a process group, all ranks of the group must call `check_sharding`.
    Otherwise, the ranks are simulated in this process.

    Args:
        op: the operator: a handle, `"ns::name"`, `"ns::name.overload"`, an `OpOverload`, or a
            packet with one overload.
        args: the positional arguments, with whole tensors. A handle takes the arguments of its
            Python function. Include sizes that are not divisible by the size of the mesh.
        kwargs: the keyword arguments.
        mesh: the shape of the device mesh.
        limit: the maximum number of combinations. If there are more, a random sample is checked.
        backend: a backend of `torch.compile`, such as `"aot_eager"`, to compile the calls on
            DTensors. It requires real ranks, because compilers cannot trace simulated ranks.
        atol: the absolute tolerance of comparisons; the default depends on the dtype.
        rtol: the relative tolerance of comparisons; the default depends on the dtype.

    Returns:
        A report with the number of placements that agree, and the placements that were rejected.

    Raises:
        OpCheckError: a call on DTensors raised, or did not agree with the call on whole tensors.
            The message describes the first placement that failed.
        MissingRuleError: the operator has no sharding rule.
        ValueError: no argument is a tensor, or `backend` is used without real ranks.

    Example:
        >>> import torch, torchop
        >>> from torchop.testing import check_sharding
        >>> @torchop.custom_op("docs::row_sums", mutates_args=())
        ... def row_sums(x: torch.Tensor) -> torch.Tensor:
        ...     return x.sum(-1)
        >>> row_sums.register_fake(shape=lambda x: x.shape[:-1], like="x")
        >>> row_sums.register_sharding("... d -> ...", reduce={"d": "sum"}, linear=(0,))
        '... d -> ...'
        >>> check_sharding(row_sums, (torch.randn(4, 6),), mesh=(2, 2)).placements
        16
        >>> row_sums.register_sharding("... d -> ...", reduce={"d": "max"})
        '... d -> ...'
        >>> check_sharding(row_sums, (torch.randn(4, 6),))
        Traceback (most recent call last):
        torchop.testing.OpCheckError: ... with x: S(1) result 0 is wrong...
    """
    operator = Operator(op, "check_sharding")
    SHARDING.lookup(operator.overload)  # raises if no sharding rule is registered
    call = _Call(operator, sample_of(operator, "check_sharding", args, kwargs), (atol, rtol))
    if not call.tensors:
        raise ValueError(f"check_sharding({operator.name}, ...): no argument is a tensor.")
    with _mesh(mesh, call.tensors[0].device.type, backend) as device_mesh:
        return _check(call, device_mesh, limit, _caller(operator.overload, backend))


def _check(call: _Call, mesh: Any, limit: int, function: Callable[..., Any]) -> ShardingReport:
    expected = call.expected()
    every, skipped = _placements(call.tensors, mesh.ndim, limit)
    right, wrong, refused = 0, [], []
    for number, placements in enumerate(every):
        described = call.described(placements)
        try:
            problem = call.compared(expected, mesh, placements, function)
        except ShardingError as error:
            # An operator may reject a combination of placements, unless it is the first one, which
            # replicates all tensors. If the operator rejects even that, the sharding rule does not
            # match the shapes of the tensors.
            if number:
                refused.append(described)
                continue
            problem = short_text(error)
        except Exception as error:
            problem = f"raised {type(error).__name__}: {short_text(error)}"
        if problem is None:
            right += 1
        else:
            wrong.append(f"with {described} {problem}")
    if wrong:
        failure = optests.opcheck_error(OpCheckError)
        raise failure(
            f"check_sharding({call.overload.name()}, ...) on a mesh of {tuple(mesh.shape)}: "
            f"{wrong[0]} ({len(wrong)} of {len(every)} placements are wrong). The rule: "
            f"{short_text(SHARDING.lookup(call.overload).cached)}."
        )
    return ShardingReport(right, refused, skipped)


class _Call:
    """A call of the operator that can be repeated with different placements of its tensors."""

    def __init__(self, operator: Operator, sample: Sample, tolerances: Any) -> None:
        self.overload = operator.overload
        self.sample, self.tolerances = sample, tolerances
        named = list(named_inputs(operator.schema, *sample))
        self.tensors = [tensor for _, _, tensor in named]
        self.names = [where.removeprefix("input ").strip("'") for _, where, _ in named]
        self.is_written = [argument in operator.schema.mutated for argument, _, _ in named]
        self.cotangents: list[Tensor] = []

    def expected(self) -> _Outcome:
        tensors = [tensor.detach().clone() for tensor in self.tensors]
        return self._outcome(self.overload, tensors, lambda cotangent: cotangent)

    def _cotangent(self, index: int, result: Tensor) -> Tensor:
        """Return a random incoming gradient for a result, which is the same on all ranks."""
        if index == len(self.cotangents):
            generator = torch.Generator(result.device).manual_seed(index)
            self.cotangents.append(torch.empty_like(result).normal_(generator=generator))
        return self.cotangents[index]

    def compared(
        self, expected: _Outcome, mesh: Any, placements: Sequence[Any], function: Any
    ) -> str | None:
        """Describe how a call on DTensors differs from `expected`, or return None if it agrees."""
        from torch.distributed.tensor import Replicate  # slow to import

        pairs = zip(self.tensors, placements, strict=True)
        tensors = [simulated_ranks.placed(tensor, mesh, each) for tensor, each in pairs]
        everywhere = [Replicate()] * mesh.ndim
        outcome = self._outcome(
            function, tensors, lambda value: simulated_ranks.placed(value, mesh, everywhere)
        )
        if outcome.keys() != expected.keys():
            counts = [sum(name.startswith("result ") for name in o) for o in (outcome, expected)]
            return f"there are {counts[0]} results, not {counts[1]}"
        for what, right in expected.items():
            problem = self._difference(outcome[what], right)
            if problem is not None:
                return f"{what} is wrong{problem}"
        return None

    def _outcome(
        self, function: Any, tensors: Sequence[Tensor], placed: Callable[[Tensor], Tensor]
    ) -> _Outcome:
        for tensor, original in zip(tensors, self.tensors, strict=True):
            tensor.requires_grad_(original.requires_grad)
        args, kwargs = with_tensors(self.sample, tensors)
        returned = function(*args, **kwargs)
        results = tensors_of(returned)
        recorded = [result for result in results if result.requires_grad]
        if recorded:
            grads = [placed(self._cotangent(i, result)) for i, result in enumerate(recorded)]
            torch.autograd.backward(recorded, grads)
        left: _Outcome = {f"result {i}": r.detach() for i, r in enumerate(results)}
        named = list(zip(self.names, tensors, self.is_written, strict=True))
        left |= {f"the gradient of {name}": tensor.grad for name, tensor, _ in named}
        for name, tensor, is_written in named:
            if is_written:
                left[f"the written {name}"] = tensor.detach()
        return left

    def _difference(self, value: Tensor | None, right: Tensor | None) -> str | None:
        if value is None or right is None:
            return None if value is right else f": it is {'missing' if value is None else 'there'}"
        placements = getattr(value, "placements", None)
        where = "" if placements is None else f", placed {_spelled(placements)}"
        is_inexact = right.is_floating_point() or right.is_complex()
        default = _TOLERANCES.get(right.element_size(), 0.0) if is_inexact else 0.0
        atol, rtol = (default if each is None else each for each in self.tolerances)
        try:
            if placements is not None:
                value = cast(Any, value).full_tensor()
            whole = simulated_ranks.whole(value)
            torch.testing.assert_close(whole, right, atol=atol, rtol=rtol, equal_nan=True)
        except AssertionError as error:
            return f"{where}: {short_text(error)}"
        return None

    def described(self, placements: Sequence[Any]) -> str:
        named = zip(self.names, placements, strict=True)
        return ", ".join(f"{name}: {_spelled(each)}" for name, each in named)


def _placements(tensors: Sequence[Tensor], ndim: int, limit: int) -> tuple[list[Any], int]:
    """Return up to `limit` combinations of placements, and the number of omitted combinations.

    The first combination replicates all tensors.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard  # slow to import

    choices = []
    for tensor in tensors:
        pending = [Partial()] if tensor.is_floating_point() or tensor.is_complex() else []
        one = [Replicate(), *(Shard(dim) for dim in range(tensor.ndim)), *pending]
        choices.append(list(itertools.product(one, repeat=ndim)))
    count = math.prod(map(len, choices))
    if count <= limit:
        return list(itertools.product(*choices)), 0
    chance = random.Random(0)
    numbers = [0, *sorted(chance.sample(range(1, count), max(limit - 1, 0)))]
    return [_combination(choices, number) for number in numbers], count - len(numbers)


def _combination(choices: Sequence[Sequence[Any]], number: int) -> tuple[Any, ...]:
    picked = []
    for choice in choices:
        number, index = divmod(number, len(choice))
        picked.append(choice[index])
    return tuple(picked)


def _spelled(placements: Sequence[Any]) -> str:
    return " ".join(map(str, placements))


@contextlib.contextmanager
def _mesh(shape: Sequence[int], device: str, backend: str | None) -> Iterator[Any]:
    """Yield a mesh over the process group, or over simulated ranks if there is no process group."""
    import torch.distributed as dist  # slow to import

    if dist.is_available() and dist.is_initialized() and not simulated_ranks.are_simulated():
        from torch.distributed.device_mesh import init_device_mesh  # slow to import

        # Compilers compare meshes by identity, but DTensor's caches may return an equal mesh from
        # an earlier call. Then compiling fails with "Node tangents_2 was invalid, but is output",
        # even for PyTorch's own operators. So clear these caches.
        dtensor.clear_caches()
        yield init_device_mesh(device, tuple(shape))
    elif backend is not None:
        raise ValueError(
            "check_sharding(..., backend=...): compilers cannot trace simulated ranks. Call it in "
            "every process of a program that torchrun starts, after init_process_group."
        )
    else:
        with simulated_ranks.simulated_mesh(shape, device) as mesh:
            yield mesh


def _caller(overload: OpOverload, backend: str | None) -> Callable[..., Any]:
    if backend is None:
        return overload

    def call(*args: Any, **kwargs: Any) -> Any:
        return overload(*args, **kwargs)

    def compile_and_call(*args: Any, **kwargs: Any) -> Any:
        # Dynamo stops compiling a code object after 8 recompilations, so copy the code object for
        # each placement.
        function = types.FunctionType(
            call.__code__.replace(), call.__globals__, call.__name__, None, call.__closure__
        )
        # Local shapes differ between placements, so by default Dynamo would make them dynamic.
        compiled = torch.compile(function, backend=backend, fullgraph=True, dynamic=False)
        return compiled(*args, **kwargs)

    return compile_and_call

"""Checks of calls in transforms such as vmap, in modes such as autocast, and on subclasses."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import torch

from torchop import MissingFormulaError
from torchop._compat import dispatch, flop_counter
from torchop._compat.optests import PassingTensor
from torchop._rules.user.sharding import SHARDING
from torchop.testing import probes
from torchop.testing._check.calls import Call, CannotCheck, Example, is_valid, reason
from torchop.testing._check.cases import Case, Details
from torchop.testing._check.checks.gradients import (
    needs_formula,
    requiring_grad,
    same_gradients,
)
from torchop.testing._check.sizes import each_resized, sizes
from torchop.testing._check.subject import Subject
from torchop.testing._check.variants import in_dtype, other_scalars
from torchop.testing._sharding import check_sharding
from torchop.testing.process_state import process_state, seed_torch

# --------------------------------------------------------------------------------------------------
# Probes


def maps_like_a_loop(
    call: Call, in_dims: Any, out_dim: int = 0, batch: int = 3, **options: Any
) -> None:
    """Check that `vmap` agrees with a loop, and does not write to the arguments."""
    run, originals = probes.on_tensors(call.op, *call.example)

    def function(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(probes.tensors_of(run(*tensors)))

    def element(tensor: torch.Tensor, dim: int | None, n: int) -> torch.Tensor:
        return tensor if dim is None else tensor.select(dim, n)

    each = zip(*(_element(call, n, batch).tensors for n in range(batch)), strict=True)
    mapped = [
        original if dim is None else torch.stack(elements, dim)
        for original, elements, dim in zip(originals, each, in_dims, strict=True)
    ]
    pairs = list(zip(mapped, in_dims, strict=True))
    loop = [function(*(element(*pair, n) for pair in pairs)) for n in range(batch)]
    expected = [torch.stack(results, out_dim) for results in zip(*loop, strict=True)]
    before = probes.copies(mapped)
    actual = torch.vmap(function, tuple(in_dims), out_dim, **options)(*mapped)
    what = f"vmap with in_dims={tuple(in_dims)}, out_dims={out_dim}"
    probes.assert_same(actual, expected, what)
    probes.assert_same(mapped, before, f"an argument after {what}")


def _element(call: Call, n: int, batch: int) -> Example:
    """Return the arguments for element `n` of a batch. Each element has different values.

    The largest numbers differ too, so that a vmap rule cannot reduce over the whole batch.
    """
    other = call.other_values(n)

    def scaled(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        return (probes.widened(tensor) * (1 - n / (2 * batch))).to(tensor.dtype)

    example = other.map(scaled)
    return example if is_valid(call.op, example) else other


def maps_twice_like_a_loop(call: Call) -> None:
    """Check that `vmap` of `vmap` agrees with two loops."""
    run, _ = probes.on_tensors(call.op, *call.example)

    def function(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(probes.tensors_of(run(*tensors)))

    each = [call.other_values(n).tensors for n in range(4)]
    loop = [function(*tensors) for tensors in each]
    expected, mapped = (
        [torch.stack(same).unflatten(0, (2, 2)) for same in zip(*columns, strict=True)]
        for columns in (loop, each)
    )
    actual = torch.vmap(torch.vmap(function))(*mapped)
    probes.assert_same(actual, expected, "vmap of vmap")


def draws_for_each(call: Call) -> None:
    """Check that random operators respect the `randomness` argument of `vmap`."""
    run, originals = probes.on_tensors(call.op, *call.example)
    mapped = [torch.stack([original, original, original]) for original in originals]
    seed_torch(0)
    for index, result in enumerate(torch.vmap(run, randomness="same")(*mapped)):
        if not torch.equal(result[0], result[1]):
            raise AssertionError(f"randomness='same': result {index} differs within the batch.")
    different = torch.vmap(run, randomness="different")(*mapped)
    if all(torch.equal(result[0], result[1]) for result in different):
        raise AssertionError("randomness='different': the results of the batch are all the same.")
    try:
        torch.vmap(run, randomness="error")(*mapped)
    except RuntimeError:
        return
    raise AssertionError("randomness='error' does not raise.")


def compiles_in_vmap(call: Call) -> None:
    run, originals = probes.on_tensors(call.op, *call.example)

    def function(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(probes.tensors_of(run(*tensors)))

    mapped = [
        torch.stack(pair) for pair in zip(originals, call.other_values().tensors, strict=True)
    ]
    expected = torch.vmap(function)(*mapped)
    torch.compiler.reset()
    try:
        compiled = torch.compile(
            torch.vmap(function), backend="aot_eager", dynamic=True, fullgraph=True
        )
        probes.assert_same(compiled(*mapped), expected, "vmap compiled with dynamic sizes")
    finally:
        torch.compiler.reset()


def maps_gradients_like_a_loop(call: Call) -> None:
    """Check that per-sample gradients from `vmap(grad(f))` agree with a loop over the samples."""
    function, inputs = call.function()
    others = [t for t in call.other_values().tensors if t.requires_grad]
    batched = [torch.stack(pair).detach() for pair in zip(inputs, others, strict=True)]

    def total(*tensors: torch.Tensor) -> torch.Tensor:
        return probes.weighted_sum(function(*tensors))

    gradient = torch.func.grad(total, tuple(range(len(inputs))))
    expected = [gradient(*(tensor[n] for tensor in batched)) for n in range(2)]
    actual = torch.vmap(gradient)(*batched)
    together = [torch.stack(pair) for pair in zip(*expected, strict=True)]
    probes.assert_same(actual, together, "vmap of torch.func.grad")


def runs_in_autocast(call: Call, before: Any = None) -> None:
    """Check that a call under autocast agrees with a call without autocast.

    An operator's autocast rule may cast all, some or none of the inputs, so accept the results for
    any of these choices. If `before` is given, first call the operator under autocast with these
    arguments.
    """
    tensors = call.tensors
    device = tensors[-1].device
    lower = torch.get_autocast_dtype(device.type)
    floats = [place for place, t in enumerate(tensors) if t.dtype.is_floating_point]
    some = [c for n in range(1, len(floats)) for c in itertools.combinations(floats[:4], n)]

    def cast(dtype: torch.dtype, places: Any) -> Any:
        changed = [t.to(dtype) if n in places else t for n, t in enumerate(tensors)]
        return call.valid(call.example.with_tensors(changed)).copy()

    with torch.autocast(device.type, dtype=lower):
        if before is not None:
            call.again(Example(*before))
        state = process_state(random_numbers=False)
        actual = call.again()
        for name, value in process_state(random_numbers=False).items():
            if "autocast" in name and value != state[name]:
                raise AssertionError(
                    f"the call changes {name} from {state[name]} to {value}. Restore it before "
                    "returning."
                )
    problem = None
    choices: list[Any] = [(lower, ()), (lower, floats), (torch.float32, floats)]
    ways: list[Any] = [(*each, {}) for each in choices + [(lower, chosen) for chosen in some]]
    # Autocast may also apply to PyTorch functions inside the kernel, so tolerate the rounding of
    # intermediate values.
    rounded = probes.rounding(lower, actual)
    ways += [(*each, rounded) for each in choices]
    # Under autocast, some PyTorch functions cast to the lower dtype and others to float32, so
    # accept any result dtype for kernels that call such functions.
    ways.append((lower, (), {**rounded, "dtypes": False}))
    for dtype, places, tolerances in ways:
        try:
            expected = probes.outcome(call.op, *cast(dtype, places))
            probes.assert_same(actual, expected, "under autocast", **tolerances)
        except Exception as error:
            problem = problem or error
        else:
            return
    raise AssertionError(
        f"under autocast, the result is neither that of the plain call nor that of a call on cast "
        f"inputs: {problem}"
    )


def ignores_autocast(call: Call) -> None:
    """Check that autocast changes nothing for arguments in double, which autocast never casts."""
    expected = call.again()
    device_type = call.tensors[-1].device.type
    with torch.autocast(device_type, dtype=torch.get_autocast_dtype(device_type)):
        actual = call.again()
    probes.assert_same(actual, expected, "under autocast, with arguments in double")


def counts_operations(call: Call, larger: Any) -> None:
    """Check that the FLOP formula returns a count, and a larger count for the call `larger`."""
    what = "the FLOP formula"
    try:
        count, of_larger = (
            flop_counter.counted(call.op, *probes.copies(each))
            for each in (tuple(call.example), larger)
        )
    except Exception as error:
        raise AssertionError(f"{what} raises {reason(error)}.") from error
    if type(count) is not int or count < 0:
        raise AssertionError(f"{what} returns {count!r}. Return an int of 0 or more.")
    if count >= of_larger and count:
        raise AssertionError(
            f"{what} returns {count} for this call, and {of_larger} if each size is twice as large."
        )


def runs_in_inference_mode(call: Call) -> None:
    """Check that the outcome is the same in inference mode, `no_grad`, and with `requires_grad`."""
    expected = call.again()
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            actual = call.again()
            probes.assert_same(actual, expected, f"in {mode.__name__}")
    if not call.schema.is_mutable:
        try:
            actual = call.again(requiring_grad(call.example))
        except Exception:
            return  # the operator refuses tensors that require grad
        probes.assert_same(actual, expected, "with arguments that require grad")


def takes_subclasses(call: Call) -> None:
    """Check that the outcome is the same for tensor subclasses that only forward calls."""

    class PassingFunctionTensor(torch.Tensor):
        """A subclass with the default `__torch_function__`. It only forwards calls."""

    with torch.no_grad():
        expected = call.again()
        plain = call.example.copy().map(lambda t: t.as_subclass(PassingFunctionTensor))
        actual = probes.mapped(
            probes.outcome(call.op, *plain), lambda t: t.as_subclass(torch.Tensor)
        )
        probes.assert_same(actual, expected, "with a subclass of Tensor")
        wrapped = call.example.copy().map(PassingTensor)
        actual = probes.mapped(
            probes.outcome(call.op, *wrapped), lambda t: getattr(t, "wrapped", t)
        )
        probes.assert_same(actual, expected, "with a subclass that wraps a Tensor")


# --------------------------------------------------------------------------------------------------
# Each of these functions yields the cases of one check (the calls that it makes). Reports print the
# first line of the docstring as the question that the check answers.


def vmap(subject: Subject, details: Details) -> Iterator[Case]:
    """Does vmap agree with a loop?"""
    subject.needs_vmap()
    if subject.is_random:
        raise CannotCheck("results are random: see subsystems.vmap_random")
    for example in subject.accepted(most=2):
        tensors = example.tensors
        if not tensors:
            continue
        choices: list[list[int | None]] = [[0] * len(tensors), [t.dim() for t in tensors]]
        if any(t.dim() > 1 for t in tensors):
            choices.append([min(t.dim(), 1) for t in tensors])
        if len(tensors) > 1:
            choices += [
                [0 if n == place else None for n in range(len(tensors))]
                for place in range(len(tensors))
            ]
            choices.append([0, *(t.dim() for t in tensors[1:])])
        written_places = subject.written_places(example)
        for in_dims in choices[:9]:
            if any(in_dims[place] is None for place in written_places):
                continue  # vmap cannot write a batch of results into an unbatched tensor
            yield _mapped(example, in_dims=in_dims)
        yield _mapped(example, in_dims=choices[0], chunk_size=2)
        if all(tensor.dim() for tensor in tensors):
            yield _mapped(example, in_dims=choices[0], out_dim=-1)
        yield _mapped(example, in_dims=choices[0], batch=9)
        yield Case("vmap of vmap", example, probe=maps_twice_like_a_loop)
        for case in (*other_scalars(subject, example), *_in_double(subject, example)):
            changed = _mapped(case.example, in_dims=choices[0])
            yield dataclasses.replace(changed, label=f"{changed.label}, {case.label}")
    raise CannotCheck("no argument is a tensor")


def _in_double(subject: Subject, example: Example) -> Iterator[Case]:
    changed = in_dtype(torch.double, example)
    if any(t.dtype is torch.float32 for t in example.tensors) and subject.refusal(changed) is None:
        yield Case("in double", changed)


def _mapped(example: Example, **options: Any) -> Case:
    words = ", ".join(f"{name}={value}" for name, value in options.items())
    return Case(f"vmap with {words}", example, probe=maps_like_a_loop, options=options)


def vmap_random(subject: Subject, details: Details) -> Iterator[Case]:
    """Does vmap respect `randomness`?"""
    if not subject.is_random:
        raise CannotCheck("results are not random: the operator has no tag nondeterministic_seeded")
    subject.needs_vmap()
    for example in subject.accepted(most=1):
        if example.tensors:
            yield Case("each kind of randomness", example, probe=draws_for_each)


def vmap_compiled(subject: Subject, details: Details) -> Iterator[Case]:
    """Does compiled vmap with dynamic sizes agree with eager mode?"""
    subject.needs_vmap()
    subject.needs_fixed_results()
    subject.needs_fake()
    examples = subject.strided("compilers support strided tensors,")
    if subject.sizes_depend_on_data:
        raise CannotCheck("result sizes depend on data, so they may differ in a batch")
    for example in examples[:2]:
        if example.tensors:
            yield Case("vmap over every tensor", example, probe=compiles_in_vmap)
    raise CannotCheck("no argument is a tensor")


def func(subject: Subject, details: Details) -> Iterator[Case]:
    """Do the gradients of torch.func agree with autograd?"""
    needs_formula(subject)
    function, inputs = Call(subject.op, *subject.double_examples[0]).function()
    try:
        torch.func.vjp(function, *(tensor.detach() for tensor in inputs))
    except RuntimeError as error:
        # Operators of torch.library.custom_op and mutable operators of torchop do not support
        # torch.func, so skip the check instead of reporting a failure.
        if "functorch transforms" in str(error) or isinstance(error, MissingFormulaError):
            raise CannotCheck(f"the formula does not support torch.func: {reason(error)}") from None
    for example in subject.double_examples[:2]:
        options = {"ways": ["of torch.func.grad", "of torch.func.vjp"]}
        yield Case("the example in double", example, None, "gradient", same_gradients, options)
    if subject.has_vmap_rule and not subject.is_random:
        details["vmap of grad"] = "tried"
        example = subject.double_examples[0]
        label = "gradients for each sample"
        yield Case(label, example, None, "gradient", maps_gradients_like_a_loop)
    else:
        details["vmap of grad"] = "not tried: no vmap rule, or random results"


def autocast(subject: Subject, details: Details) -> Iterator[Case]:
    """Does a call under autocast agree with a call on the original inputs, or on cast inputs?"""
    for example in subject.accepted():
        if any(t.dtype is torch.float32 for t in example.tensors):
            yield Case("torch.autocast", example, probe=runs_in_autocast)
            # A faulty autocast rule may cache the arguments of the first call after casting them,
            # and pass them to the kernel again in the second call.
            others = Example(*probes.other_values(tuple(example)))
            options = {"before": tuple(example)}
            label = "torch.autocast, after other values"
            yield Case(label, others, probe=runs_in_autocast, options=options, shrink=False)
            yield from _with_one_in_half(subject, example)
            for case in _in_double(subject, example):
                yield Case("torch.autocast in double", case.example, probe=ignores_autocast)


def _with_one_in_half(subject: Subject, example: Example) -> Iterator[Case]:
    """Yield calls with one argument in float16, if the operator has an autocast rule.

    The autocast rule must cast this argument to the dtype of the autocast region, just as it casts
    arguments in float32. Without autocast, the operator may reject such calls.
    """
    key = f"Autocast{dispatch.dispatch_key_name(example.tensors[-1].device.type)}"
    if not subject.operator.has_kernel(key):
        return
    for place, tensor in enumerate(example.tensors):
        if tensor.dtype is torch.float32:
            changed = example.replace(place, tensor.half())
            label = f"torch.autocast, with {subject.names(example)[place]} in float16"
            yield Case(label, changed, probe=runs_in_autocast, calls=False, shrink=False)


def inference_mode(subject: Subject, details: Details) -> Iterator[Case]:
    """Is the outcome the same in inference mode, and if arguments require grad?"""
    for example in subject.accepted():
        yield Case("the example", example, probe=runs_in_inference_mode)


def subclasses(subject: Subject, details: Details) -> Iterator[Case]:
    """Is the outcome the same for subclasses of Tensor that only forward calls?"""
    for example in subject.strided("torch.Tensor.as_subclass supports strided tensors,"):
        yield Case("the example", example, probe=takes_subclasses)


def flops(subject: Subject, details: Details) -> Iterator[Case]:
    """Does the FLOP formula return a count for each call, and a larger one for larger sizes?"""
    if not flop_counter.has_count(subject.op):
        raise CannotCheck("no FLOP formula")
    for example in subject.accepted():
        for _, larger in each_resized(example, {size: 2 * size for size in sizes(example)}):
            if subject.refusal(larger) is None:
                options = {"larger": tuple(larger)}
                yield Case("the example", example, probe=counts_operations, options=options)


def sharding(subject: Subject, details: Details) -> Iterator[Case]:
    """Does a call on DTensors agree with a call on whole tensors, in every placement?"""
    if not SHARDING.has(subject.op):
        raise CannotCheck("no sharding rule registered with torchop")
    options = {"limit": 60}
    for example in subject.accepted(most=2):
        if example.tensors:
            label = "DTensors on two ranks"
            yield Case(label, example, probe=check_sharding, options=options, shrink=False)

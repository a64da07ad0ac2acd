"""Checks that gradients are correct, and that writes to saved tensors are detected."""

from __future__ import annotations

import contextvars
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from torchop import ForwardModeError, MissingFormulaError
from torchop.testing import probes
from torchop.testing._check.calls import REJECTED, Call, CannotCheck, Example, reason
from torchop.testing._check.cases import Case, Details
from torchop.testing._check.subject import Subject
from torchop.testing.process_state import seed_torch

# --------------------------------------------------------------------------------------------------
# Probes


def gradients_are_right(call: Call, order: int = 1, forward: bool = False) -> None:
    """Check gradients against finite differences.

    If the check fails, repeat it at nearby inputs, because the function may have a kink at the
    original inputs, like relu at 0.
    """
    needs_finite_results(call)
    function, inputs = call.function()
    check: Any = torch.autograd.gradcheck if order == 1 else torch.autograd.gradgradcheck
    is_large = sum(tensor.numel() for tensor in inputs) > 40
    options: dict[str, Any] = {"fast_mode": is_large}
    if forward:
        options |= {"check_forward_ad": True, "check_backward_ad": False}
        options["check_undefined_grad"] = False

    def check_at(tensors: Any) -> None:
        if is_large and order == 1 and not forward:
            # Check a single direction first, because gradcheck takes minutes to report an incorrect
            # gradient of large tensors.
            probes.slope_is_right(function, tensors)
        check(function, tensors, **options)

    try:
        check_at(inputs)
    except RuntimeError:
        seed_torch(1)
        try:
            nearby = moved_inputs(call, 0.01)
        except CannotCheck:
            nearby = inputs
        check_at(nearby)


def needs_finite_results(call: Call) -> None:
    """Skip the case if a result is infinite or NaN, because its finite differences are then NaN."""
    results = filter(probes.is_plain, probes.tensors_of(call.record.outcome))
    # PyTorch cannot test numbers of 8 bits.
    if any(t.itemsize > 1 and not bool(t.isfinite().all()) for t in results):
        raise CannotCheck("a result is infinite or NaN")


def moved_inputs(call: Call, distance: float) -> list[Tensor]:
    """Return the tensors that require grad, moved by random numbers between 0 and `distance`."""
    moved = call.changed(
        lambda t: (
            (t.detach() + distance * torch.rand_like(t)).requires_grad_() if t.requires_grad else t
        )
    )
    return [tensor for tensor in moved.tensors if tensor.requires_grad]


def slopes_are_right(call: Call, step: float = 1e-2, tolerance: float = 2e-2) -> None:
    """Check gradients against finite differences, along a single direction.

    The default step and tolerance are for float32.
    """
    needs_finite_results(call)
    function, _ = call.function()
    problem = slope_problem(
        function, lambda place: moved_inputs(call, 0.1 * place), step, tolerance
    )
    if problem is not None:
        raise problem


def slope_problem(
    function: Any,
    inputs_at: Callable[[int], Sequence[Tensor]],
    step: float = 1e-6,
    tolerance: float = 1e-3,
) -> RuntimeError | None:
    """Compare gradients with finite differences at up to three points.

    The function may have kinks at some of the points, so return None as soon as the gradients are
    right at one point. Otherwise return the first error. If `valid` rejects the inputs at every
    point, raise CannotCheck.
    """
    problem: RuntimeError | None = None
    for place in range(3):
        seed_torch(place)
        try:
            probes.slope_is_right(function, inputs_at(place), step, tolerance)
        except CannotCheck:
            continue
        except RuntimeError as error:
            problem = problem or error
        else:
            return None
    if problem is None:
        raise CannotCheck(REJECTED)
    return problem


def saved_tensors_are_watched(call: Call) -> None:
    """Check that writes after the forward pass make backward raise, or do not affect gradients."""
    function, inputs = call.function()
    expected = probes.gradients(function, inputs)
    for what in ("arguments", "results"):
        leaves = [tensor.detach().requires_grad_() for tensor in inputs]
        passed = [leaf.clone() for leaf in leaves]
        results = function(*passed)
        total = probes.weighted_sum([result.clone() for result in results])
        written = {"arguments": passed, "results": results}[what]
        with torch.no_grad():
            for tensor in filter(probes.is_plain, written):
                tensor.mul_(0.5).add_(1)
        try:
            actual = torch.autograd.grad(total, leaves, allow_unused=True)
        except RuntimeError:
            continue  # autograd detected the write to a saved tensor
        try:
            probes.assert_same(actual, expected, f"gradients after a write to the {what}")
        except AssertionError as error:
            raise AssertionError(f"{_unwatched(results, written)} {error}") from None


def _unwatched(results: Sequence[Tensor], written: Sequence[Tensor]) -> str:
    """Return a message that names the attributes of `ctx` that share memory with `written`."""
    names = {
        f"ctx.{name}"
        for node in {result.grad_fn for result in results if result.grad_fn is not None}
        for name, value in getattr(node, "__dict__", {}).items()
        for part in (value if isinstance(value, (list, tuple)) else (value,))
        if any(_shares_memory(part, tensor) for tensor in written)
    }
    kept = f"{', '.join(sorted(names))} keeps" if names else "the formula keeps"
    return (
        f"{kept} memory that the caller may write before the backward, and autograd does not "
        "notice the write. In setup_context, pass the tensor to ctx.save_for_backward, and convert "
        "it in the backward, from ctx.saved_tensors."
    )


def _shares_memory(value: Any, tensor: Tensor) -> bool:
    if hasattr(value, "__array_interface__"):  # a NumPy array
        value = torch.as_tensor(value)
    if not isinstance(value, Tensor) or not probes.is_plain(value) or not probes.is_plain(tensor):
        return False
    one, other = value.untyped_storage(), tensor.untyped_storage()
    starts, ends = (
        (one.data_ptr(), other.data_ptr()),
        (one.data_ptr() + one.nbytes(), other.data_ptr() + other.nbytes()),
    )
    return max(starts) < min(ends)


def incoming_gradients_are_kept(call: Call) -> None:
    """Check that the backward formula modifies neither incoming gradients nor arguments in place.

    Autograd may pass the same gradient tensor to several nodes. If the backward formula modified
    it, the other nodes would compute wrong gradients.
    """
    function, inputs = call.function()
    before = probes.copies(inputs)
    results = [result for result in function(*inputs) if result.requires_grad]
    given, kept = ([torch.ones_like(result) for result in results] for _ in range(2))
    torch.autograd.grad(results, inputs, given, allow_unused=True)
    probes.assert_same(given, kept, "the incoming gradient after backward")
    probes.assert_same(inputs, before, "an argument after forward and backward")


def _in_another_thread(function: Any, inputs: Sequence[Tensor]) -> Sequence[Any]:
    total, answer = probes.weighted_sum(function(*inputs)), Future[Any]()

    def differentiate() -> None:
        try:
            answer.set_result(torch.autograd.grad(total, inputs, allow_unused=True))
        except BaseException as error:
            answer.set_exception(error)

    # The priority of providers (alternative kernels) is stored in a context variable, so run the
    # thread in a copy of the current context.
    run = contextvars.copy_context().run
    threading.Thread(target=run, args=(differentiate,), daemon=True).start()
    try:
        return list(answer.result(_SECONDS))
    except TimeoutError:
        raise AssertionError(
            f"backward in another thread did not return within {_SECONDS:g} s."
        ) from None


_SECONDS = 8.0


def _func_grad(function: Any, inputs: Sequence[Tensor]) -> Sequence[Any]:
    plain = tuple(tensor.detach() for tensor in inputs)
    places = tuple(range(len(plain)))
    return [*torch.func.grad(lambda *t: probes.weighted_sum(function(*t)), places)(*plain)]


def _func_vjp(function: Any, inputs: Sequence[Tensor]) -> Sequence[Any]:
    plain = (tensor.detach() for tensor in inputs)
    pull_back = torch.func.vjp(lambda *t: probes.weighted_sum(function(*t)), *plain)[1]
    return [*pull_back(torch.ones((), dtype=torch.double))]


# Other ways to compute gradients. All of them must agree with a plain `torch.autograd.grad` call.
WAYS: Mapping[str, Callable[[Any, Sequence[Tensor]], Sequence[Any]]] = {
    "in another thread": _in_another_thread,
    "of torch.func.grad": _func_grad,
    "of torch.func.vjp": _func_vjp,
}


def same_gradients(call: Call, ways: Sequence[str]) -> None:
    """Check that all of the given `ways` compute the same gradients as `torch.autograd.grad`."""
    function, inputs = call.function()
    expected = probes.gradients(function, inputs)
    for way in ways:
        actual = WAYS[way](function, inputs)
        probes.assert_same(actual, expected, f"gradients {way}")


# --------------------------------------------------------------------------------------------------
# Each of these functions yields the cases of one check (the calls that it makes). Reports print the
# first line of the docstring as the question that the check answers.

gradient_case = functools.partial(Case, group="gradient")


def needs_formula(subject: Subject, order: int = 1) -> None:
    """Raise CannotCheck if the operator does not support derivatives of this order."""
    if not subject.has_autograd_kernel:
        raise CannotCheck("no autograd formula: no kernel is registered at an autograd key")
    try:
        function, inputs = Call(subject.op, *subject.trainable_examples[0]).function()
        results = function(*inputs)
        if any(result.is_inference() for result in results):
            raise CannotCheck("autograd cannot save inference tensors; see contracts.schema")
        results = [result for result in results if result.requires_grad]
        if not results:
            raise CannotCheck("no autograd formula that runs: results do not require grad")
        for _ in range(order):
            total = probes.weighted_sum(results)
            grads = torch.autograd.grad(total, inputs, create_graph=True, allow_unused=True)
            results = [grad for grad in grads if grad is not None and grad.requires_grad]
            if not results:
                return
    except CannotCheck:
        raise
    except Exception as error:
        text = str(error)
        says_so = "no autograd formula" in text or "once_differentiable" in text
        is_stocks = "derivative for" in text and "not implemented" in text
        if says_so or is_stocks or isinstance(error, MissingFormulaError):
            raise CannotCheck(f"no autograd formula that runs: {reason(error)}") from None


def trainable_example(subject: Subject) -> Example | None:
    """Return the first accepted example, with floating-point tensors that require grad.

    Return None if the example has no such tensors, or if the operator mutates arguments or has no
    backward formula.
    """
    if subject.schema.is_mutable:
        return None
    try:
        needs_formula(subject)
    except CannotCheck:
        return None
    example = requiring_grad(subject.accepted(most=1)[0])
    return example if any(t.requires_grad for t in example.tensors) else None


def requiring_grad(example: Example) -> Example:
    return example.map(
        lambda t: t.detach().requires_grad_() if t.dtype.is_floating_point else t.detach()
    )


def needs_digits(subject: Subject) -> None:
    """Raise CannotCheck if a result is too imprecise for finite differences, which need double."""
    function, inputs = Call(subject.op, *subject.double_examples[0]).function()
    for result in function(*inputs):
        if result.requires_grad and torch.finfo(result.dtype).bits < 64:
            raise CannotCheck(
                f"the result has dtype {result.dtype} for arguments in double. Finite differences "
                "need double"
            )


def gradgradcheck(subject: Subject, details: Details) -> Iterator[Case]:
    """Do second derivatives agree with finite differences?"""
    needs_formula(subject, 2)
    needs_digits(subject)
    options = {"order": 2}
    example = subject.double_examples[0]
    yield gradient_case(
        "the example in double", example, probe=gradients_are_right, options=options
    )


def forward_mode(subject: Subject, details: Details) -> Iterator[Case]:
    """Does forward mode agree with finite differences?"""
    for example in subject.double_examples:
        function, inputs = Call(subject.op, *example).function()
        plain = tuple(tensor.detach() for tensor in inputs)
        try:
            tangents = torch.func.jvp(function, plain, tuple(torch.ones_like(t) for t in plain))[1]
        except Exception as error:
            text = str(error)
            says_so = "jvp" in text and ("implement" in text or "forward" in text)
            if says_so or isinstance(error, (ForwardModeError, NotImplementedError)):
                raise CannotCheck(f"no forward-mode formula: {reason(error)}") from None
        else:
            if subject.operator.handle is None and not any(bool(t.any()) for t in tangents):
                raise CannotCheck(
                    "no forward-mode formula. PyTorch returns zeros for operators of "
                    "torch.library; operators of torchop raise ForwardModeError"
                )
        options = {"forward": True}
        yield gradient_case(
            "the example in double", example, probe=gradients_are_right, options=options
        )


def with_formula(subject: Subject, label: str, probe: Any, order: int = 1) -> Iterator[Case]:
    """Yield cases for up to two examples that require grad, if derivatives of `order` exist."""
    needs_formula(subject, order)
    for example in subject.trainable_examples[:2]:
        yield gradient_case(label, example, probe=probe)


def saved(subject: Subject, details: Details) -> Iterator[Case]:
    """Does backward detect writes to the tensors that it needs?"""
    if subject.schema.is_mutable:
        raise CannotCheck("the operator writes arguments")
    for case in with_formula(subject, "incoming gradients", incoming_gradients_are_kept):
        yield dataclasses.replace(case, group="incoming")
    yield from with_formula(subject, "the example", saved_tensors_are_watched)

"""What is checked: an operator, its examples, and what it is compared with."""

from __future__ import annotations

import copy
import functools
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from torchop import AliasError, ProviderError, ResultError, UndeclaredMutationError
from torchop._compat import dispatch, fake_tensors
from torchop._rules.providers import every_argument
from torchop._rules.providers.provider import Provider
from torchop._rules.user.examples import EXAMPLES, make_examples, operator_of_examples
from torchop.extend import Form, Operator, OpLike, named_inputs, short_repr, short_text
from torchop.testing import _samples, probes
from torchop.testing.process_state import forks, restored


class CannotCheck(Exception):  # noqa: N818  (not an error: what a check says instead of a result)
    """Why a check cannot be done, or, for a case, why there is no such variant."""


class Refused(CannotCheck):
    """What refuses the arguments of a case: the operator, or its reference."""


def breaks_contract(error: BaseException) -> bool:
    """Whether an error says that the kernel returned or wrote what its schema rules out.

    Then the kernel is wrong, while any other exception may be how it refuses arguments.
    """
    ours = isinstance(error, (AliasError, ResultError, UndeclaredMutationError))
    return ours or "may not alias any inputs to this custom operator" in text_of(error)  # PyTorch's


REJECTED = "'valid' of register_examples rejects it"


class Excluded(Exception):  # noqa: N818  (no error: what `valid`, or `supports`, says)
    """What a call counts as that `valid`, or the provider, excludes: it is not made."""


class ValidError(ValueError):
    """The `valid` of the examples raised an exception, or returned something that is no bool."""


class ForkError(Exception):
    """What a call that forks the process counts as: it is not made again."""


class Example(NamedTuple):
    """The arguments of a call, as the schema has them."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def tensors(self) -> list[Tensor]:
        return probes.tensors_of(tuple(self))

    def map(self, change: Callable[[Tensor], Any]) -> Example:
        """The example with `change` of each tensor."""
        return Example(*probes.mapped(tuple(self), change))

    def replace(self, index: int, tensor: Tensor) -> Example:
        """The example with another tensor at one place."""
        tensors = self.tensors
        return self.with_tensors([*tensors[:index], tensor, *tensors[index + 1 :]])

    def with_tensors(self, tensors: Sequence[Tensor]) -> Example:
        """The example with these tensors in place of its own."""
        return Example(*probes.with_tensors(tuple(self), tensors))

    def copy(self) -> Example:
        """The example in memory of its own, laid out as it was."""
        return Example(*probes.copies(tuple(self)))


Arrangement: TypeAlias = Callable[[Example], Example]


@dataclass(frozen=True)
class Case:
    """One call of a probe: what may fail, be made smaller, and be printed.

    Attributes:
        label: what is special, in words.
        probe: `probe(op, args, kwargs, **options)` raises if the operator is wrong.
        example: what the arguments are made from; smaller ones are tried in its place.
        arrange: makes the arguments; raises CannotCheck where that makes no sense. By default, they
            are the example.
        options: more arguments of the probe, or a function that makes them of the arguments.
        calls: whether the operator is called with the arguments first; what it refuses, it need
            not do right.
        shrink: whether smaller examples are tried.
    """

    label: str
    probe: Callable[..., object]
    example: Example
    arrange: Arrangement | None = None
    options: Mapping[str, Any] | Callable[[Example], Mapping[str, Any]] | None = None
    calls: bool = True
    shrink: bool = True

    def arguments(self) -> tuple[Example, dict[str, Any]]:
        """New arguments for the probe, and its options."""
        example = self.call()
        return example, self.options_for(example)

    def call(self) -> Example:
        """New arguments for the probe."""
        example = self.example.copy()
        return example if self.arrange is None else self.arrange(example)

    def options_for(self, example: Example) -> dict[str, Any]:
        """The options of the probe for these arguments; a reference is called with a copy."""
        options = self.options(example.copy()) if callable(self.options) else self.options
        return dict(options or {})


class Subject:
    """An operator that is checked, and everything that checks want to know of it.

    Raises:
        MissingRuleError: there are no examples.
        TypeError: an example is not a tuple of arguments, or `(args, kwargs)`.
        ValueError: an example has no data or is not valid, or no such operator can be meant.
    """

    def __init__(
        self,
        op: OpLike,
        examples: Sequence[Any] = (),
        *,
        reference: Callable[..., Any] | None = None,
        seed: int = 0,
        rtol: float | None = None,
        atol: float | None = None,
    ) -> None:
        self.operator = Operator(op, "check")
        pairs = (
            [_samples.call_of(example) for example in examples] if examples else make_examples(op)
        )
        by_handle = operator_of_examples(op, "check")
        if not examples or all(_samples.is_call(by_handle, *pair) for pair in pairs):
            self.operator = by_handle
        self.name = str(self.operator)
        self.schema = self.operator.schema
        self.op = self.operator.overload
        self.reference = None if reference is None else self.operator.flat_function(reference)
        self.seed = seed
        tolerances = {"rtol": rtol, "atol": atol}
        self.tolerances = {name: each for name, each in tolerances.items() if each is not None}
        self.is_random = torch.Tag.nondeterministic_seeded in self.op.tags
        # The check that found a call which breaks the contract, as others would find it again.
        self.broken_in: str | None = None
        self._valid = EXAMPLES.valid(self.op)
        # How many calls `valid` rejected; shared with the subjects that are made from this one.
        self.counts = Counter(rejected=0)
        self.originals = [self._original(*pair) for pair in pairs]
        for index, example in enumerate(self.originals):
            if not self.is_valid(example):
                raise ValueError(
                    f"check({self.name}, ...): 'valid' of register_examples rejects example "
                    f"{index}. Change the example, or 'valid'."
                )
        # Whose kernel is checked, None for the reference; the latter's; why it cannot run here.
        self.provider: Provider | None = None
        self.of_reference = self
        self.unsupported = ""
        # The calls of the checks of inputs, once they were generated for the first provider.
        self.inputs: list[Case] | None = None
        # Detached and contiguous: how tensors lie in memory is for the checks to choose.
        self.examples = [Example(*probes.contiguous_copies(tuple(each))) for each in self.originals]

    def _original(self, args: tuple[Any, ...], kwargs: Any) -> Example:
        if not self.operator.takes_structures:
            try:
                _samples.refuse_lists(
                    self.schema, self.operator.signature.bind(*args, **kwargs).arguments
                )
            except TypeError as error:
                raise TypeError(
                    f"check({self.name}, ...): an example is a tuple of arguments, or (args, "
                    f"kwargs), but this one is not a call of {self.schema}: {error}. Pass "
                    "several examples one by one, as in check(op, *examples)."
                ) from None
        args, kwargs = _samples.sample_of(self.operator, "check", args, kwargs)
        args = tuple(list(a) if isinstance(a, (list, tuple)) else a for a in args)
        return Example(args, kwargs)

    def __str__(self) -> str:
        return self.name

    def declined(self, example: Example) -> str | None:
        """Why the provider does not take a call; None if it does, or there is none."""
        if self.provider is None:
            return None
        try:
            answer = self.provider.takes(*every_argument(self.schema, *example))
        except ProviderError as error:  # which one check of the provider is about
            return str(error)
        name = self.provider.name
        return None if answer else f"the provider {name!r} does not take it: `supports` says no"

    def is_valid(self, example: Example) -> bool:
        """Whether the author's `valid` accepts a call, or each call of a program of several.

        Raises:
            ValidError: `valid` raised an exception, or returned something that is no bool.
        """
        if self._valid is None:
            return True
        if example.args and all(isinstance(arg, tuple) for arg in example.args):
            return all(self.is_valid(Example(*call)) for call in example.args)
        args, kwargs = example.copy()
        try:
            with restored(), torch.no_grad():
                answer = self._valid(*args, **kwargs)
        except Exception as error:
            raise ValidError(
                f"'valid' of register_examples raised {reason(error)}. Return False for arguments "
                f"that no caller may pass; these were {short_repr(tuple(example))}."
            ) from error
        if not isinstance(answer, bool):
            raise ValidError(
                f"'valid' of register_examples returned {short_repr(answer)}. Return True or False."
            )
        self.counts["rejected"] += not answer
        return answer

    def written_places(self, example: Example) -> set[int]:
        """The places, among the tensors of an example, of those that are written."""
        inputs = enumerate(named_inputs(self.schema, *example))
        return {place for place, (name, _, _) in inputs if name in self.schema.mutated}

    def names(self, example: Example) -> list[str]:
        """Return what messages call each tensor of an example, such as "argument 'xs[1]'"."""
        return probes.argument_names(self.op, *example)

    def refusal(self, example: Example, results: list[Any] | None = None) -> Exception | None:
        """What the operator raises for these arguments; `results` gets its outcome."""
        if not self.is_valid(example):
            return Excluded(REJECTED)
        declined = self.declined(example)
        if declined is not None:
            return Excluded(declined)
        args, kwargs = example.copy()
        process, before = os.getpid(), forks()
        try:
            with restored(), torch.no_grad():
                outcome = probes.outcome(self.op, args, kwargs)
            if results is not None:
                results += probes.copies(outcome)
        except Exception as error:
            return error
        finally:
            if os.getpid() != process:  # a copy of the process, which must not go on as we do
                os._exit(1)
        return ForkError("a call forks the process") if forks() != before else None

    @functools.cached_property
    def first_calls(self) -> list[tuple[Example, Exception | None, list[Any]]]:
        """For each example, what the operator raises or returns when it is first called with it."""
        calls = []
        for example in self.examples:
            results: list[Any] = []
            calls.append((example, self.refusal(example, results), results))
        return calls

    def limited(self, takes: Callable[[Example], bool]) -> Subject:
        """The subject with some of its examples alone; itself if these are all."""
        kept = [place for place, example in enumerate(self.examples) if takes(example)]
        if len(kept) == len(self.examples):
            return self
        limited = copy.copy(self)
        for name, value in vars(type(self)).items():
            if isinstance(value, functools.cached_property):
                vars(limited).pop(name, None)
        for name in ("originals", "examples", "first_calls"):
            setattr(limited, name, [getattr(self, name)[place] for place in kept])
        return limited

    def accepted(self, *, most: int = 3) -> list[Example]:
        """The first examples that the operator can be called with."""
        accepted = [example for example, refusal, _ in self.first_calls if refusal is None][:most]
        if not accepted:
            raise CannotCheck(
                f"the operator refuses every example: {reason(self.first_calls[0][1])}"
            )
        return accepted

    def first_results(self, example: Example) -> list[Any]:
        """What the operator returned, and wrote, when it was first called with an example."""
        return next(results for each, _, results in self.first_calls if each is example)

    def expectation(self, example: Example, what: str) -> dict[str, Any]:
        """What a probe compares with: the user's reference where there is one."""
        options: dict[str, Any] = {"what": what, **self.tolerances}
        if self.is_random:
            options["values"] = False
        if self.reference is not None:
            args, kwargs = probes.contiguous_copies(tuple(example))
            try:
                result = probes.outcome(self.op, args, kwargs, self.reference)
            except Exception as error:
                raise Refused(f"the reference refuses it: {reason(error)}") from None
            options |= {"expected": probes.mapped(result, Tensor.detach), "dtypes": False}
        return options

    def has_kernel(self, *keys: str) -> bool:
        """Whether something is registered for the operator at one of these dispatch keys."""
        return any(self.operator.has_kernel(key) for key in (*keys, "CompositeImplicitAutograd"))

    def is_for(self, device_type: str) -> bool:
        """Whether it has a kernel for tensors there. A fallback of the backend is none."""
        if kernels := self.operator.kernels:
            return not {device_type, "every device"}.isdisjoint(kernels)
        return self.has_kernel(dispatch.dispatch_key_name(device_type), "CompositeExplicitAutograd")

    @functools.cached_property
    def fake_problem(self) -> str | None:
        """Why the operator does not run on fake tensors; None if it does."""
        for example in self.examples:
            if self.refusal(example) is None:
                try:
                    self.run_fake(example)
                except Exception as error:
                    return reason(error)
        return None

    def run_fake(self, example: Example) -> list[Any]:
        mode, (args, kwargs) = _samples.with_fake_tensors((example.args, example.kwargs))
        with mode:
            return probes.leaves(self.op(*args, **kwargs))

    @functools.cached_property
    def sizes_depend_on_data(self) -> bool:
        """Whether only data tells the sizes of results."""
        return any(
            fake_tensors.number_of(size) is None
            for example in self.accepted(most=1)
            for result in probes.tensors_of(self.run_fake(example))
            for size in result.shape
        )

    def needs_fixed_results(self) -> None:
        """Raises CannotCheck if results are random, so that there is nothing to compare."""
        if self.is_random:
            raise CannotCheck("its results are random")

    def needs_vmap(self) -> None:
        """Raises CannotCheck without a rule for vmap."""
        if not self.has_kernel("FuncTorchBatched"):
            raise CannotCheck("no vmap rule")

    @property
    def devices(self) -> set[str]:
        """The types of the devices on which the tensors of the examples are."""
        return {t.device.type for example in self.examples for t in example.tensors}

    @property
    def has_autograd_kernel(self) -> bool:
        """Whether something is registered for the operator where autograd calls it."""
        names = (dispatch.dispatch_key_name(device) for device in self.devices)
        return self.has_kernel("Autograd", *(f"Autograd{name}" for name in names))

    @functools.cached_property
    def double_examples(self) -> list[Example]:
        """The examples as gradients are checked on them: double, and requiring grad.

        Raises:
            CannotCheck: the operator has no gradient, or cannot compute in double.
        """
        return self._requiring_grad(_samples.double, "no double kernel")

    @functools.cached_property
    def trainable_examples(self) -> list[Example]:
        """The double examples, or those in float32 if the operator does not take double.

        Raises:
            CannotCheck: the operator has no gradient.
        """
        if self.takes_double:
            return self.double_examples
        return self._requiring_grad(_samples.single, "no float32 kernel")

    @property
    def takes_double(self) -> bool:
        """Whether there are double examples."""
        try:
            return bool(self.double_examples)
        except CannotCheck:
            return False

    def _requiring_grad(self, change: Callable[[Tensor], Tensor], problem: str) -> list[Example]:
        if self.schema.is_mutable and (self.schema.form is Form.OUT or not self.schema.returns):
            raise CannotCheck("it only writes into its arguments: gradients go through its callers")
        changed = [self._as_asked(n, each.map(change)) for n, each in enumerate(self.examples)]
        changed = [each for each in changed if any(t.requires_grad for t in each.tensors)]
        if not changed:
            raise CannotCheck("no argument is of a floating-point dtype")
        accepted = [each for each in changed if self.refusal(each) is None]
        if not accepted:
            raise CannotCheck(f"{problem}: {reason(self.refusal(changed[-1]))}")
        return accepted

    def _as_asked(self, number: int, example: Example) -> Example:
        """Without gradients of what requires none in the example, if something there does.

        Nor of what is written beside a result, such as the statistics of a batch.
        """
        asked = [tensor.requires_grad for tensor in self.originals[number].tensors]
        if not any(asked):
            asked = [tensor.requires_grad for tensor in example.tensors]
        if self.schema.form is not Form.INPLACE:
            written = self.written_places(example)
            asked = [is_asked and place not in written for place, is_asked in enumerate(asked)]
        pairs = zip(example.tensors, asked, strict=True)
        return example.with_tensors([t if is_asked else t.detach() for t, is_asked in pairs])


def text_of(error: BaseException | None) -> str:
    """What an exception says."""
    try:
        return str(error).strip()
    except Exception:  # of the exception's own class
        return "(its text cannot be read)"


def reason(error: BaseException | None) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {short_text(text_of(error) or '(no message)')}"

"""The operator under test, its examples, and a cache of the calls that checks have made."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from torchop import ProviderError
from torchop._compat import dispatch, fake_tensors
from torchop._rules.layout import layouts_of
from torchop._rules.providers.provider import Provider
from torchop._rules.user.examples import make_examples, operator_of_examples
from torchop.extend import Form, Operator, OpLike, named_inputs
from torchop.testing import _samples, probes
from torchop.testing._check.calls import (
    REJECTED,
    Call,
    CannotCheck,
    Example,
    Refused,
    is_valid,
    reason,
)
from torchop.testing._check.cases import Case, Variant
from torchop.testing._check.layouts import in_layout
from torchop.testing.process_state import restored


class Subject:
    """The operator under test, together with its examples and the properties that checks query."""

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
        # The name of the first check that reported a schema violation, if any did so far. All other
        # checks skip calls that violate the schema, so that each violation is reported only once.
        self.broken_in: str | None = None
        # How many calls the `valid` predicate of `register_examples` has rejected so far. The
        # copies that `with_provider` makes for other kernels share this counter, so it counts the
        # calls of all kernels.
        self.counts = Counter(rejected=0)
        self.originals = [self._original(*pair) for pair in pairs]
        for index, example in enumerate(self.originals):
            if not self.is_valid(example):
                raise ValueError(
                    f"check({self.name}, ...): 'valid' of register_examples rejects example "
                    f"{index}. Change the example, or 'valid'."
                )
        # The provider whose kernel is under test, or None for the reference kernel. If this
        # provider cannot run on this machine, `unsupported` holds the reason.
        self.provider: Provider | None = None
        self.unsupported = ""
        self.of_reference = self
        # Detach the examples and make them contiguous, because each variant of an example chooses
        # memory layouts and sets requires_grad itself.
        self.examples = [Example(*probes.contiguous_copies(tuple(each))) for each in self.originals]
        # If needs_first_outcomes is true, `run_check` calls the operator in forked processes
        # before its first call in this process, and stores the calls and outcomes in
        # first_outcomes.
        self.needs_first_outcomes = False
        self.first_outcomes: list[tuple[Example, list[Any]]] = []
        self._cases: dict[str, tuple[list[Case], CannotCheck | None]] = {}
        self._calls: dict[Case, Call] = {}
        self._outcomes: list[tuple[Example, Call]] = []

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

    def with_provider(self, provider: Provider, unsupported: str) -> Subject:
        """Return a copy for checking a provider's kernel, without the recorded calls."""
        made = copy.copy(self)
        for name, value in vars(Subject).items():
            if isinstance(value, functools.cached_property):
                vars(made).pop(name, None)
        made.provider, made.unsupported = provider, unsupported
        made._calls, made._outcomes, made.broken_in = {}, [], None
        made.first_outcomes = []
        return made

    # ----------------------------------------------------------------------------------------------
    # Calls

    def is_valid(self, example: Example) -> bool:
        """Return whether the `valid` predicate of `register_examples` accepts a call.

        Rejected calls are counted, because the report lists how many variants were not tried.
        """
        answer = is_valid(self.op, example)
        self.counts["rejected"] += not answer
        return answer

    def declined(self, example: Example) -> str | None:
        """Return why the provider does not support a call, or None if it does.

        The reference kernel has no `supports` function, so the result for it is always None.
        """
        if self.provider is None:
            return None
        try:
            answer = self.provider.takes(*self.schema.fill_defaults(*example))
        except ProviderError as error:  # the check `providers.supports` reports this error
            return str(error)
        name = self.provider.name
        return None if answer else f"`supports` of the provider {name!r} returns False"

    def place(self, example: Example) -> int:
        return next(place for place, each in enumerate(self.examples) if each is example)

    def cases(self, variant: Variant) -> Iterator[Case]:
        """Yield the cases that a variant generates, and cache them for later checks.

        If the variant does not apply to one of the examples, raise CannotCheck, but only after
        yielding the cases for the other examples.
        """
        if variant.name not in self._cases:
            found: list[Case] = []
            problem = None
            base = self.of_reference
            # The "plain" variants pass the examples unmodified, so they include examples that the
            # operator rejects. All other variants modify examples that the operator accepts.
            is_plain = variant.group == "plain"
            for example in base.examples if is_plain else base.accepted(most=variant.most):
                try:
                    for case in variant.make(base, example):
                        found.append(dataclasses.replace(case, group=variant.group))
                except CannotCheck as error:
                    problem = error
            self._cases[variant.name] = found, problem
        found, problem = self._cases[variant.name]
        yield from found
        if problem is not None:
            raise problem

    def call(self, case: Case) -> Call:
        if case not in self._calls:
            example = case.arguments()
            if not self.is_valid(example):
                raise CannotCheck(REJECTED)
            self._calls[case] = Call(self.op, *example)
        return self._calls[case]

    def known(self, case: Case, call: Call) -> Case:
        """Cache an existing call so that `call(case)` returns it, and return the case."""
        self._calls[case] = call
        return case

    def share_expected(self, call: Call, example: Example) -> None:
        """Reuse an example's expected outcome if `call` differs from it only in memory layout."""
        if not call.example.equals(example):
            return
        if not any(known is example for known, _ in self._outcomes):
            self._outcomes.append((example, Call(self.op, *example)))
        (made,) = (made for known, made in self._outcomes if known is example)
        with contextlib.suppress(Exception):  # the probe makes the call again and reports the error
            vars(call)["contiguous"] = made.contiguous

    def refusal(self, example: Example) -> Exception | None:
        """Return the exception that the operator raises for an example, or None if it succeeds.

        If the provider or the `valid` predicate of `register_examples` rejects the example, skip
        the call and return a CannotCheck exception with the reason.
        """
        why = self.declined(example) if self.is_valid(example) else REJECTED
        if why is not None:
            return CannotCheck(why)
        with restored(), torch.no_grad():
            return Call(self.op, *example).record.error

    @functools.cached_property
    def first_calls(self) -> list[Call]:
        calls = [Call(self.op, *example) for example in self.examples]
        for call in calls:
            if self.declined(call.example) is None:
                with restored(), torch.no_grad():
                    _ = call.record
        return calls

    def accepted(self, *, most: int = 3) -> list[Example]:
        return [self.examples[place] for place in self._accepted[:most]]

    @functools.cached_property
    def _accepted(self) -> list[int]:
        pairs = list(zip(self.examples, self.first_calls, strict=True))
        declined = [self.declined(example) for example, _ in pairs]
        places = [
            place
            for place, (_, call) in enumerate(pairs)
            if declined[place] is None and call.record.error is None
        ]
        if not places:
            why = declined[0] or reason(self.first_calls[0].record.error)
            raise CannotCheck(f"the operator refuses every example: {why}")
        return places

    def strided(self, what: str) -> list[Example]:
        """Return the accepted examples in which every tensor is strided.

        If every example contains a tensor with another layout, raise CannotCheck with a message
        that starts with `what`.
        """
        layouts = [{t.layout for t in each.tensors} - {torch.strided} for each in self.accepted()]
        if all(layouts):
            names = ", ".join(sorted({str(name) for each in layouts for name in each}))
            raise CannotCheck(f"{what} not {names} tensors")
        return [e for e, others in zip(self.accepted(), layouts, strict=True) if not others]

    # ----------------------------------------------------------------------------------------------
    # Properties of the operator

    def written_places(self, example: Example) -> set[int]:
        """Return the indices in `example.tensors` of the tensors that the operator writes to."""
        inputs = enumerate(named_inputs(self.schema, *example))
        return {place for place, (name, _, _) in inputs if name in self.schema.mutated}

    def excluded_places(self, layout: str, example: Example) -> set[int]:
        """Return the indices of the tensors that the kernel never receives in `layout`.

        The operator declares a different layout for these tensors, so torchop copies them first.
        """
        declared, excluded = layouts_of(self.op), set()
        for place, (name, _, _) in enumerate(named_inputs(self.schema, *example)):
            if name in declared:
                try:
                    tensor = in_layout(layout, [place])(example).tensors[place]
                    if not declared[name].fits(tensor):
                        excluded.add(place)
                except Exception:  # the tensor cannot have one of the layouts
                    excluded.add(place)
        return excluded

    def names(self, example: Example) -> list[str]:
        return probes.argument_names(self.op, *example)

    def by_name(self, example: Example) -> Example:
        """Return the example with all arguments passed by keyword."""
        names = (argument.name for argument in self.schema.arguments)
        return Example((), {**dict(zip(names, example.args, strict=False)), **example.kwargs})

    def scalars(self, example: Example) -> dict[str, Any]:
        """Return the arguments of a call by name, with the defaults of omitted floats and bools."""
        defaults = {a.name: a.default for a in self.schema.arguments}
        numbers = {name: each for name, each in defaults.items() if type(each) in (bool, float)}
        return {**numbers, **self.by_name(example).kwargs}

    def expectation(self, example: Example, what: str) -> dict[str, Any]:
        """Return keyword arguments for a probe that compares the results of a call.

        If the user passed a reference function to `check`, the probe gets the outcome of this
        function as `expected`.
        """
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
        """Return whether a kernel is registered for a key or for CompositeImplicitAutograd."""
        return any(self.operator.has_kernel(key) for key in (*keys, "CompositeImplicitAutograd"))

    def is_for(self, device_type: str) -> bool:
        """Return whether the operator has its own kernel for a device type.

        Backend fallbacks are ignored, because they are not specific to the operator.
        """
        if kernels := self.operator.kernels:
            return not {device_type, "every device"}.isdisjoint(kernels)
        return self.has_kernel(dispatch.dispatch_key_name(device_type), "CompositeExplicitAutograd")

    def needs_fixed_results(self) -> None:
        if self.is_random:
            raise CannotCheck("results are random")

    def needs_vmap(self) -> None:
        if not self.has_vmap_rule:
            raise CannotCheck("no vmap rule")

    @property
    def has_vmap_rule(self) -> bool:
        # torchop registers a vmap kernel for every operator with a declared side effect. Unless the
        # author has registered a vmap rule, this kernel only raises an error.
        raises = self.operator.effect is not None and not any(
            rule.startswith("vmap") for rule in self.operator.rules
        )
        return self.has_kernel("FuncTorchBatched") and not raises

    def needs_fake(self) -> None:
        if self.fake_problem is not None:
            raise CannotCheck(f"no fake kernel that runs: {self.fake_problem}")

    @functools.cached_property
    def fake_problem(self) -> str | None:
        with contextlib.suppress(CannotCheck):  # the operator refuses every example
            for example in self.accepted():
                problem = self.problem_of_fake(example)
                if problem is not None and _has_fakes(example):
                    return problem
        return None

    def problem_of_fake(self, example: Example) -> str | None:
        """Return why the fake kernel fails for an example, or None if it succeeds."""
        try:
            self._run_fake(example)
        except Exception as error:
            return reason(error)
        return None

    def has_fake_sizes(self, example: Example) -> bool:
        """Return whether the fake kernel returns the same sizes as the kernel.

        If the operator has no working fake kernel, return True, because there is nothing to
        compare. If the fake kernel raises for this example only, return False.
        """
        if self.fake_problem is not None:
            return True
        try:
            fakes = probes.tensors_of(self._run_fake(example))
        except Exception:
            return False
        reals = probes.tensors_of(probes.leaves(Call(self.op, *example).record.result))
        pairs = zip(fakes, reals, strict=False)
        return not any(fake_tensors.shapes_differ(fake, real) for fake, real in pairs)

    def _run_fake(self, example: Example) -> list[Any]:
        mode, (args, kwargs) = _samples.with_fake_tensors((example.args, example.kwargs))
        with mode:
            return probes.leaves(self.op(*args, **kwargs))

    @functools.cached_property
    def sizes_depend_on_data(self) -> bool:
        """Whether result sizes depend on the data in the arguments, as in `torch.nonzero`."""
        (example,) = self.accepted(most=1)
        shapes = (t.shape for t in probes.tensors_of(self._run_fake(example)))
        return None in map(fake_tensors.number_of, itertools.chain(*shapes))

    @property
    def devices(self) -> set[str]:
        return {t.device.type for example in self.examples for t in example.tensors}

    @property
    def has_autograd_kernel(self) -> bool:
        names = (dispatch.dispatch_key_name(device) for device in self.devices)
        return self.has_kernel("Autograd", *(f"Autograd{name}" for name in names))

    # ----------------------------------------------------------------------------------------------
    # Examples with gradients

    @functools.cached_property
    def double_examples(self) -> list[Example]:
        return self._requiring_grad(_samples.double, "no double kernel")

    @functools.cached_property
    def trainable_examples(self) -> list[Example]:
        """The examples with tensors that require grad, in double if the operator supports it."""
        if self.takes_double:
            return self.double_examples
        return self._requiring_grad(_samples.single, "no float32 kernel")

    @property
    def takes_double(self) -> bool:
        try:
            return bool(self.double_examples)
        except CannotCheck:
            return False

    def _requiring_grad(self, change: Callable[[Tensor], Tensor], problem: str) -> list[Example]:
        if self.schema.is_mutable and (self.schema.form is Form.OUT or not self.schema.returns):
            raise CannotCheck("the operator only writes arguments, so no result has a gradient")
        changed = [self._as_given(n, each.map(change)) for n, each in enumerate(self.examples)]
        changed = [each for each in changed if any(t.requires_grad for t in each.tensors)]
        if not changed:
            raise CannotCheck("no argument is of a floating-point dtype")
        accepted = [each for each in changed if self.refusal(each) is None]
        if not accepted:
            raise CannotCheck(f"{problem}: {reason(self.refusal(changed[-1]))}")
        return accepted

    def _as_given(self, number: int, example: Example) -> Example:
        """Detach the tensors of an example whose gradients should not be checked.

        If some tensors in the author's example require grad, detach all others. Also detach the
        tensors that the operator writes to, such as running statistics, unless it is an in-place
        operator.
        """
        given = [tensor.requires_grad for tensor in self.originals[number].tensors]
        if not any(given):
            given = [tensor.requires_grad for tensor in example.tensors]
        if self.schema.form is not Form.INPLACE:
            written = self.written_places(example)
            given = [requires and place not in written for place, requires in enumerate(given)]
        pairs = zip(example.tensors, given, strict=True)
        return example.with_tensors([t if requires else t.detach() for t, requires in pairs])


def _has_fakes(example: Example) -> bool:
    """Return whether all tensors can be converted to fake tensors, unlike CSR tensors."""
    try:
        with fake_tensors.new_fake_mode() as mode:
            example.map(mode.from_tensor)
    except Exception:
        return False
    return True

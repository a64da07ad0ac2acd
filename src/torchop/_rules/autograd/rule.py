"""The autograd rule: an operator's Autograd kernel, and the backward and forward-mode formulas."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.library

from torchop._compat import autograd, compilers, dispatch, functorch
from torchop._compat.classes import DispatchKeySet
from torchop._core import checking
from torchop._core.call import tensors_in
from torchop._core.definition import CompiledRule, Definition
from torchop._core.lock import registration_lock
from torchop._errors import MissingFormulaError, RuleSignatureError, warn
from torchop._rules.autograd import forward_mode
from torchop._rules.autograd.checks import check_replaces_no_gradient
from torchop._rules.autograd.formula import NO_FORMULA, Formula, SetupContext
from torchop._rules.autograd.function import apply, make_function
from torchop._rules.mutation import kernels as mutation
from torchop._rules.mutation.writable import check_history, check_no_grad, check_saved
from torchop._schema.callables import check_setup_context, setup_caller, takes_residuals
from torchop._schema.forms import Form


class AutogradRule(CompiledRule[Formula]):
    """The backward and forward-mode formulas of an operator, and its Autograd kernel."""

    formula = NO_FORMULA
    tangents: forward_mode.Tangents | None = None
    # If the operator has no backward formula, calls that need a gradient run this function instead,
    # because autograd can differentiate the operators that it calls.
    decomposition: Callable[..., Any] | None = None
    # The operator's `autograd.Function`. It is created lazily, by the first call that needs a
    # gradient, because creating a class is slow.
    cached_function: Any = None
    # Whether the user was already warned that gradients are lost, because the operator writes
    # values that require grad into a tensor that does not.
    has_warned_of_lost_gradients = False

    def install(self) -> None:
        """Install the kernel at the Autograd key.

        Operators without a backward formula need this kernel too, because otherwise autograd would
        not record the call, and the backward pass would silently stop there instead of raising an
        error.
        """
        if not self.installed:
            self.definition.implement("Autograd", self.kernel, with_keyset=True)

    @property
    def installed(self) -> bool:
        return "Autograd" in self.definition.registered

    def compile(self) -> Formula:
        checker = checking.checker if self.formula.function is not None else None
        # Existing call plans (compiled rules) share the `Formula` object, so copy it before
        # changing its attributes.
        is_same = self.tangents is None and checker is None
        formula = self.formula if is_same else copy.copy(self.formula)
        if self.tangents is not None:
            jvp, setup_context = self.tangents
            has_keywords = bool(self.definition.schema.keyword_only)
            setup = setup_caller(setup_context, has_keywords) or formula.setup
            if setup is not None and takes_residuals(setup_context or formula.setup_context):
                setup = self.training_form().computing(setup)
            formula.tangents = jvp, setup
        if checker is not None:
            definition = self.definition
            if formula.backward is not None:
                formula.backward = checker.backward(definition, formula.backward)
            if formula.save is not None:
                formula.save = checker.save(definition, definition.schema, formula.save)
        return formula

    def cache_parts(self) -> Iterator[object]:
        yield from (self.formula.cache_part, self.formula.setup_context, self.tangents)

    def repr_text(self) -> str | None:
        return ", ".join(filter(None, (self.formula.title, self.tangents and "jvp"))) or None

    @property
    def function(self) -> Any:
        if self.cached_function is None:
            with registration_lock:
                if self.cached_function is None:
                    self.cached_function = make_function(self.definition, AutogradRule)
                    self.definition.outdate_plan()  # C++ finds the function in the new plan
        return self.cached_function

    def register_jvp(
        self, jvp: Callable[..., Any], setup_context: SetupContext | None = None
    ) -> None:
        jvp, setup_context = self.definition.convention.jvp(jvp, setup_context)
        forward_mode.check_jvp(self.definition, jvp)
        if not self.installed:
            check_replaces_no_gradient(self.definition)
        has_keywords = bool(self.definition.schema.keyword_only)
        check_setup_context(self.definition, setup_context, has_keywords)
        with self.definition.registered.registering("forward-mode formula"):
            self.update(self.install, tangents=(jvp, setup_context))

    def training_form(self) -> Any:
        definition = self.definition
        if definition.declaration.residuals is None:
            raise RuleSignatureError(
                f"{definition}: setup_context has the parameter 'residuals', but the operator "
                'declares none. Define it with residuals={"lse": Tensor}, for example, and return '
                "torchop.residuals(output, lse) from the kernels."
            )
        return definition.declaration.residuals.training_form(definition)

    @compilers.never_traced
    def kernel(self, keyset: DispatchKeySet, /, *args: Any, **kwargs: Any) -> Any:
        definition = self.definition
        schema = definition.schema
        is_dual = autograd.is_dual_level() and forward_mode.has_tangents((*args, *kwargs.values()))
        if is_dual:
            tangents = definition.plan[AutogradRule].tangents
            if tangents is None:
                if self.decomposition is None:
                    raise forward_mode.unsupported(definition)
                return self.decomposition(*args, **kwargs)
            # If the call also records a gradient, do not compute the tangents here, because the
            # tensors saved for the backward pass would lose their tangents. The `autograd.Function`
            # (see `apply` below) computes them instead.
            if not (torch.is_grad_enabled() and autograd.any_requires_grad(tensors_in(args))):
                return forward_mode.differentiate(definition, tangents, args, kwargs)
        if schema.form is Form.OUT:
            _check_no_grad(definition, (*args, *kwargs.values()))
        elif torch.is_grad_enabled() and autograd.any_requires_grad(
            # `torch._C._any_requires_grad` ignores lists that contain None, so pass the tensors in
            # the lists instead.
            tensors_in(args) if schema.lists_may_hold_none else args
        ):
            decomposition = self.decomposition if self.formula.backward is None else None
            # In a torch.func transform, a decomposition writes into a copy, so the caller's tensor
            # needs no check.
            if decomposition is None or not functorch.is_active():
                _check_written(definition, args, kwargs)
            if decomposition is not None:
                return decomposition(*args, **kwargs)
            if schema.is_mutable and self.formula.backward is None:
                # Later calls may be native (without the dispatcher), but the first call that
                # records a gradient always goes through the dispatcher, so it is enough to warn
                # here.
                self._warn_of_lost_gradients(args, kwargs)
            formula = definition.plan[AutogradRule]
            if is_dual and formula.training is not None:
                raise forward_mode.residuals_unsupported(definition)
            if formula.traced is not None and not is_dual:
                result = formula.traced(args, kwargs)
                if result is not NotImplemented:
                    return result
            return apply(self.function, definition, keyset, args, kwargs, is_dual=is_dual)
        # Masking `keyset` skips autograd for this call only, so `below_autograd` is needed to skip
        # it for the operators that the kernel calls, too.
        with autograd.below_autograd():
            keyset = keyset & dispatch.AFTER_AUTOGRAD
            return dispatch.redispatch(definition.overload, keyset, args, kwargs)

    def _warn_of_lost_gradients(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Warn once if the call writes values that require grad into a tensor that does not.

        This is not an error, because many operators only collect statistics in such a tensor.
        """
        definition, form = self.definition, self.definition.schema.form
        if self.has_warned_of_lost_gradients or form is not Form.PLAIN:
            return
        named = mutation.read(definition, args, kwargs)
        sources = [where for where, tensor in named if tensor.requires_grad]
        written = [where for where, _ in mutation.written(definition, args, kwargs)]
        if not sources or not written:
            return
        self.has_warned_of_lost_gradients = True
        names = [where.removeprefix("input ").strip("'") for where in sources]
        detached = ", ".join(f"{name}.detach()" for name in names)
        warn(
            f"{definition}: {' and '.join(sources)} requires grad, and the operator writes into "
            f"{', '.join(written)} without a gradient formula, so no gradient flows back through "
            f"the written values. If that is intended, pass {detached}. Otherwise, make the "
            "operator an in-place form (torch.Tag.inplace) with a formula, or return the new "
            "values.",
            UserWarning,
        )


def install(definition: Definition) -> None:
    """Install the autograd kernel of a new operator.

    Operators of `torchop.compat` (`is_lenient`) get the kernel only once a backward formula is
    registered. Until then, PyTorch's autograd fallback handles their calls.
    """
    if not definition.declaration.is_lenient:
        definition.rule(AutogradRule).install()


def _check_written(definition: Definition, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise if the call mutates a tensor in a way that would make gradients silently wrong."""
    if not definition.schema.is_mutable:
        return
    if functorch.is_active():
        raise _mutation_in_transform(definition)
    written = mutation.written(definition, args, kwargs)
    check = check_history if definition.schema.form is Form.INPLACE else check_no_grad
    check(definition, written)
    if definition.plan[AutogradRule].save is not None:
        check_saved(definition, written, mutation.read(definition, args, kwargs))


def _mutation_in_transform(definition: Definition) -> MissingFormulaError:
    return MissingFormulaError(
        f"{definition}: a torch.func transform differentiates this call, but the operator mutates "
        f"{', '.join(definition.schema.mutated)}, so the gradient would be silently wrong. Define "
        "a functional operator and register a formula for it, or detach the inputs."
    )


def _check_no_grad(definition: Definition, values: Sequence[Any]) -> None:
    if torch.is_grad_enabled() and autograd.any_requires_grad(values):
        raise RuntimeError(
            f"{definition}: functions with out=... arguments don't support automatic "
            "differentiation, but one of the arguments requires grad. Use the functional operator, "
            "or torch.no_grad()."
        )

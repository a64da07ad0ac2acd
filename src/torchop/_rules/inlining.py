"""The inlining rule: compilers replace calls to an operator with the operators in its function.

AOTAutograd replaces the call when it traces the graph for the backend, either below autograd or, if
the backward formula is derived, above autograd. Dynamo and `torch.export` create their graphs
earlier, so these graphs still contain the call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

from torchop._compat import autocasting, compilers, dispatch, functorch, registries, tracing
from torchop._compat.classes import FunctionalTensorMode
from torchop._compat.fake_tensors import reads_data
from torchop._core.call import tensors_in
from torchop._core.contract import alias_error, check_returned_arguments, result_check
from torchop._core.definition import CompiledRule, Definition
from torchop._errors import TracingError, mistake, short_repr, short_text
from torchop._rules.checkpoint_modes import marked, marked_as_one_call
from torchop._rules.effect import functionalize_unless_dropped
from torchop._rules.fake.rule import FakeRule
from torchop._rules.kernels.rule import KernelRule
from torchop._schema.defaults import bind
from torchop._schema.forms import Form

Choice = Literal["opaque", "inline"]
# One choice for all backends of torch.compile, or one for each backend. By default ("opaque"), the
# graph contains a call to the operator.
Compile: TypeAlias = "Choice | Mapping[str, Choice]"


class Inlined(NamedTuple):
    """The backends that inline an operator, or None for all backends.

    If `launches` is true, the operator's function launches Triton kernels, which run only on GPUs.
    So on device types for which the user registered another kernel, calls are not inlined.
    """

    backends: tuple[str, ...] | None
    launches: bool = False

    def __str__(self) -> str:
        return "inlined by " + ("compilers" if self.backends is None else ", ".join(self.backends))

    def by_current_backend(self) -> bool:
        return compilers.decomposes_for_backends() and (
            self.backends is None or compilers.compiling_backend() in self.backends
        )


def declared_inlining(choice: Any, *, launches: bool = False) -> Inlined | None:
    """Validate the `compile` argument of `custom_op`, and return the backends that inline.

    If the function launches Triton kernels (`launches`), all backends inline it.
    """
    if launches:
        return Inlined(None, launches=True)
    if choice == "opaque":
        return None
    choices = choice.values() if isinstance(choice, Mapping) else (choice,)
    if any(item not in ("opaque", "inline") for item in choices):
        raise mistake(
            "compile expects 'opaque', 'inline', or a mapping from backends to these, such as "
            f"{{'inductor': 'inline'}}; got {short_repr(choice)}.",
            ValueError,
        )
    if "inline" not in choices:
        return None
    if not isinstance(choice, Mapping):
        return Inlined(None)
    return Inlined(tuple(backend for backend, item in choice.items() if item == "inline"))


class InliningRule(CompiledRule["Inlined | None"]):
    """The compiler backends that inline an operator, or None if no backend inlines it."""

    inlined: Inlined | None = None

    def disable(self) -> None:
        """Disable inlining, because the user registered another rule for FunctionalTensorMode."""
        self.inlined = None

    def cache_parts(self) -> Iterator[object]:
        if self.inlined is not None:
            yield from (str(self.inlined), self.definition.function)
            providers = self.definition.rule(KernelRule).providers
            if providers is not None:
                # The graph contains the code of one provider's kernel, so include everything that
                # affects which provider is chosen.
                yield from providers.cache_parts(self.definition.name)

    def repr_text(self) -> str | None:
        return None if self.inlined is None else str(self.inlined)

    def compile(self) -> Inlined | None:
        return self.inlined


def install(definition: Definition) -> Callable[[], None] | None:
    """Install the rule for FunctionalTensorMode if the operator is declared as inlined.

    This must run before other installers that add default rules for FunctionalTensorMode, because
    the first default rule wins. It adds no rule for operators that mutate arguments, because their
    functionalization rule calls `around` itself.
    """
    inlined = definition.declaration.inlined
    if inlined is None:
        return None
    definition.rule(InliningRule).inlined = inlined
    if not definition.schema.is_mutable:
        hook = around(definition, functionalize_unless_dropped)
        definition.registered.add_default_rule(FunctionalTensorMode, hook)

    def finish() -> None:
        # Compilers trace the function anyway, so it can also serve as the fake kernel.
        if definition.schema.form is Form.PLAIN:
            definition.rule(FakeRule).replace(_traceable(definition, inlined))

    return finish


def _own_device(definition: Definition, args: Iterable[Any]) -> str | None:
    kernels = definition.rule(KernelRule)
    installed = {key for key, device in kernels.installed().items() if device in kernels.functions}
    devices = (tensor.device.type for tensor in tensors_in(tuple(args)))
    return next((d for d in devices if dispatch.dispatch_key_name(d) in installed), None)


def _traceable(definition: Definition, inlined: Inlined) -> Callable[..., Any]:
    assert definition.function is not None
    function = bind(definition.function, definition.schema)

    @functools.wraps(function)
    def traceable(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            device = _own_device(definition, (*args, *kwargs.values()))
            if inlined.launches and device is not None:
                raise TracingError(
                    f"{definition}: register a fake kernel for compiled calls of the kernel for "
                    f"{device}: the function raised {type(error).__name__}: {short_text(error)}"
                ) from error
            if not reads_data(error, definition.overload):
                raise
            reading = str(error).partition("\n")[0]
            raise TracingError(
                f"{definition}: the function cannot be traced, because it reads the data of a "
                f"tensor ({reading}). With compile='inline', compilers run it on tensors without "
                "data, so it must only call PyTorch operators. Define the operator with "
                "compile='opaque' and register a fake kernel."
            ) from error

    return traceable


def around(definition: Definition, opaque: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a rule for FunctionalTensorMode to inline calls if the operator is declared as inlined.

    The returned rule traces the operator's kernel. Calls that must not be inlined use the wrapped
    rule `opaque`, which records a call to the operator in the graph.
    """
    inlined = definition.declaration.inlined
    if inlined is None:
        return opaque
    schema, body = definition.schema, _traceable(definition, inlined)
    check_result = result_check(schema.returns)

    def functionalize(mode: Any, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
        own = inlined.launches and _own_device(definition, (*args, *(kwargs or {}).values()))
        if own or not inlined.by_current_backend() or registries.effect_of(op._name) is not None:
            return opaque(mode, op, types, args, kwargs)
        if not all(map(tracing.is_traceable_type, types)):
            return NotImplemented  # the Tensor subclass may handle the call
        kwargs = kwargs or {}
        with mode, autocasting.in_state_of_kernel(), marked(op, args, kwargs):
            traced = _chosen(definition, args, kwargs) or body
            result = check_result(traced(*args, **kwargs), definition, "function")
        if schema.form is not Form.PLAIN:
            check_returned_arguments(definition, schema, args, kwargs, result)
        elif not schema.is_view:
            _check_fresh(definition, args, kwargs, result)
        return result

    return functionalize


def traced_above_autograd(
    definition: Definition, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Trace the operator's function, so that AOTAutograd differentiates the operators it calls.

    The autograd kernel calls this if the operator's backward formula is derived from its function.
    Return NotImplemented if the call must not be inlined.
    """
    inlined = definition.plan[InliningRule]
    tensors = list(tensors_in((*args, *kwargs.values())))
    if (
        inlined is None
        or inlined.launches
        or not tracing.is_functionalizing()
        # Leave calls with batched tensors to the user's vmap rule, and calls with DTensors to the
        # sharding rule.
        or any(map(functorch.holds_batch, tensors))
        or not all(tracing.is_traceable_type(type(tensor)) for tensor in tensors)
        or not inlined.by_current_backend()
    ):
        return NotImplemented
    check_result = result_check(definition.schema.returns)
    with marked_as_one_call(definition.overload, args, kwargs):
        result = _traceable(definition, inlined)(*args, **kwargs)
    result = check_result(result, definition, "function")
    if not functorch.is_active():  # tensors in a transform have no storage
        _check_fresh(definition, args, kwargs, result)
    return result


def _chosen(
    definition: Definition, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[..., Any] | None:
    """Return the provider's kernel that would run this call, or None for the reference kernel.

    If the provider's `supports` function reads a symbolic size, this adds a guard to the graph.
    """
    choice = definition.rule(KernelRule).choice(args, kwargs)
    kernel = choice and choice.trace(*definition.schema.fill_defaults(args, kwargs))
    return kernel and bind(kernel, definition.schema)


def _check_fresh(
    definition: Definition, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
) -> None:
    storages = set(map(tracing.functional_storage, tensors_in((*args, *kwargs.values()))))
    for output in tensors_in(result if isinstance(result, tuple) else (result,)):
        storage = tracing.functional_storage(output)
        if storage in storages:
            raise alias_error(str(definition), definition.schema, args, kwargs, result)
        storages.add(storage)

"""The vmap rule: how `torch.vmap` maps an operator over a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, Literal, overload

import torch.library

from torchop._compat import compilers, dispatch, functorch
from torchop._core.call import tensors_in
from torchop._core.contract import alias_error, result_check, shares_memory, spell_result
from torchop._core.definition import CompiledRule, Definition
from torchop._core.registry import OpLike, resolve
from torchop._errors import ResultError, RuleSignatureError, add_note, short_repr
from torchop._rules.vmap.sequential import map_call
from torchop._schema.callables import Function, Lambda, decorator_or_call
from torchop._schema.defaults import bind, fitted

_LEADING = ("info", "in_dims")


SEQUENTIAL: Final = "sequential"
VmapFunction = Callable[..., Any] | Literal["sequential"]


class VmapRule(CompiledRule["VmapFunction | None"]):
    """The vmap rule that the user registered for an operator, or None if there is none."""

    function: VmapFunction | None = None

    def compile(self) -> VmapFunction | None:
        if self.function is None or isinstance(self.function, str):
            return self.function
        return _checked(self.definition, bind(self.function, self.definition.schema, len(_LEADING)))

    def cache_parts(self) -> Iterator[object]:
        yield self.function

    def repr_text(self) -> str | None:
        if self.function is None:
            return None
        return f"vmap ({self.function})" if isinstance(self.function, str) else "vmap"

    def register(self, function: VmapFunction) -> None:
        if function == SEQUENTIAL:
            self._check_sequential()
        else:
            authored = self.definition.authored(function)
            function = self._checked_function(self.definition.convention.vmap(authored))
        with self.definition.registered.registering("vmap rule"):
            self.update(self._install, function=function)

    def _check_sequential(self) -> None:
        if self.definition.schema.is_view:
            raise RuntimeError(
                f"{self.definition} returns views, but the vmap rule {SEQUENTIAL!r} would return "
                "stacked copies. Register a function that returns a view of the whole batch. "
                f"Got {self.definition.schema}."
            )

    def _checked_function(self, function: Any) -> Any:
        definition, schema = self.definition, self.definition.schema
        if isinstance(function, str):
            raise RuleSignatureError(
                f"{definition}: a vmap rule must be a function or {SEQUENTIAL!r}, got "
                f"{short_repr(function)}."
            )
        if any(argument.holds_tensors for argument in schema.keyword_only):
            raise NotImplementedError(
                f"{definition}: register_vmap does not support kwarg-only Tensor args, because "
                f"in_dims has no entry for them. Make the tensors positional. Got {schema}."
            )
        return fitted(f"{definition}: a vmap rule", function, schema, _LEADING)

    def _install(self) -> None:
        definition = self.definition
        if definition.registered.kernel("FuncTorchBatched") != self.kernel:
            definition.implement("FuncTorchBatched", self.kernel)
        key = functorch.VMAP_OF_RANDOM_CALLS
        if (
            self.function == SEQUENTIAL
            and key not in definition.registered
            and torch.Tag.nondeterministic_seeded in definition.overload.tags
        ):
            definition.implement(key, self._run_random)

    @compilers.never_traced
    def kernel(self, /, *args: Any, **kwargs: Any) -> Any:
        definition = self.definition
        rule = definition.plan[VmapRule]
        if not callable(rule):  # the rule is "sequential"
            return map_call(definition, args, kwargs)
        try:
            return functorch.call_vmap_rule(rule, definition.overload, args, kwargs)
        except Exception as error:
            if compilers.dynamo_is_tracing():
                # Dynamo's error does not show this frame, so name the operator in a note.
                add_note(error, f"in the vmap rule of {definition}")
            raise

    @compilers.never_traced
    def _run_random(self, /, *args: Any, **kwargs: Any) -> Any:
        """Handle a call to a random operator under vmap, even if no tensor is batched."""
        definition = self.definition
        if definition.plan[VmapRule] == SEQUENTIAL:
            return map_call(definition, args, kwargs)
        with dispatch.without_keys(functorch.VMAP_OF_RANDOM_CALLS):
            return definition.overload(*args, **kwargs)


def _checked(definition: Definition, rule: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a vmap rule to check its output and `out_dims`, because PyTorch checks neither."""
    schema, declaration = definition.schema, definition.declaration
    check_result = result_check(schema.returns)
    is_functional = schema.is_functional and not declaration.is_lenient and definition.is_ours

    def checked(info: Any, in_dims: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        returned = rule(info, in_dims, *args, **kwargs)
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise ResultError(
                f"{definition}: expected the vmap rule to have two returns, an output and out_dims "
                "(the dimension of each output that is mapped over, or None), got "
                f"{spell_result(returned)}."
            )
        output = check_result(returned[0], definition, "vmap rule")
        dims = _checked_dims(definition, output, returned[1], info.batch_size)
        if is_functional:
            _check_fresh(definition, args, kwargs, output)
        return output, dims

    return checked


def _check_fresh(definition: Definition, args: Any, kwargs: Any, output: Any) -> None:
    tensors = [*tensors_in((*args, *kwargs.values()))]
    outputs = [*tensors_in(output if isinstance(output, tuple) else (output,))]
    if any(map(functorch.is_wrapped, (*tensors, *outputs))):
        # Tensors wrapped by another transform have no storage, so compare the identities of the
        # objects.
        ids = [*map(id, outputs)]
        is_alias = len({*ids}) < len(ids) or any(id(tensor) in ids for tensor in tensors)
    else:
        is_alias = shares_memory(args, kwargs, output)
    if is_alias:
        raise alias_error(f"{definition}: vmap rule", definition.schema, args, kwargs, output)


def _checked_dims(definition: Definition, output: Any, dims: Any, batch_size: int) -> Any:
    """Check the `out_dims` of a vmap rule. Return a dimension or None for each output tensor.

    If the rule returned a single value as `out_dims`, the value applies to all outputs.
    """
    if isinstance(output, (tuple, list)):
        if not isinstance(dims, (tuple, list)):
            dims = [dims] * len(output)
        if len(dims) == len(output):
            pairs = zip(output, dims, strict=True)
            return type(output)([_checked_dims(definition, o, d, batch_size) for o, d in pairs])
        returned = f"{len(output)} outputs"
    elif dims is None or not isinstance(output, torch.Tensor):
        return None
    elif isinstance(dims, int) and -output.dim() <= dims < output.dim():
        if output.size(dims) == batch_size:
            return dims % output.dim()
        returned = f"an output of shape {list(output.shape)} in a batch of size {batch_size}"
    else:
        returned = f"an output of {output.dim()} dimensions"
    raise ResultError(
        f"{definition}: the vmap rule returned out_dims={short_repr(dims)} for {returned}."
    )


def missing_rule_error(name: str, error: RuntimeError) -> RuntimeError | None:
    # Recognize the errors that PyTorch's batchedTensorForLoopFallback raises for this operator
    # (aten/src/ATen/functorch/BatchedFallback.cpp). A vmap rule may have called another operator
    # whose name starts with `name`, so also compare the character after the name.
    start = f"Batching rule not implemented for {name}"
    if not str(error).startswith((f"{start};", f"{start}. ")):
        return None
    return RuntimeError(
        f"{start}, and PyTorch cannot generate one. "
        f"Register a rule with register_vmap('{name}', rule), such as rule={SEQUENTIAL!r}."
    )


@overload
def register_vmap(
    op: OpLike, /, func: Literal["sequential"], *, lib: torch.library.Library | None = None
) -> None: ...


@overload
def register_vmap(
    op: OpLike,
    /,
    func: Function | Lambda | None = None,
    *,
    lib: torch.library.Library | None = None,
) -> Function: ...


@compilers.eager_only
def register_vmap(
    op: OpLike,
    /,
    func: Function | Lambda | Literal["sequential"] | None = None,
    *,
    lib: torch.library.Library | None = None,
) -> Function | None:
    """Register how `torch.vmap` maps an operator over a batch.

    Without a rule, PyTorch calls the operator once per element and warns, but this fallback
    supports neither lists of tensors nor non-tensor results.

    Args:
        op: the operator, as its handle (the object that `custom_op` returned), `"ns::name"`,
            `"ns::name.overload"`, an `OpOverload`, or a packet with one overload.
        func: the rule, called as `func(info, in_dims, *args, **kwargs) -> (output, out_dims)`.
            `in_dims` contains the mapped dimension of each positional argument, or None if vmap
            does not map over the argument. `out_dims` contains the mapped dimension of each output,
            or None. `info.batch_size` is the size of the mapped dimension, and `info.randomness` is
            the `randomness` argument of `vmap`. The rule `"sequential"` calls the operator once per
            element and stacks the results. If `func` is omitted, a decorator is returned. For an
            operator with residuals, see `torchop.residuals`.
        lib: the library that owns the registration, so that closing it removes the registration. By
            default, the registration is permanent.

    Returns:
        `func`, or a decorator if `func` is omitted. None for `"sequential"`.

    Raises:
        NotImplementedError: the operator has keyword-only tensors, and `func` is a function.
        OperatorNotFoundError: the operator is not defined.
        RuleSignatureError: `func` does not accept these arguments.
        RuntimeError: the rule is `"sequential"`, and the operator returns views.

    With `"sequential"`, mutated tensors must be batched, because the operator writes into slices of
    the batch. Operators with `torch.Tag.nondeterministic_seeded` respect the `randomness` argument
    of `vmap`. If the batch is empty, the fake kernel determines the shapes of the results.

    Example:
        >>> import torch, torchop
        >>> @torchop.custom_op("docs::cube", mutates_args=())
        ... def cube(x: torch.Tensor) -> torch.Tensor:
        ...     return x**3
        >>> @torchop.register_vmap("docs::cube")
        ... def _(info, in_dims, x):
        ...     return cube(x), in_dims[0]
        >>> torch.vmap(cube)(torch.tensor([1.0, 2.0]))
        tensor([1., 8.])

    Based on `torch.library.register_vmap` and `jax.pure_callback(vmap_method="sequential")`.
    """
    rule = resolve(op, "register_vmap", lib).rule(VmapRule)
    if isinstance(func, str):
        rule.register(func)
        return None
    return decorator_or_call(rule.register, func)

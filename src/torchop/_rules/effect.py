"""The effect rule prevents compilers from removing or reordering calls with side effects."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeAlias

import torch.library

from torchop._compat import checkpointing, compilers, dispatch, opaque_types, registries, tracing
from torchop._compat.classes import EffectType, FunctionalTensorMode, OpOverload
from torchop._core.definition import CompiledRule, Definition
from torchop._core.lock import registration_lock
from torchop._core.registry import OpLike, op_name, own_definition, resolve
from torchop._errors import SchemaError, SchemaWarning, TracingError, short_repr, warn
from torchop._rules import in_autocast
from torchop._rules.checkpoint_modes import register_for_checkpoints
from torchop._schema.convention import Convention
from torchop._schema.schema import Schema

# None means that nothing was declared, whereas `"none"` declares that the operator has no effect,
# so compilers may remove its calls.
Effect: TypeAlias = "EffectType | Literal['ordered', 'none'] | None"
Declared: TypeAlias = "EffectType | Literal['none'] | None"

_CUSTOM_CLASS = "__torch__"
# The declared side effect that each operator had when it was last traced, by the operator's name.
# Entries survive a redefinition of the operator, because PyTorch caches compiled code by the
# operator's name and may return code that was compiled for the old effect.
_traced: dict[str, EffectType | None] = {}


class EffectRule(CompiledRule[Declared]):
    """The side effect that `custom_op` or `register_effect` declares for an operator.

    A compiled graph passes a token from each effectful call to the next, so compilers cannot remove
    or reorder these calls.
    """

    declared: Declared = None

    def watch(self) -> None:
        """Install a check that raises during tracing if a compiler would silently remove a call."""
        schema = self.definition.schema
        if not (schema.is_mutable or schema.is_view):
            self.definition.registered.add_default_rule(
                FunctionalTensorMode, functionalize_unless_dropped
            )

    def compile(self) -> Declared:
        return self.declared

    def cache_parts(self) -> Iterator[object]:
        yield str(self.declared)

    def repr_text(self) -> str | None:
        if self.declared is None:
            return None
        return "no effect" if self.declared == "none" else f"effect {self.declared.name}"

    def register(self, effect: Effect) -> None:
        """Declare the effect of the operator. If `effect` is None, remove the declaration."""
        definition = self.definition
        declared = check_effect(effect, definition.schema, "register_effect")
        if not definition.is_ours and _kind(declared) is not None:
            _check_not_composite(definition)
        check_not_traced(definition.schema, declared)
        with definition.registered.registering("effect"), registration_lock:
            self.update(self._install, declared=declared)

    def _install(self) -> None:
        definition, effect = self.definition, _kind(self.declared)
        if effect is not None:
            self.watch()
            register_for_checkpoints(definition)
            if not dispatch.has_kernel(str(definition), "FuncTorchBatched"):
                definition.implement_temporarily("FuncTorchBatched", self._reject_vmap)
        elif definition.registered.kernel("FuncTorchBatched") == self._reject_vmap:
            definition.registered.remove("FuncTorchBatched")
        remove = registries.register_effect(str(definition), effect)
        definition.registered.add("effect", None, remove)

    @compilers.never_traced
    def _reject_vmap(self, /, *args: Any, **kwargs: Any) -> Any:
        name = str(self.definition)
        raise TracingError(
            f"{name} has an effect, and vmap does not define how often the effect happens for a "
            f"batch. Register a vmap rule that does (register_vmap({name!r}, ...)), or call the "
            "operator outside vmap."
        )


def install(definition: Definition) -> Callable[[], None] | None:
    """Return a function that registers the effect, to be called once the operator is defined."""
    schema, effect = definition.schema, definition.declaration.effect
    if schema.returns_nothing:
        definition.rule(EffectRule).watch()
    if effect is None and _CUSTOM_CLASS not in schema.written:
        return None

    def finish() -> None:
        if _CUSTOM_CLASS in schema.written:
            registries.set_default_effect(str(definition))
        if effect is not None:
            definition.rule(EffectRule).register(effect)

    return finish


def may_change_objects(schema: Schema, *, also_generators: bool = False) -> bool:
    """Return whether an operator counts as having a side effect because it may change an object.

    Return False if the operator mutates or aliases an argument, because PyTorch ignores the effects
    of such operators. Generator arguments count only if `also_generators` is true: PyTorch's own
    random operators have no effect either, and with an effect, the operator could not be used with
    `vmap` or a derived backward formula.
    """
    types = schema.object_types
    if not types or schema.is_mutable or schema.is_view:
        return False
    return also_generators or types != {opaque_types.custom_class_name(torch.Generator)}


def declared_effect(
    effect: Any, schema: Schema, convention: Convention, *, is_inlined: bool
) -> Declared:
    """Validate the `effects` argument of `custom_op`, and return the operator's effect.

    An operator that takes objects by reference is assumed to change them, so its effect is
    `"ordered"` unless the author declares another effect or `"none"`, or compilers inline the
    operator.
    """
    mutates_objects = convention.mutates_objects
    if mutates_objects and effect == "none" and not is_inlined:
        raise SchemaError(
            f"{schema.name}: mutates_args names an object, so the operator has an effect on it, "
            'but effects="none" says that the operator has no effect. Remove one of them.'
        )
    declared: Declared = None
    if effect is not None:
        declared = check_effect(effect, schema, "effects")
    elif not is_inlined and may_change_objects(schema, also_generators=mutates_objects):
        declared = EffectType.ORDERED
    if is_inlined and isinstance(declared, EffectType):
        raise ValueError(
            f"{schema.name}: compile='inline' lets a compiler trace the function, so the effect "
            "would only happen during tracing. Use compile='opaque' for an operator with an effect."
        )
    if declared is not None:
        check_not_traced(schema, declared)
    elif schema.returns_nothing and not schema.is_mutable:
        warn(
            f"{schema.name} returns nothing and mutates nothing, so a compiler would remove all "
            "calls, and torch.compile rejects it. If it has a side effect, such as logging, pass "
            'effects="ordered" to custom_op. If it writes into an argument, name that in '
            'mutates_args. If it has no effect, pass effects="none".',
            SchemaWarning,
        )
    return declared


def check_effect(effect: Any, schema: Schema, caller: str) -> Declared:
    declared: Declared = EffectType.ORDERED if effect == "ordered" else effect
    if declared not in (None, "none") and not isinstance(declared, EffectType):
        raise ValueError(
            f"{schema.name}: {caller} expects EffectType.ORDERED, also written 'ordered', 'none', "
            f"or None; got {short_repr(effect)}."
        )
    if _kind(declared) is None:
        return declared
    if schema.is_mutable or schema.is_view:
        raise ValueError(
            f"{schema.name}: PyTorch ignores the effect of an operator that mutates or aliases an "
            f"argument, such as {schema}. Compilers keep its calls in order, but remove a call if "
            "nothing uses the tensor that it writes. Declare the effect on an operator that "
            "mutates nothing, or write into a tensor that outlives the compiled function."
        )
    return declared


def _check_not_composite(definition: Definition) -> None:
    if dispatch.has_kernel(str(definition), "CompositeImplicitAutograd"):
        raise ValueError(
            f"{definition}: PyTorch ignores the effect of an operator with a "
            "CompositeImplicitAutograd kernel, because a compiler traces into the kernel and "
            "runs the Python code only once. Register the kernel at CompositeExplicitAutograd, "
            "or for a device."
        )


def check_not_traced(schema: Schema, declared: Declared) -> None:
    """Raise if the operator was already traced without the side effect that is being declared.

    Graphs that were compiled earlier would ignore the new effect. If an effect is being removed,
    only warn, because the old graphs still keep every call and so remain correct.
    """
    effect = _kind(declared)
    name = schema.name
    before = _traced.get(name, effect)
    if before is effect:
        return
    if effect is None:
        warn(
            f"{name}: a compiler has already traced the operator with the effect that is removed "
            "now. PyTorch finds compiled code by the operator's name, so graphs that were compiled "
            "before still keep every call, in order. torch.compiler.reset() makes this process "
            "recompile functions, unless a cache on disk has the graph.",
            UserWarning,
        )
        return
    raise TracingError(
        f"{name}: a compiler has already traced the operator without an effect. PyTorch caches "
        "compiled code by the operator's name, so only some graphs would respect the effect. "
        'Declare it where the operator is defined, custom_op(..., effects="ordered"), before '
        "compiling. Then cached graphs from earlier processes are not reused."
    )


def _kind(declared: Declared) -> EffectType | None:
    return None if declared == "none" else declared


def how_to_declare(name: object) -> str:
    return (
        f"{name} returns nothing and mutates nothing, so a compiler would remove it. If it has a "
        'side effect, declare it: effects="ordered" in custom_op, or '
        f"torchop.register_effect({str(name)!r}, torchop.EffectType.ORDERED). If it writes into "
        "an argument, name that in mutates_args. If it has no effect, declare that: "
        'effects="none".'
    )


def functionalize_unless_dropped(mode: Any, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Trace a call in FunctionalTensorMode, or raise if compilers would drop it as dead code."""
    name = op._name
    effect = registries.effect_of(name)
    if effect is None:
        if not op._schema.returns and _effect_is_undeclared(op):
            raise TracingError(how_to_declare(name))
    elif not tracing.effect_is_threaded(mode, effect):
        raise TracingError(
            f"{name} has an effect, but PyTorch drops effectful calls from a graph inside a "
            "graph (a branch of torch.cond, the body of a loop, a nested region that is "
            "differentiated). Move the call out of the inner graph, or do not compile this "
            "function: torch.compiler.disable."
        )
    _traced[name] = effect
    if effect is None:
        return in_autocast.trace(mode, op, types, args, kwargs)
    # Save the results here too, because `in_checkpoint` does not always run: before PyTorch 2.13, a
    # checkpointed region without a policy function has no checkpointing mode.
    with checkpointing.saving_in_trace():
        return in_autocast.trace(mode, op, types, args, kwargs)


def _effect_is_undeclared(op: OpOverload) -> bool:
    definition = own_definition(op, op_name(op, "torch.compile"))
    return definition is not None and definition.plan[EffectRule] is None


@compilers.eager_only
def register_effect(
    op: OpLike,
    effect: Effect,
    *,
    lib: torch.library.Library | None = None,
) -> None:
    """Declare a side effect that an operator's schema does not show.

    Compilers then keep every call and preserve the order of calls with the same effect. If you
    define the operator yourself, declare the effect there instead, with
    `custom_op(..., effects="ordered")`.

    Args:
        op: the operator, as its handle (the object that `custom_op` returned), `"ns::name"`,
            `"ns::name.overload"`, an `OpOverload`, or a packet with one overload.
        effect: `EffectType.ORDERED` or `"ordered"`; `"none"` if the operator has no effect; None to
            remove the declaration.
        lib: the library that owns the registration, so that closing it removes the registration. By
            default, the registration is permanent.

    Raises:
        TracingError: the operator was already compiled without the effect.
        OperatorNotFoundError: the operator is not defined.
        ValueError: the effect is invalid, or PyTorch ignores effects of this operator because it
            mutates or aliases an argument, or has a CompositeImplicitAutograd kernel.

    Example:
        >>> import torch, torchop
        >>> @torchop.custom_op("docs::log_mean", mutates_args=())
        ... def log_mean(x: torch.Tensor) -> torch.Tensor:
        ...     print(x.mean())
        ...     return x.clone()
        >>> torchop.register_effect("docs::log_mean", torchop.EffectType.ORDERED)

    Based on `_register_effectful_op` of `torch.library`.
    """
    resolve(op, "register_effect", lib).rule(EffectRule).register(effect)

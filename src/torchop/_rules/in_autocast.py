"""Run an operator in a compiled program in the autocast state in which its call was traced.

Compiled code runs with autocast disabled (`_DisableAutocast` in
torch/_functorch/_aot_autograd/runtime_wrappers.py), because the casts of PyTorch's operators are
already part of the graph. But the kernel of a custom operator may also call PyTorch's operators,
whose inputs autocast would cast in eager mode. So if autocast is enabled during tracing, `trace`
records a call to `torchop::in_autocast`, which calls the operator with autocast enabled.

Operators with an autocast rule are called directly, because their kernels always run with autocast
disabled.

The functionalization rule also uses `torchop::in_autocast`, even with autocast disabled, to call
operators that PyTorch's functionalization does not support (see `trace_by_name`).

A single operator, `torchop::in_autocast`, is defined at import and serves all operators. Defining a
helper operator for each operator instead would slow down registration, and a helper operator
defined during tracing would be missing in a process that loads the graph from a cache or a file.
"""

from __future__ import annotations

import ast
import functools
import itertools
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.library
from torch import Tensor

from torchop._compat import (
    autocasting,
    compilers,
    dispatch,
    fake_tensors,
    inductor_writes,
    libraries,
    opaque_types,
    operators,
    registries,
    schemas,
    torch_ops,
    traced_objects,
)
from torchop._compat.classes import EffectType, OpOverload, Tag
from torchop._core.call import tensors_in
from torchop._errors import FakeKernelError, TracingError
from torchop._rules.autograd.gradients import unflatten
from torchop._rules.checkpoint_modes import marked

# The method `fake_kernel` of `FakeRule`. `_rules.fake.rule` sets this variable, because importing
# that module here would be circular.
fake_kernel: Any = None


def trace(mode: Any, op: OpOverload, types: Any, args: Any, kwargs: Any) -> Any:
    """Trace a call in FunctionalTensorMode, so that the kernel runs in the current autocast state.

    A trace before autograd (`pre_dispatch`) contains the operator itself, because it also records
    the `torch.autocast` regions.
    """
    if not _state_of_kernel(mode, op, args, kwargs or {}):
        return mode.__torch_dispatch__(op, types, args, kwargs)
    return trace_by_name(mode, op, types, args, kwargs or {})


def trace_by_name(
    mode: Any,
    op: OpOverload,
    types: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    *,
    returns_arguments: bool = False,
) -> Any:
    """Trace a call to `torchop::in_autocast`, which calls `op` in the current autocast state.

    If `returns_arguments` is true, `op` only returns arguments that it mutates, so the traced call
    returns nothing.
    """
    call = _Encoder(op).encode(_state_of_kernel(mode, op, args, kwargs), args, kwargs)
    is_in_place = bool(call.written) and (returns_arguments or not op._schema.returns)
    tags = frozenset(_TAGS.values()).intersection(op.tags)
    called = _overloads[is_in_place, registries.effect_of(op._name) is not None, tags]
    with marked(op, args, kwargs):
        flat = mode.__torch_dispatch__(called, types, call.arguments, {})
    if flat is NotImplemented or is_in_place:
        return flat
    results = iter(flat)
    nested = unflatten(results, _latest.lengths)
    with mode:
        for tensor, value in zip(call.written, results, strict=True):
            tensor.copy_(value)
    if len(nested) == 1:
        return nested[0]
    return nested or None


def _state_of_kernel(
    mode: Any, op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]
) -> autocasting.State:
    """Return the autocast state of the call, or an empty state if the kernel needs no autocast."""
    state = () if mode.pre_dispatch else autocasting.state_of_kernel()
    devices = {tensor.device.type for tensor in tensors_in((*args, *kwargs.values()))}
    if not any(name in devices or not devices for name, _ in state):
        return ()
    returns = op._schema.returns
    is_view = any(
        result.alias_info is not None and not result.alias_info.is_write for result in returns
    )
    is_supported = {str(result.type) for result in returns} <= {"Tensor", "List[Tensor]"}
    fakes = registries.fake_functions(op._name)
    # Only torchop's fake kernels run with autocast enabled. If the operator has another fake
    # kernel, the real kernel must run without autocast too, so that its results have the dtypes
    # that the fake kernel predicts.
    has_our_fake = bool(fakes) and getattr(fakes[-1], "__func__", None) is fake_kernel
    return state if not is_view and is_supported and has_our_fake else ()


class _Latest(threading.local):
    """The structure of the results of this thread's latest call to `torchop::in_autocast`.

    `lengths` has an entry for each result: the length of a list, or None for a tensor. The fake
    kernel sets it while `trace` traces a call.
    """

    lengths: Sequence[int | None] = ()


_latest = _Latest()


# --------------------------------------------------------------------------------------------------
# Encode a call as arguments of `torchop::in_autocast`


class _Call(NamedTuple):
    """The arguments of `torchop::in_autocast`."""

    text: str
    written: list[Tensor]  # the tensors that the operator mutates
    tensors: list[Tensor]  # all other tensors
    sizes: list[Any]  # SymInts
    number: Any  # the first SymFloat
    objects: Sequence[Any] = ()  # objects of opaque types

    @property
    def arguments(self) -> tuple[Any, ...]:
        # Leave out an empty list of objects, because torch.export cannot serialize it.
        return tuple(self) if self.objects else tuple(self)[:-1]


class _Encoder:
    def __init__(self, op: OpOverload) -> None:
        self.op = op
        self.mutated = {
            argument.name
            for argument in op._schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
        }
        self.written: list[Tensor] = []
        self.tensors: list[Tensor] = []
        self.sizes: list[Any] = []
        self.number: Any = None
        self.objects: list[Any] = []
        self.in_autocast = False

    def encode(
        self, state: autocasting.State, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> _Call:
        self.in_autocast = bool(state)
        names = [argument.name for argument in self.op._schema.arguments]
        parts = (
            self.op._name,
            [[name, self._value(name, dtype)] for name, dtype in state],
            [self._value(name, value) for name, value in zip(names, args, strict=False)],
            {name: self._value(name, value) for name, value in kwargs.items()},
        )
        return _Call(repr(parts), self.written, self.tensors, self.sizes, self.number, self.objects)

    def _value(self, name: str, value: Any) -> Any:
        """Encode a value as a Python literal, or as `(kind, value)` if it has no literal."""
        if value is None or isinstance(value, (bool, int, str)):
            return value
        if isinstance(value, Tensor):
            return self._added("written" if name in self.mutated else "tensors", value)
        if isinstance(value, (list, tuple)):
            return [self._value(name, item) for item in value]
        if isinstance(value, torch.SymInt):
            return self._added("sizes", value)
        if isinstance(value, torch.SymFloat) and self.number is None:
            self.number = value
            return ("number", None)
        if isinstance(value, (float, torch.SymFloat)):
            value = float(value)
            return value if math.isfinite(value) else ("float", str(value))
        if isinstance(value, torch.SymBool):
            return bool(value)
        if isinstance(value, complex):
            return ("complex", str(value))
        if isinstance(value, torch.device):
            return ("device", str(value))
        if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
            return ("torch", str(value).removeprefix("torch."))
        if opaque_types.custom_class_name(traced_objects.class_of(value)) is not None:
            return self._added("objects", value)
        problem = f"because argument {name!r} is of type {type(value).__name__}"
        if not self.in_autocast:
            raise TracingError(
                f"{self.op}: a compiler cannot trace this call, {problem}. Define the operator "
                "with torchop.custom_op, which supports more types, or call it outside of the "
                "compiled function."
            )
        raise TracingError(
            f"{self.op}: a compiler traces this call while autocast is enabled, and cannot pass "
            f"the autocast state to the kernel, {problem}. Register an autocast rule, such as "
            f"torchop.register_autocast({self.op._name!r}, 'cuda', torch.float32), or disable "
            "autocast for the call."
        )

    def _added(self, kind: str, value: Any) -> tuple[str, int]:
        values = getattr(self, kind)
        values.append(value)
        return kind, len(values) - 1


@functools.lru_cache(maxsize=4096)
def _parsed(text: str) -> Any:
    return ast.literal_eval(text)


def _decoded(call: _Call, value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(call, item) for item in value]
    if not isinstance(value, tuple):
        return value
    kind, content = value
    if kind in ("written", "tensors", "sizes", "objects"):
        return getattr(call, kind)[content]
    return call.number if kind == "number" else _CONSTANTS[kind](content)


_CONSTANTS: dict[str, Callable[[str], Any]] = {
    "float": float,
    "complex": complex,
    "device": torch.device,
    "torch": functools.partial(getattr, torch),
}


def _run(call: _Call) -> list[Tensor]:
    """Call the operator in the autocast state of the trace, and return its results as a list."""
    name, state, args, kwargs = _parsed(call.text)
    op = torch_ops.lookup_overload(*operators.parts(name))
    values = _decoded(call, args)
    keywords = {name: _decoded(call, value) for name, value in kwargs.items()}
    with autocasting.traced_in(tuple((name, _decoded(call, dtype)) for name, dtype in state)):
        result = op(*values, **keywords)
    results = result if isinstance(result, tuple) else () if result is None else (result,)
    _latest.lengths = [len(each) if isinstance(each, list) else None for each in results]
    return list(tensors_in(results))


def _in_dtypes_of_fakes(call: _Call, results: list[Tensor]) -> list[Tensor]:
    """Return the results, or raise if the fake kernel returned different dtypes.

    Without this check, Inductor would read the memory with the wrong dtype. The results of a
    backward kernel are cast instead, because autograd also casts gradients to the input's dtype in
    eager mode.
    """
    key = (call.text, *[tensor.dtype for tensor in (*call.written, *call.tensors)])
    if any(map(fake_tensors.is_fake, (*call.tensors, *call.written, *results))):
        _dtypes_of_fakes[key] = [tensor.dtype for tensor in results]
        return results
    if key not in _dtypes_of_fakes:  # the graph comes from a cache
        with fake_tensors.new_fake_mode() as mode:
            written, tensors = (
                [mode.from_tensor(tensor) for tensor in each]
                for each in (call.written, call.tensors)
            )
            fakes = _run(call._replace(written=written, tensors=tensors))
        _dtypes_of_fakes[key] = [tensor.dtype for tensor in fakes]
    dtypes, name = _dtypes_of_fakes[key], _parsed(call.text)[0]
    for index, (tensor, fake) in enumerate(zip(results, dtypes, strict=True)):
        if tensor.dtype is not fake and not name.endswith(_BACKWARD_KERNEL):
            raise FakeKernelError(
                f"{name}: under autocast, tensor {index} of the result is {tensor.dtype}, but "
                f"{fake} in the fake kernel. Compute the dtype in the fake kernel with the same "
                "PyTorch operators as in the kernel, or disable autocast in the kernel by an "
                f"autocast rule: torchop.register_autocast({name!r}, 'cuda', torch.float32), for "
                "example."
            )
    return [tensor.to(fake) for tensor, fake in zip(results, dtypes, strict=True)]


_BACKWARD_KERNEL = "__backward_kernel"
# The dtypes of the fake kernels' results, keyed by the call's text and the dtypes of its tensors.
_dtypes_of_fakes: dict[tuple[Any, ...], list[torch.dtype]] = {}


# --------------------------------------------------------------------------------------------------
# The operators


@compilers.never_traced
def _functional(*args: Any) -> list[Tensor]:
    """Call an operator on copies of the mutated tensors. Return the results and the copies."""
    call = _Call(*args)
    call = call._replace(written=list(map(copy_with_strides, call.written)))
    return [*_in_dtypes_of_fakes(call, _run(call)), *call.written]


@compilers.never_traced
def _in_place(*args: Any) -> None:
    _run(_Call(*args))


def copy_with_strides(tensor: Tensor) -> Tensor:
    """Copy a tensor with its strides. For a slice, `clone` would return a contiguous copy."""
    copy = torch.empty_strided(
        tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )
    return copy.copy_(tensor)


# The tags that affect how compilers transform a call, keyed by their names in the overloads below.
_TAGS = {"random": Tag.nondeterministic_seeded, "unsafe": Tag.cudagraph_unsafe}


def _define() -> dict[tuple[bool, bool, frozenset[Tag]], OpOverload]:
    """Define the overloads of `in_autocast`, one per combination of mutation, effect and tags."""
    found = {}
    for is_in_place, has_effect, *has_tags in itertools.product((False, True), repeat=4):
        if is_in_place and has_effect:  # operators that mutate arguments have no effect
            continue
        name = "in_autocast_" if is_in_place else "in_autocast"
        overload = "_".join(itertools.compress((*_TAGS, "effect"), (*has_tags, has_effect)))
        local = f"{name}.{overload}".removesuffix(".")
        written = "Tensor(a!)[]" if is_in_place else "Tensor[]"
        arguments = (
            f"str call, {written} written, Tensor[] tensors, SymInt[] sizes, float? number, "
            f"{schemas.custom_class()}[]? objects=None"
        )
        returned = "()" if is_in_place else "Tensor[]"
        tags = frozenset(itertools.compress(_TAGS.values(), has_tags))
        kernel = _in_place if is_in_place else _functional
        schema = f"{local}({arguments}) -> {returned}"
        qualname = libraries.define(_library, schema, (Tag.pt2_compliant_tag, *tags))
        libraries.implement(_library, local, dispatch.kernel_key("default"), kernel)
        registries.register_fake(qualname, kernel, __name__)
        if has_effect:
            registries.register_effect(qualname, EffectType.ORDERED)
        if is_in_place:
            inductor_writes.register_lowerings(qualname)
        found[is_in_place, has_effect, tags] = torch_ops.lookup_overload("torchop", name, overload)
    return found


_library = torch.library.Library("torchop", "FRAGMENT")
_overloads = _define()

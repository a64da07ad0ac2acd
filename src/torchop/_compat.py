"""The one module that touches private PyTorch names.

Checked on torch 2.11, 2.13 and 2.15. The rest of torchop speaks to PyTorch's internals through the
names below, so supporting a new release is a matter of this file.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import BuiltinFunctionType, CellType, CodeType, FrameType, FunctionType
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.autograd.forward_ad as _forward_ad
import torch.library
from torch._C import DispatchKey as DispatchKey
from torch._C import DispatchKeySet as DispatchKeySet
from torch._C import FunctionSchema as FunctionSchema
from torch._C import Tag as Tag
from torch._compile import _disable_dynamo
from torch._library.autograd import (
    make_autograd_impl,
    not_list_of_tensor,
    supports_tensorlist,
)
from torch._library.custom_ops import OPDEF_TO_LIB, OPDEFS
from torch._library.custom_ops import CustomOpDef as CustomOpDef
from torch._library.effects import EffectType as EffectType
from torch._library.fake_impl import FakeImplCtx as FakeImplCtx
from torch._library.opaque_object import is_opaque_type
from torch._library.simple_registry import singleton as _rules_registry
from torch._library.utils import Kernel as _FakeKernel
from torch._ops import OpOverload as OpOverload
from torch._ops import OpOverloadPacket as OpOverloadPacket
from torch._ops import _OpNamespace, _refresh_packet
from torch.utils._pytree import tree_flatten

RegistrationHook = Callable[[], None]
_Function = TypeVar("_Function", bound=Callable[..., Any])

# The logger that users of torch.library already configure and test against.
LOGGER_NAME = "torch._library.custom_ops"

# --------------------------------------------------------------------------------------------------
# Names that PyTorch's own objects occupy, where an operator of that name could never be reached.


OPS_ATTRIBUTES = frozenset(dir(type(torch.ops))) | {
    "_dir",
    "_higher_order_op_namespace",
    "loaded_libraries",
}
NAMESPACE_ATTRIBUTES = frozenset(dir(_OpNamespace)) | set(vars(_OpNamespace("torchop")))
# The private attributes of a packet; the others are its overloads.
PACKET_ATTRIBUTES = frozenset(dir(OpOverloadPacket)) | {
    name for name in vars(torch.ops.aten.sin) if name.startswith("_")
}


@functools.lru_cache(maxsize=256)
def is_schema_identifier(text: str) -> bool:
    """Whether the schema parser reads `text` as an identifier, not as a TorchScript keyword."""
    try:
        torch._C.parse_schema(f"{text}() -> ()")
    except RuntimeError:
        return False
    return True


# --------------------------------------------------------------------------------------------------
# Schemas


def parse_schema(text: str) -> FunctionSchema:
    """Parses a schema with a name; raises RuntimeError with the parser's own explanation."""
    return torch._C.parse_schema(text)


def registered_schema(name: str, overload: str) -> FunctionSchema:
    """The schema of an operator that the dispatcher knows; raises RuntimeError otherwise."""
    return torch._C._get_schema(name, overload)


def is_registered(name: str, overload: str) -> bool:
    """Whether the dispatcher has a schema for this operator, whoever defined it."""
    return torch._C._get_operation_overload(name, overload) is not None


def is_defined_in_python(qualname: str) -> bool:
    """Whether an operator was defined through a library of `torch.library`, or of ours."""
    return qualname in torch.library._defs


def overload_names(qualname: str) -> list[str]:
    """The overloads defined under `namespace::name`; the default one is the empty string."""
    _, names = torch._C._jit_get_operation(qualname)
    return list(names or ())


def custom_class_name(annotation: Any) -> str | None:
    """The schema name of a registered opaque (custom) class, Enum and Generator included."""
    if not isinstance(annotation, type):
        return None
    if not is_opaque_type(annotation):
        # A custom class since 2.13; before, the schema language had a type of its own for it.
        return "Generator" if annotation is torch.Generator else None
    from torch._library.opaque_object import get_opaque_type_name

    return get_opaque_type_name(annotation)


def traced_object_class() -> type:
    """What stands for an object of a registered class while a tracer runs."""
    from torch._library.fake_class_registry import FakeScriptObject

    return FakeScriptObject


def is_returnable_custom_class(annotation: Any) -> bool:
    """Whether PyTorch allows a registered custom class as a return type."""
    if not isinstance(annotation, type):
        return False
    from torch._library import opaque_object

    # Renamed between 2.13 ("reference") and 2.15 ("symbolic").
    check = getattr(opaque_object, "is_opaque_symbolic_type", None) or getattr(
        opaque_object, "is_opaque_reference_type", None
    )
    return check is not None and bool(check(annotation))


def is_group_name(annotation: Any) -> bool:
    """Whether `annotation` is torch.distributed's GroupName, a NewType of str."""
    module = sys.modules.get("torch.distributed.distributed_c10d")
    return module is not None and annotation is getattr(module, "GroupName", object())


# The schema stores the enumerations of the C++ side as integers; these are their Python objects.
def _dtype_codes() -> Iterator[tuple[int, torch.dtype]]:
    for dtype in {value for value in vars(torch).values() if isinstance(value, torch.dtype)}:
        # Newer dtypes can be made, but not yet written as a default.
        with contextlib.suppress(RuntimeError):
            name = str(dtype).removeprefix("torch.")
            parsed = torch._C.parse_schema(f"f(ScalarType d={name}) -> ()")
            yield cast(int, parsed.arguments[0].default_value), dtype


SCALAR_TYPES: dict[int, torch.dtype] = dict(_dtype_codes())
LAYOUTS: dict[int, torch.layout] = {0: torch.strided}
MEMORY_FORMATS: dict[int, torch.memory_format] = {0: torch.contiguous_format}


# --------------------------------------------------------------------------------------------------
# Devices, dispatch keys and thread-local dispatch state

AFTER_AUTOGRAD = torch._C._after_autograd_keyset
AFTER_ADINPLACEORVIEW = torch._C._after_ADInplaceOrView_keyset

# The keys of tensors whose values are not what lies in their memory, in the order of dispatch.
MATH_BIT_KEYS = ("Negative", "Conjugate")


def below_math_bits(keyset: DispatchKeySet) -> DispatchKeySet:
    """The keys that are left of a call once its conjugate and negated views are resolved."""
    for key in MATH_BIT_KEYS:
        keyset = keyset.remove(getattr(DispatchKey, key))
    return keyset & AFTER_ADINPLACEORVIEW


below_autograd = torch._C._AutoDispatchBelowAutograd
any_alias: Callable[..., bool] = torch._C._any_output_is_alias_to_input_or_output
autocast_is_available: Callable[[str], bool] = torch._C._is_autocast_available
parse_dispatch_key: Callable[[str], DispatchKey | None] = torch._C._parse_dispatch_key


def dispatch_key_name(device_type: str) -> str:
    """The backend key of a device type; raises RuntimeError listing the types PyTorch knows."""
    return torch._C._dispatch_key_for_device(device_type)


def kernel_key(kind: str) -> str:
    """The dispatch key of a kernel for a device type, `"default"`, or a key by its own name.

    Raises:
        RuntimeError: none of these; lists the device types that PyTorch knows.
    """
    if kind == "default":
        return "CompositeExplicitAutograd"
    return kind if parse_dispatch_key(kind) is not None else dispatch_key_name(kind)


def backend_keyset(device_type: str) -> DispatchKeySet:
    """The key set that redispatches a call to one backend."""
    return DispatchKeySet(getattr(DispatchKey, dispatch_key_name(device_type)))


def is_python_key(name: str) -> bool:
    """Whether Python has a name for a dispatch key, which it has not for all of them."""
    return hasattr(DispatchKey, name)


def without_key(name: str) -> contextlib.AbstractContextManager[Any]:
    """Excludes a dispatch key in this thread, as long as the context lasts."""
    return torch._C._ExcludeDispatchKeyGuard(DispatchKeySet(getattr(DispatchKey, name)))


def with_overlooked_keys(
    qualname: str, keyset: DispatchKeySet, tensors: Iterable[torch.Tensor]
) -> DispatchKeySet:
    """The keys with which a call goes on from BackendSelect, counting tensors not looked at before.

    Args:
        qualname: the operator.
        keyset: the keys that the dispatcher computed.
        tensors: those that it overlooked.
    """
    overlooked = DispatchKeySet(DispatchKey.Undefined)
    for tensor in tensors:
        overlooked = overlooked | torch._C._dispatch_keys(tensor)
    # ADInplaceOrView is on for every thread, so its kernel has run by now.
    overlooked = overlooked.remove(DispatchKey.ADInplaceOrView)
    keyset = (keyset | overlooked) - torch._C._dispatch_tls_local_exclude_set()
    keyset = keyset.remove(DispatchKey.BackendSelect)
    # A redispatch does not skip fallthroughs, as a first dispatch does.
    rest = keyset
    while (key := rest.highestPriorityTypeId()) != DispatchKey.Undefined:
        if has_kernel(
            qualname, key.name
        ) and torch._C._dispatch_kernel_for_dispatch_key_is_fallthrough(qualname, key.name):
            keyset = keyset.remove(key)
        rest = rest.remove(key)
    return keyset


def has_kernel(qualname: str, key: str) -> bool:
    """Whether a kernel is registered at exactly this dispatch key."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(qualname, key)


def keys_of_call(tensors: Iterable[torch.Tensor]) -> list[str]:
    """The dispatch keys of a call with these tensors in this thread, in the order of dispatch."""
    keyset = torch._C._dispatch_tls_local_include_set()
    for tensor in tensors:
        keyset = keyset | torch._C._dispatch_keys(tensor)
    keyset = keyset - torch._C._dispatch_tls_local_exclude_set()
    names = []
    while (key := keyset.highestPriorityTypeId()) != DispatchKey.Undefined:
        names.append(torch._C._dispatch_key_name(key))
        keyset = keyset.remove(key)
    return names


def kernel_table(qualname: str) -> dict[str, str]:
    """What the dispatcher runs at each key that it does not pass over: where it was registered."""
    lines = torch._C._dispatch_dump_table(qualname).splitlines()
    pairs = (line.partition(": ") for line in lines)
    return {key: text for key, _, text in pairs if not text.startswith("fallthrough")}


# --------------------------------------------------------------------------------------------------
# Autograd, forward mode and functorch


def autograd_is_excluded() -> bool:
    """Whether this thread is below autograd, inside a kernel that the dispatcher called."""
    return torch._C._dispatch_tls_is_dispatch_key_excluded(DispatchKey.AutogradOther)


# What `below_autograd` excludes, where it is not excluded already.
_AUTOGRAD_KEYS = (
    DispatchKeySet(DispatchKey.AutogradFunctionality)
    | DispatchKeySet(DispatchKey.AutogradOther)
    | DispatchKeySet(DispatchKey.AutogradNestedTensor)
)


@contextlib.contextmanager
def above_autograd() -> Iterator[None]:
    """Lets autograd record, inside a kernel that the dispatcher called below it too."""
    include = torch._C._dispatch_tls_local_include_set()
    exclude = torch._C._dispatch_tls_local_exclude_set() - _AUTOGRAD_KEYS
    with torch._C._ForceDispatchKeyGuard(include, exclude), torch.enable_grad():
        yield


def dispatch_modes_are_active() -> bool:
    """Whether a mode sees the operators that this thread calls."""
    return torch._C._len_torch_dispatch_stack() > 0


def has_tangent(tensor: torch.Tensor) -> bool:
    """Whether forward-mode differentiation follows this tensor; only asked at a dual level."""
    return torch._VF._unpack_dual(tensor, level=_DUAL_LEVEL)[1] is not None


_DUAL_LEVEL = 0  # PyTorch has no other yet: transforms inside transforms wrap tensors instead


def unpack_dual(value: Any) -> tuple[Any, torch.Tensor | None]:
    """A tensor without the tangent with which forward mode follows it, and that tangent.

    A tensor that has none is returned as it is, and so is what is no tensor.
    """
    if not isinstance(value, torch.Tensor) or not has_tangent(value):
        return value, None
    primal, tangent = torch._VF._unpack_dual(value, level=_DUAL_LEVEL)
    return primal, tangent


def make_dual(tensor: torch.Tensor, tangent: torch.Tensor) -> torch.Tensor:
    """Gives a tensor a tangent."""
    dual: torch.Tensor = torch._VF._make_dual(tensor, tangent, level=_DUAL_LEVEL)
    return dual


def any_requires_grad(values: Iterable[Any]) -> bool:
    """Whether a tensor among the values, or in a list among them, requires grad."""
    return torch._C._any_requires_grad(*values)


def device(name: str | torch.device) -> torch.device:
    """The device of this name, made where a mode of the user's does not see it."""
    with torch._C.DisableTorchFunction():
        return torch.device(name)


_CREATION_META = torch._C._autograd.CreationMeta
_MODE_PROBLEM = (
    "A view was created in {} mode and is being modified inplace {}. Given that this use case is "
    "ambiguous and error-prone, it is forbidden. You can clarify your code by moving both the view "
    "and the inplace either both inside the {} block (if you don't want the inplace to be tracked) "
    "or both outside (if you want the inplace to be tracked)."
)
_VIEW_PROBLEMS = {
    _CREATION_META.NO_GRAD_MODE: _MODE_PROBLEM.format(
        "no_grad", "with grad mode enabled", "no_grad"
    ),
    _CREATION_META.INFERENCE_MODE: _MODE_PROBLEM.format(
        "inference", "in normal mode", "inference_mode"
    ),
    _CREATION_META.MULTI_OUTPUT_NODE: (
        "Output {} of {} is a view and is being modified inplace. This view is the output of a "
        "function that returns multiple views. Such functions do not "
        "allow the output views to be modified inplace. You should replace the inplace operation "
        "by an out-of-place one."
    ),
    _CREATION_META.IN_CUSTOM_FUNCTION: (
        "Output {} of {} is a view and is being modified inplace. This view was created inside a "
        "custom Function (or because an input was returned as-is) "
        "and the autograd logic to handle view+inplace would override the custom backward "
        "associated with the custom Function, leading to incorrect gradients. This behavior is "
        "forbidden. You can fix this by cloning the output of the custom Function."
    ),
}


def view_problem(view: torch.Tensor) -> str | None:
    """Why autograd could not rewrite the history of a view, in PyTorch's words; None if it can."""
    problem = _VIEW_PROBLEMS.get(torch._C._autograd._get_creation_meta(view))
    if problem is None:
        return None
    function = view.grad_fn.name().partition("Backward")[0] if view.grad_fn else "a function"
    return problem.format(view.output_nr, function)


def show_mutation(tensor: torch.Tensor) -> None:
    """Tells functionalization that a tensor was written in a way that autograd follows.

    It takes what an operator that it does not know writes for hidden from autograd, and what is
    written without grad mode, as inside of an `autograd.Function`, for meant to be without history.
    An input of a compiled graph would then be overwritten and keep its old history.
    """
    elem = getattr(tensor, "elem", None)
    if elem is not None and torch._is_functional_tensor(elem):
        with torch.enable_grad():
            torch._functionalize_sync(elem)
            torch._functionalize_replace(elem, torch._from_functional_tensor(elem))
            torch._functionalize_commit_update(elem)
            torch._functionalize_sync(elem)


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether elements of a tensor are known to be the same memory, as after `expand`."""
    # For layouts without strides, PyTorch's function says yes.
    return tensor.layout is torch.strided and torch._debug_has_internal_overlap(tensor) == 1


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill one piece of memory, each in a place of its own."""
    return tensor.layout is torch.strided and torch.ops.aten.is_non_overlapping_and_dense(tensor)


def forward_mode_is_active() -> bool:
    """Whether tensors may carry tangents in this thread."""
    if not torch._C._is_fwd_grad_enabled():
        return False
    if _forward_ad._current_level >= 0:
        return True
    # A compiled graph enters the level without telling Python.
    interpreter = torch._C._functorch.peek_interpreter_stack()
    return interpreter is not None and interpreter.key() == torch._C._functorch.TransformType.Jvp


def dynamo_is_tracing() -> bool:
    """Whether Dynamo calls an operator to see what it returns, and will call it again."""
    from torch._guards import TracingContext

    return TracingContext.try_get() is not None


def functorch_is_active() -> bool:
    """Whether a `torch.func` transform is on the stack."""
    return torch._C._are_functorch_transforms_active()


# The key at which a transform takes hold of a call, and two questions about tensors inside one.
FUNCTORCH_ENTRY = "FuncTorchDynamicLayerFrontMode"
is_functorch_wrapped: Callable[[torch.Tensor], bool] = (
    torch._C._functorch.is_functorch_wrapped_tensor
)
is_batched: Callable[[torch.Tensor], bool] = torch._C._functorch.is_batchedtensor


def holds_batch(tensor: torch.Tensor) -> bool:
    """Whether `torch.vmap` maps over a tensor, at any level of the transforms around it."""
    while is_functorch_wrapped(tensor):
        if is_batched(tensor):
            return True
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return False


def without_randomness_of_vmap() -> contextlib.AbstractContextManager[Any]:
    """Lets what runs in a vmap rule draw random numbers as if no vmap were around it.

    PyTorch keeps the key of the mode that says how `torch.vmap` draws them while a rule runs. An
    older mode, which batches of gradients still use, refuses to draw any.
    """
    return torch._C._ExcludeDispatchKeyGuard(_VMAP_MODES)


_VMAP_MODES = DispatchKeySet(DispatchKey.FuncTorchVmapMode)
if (_older_mode := torch._C._parse_dispatch_key("VmapMode")) is not None:
    _VMAP_MODES |= DispatchKeySet(_older_mode)


@contextlib.contextmanager
def leaves_may_be_made() -> Iterator[None]:
    """Allows `requires_grad_()` where a transform of `torch.func` is further out."""
    previous = torch._C._functorch.get_inplace_requires_grad_allowed()
    torch._C._functorch.set_inplace_requires_grad_allowed(True)
    try:
        yield
    finally:
        torch._C._functorch.set_inplace_requires_grad_allowed(previous)


def computed_kernel(qualname: str, key: str) -> Any:
    """The kernel that an operator has at a dispatch key, a fallback for all operators included."""
    return torch._C._dispatch_get_computed_kernel_for_dispatch_key(qualname, key)


@contextlib.contextmanager
def single_level_autograd() -> Iterator[None]:
    """Lets an autograd.Function be applied at the functorch level that called the operator."""
    previous = torch._C._functorch.get_single_level_autograd_function_allowed()
    torch._C._functorch.set_single_level_autograd_function_allowed(True)
    try:
        yield
    finally:
        torch._C._functorch.set_single_level_autograd_function_allowed(previous)


@contextlib.contextmanager
def outer_levels_differentiate() -> Iterator[None]:
    """Turns both gradient modes back on, inside the forward of an autograd.Function.

    The function has turned them off for its own level; a transform further out still needs them.
    """
    with torch.enable_grad(), _forward_ad._set_fwd_grad_enabled(True):
        yield


# What applies a function lives in C. `autograd.Function` adds a Python `apply` that routes to
# functorch's own scheme, which wants a `setup_context` staticmethod and a function per level.
FunctionBase: Any = torch.autograd.function._SingleLevelFunction


def make_autograd_function(
    name: str,
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    jvp: Callable[..., Any],
) -> Any:
    """Makes an autograd function that is applied at the level that calls it."""
    return type(
        name,
        (FunctionBase,),
        {
            "forward": staticmethod(forward),
            "backward": staticmethod(backward),
            "jvp": staticmethod(jvp),
            "_compiled_autograd_key": staticmethod(torch.autograd.Function._compiled_autograd_key),
        },
    )


_raw_saved_tensors: Any = torch._C._FunctionBase.saved_tensors


def context_type(function: Any) -> Any:
    """The class of the `ctx` objects that an autograd.Function hands out."""
    return function._backward_cls


def raw_saved_tensors(ctx: Any) -> tuple[torch.Tensor | None, ...]:
    """`ctx.saved_tensors` past any property that hides it."""
    return cast(tuple[Any, ...], _raw_saved_tensors.__get__(ctx))


def call_vmap_rule(rule: Callable[..., Any], op: OpOverload, args: Any, kwargs: Any) -> Any:
    """Runs a vmap rule at the current functorch level: unwraps, calls, wraps the results."""
    from torch._functorch.autograd_function import custom_function_call_vmap_helper
    from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

    interpreter = retrieve_current_functorch_interpreter()
    return custom_function_call_vmap_helper(cast(Any, interpreter), rule, op, *args, **kwargs)


# The key at which PyTorch's own random operators meet vmap, mapped over or not.
VMAP_OF_RANDOM_CALLS = "FuncTorchVmapMode"


def is_random(op: OpOverload) -> bool:
    """Whether an operator says, by its tag, that it draws random numbers."""
    return Tag.nondeterministic_seeded in op.tags


class Vmap(NamedTuple):
    """The innermost `vmap` that is active."""

    level: int
    batch_size: int
    randomness: str

    def unwrap(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int | None]:
        """The tensor with the dimension that is mapped over, and which that is."""
        tensor, dim = torch._C._functorch._unwrap_batched(tensor, self.level)
        return tensor, dim

    def wrap(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor whose first dimension is mapped over, as `vmap` shows it."""
        from torch._functorch import vmap

        wrapped: torch.Tensor = cast(Any, vmap)._add_batch_dim(tensor, 0, self.level)
        return wrapped


def current_vmap() -> Vmap:
    """The `vmap` in whose batching kernel we are."""
    from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

    interpreter: Any = retrieve_current_functorch_interpreter()
    return Vmap(interpreter.level(), int(interpreter.batch_size()), interpreter.randomness())


@contextlib.contextmanager
def below_vmap() -> Iterator[None]:
    """Makes calls go on from the batching kernel of the innermost `vmap`."""
    with without_key("FuncTorchBatched"), without_key(VMAP_OF_RANDOM_CALLS):
        yield


# --------------------------------------------------------------------------------------------------
# Fake tensors


@contextlib.contextmanager
def describing() -> Iterator[Callable[[Sequence[Any], torch.Tensor], torch.Tensor]]:
    """Lets operators describe their results, out of sight of transforms and modes.

    Yields what makes a fake tensor, given a shape and a tensor that has the dtype and device.
    """
    from torch._guards import detect_fake_mode
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import _disable_current_modes

    mode = detect_fake_mode() or FakeTensorMode()
    with torch._C._DisableFuncTorch(), _disable_current_modes(), mode:
        yield lambda shape, like: torch.empty(tuple(shape), dtype=like.dtype, device=like.device)


def active_fake_mode() -> Any | None:
    """The FakeTensorMode that is running an operator in this thread, or None."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)


def new_fake_mode() -> Any:
    """A mode that makes fake tensors, and knows symbols for sizes that depend on data."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return FakeTensorMode(shape_env=ShapeEnv())


def shown_to_tracer(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """A size that was computed out of a tracer's sight, computed again from those of tensors.

    The tracer would write the formula into the graph by itself, but in 2.13 with an operator for
    sums that an exported file cannot hold.
    """
    if isinstance(value, (list, tuple)):
        return type(value)(shown_to_tracer(item, tensors) for item in value)
    if not isinstance(value, torch.SymInt):
        return value
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    if get_proxy_mode() is None:
        return value
    from torch.utils._sympy.interp import sympy_interp
    from torch.utils._sympy.reference import PythonReferenceAnalysis

    sizes: list[Any] = [size for tensor in tensors for size in tensor.shape]
    known = {size.node.expr: size for size in sizes if isinstance(size, torch.SymInt)}
    formula = value.node.expr
    if not formula.free_symbols <= known.keys():
        return value
    return sympy_interp(PythonReferenceAnalysis, known, formula)


def is_dynamo_compiling() -> bool:
    """Whether Dynamo is following the caller: it finds True, and every other caller False."""
    return torch.compiler.is_dynamo_compiling()


def stock_fake_context() -> FakeImplCtx | None:
    """The context of a fake kernel that torch.library is running in this thread.

    torch.library keeps one for the process, so it may be that of another thread.
    """
    context = cast("FakeImplCtx | None", torch.library.get_ctx())
    return context if context is not None and context._fake_mode is active_fake_mode() else None


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor carries no data: a FakeTensor or a meta tensor."""
    fake_tensor = sys.modules.get("torch._subclasses.fake_tensor")
    return tensor.is_meta or (
        fake_tensor is not None and isinstance(tensor, fake_tensor.FakeTensor)
    )


# Within it, neither a subclass of Tensor nor a mode sees what functions are called.
plain_tensors: Callable[[], contextlib.AbstractContextManager[Any]] = torch._C.DisableTorchFunction


def is_capturing(tensor: torch.Tensor) -> bool:
    """Whether a CUDA graph is being captured, in which a tensor must not be read."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def is_traced(tensor: torch.Tensor) -> bool:
    """Whether a tensor belongs to a compiler's trace: fake, or functionalized."""
    return is_fake(tensor) or (
        torch._is_functional_tensor(tensor) or type(tensor).__name__ == "FunctionalTensor"
    )


_TRACING_MODES = tuple(torch._C._TorchDispatchModeKey.__members__.values())


def is_tracing(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether what runs here becomes part of a graph, or has no data: a compiler's trace."""
    modes = map(torch._C._get_dispatch_mode, _TRACING_MODES)
    return any(mode is not None for mode in modes) or any(map(is_traced, tensors))


def explained_tracing_error(
    error: type[BaseException], op: OpOverload, message: str
) -> RuntimeError:
    """An exception that Dynamo treats like `error`, and that reads `message`."""
    explained = type(error.__name__, (error,), {"__str__": lambda self: message})
    return cast(RuntimeError, explained(op))


def data_dependent_errors() -> tuple[type[BaseException], type[BaseException]]:
    """FakeTensor's exceptions for reading a value, and for a size that depends on one."""
    from torch._subclasses import fake_tensor

    return fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException


# --------------------------------------------------------------------------------------------------
# torch.library's registries


def push_fake(qualname: str, function: Callable[..., Any], source: str) -> RegistrationHook:
    """Makes `function` the fake kernel that FakeTensor runs; returns what takes it back."""
    kernels = _rules_registry.find(qualname).fake_impl.kernels
    kernel = _FakeKernel(function, source)
    kernels.append(kernel)

    def remove() -> None:
        if kernel in kernels:
            kernels.remove(kernel)

    return remove


def fake_source(qualname: str) -> str | None:
    """Where the fake kernel that FakeTensor would run was registered, if there is one."""
    kernel = _rules_registry.find(qualname).fake_impl.kernel
    return kernel.source if kernel else None


def register_torch_dispatch(
    qualname: str,
    cls: type,
    function: Callable[..., Any],
    *,
    instead_of: Callable[..., Any] | None = None,
) -> RegistrationHook:
    """Registers a rule for a mode or Tensor subclass; returns what takes it back.

    Args:
        qualname: the operator.
        cls: the mode or subclass.
        function: the rule.
        instead_of: a rule that may be there, and gives way.
    """
    withdraw_torch_dispatch(qualname, cls, instead_of)
    rules = _rules_registry.find(qualname).torch_dispatch_rules
    return rules.register(cls, function).destroy


def offer_torch_dispatch(qualname: str, cls: type, function: Callable[..., Any]) -> bool:
    """Registers a rule for a mode if there is none; returns whether there was none."""
    rules = _rules_registry.find(qualname).torch_dispatch_rules
    if rules.find(cls) is not None:
        return False
    rules.register(cls, function)
    return True


def withdraw_torch_dispatch(qualname: str, cls: type, function: Callable[..., Any] | None) -> None:
    """Takes a rule back, if it is still this one."""
    rules = _rules_registry.find(qualname).torch_dispatch_rules
    if function is not None and rules.find(cls) is function:
        del rules._data[cls]


def functional_tensor_mode() -> type:
    """The mode in which compilers make a trace functional."""
    from torch._subclasses.functional_tensor import FunctionalTensorMode

    return FunctionalTensorMode


def decomposes_for_backends() -> bool:
    """Whether what is being traced goes to a backend, and not into an exported program."""
    from torch.export._trace import custom_triton_ops_decomposition_disabled

    return not custom_triton_ops_decomposition_disabled()


def compiling_backend() -> str | None:
    """The name of the backend for which this thread compiles, if there is one.

    Nothing that AOT Autograd sets tells backends apart, but it is called by one.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        code = frame.f_code
        if code.co_filename.endswith(_INDUCTOR_FILE):
            return "inductor"
        if code.co_name in _CALLS_OF_BACKENDS and code.co_filename.endswith(_DYNAMO_FILE):
            backend = frame.f_locals.get("compiler_fn") or frame.f_locals["self"].compiler_fn
            name = getattr(backend, "compiler_name", None) or getattr(backend, "__name__", None)
            return name if isinstance(name, str) else type(backend).__name__
        frame = frame.f_back
    return None


_INDUCTOR_FILE = os.path.join("torch", "_inductor", "compile_fx.py")
_DYNAMO_FILE = os.path.join("torch", "_dynamo", "output_graph.py")
_CALLS_OF_BACKENDS = ("_call_user_compiler", "call_user_compiler")


def launching_triton() -> contextlib.AbstractContextManager[Any]:
    """Lets `wrap_triton` hand out the bare kernels, outside of a trace."""
    from torch._library.triton import set_wrap_triton_enabled

    return set_wrap_triton_enabled(False)


def note_triton_kernels(qualname: str, function: Callable[..., Any]) -> None:
    """Tells PyTorch's compile caches which Triton kernels an operator consists of."""
    from importlib.util import find_spec

    from torch._library import triton

    if find_spec("triton") is not None:  # or PyTorch warns that it finds none
        triton.triton_ops_to_kernels[qualname] = triton.get_inner_triton_kernels(function)


def is_traceable_type(cls: type) -> bool:
    """Whether a compiler's functional trace knows what to do with tensors of a class."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    return cls in (torch.Tensor, FunctionalTensor) or issubclass(cls, FakeTensor)


def _traced_base(tensor: torch.Tensor) -> torch.Tensor:
    from torch._higher_order_ops.auto_functionalize import get_base

    base = get_base(tensor)
    return tensor if base is None else cast(torch.Tensor, base)


def traced_memory(tensor: torch.Tensor) -> int:
    """What tells whether two tensors of a compiler's trace have the same memory."""
    return _traced_base(tensor)._cdata


def functional_storage(tensor: torch.Tensor) -> int:
    """What tells whether two tensors of a functional trace have the same memory, below autograd."""
    elem: torch.Tensor = getattr(tensor, "elem", tensor)
    storage: int = elem.untyped_storage()._cdata
    return storage


def is_view_of_other_type(tensor: torch.Tensor) -> bool:
    """Whether a tensor of a compiler's trace is a view of one with another dtype."""
    return _traced_base(tensor).dtype is not tensor.dtype


def traced_node(mode: Any, tensor: torch.Tensor) -> torch.fx.Node | None:
    """The node of the graph being traced that computes a functional tensor; None without a graph.

    Args:
        mode: the `FunctionalTensorMode` that makes the trace functional.
        tensor: one of its tensors.
    """
    from torch._subclasses.functional_tensor import PythonFunctionalizeAPI
    from torch.fx.experimental import proxy_tensor

    proxy_mode = proxy_tensor.get_proxy_mode()
    if proxy_mode is None:
        return None
    value: Any = PythonFunctionalizeAPI(mode).unwrap_tensors(tensor)
    proxy: Any = proxy_tensor.get_proxy_slot(value, proxy_mode.tracer, None)
    return None if proxy is None else proxy.proxy.node


# --------------------------------------------------------------------------------------------------
# Effects


def register_effect(qualname: str, effect: EffectType | None) -> RegistrationHook:
    """Tells functionalization of an effect; returns what brings back the one before."""
    holder = _rules_registry.find(qualname).effect
    previous = holder.effect
    holder.register(effect)

    def take_back() -> None:
        if holder.effect is effect:
            holder.register(previous)

    return take_back


def effect_of(qualname: str) -> EffectType | None:
    """The effect of an operator that functionalization knows, whoever declared it."""
    return _rules_registry.find(qualname).effect.effect


def set_default_effect(qualname: str) -> None:
    """Lets PyTorch find the effect that a schema has by itself, if it holds a ScriptObject.

    PyTorch does that for the first question after an operator, which may come before its schema.
    """
    _rules_registry.find(qualname).effect._set_default_effect()


def effect_is_threaded(mode: Any, effect: EffectType) -> bool:
    """Whether the graph that is being traced orders calls that have an effect, and so keeps them.

    PyTorch hands a token from one such call to the next. Most graphs inside a graph (the branches
    of a `torch.cond`, the body of a loop) neither take nor return it, so a call there is dead code.

    Args:
        mode: the FunctionalTensorMode that functionalizes the call.
        effect: its effect.
    """
    from torch.fx.experimental import proxy_tensor

    proxy_mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
    if proxy_mode is None:
        return True  # nothing is traced yet
    token = mode._tokens.get(effect)
    if token is None:
        # A backward makes its first token itself.
        tracer = proxy_tensor._CURRENT_MAKE_FX_TRACER
        return tracer is None or not tracer.is_hop_subgraph_tracer()
    if hasattr(token, "elem"):
        token = torch._from_functional_tensor(token.elem)
    return proxy_tensor.has_proxy_slot(token, cast(Any, proxy_mode).tracer)


def checkpoint_mode() -> type | None:
    """The mode in which activation checkpointing sees the operators of a checkpointed region."""
    import torch.utils.checkpoint

    return getattr(torch.utils.checkpoint, "_CachingTorchDispatchMode", None)


def selective_checkpointing_is_active() -> bool:
    """Whether what this thread calls may be saved, or taken from what was, instead of computed."""
    if not dispatch_modes_are_active():
        return False
    import torch.utils.checkpoint as checkpointing
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    names = ("_CachingTorchDispatchMode", "_CachedTorchDispatchMode")
    modes = tuple(getattr(checkpointing, name) for name in names if hasattr(checkpointing, name))
    return any(isinstance(mode, modes) for mode in _get_current_dispatch_mode_stack())


def checkpoint_policies() -> Any:
    """The enumeration of what selective checkpointing may do with the result of a call."""
    from torch.utils.checkpoint import CheckpointPolicy

    return CheckpointPolicy


@contextlib.contextmanager
def saving_in_trace() -> Iterator[None]:
    """Makes a compiler keep what is traced here for the backward, and not compute it again."""
    from torch.utils.checkpoint import CheckpointPolicy

    proxy_mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
    if proxy_mode is None:
        yield
        return
    graph = cast(Any, proxy_mode).tracer.graph
    count = len(graph.nodes)
    yield
    for node in itertools.islice(reversed(graph.nodes), len(graph.nodes) - count):
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def flop_registry() -> dict[Any, Any]:
    """By packet, what FlopCounterMode counts.

    PyTorch does not find an entry again after an overload was added to its packet, whose hash that
    changes: such entries are put where they belong.
    """
    from torch.utils.flop_counter import flop_registry

    if any(packet not in flop_registry for packet in flop_registry):
        entries = list(flop_registry.items())
        flop_registry.clear()
        flop_registry.update(entries)
    return flop_registry


def _refresh(packet: OpOverloadPacket) -> None:
    """Makes a packet see its overloads anew, and stay in the registry above."""
    counter = sys.modules.get("torch.utils.flop_counter")
    formula = None if counter is None else counter.flop_registry.pop(packet, None)
    _refresh_packet(packet)
    if formula is not None:
        cast(Any, counter).flop_registry[packet] = formula


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """Maps the leaves of nested tuples, lists and dicts."""
    return torch.utils._pytree.tree_map(function, tree)


# --------------------------------------------------------------------------------------------------
# Handles of custom_op


def published_handle(qualname: str) -> CustomOpDef | None:
    """The handle that torch.library's functions consult for a name."""
    return cast("CustomOpDef | None", OPDEFS.get(qualname))


def published_handles() -> dict[str, CustomOpDef]:
    """Every handle that torch.library's functions could find at the moment."""
    return dict(OPDEFS)


def publish(qualname: str, handle: CustomOpDef, library: torch.library.Library) -> None:
    """Puts a handle where torch.library's functions, and its own custom_op, look for it."""
    OPDEFS[qualname] = handle
    OPDEF_TO_LIB[qualname] = library


def unpublish(qualname: str, library: torch.library.Library) -> None:
    """Takes a handle out again, unless another definition has taken the name since."""
    if OPDEF_TO_LIB.get(qualname) is library:
        del OPDEF_TO_LIB[qualname]
        OPDEFS.pop(qualname, None)


def published_library(qualname: str) -> torch.library.Library | None:
    """The library behind a handle that `custom_op`, ours or PyTorch's, made."""
    return OPDEF_TO_LIB.get(qualname)


# --------------------------------------------------------------------------------------------------
# What torch.library's custom_op registers
#
# A function is known by its code object, which is a constant of the function that makes it. What it
# closes over says for which operator it was made.


def _code_inside(function: Any, *names: str) -> CodeType | None:
    """The code of a function inside a function, by their names; None if there is none."""
    code: CodeType | None = getattr(function, "__code__", None)
    for name in names:
        constants = code.co_consts if code is not None else ()
        found = [c for c in constants if isinstance(c, CodeType) and c.co_name == name]
        code = found[0] if len(found) == 1 else None
    return code


def _made_by(function: Any, maker: Any, *names: str) -> dict[str, Any] | None:
    """What a function closes over, if it is the one of these names inside `maker`; else None."""
    code = _code_inside(maker, *names)
    if (
        code is None
        or not isinstance(function, FunctionType)
        or function.__code__ is not code
        or function.__globals__ is not maker.__globals__
        or function.__defaults__ is not None
        or function.__kwdefaults__ is not None
    ):
        return None
    found = {}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # a variable that was never assigned
            found[name] = cell.cell_contents
    return found


_torch_library_impl: Any = getattr(torch.library, "_impl", None)


class StockKernel(NamedTuple):
    """A kernel of `torch.library.custom_op`: what is around the user's function, and that.

    Attributes:
        definition: the operator's handle.
        function: the user's, for this device, as long as nothing in `sources` changes.
        sources: where that was read: (dictionary, key, value), or (set, key, whether it is in it).
        check: `check(args, kwargs, result)` returns a result, or raises, as the kernel would.
    """

    definition: CustomOpDef
    function: Callable[..., Any]
    sources: tuple[tuple[Any, Any, Any], ...]
    check: Callable[[tuple[Any, ...], dict[str, Any], Any], Any]


def stock_kernel(kernel: Any, overload: OpOverload) -> StockKernel | None:
    """What `custom_op` registered as a kernel of this operator; None if it is anything else."""
    around: Any = _made_by(kernel, CustomOpDef.register_kernel, "inner", "backend_impl")
    if around is None or around.keys() != {"device_type", "self"}:
        return None
    definition, device = around["self"], around["device_type"]
    if not isinstance(definition, CustomOpDef) or definition._opoverload is not overload:
        return None
    attributes = vars(definition)
    functions, disabled = attributes.get("_backend_fns"), attributes.get("_disabled_kernel")
    if type(functions) is not dict or type(disabled) is not set:
        return None
    wrapped = functions.get(device)
    untraced = _made_by(wrapped, _disable_dynamo, "inner") or {}
    inside = _made_by(untraced.get("fn"), CustomOpDef.register_kernel, "inner", "wrapped_fn") or {}
    is_its_own = inside.get("self") is definition and inside.get("device_type") == device
    if not is_its_own:
        return None
    is_disabled = device in disabled
    sources: list[tuple[Any, Any, Any]] = [
        (attributes, "_backend_fns", functions),
        (functions, device, wrapped),
        (attributes, "_disabled_kernel", disabled),
        (disabled, device, is_disabled),
    ]
    function = inside["fn"]
    if is_disabled:
        function = attributes["_init_fn"]
        sources.append((attributes, "_init_fn", function))
    check = functools.partial(_stock_check, kernel, definition, device, wrapped)
    return StockKernel(definition, function, tuple(sources), check)


def below_impl(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The user's function, where `torch.library.impl` put one around it that stops Dynamo."""
    untraced = _made_by(kernel, _disable_dynamo, "inner") or {}
    inside = _made_by(untraced.get("fn"), _torch_library_impl, "register_", "func_no_dynamo") or {}
    return cast("Callable[..., Any]", inside.get("func", kernel))


def is_made_by_custom_op(kernel: Any) -> bool:
    """Whether `custom_op` of `torch.library` made a kernel, for whatever operator."""
    return _made_by(kernel, CustomOpDef.register_kernel, "inner", "backend_impl") is not None


def _stock_check(
    kernel: Any,
    definition: CustomOpDef,
    device: str | None,
    wrapped: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    result: Any,
) -> Any:
    """PyTorch's own code for what is checked of a result, with the result in place of a call."""
    returned = functools.update_wrapper(lambda *args, **kwargs: result, wrapped)
    cells = {"device_type": device, "self": _Computed(definition, {device: returned})}
    closure = tuple(CellType(cells[name]) for name in kernel.__code__.co_freevars)
    check = FunctionType(kernel.__code__, kernel.__globals__, "backend_impl", None, closure)
    return check(*args, **kwargs)


class _Computed:
    """A definition to whoever reads it, but with other kernels."""

    def __init__(self, definition: CustomOpDef, functions: Mapping[str | None, Any]) -> None:
        self._definition = definition
        self._backend_fns = functions

    def __getattr__(self, name: str) -> Any:
        return getattr(self._definition, name)


class StockFormula(NamedTuple):
    """What torch.library registers at Autograd, with a formula or without one.

    Attributes:
        function: the `autograd.Function`.
        setup_context: the user's.
        takes_keywords: whether that takes the keyword-only arguments too.
        sources: where that was read.
        note_lists: if the function takes lists of tensors, how they are spread out for it:
            `note_lists(args, count)` returns the inputs, and what `ctx._pt_metadata` says of them
            and of so many results.
    """

    function: Any
    setup_context: Callable[..., Any] | None
    takes_keywords: bool
    sources: tuple[tuple[Any, Any, Any], ...]
    note_lists: Callable[[tuple[Any, ...], int], tuple[list[Any], Any]] | None


def stock_formula(kernel: Any, overload: OpOverload) -> StockFormula | None:
    """What torch.library registered at Autograd for this operator; None if it is anything else."""
    maker = make_autograd_impl
    around = _made_by(kernel, maker, "autograd_impl") or {}
    # The first until 2.13, the second in 2.15. Both know the operator; `autograd_impl` itself does
    # since 2.13.
    names = ("forward_no_grad", "redispatch_no_grad")
    plain = next((_made_by(around[name], maker, name) for name in names if name in around), None)
    if (plain or {}).get("op") is not overload or around.get("op", overload) is not overload:
        return None
    function = around["Generated"]
    spread = {
        name: (_made_by(getattr(function, name), supports_tensorlist, f"new_{name}") or {})
        for name in ("forward", "backward", "apply")
    }
    takes_lists = all(spread.values())
    original = {
        name: spread[name][f"orig_{name}"] if takes_lists else getattr(function, name)
        for name in ("forward", "backward")
    }
    forward, backward = (_made_by(original[name], maker, name) for name in original)
    if forward is None or backward is None:
        return None
    info = forward["info"]
    attributes = vars(info)
    setup_context = attributes.get("_setup_context_fn")
    sources = ((attributes, "_setup_context_fn", setup_context),)
    if forward["op"] is not overload or backward["info"] is not info:
        return None
    note_lists = None
    if takes_lists:
        note_lists = functools.partial(_note_lists, spread["apply"]["TensorListMetadata"])
    return StockFormula(
        function, setup_context, forward["has_kwarg_only_args"], sources, note_lists
    )


def _note_lists(metadata: Any, args: tuple[Any, ...], count: int) -> tuple[list[Any], Any]:
    """What `supports_tensorlist` does before the call, and what it adds afterwards."""
    # The last is what any formula takes besides the arguments; with lists, it takes one more.
    flat, inputs = tree_flatten((*args, None), not_list_of_tensor)
    _, outputs = tree_flatten((None,) * count)
    return flat, metadata(inputs, outputs, count > 1)


def counts_versions_as_stock(kernel: Any, overload: OpOverload) -> bool:
    """Whether a kernel is the one by which `custom_op` counts versions of what is written."""
    # 2.11 makes it elsewhere, and does not tell there for which operator.
    maker = getattr(CustomOpDef, "_register_mutation_version_bump", None)
    around = _made_by(kernel, maker, "adinplaceorview_impl")
    if around is None:  # a view, or not PyTorch's
        return False
    return around.get("op") is overload and around.get("is_view") is False


def defining_libraries() -> dict[str, torch.library.Library]:
    """By the names of operators, the libraries that defined them and are still there.

    PyTorch keeps no list of them. A look at all objects takes some 50 ms.
    """
    import gc

    found = {}
    for candidate in gc.get_objects():
        # By its type: a proxy would have to load what it stands for, to tell its class.
        if issubclass(type(candidate), torch.library.Library):
            found.update(dict.fromkeys(candidate._op_defs, candidate))
    return found


def forget_hook(library: torch.library.Library, hook: RegistrationHook) -> None:
    """Takes back what `on_close` added."""
    handles = library._registration_handles
    handles[:] = [h for h in handles if not (isinstance(h, _Once) and h.runs(hook))]


def all_operators() -> set[str]:
    """The names of all operators that the dispatcher knows.

    TorchScript's registry, of which `is_registered` asks, must not be asked about an operator that
    may be gone: it remembers some, and reads freed memory.
    """
    return set(torch._C._dispatch_get_all_op_names())


def defined_in_python() -> set[str]:
    """Those of them that were defined through a library of Python's."""
    # PyTorch keeps the names as they were written, in one case with a new line.
    return all_operators() & {re.sub(r"\s", "", name) for name in torch.library._defs}


def watch_definitions(
    on_defined: Callable[[torch.library.Library, str], None],
) -> RegistrationHook:
    """Calls `on_defined(library, name)` after each definition by a library; returns the undoing."""

    @functools.wraps(torch.library.Library.define)
    def define(self: Any, schema: str, *args: Any, **kwargs: Any) -> Any:
        result = before(self, schema, *args, **kwargs)
        on_defined(self, f"{self.ns}::{schema.split('(')[0].strip()}")
        return result

    cls: Any = torch.library.Library
    before = cls.define
    cls.define = define

    def stop() -> None:
        if cls.define is define:
            cls.define = before

    return stop


def observing_mode(
    note: Callable[[str, tuple[Any, ...], dict[str, Any]], None],
) -> contextlib.AbstractContextManager[Any]:
    """A mode that tells of each call of an operator in this thread, before it happens."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Observing(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            note(func._name.removesuffix(".default"), args, kwargs or {})
            return func(*args, **(kwargs or {}))

    return cast("contextlib.AbstractContextManager[Any]", cast(Any, Observing)())


# --------------------------------------------------------------------------------------------------
# Libraries


def define(library: torch.library.Library, schema: str, tags: Iterable[Tag]) -> None:
    """Defines an operator whose schema was checked before, without checking it again."""
    assert library.m is not None
    library.m.define(schema, "", tuple(tags))
    qualname = f"{library.ns}::{schema[: schema.index('(')]}"
    library._op_defs.add(qualname)
    torch.library._defs.add(qualname)


def implement(
    library: torch.library.Library,
    name: str,
    key: str,
    kernel: Callable[..., Any],
    *,
    with_keyset: bool = False,
    replaces: bool = False,
) -> None:
    """Registers a Python kernel at one dispatch key, where there may be one that it replaces."""
    assert library.m is not None
    if replaces and has_kernel(f"{library.ns}::{name}", key):
        with warnings.catch_warnings():
            # PyTorch warns once per process that a kernel is replaced; it is what was asked for.
            warnings.filterwarnings("ignore", message="Warning only once", category=UserWarning)
            library.m.impl(name, key, kernel, with_keyset)
    else:
        library.m.impl(name, key, kernel, with_keyset)
    record = f"{library.ns}/{name}/{key}"
    torch.library._impls.add(record)
    library._op_impls.add(record)


def install_view_tracking(library: torch.library.Library, name: str) -> None:
    """Installs PyTorch's kernel that marks the outputs of a view operator as views."""
    assert library.m is not None
    library.m.register_ad_inplace_or_view_fallback(name)


def on_close(library: torch.library.Library, hook: RegistrationHook) -> None:
    """Runs `hook` once, when a library, ours or PyTorch's, is destroyed or collected."""
    library._registration_handles.append(cast(Any, _Once(hook)))


class _Once:
    """A registration handle that may be destroyed twice: by a library, and by its finalizer."""

    __slots__ = ("_hook",)

    def __init__(self, hook: RegistrationHook) -> None:
        self._hook: RegistrationHook | None = hook

    def destroy(self) -> None:
        hook, self._hook = self._hook, None
        if hook is not None:
            hook()

    def runs(self, hook: RegistrationHook) -> bool:
        return self._hook == hook


def forget_definitions(library: torch.library.Library) -> None:
    """Keeps PyTorch from clearing up after a library itself, when it is destroyed and finalized.

    It would touch names that were defined since, and take packets out of `torch.ops` that
    `replacing` keeps there.
    """
    torch.library._defs.difference_update(library._op_defs)
    torch.library._impls.difference_update(library._op_impls)
    library._op_defs.clear()
    library._op_impls.clear()


# --------------------------------------------------------------------------------------------------
# torch.ops


def lookup_overload(namespace: str, name: str, overload: str) -> OpOverload:
    """The OpOverload of an operator; raises AttributeError if nobody defined it."""
    packet = getattr(getattr(torch.ops, namespace), name)
    return cast(OpOverload, getattr(packet, overload or "default"))


def refresh_packet(namespace: str, name: str) -> None:
    """Makes an existing `torch.ops` packet see an overload that was just defined."""
    packet = _existing_packet(namespace, name)
    if packet is not None:
        attributes = vars(packet)
        for overload, held in list(attributes.items()):
            if isinstance(held, OpOverload) and is_retired(held):
                del attributes[overload]
        _refresh(packet)


# Names whose operator is about to be defined anew.
_replaced: set[str] = set()


@contextlib.contextmanager
def replacing(namespace: str, name: str) -> Iterator[None]:
    """Keeps the packet of a name in `torch.ops`, while the body destroys and defines its operator.

    Without it, a thread that looks the name up would make another packet. Each of the two would
    hand out an overload, of which only one is known here and can be told when the operator goes.
    """
    qualname = f"{namespace}::{name}"
    _replaced.add(qualname)
    try:
        yield
    finally:
        _replaced.discard(qualname)
        _clear_packet(namespace, name)


def _clear_packet(namespace: str, name: str) -> None:
    """Takes a packet out of `torch.ops`, unless its name has an operator, or will have one."""
    qualname = f"{namespace}::{name}"
    packet = _existing_packet(namespace, name)
    if packet is None or qualname in _replaced:
        return
    if not overload_names(qualname):
        operators = getattr(torch.ops, namespace)
        delattr(operators, name)
        if name in operators._dir:
            operators._dir.remove(name)
    elif is_retired(packet):
        _refresh(packet)


def retire_overload(namespace: str, name: str, overload: str, reason: Callable[[], str]) -> None:
    """Makes the objects under `torch.ops` raise, before the operator behind them goes away.

    Whoever still holds one (a compiled graph, a variable) would otherwise call freed memory.
    """
    packet = _existing_packet(namespace, name)
    if packet is None:
        return
    # The overload that raises stays where it is: asked for it again, a packet that PyTorch has
    # forgotten would make one that calls, and that nobody could tell when the operator goes.
    held = vars(packet).get(overload or "default")
    if held is not None and not is_retired(held):
        gone = _Gone(hash(held), reason)
        for attribute in ("_op", "_op_dk", "_cpp_dispatch_handle", "_handle"):
            if attribute in vars(held) or attribute == "_handle":
                vars(held)[attribute] = gone
        if vars(held).get("_pyobj_dispatcher") is not None:
            held._pyobj_dispatcher = None
    if not is_retired(packet):
        gone_packet = _PacketOp(hash(packet), namespace, name, reason)
        gone_packet.__module__ = packet._op.__module__
        packet._op = gone_packet


@contextlib.contextmanager
def emptied(names: Iterable[tuple[str, str, str]], reason: Callable[[str], str]) -> Iterator[None]:
    """Lets nobody into operators any more, while the body destroys them.

    Calls that are under way in other threads are not waited for: nothing tells reliably when the
    last of them has left PyTorch's dispatcher.

    Args:
        names: the operators that the body destroys: namespace, name and overload.
        reason: what a call of one of them is told, given its name.

    Raises:
        RuntimeError: this thread is inside a call of one of them, which would go on in freed
            memory. Nothing has changed then.
    """
    names = tuple(names)
    for operator in _called_here() & {f"{namespace}::{name}" for namespace, name, _ in names}:
        raise RuntimeError(f"{operator} cannot be destroyed or replaced from inside a call of it.")
    for namespace, name, overload in names:
        with contextlib.suppress(AttributeError):
            # There must be something that raises, or torch.ops would make what does not.
            lookup_overload(namespace, name, overload)
        qualname = f"{namespace}::{name}" + (f".{overload}" if overload else "")
        retire_overload(namespace, name, overload, functools.partial(reason, qualname))
    yield
    for namespace, name, _ in names:
        _clear_packet(namespace, name)


# Further ways of telling which operators this thread is calling.
calls_without_frames: list[Callable[[], Iterable[str]]] = []


def _called_here() -> set[str]:
    """The operators that this thread is in the middle of calling."""
    found = {name for calls in calls_without_frames for name in calls()}
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename == _OPS_FILE:
            subject = frame.f_locals.get("self")
            if isinstance(subject, OpOverload):
                found.add(str(subject._schema.name))
            elif isinstance(subject, OpOverloadPacket):
                found.add(str(subject._qualified_op_name))
        frame = frame.f_back
    return found


_OPS_FILE = OpOverload.__call__.__code__.co_filename


def is_retired(op: OpOverload | OpOverloadPacket) -> bool:
    """Whether the operator behind an object of `torch.ops` was destroyed, or is about to be."""
    return isinstance(vars(op).get("_op"), _Gone)


def existing_overload(namespace: str, name: str, overload: str) -> Any | None:
    """The OpOverload that `torch.ops` hands out at the moment, if anybody asked for it."""
    packet = _existing_packet(namespace, name)
    held = None if packet is None else vars(packet).get(overload or "default")
    return None if held is None or is_retired(held) else held


def live_overload(namespace: str, name: str, overload: str) -> OpOverload | None:
    """The OpOverload of an operator, made if nobody asked for it before; None if it is gone."""
    try:
        held = lookup_overload(namespace, name, overload)
    except AttributeError:
        return None
    return None if is_retired(held) else held


def _existing_packet(namespace: str, name: str) -> Any | None:
    # vars(), not getattr: looking an operator up would create what we only want to find.
    operators = vars(torch.ops).get(namespace)
    return None if operators is None else vars(operators).get(name)


class _Gone:
    """Stands where the C++ callable of a destroyed operator stood."""

    def __init__(self, original_hash: int, reason: Callable[[], str]) -> None:
        self._hash = original_hash
        self._reason = reason

    def __hash__(self) -> int:
        return self._hash

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from torchop._errors import OperatorGoneError

        raise OperatorGoneError(self._reason())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self


class _PacketOp(_Gone):
    """A packet is a name: it finds the operator that has the name now, if there is one."""

    def __init__(
        self, original_hash: int, namespace: str, name: str, reason: Callable[[], str]
    ) -> None:
        super().__init__(original_hash, reason)
        self._namespace = namespace
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        packet = getattr(getattr(torch.ops, self._namespace), self._name, None)
        if packet is None or packet._op is self:  # destroyed, or just about to be
            return super().__call__(*args, **kwargs)
        return packet(*args, **kwargs)


def replace_function(overload: OpOverload, operator: Any, entry: Any) -> Callable[..., Any]:
    """Makes calls of an overload, and of its packet, come in at an entry.

    Where somebody has put a function of Python, such as one that observes calls, it stays.

    Args:
        overload: the object of `torch.ops`.
        operator: the class of what stands where those objects keep their C++ functions.
        entry: what it leads to.

    Returns:
        What the overload called before.
    """
    function = overload._op
    if is_cpp_function(function):
        overload._op = operator(entry, function)
        _follow_overloads(overload._overloadpacket, operator)
    return function


def is_cpp_function(function: Any) -> bool:
    """Whether it is what PyTorch puts into an object of `torch.ops`."""
    # In 2.15, an overload has an object of a class of its own.
    return isinstance(function, BuiltinFunctionType) or type(function).__module__ == "torch._C"


def take_back_function(overload: OpOverload, operator: Any, entry: Any) -> None:
    """Undoes `replace_function`, where what it put there is still there."""
    held = overload._op
    if isinstance(held, operator) and held.entry is entry:
        overload._op = held.dispatch
    _follow_overloads(overload._overloadpacket, operator)


def _follow_overloads(packet: OpOverloadPacket, operator: Any) -> None:
    """Makes a packet call its overloads as they are called themselves, in PyTorch's order.

    From the first overload on that calls a C++ function, the packet's own decides.
    """
    held: Any = packet._op
    is_ours = isinstance(held, operator)
    function = held.dispatch if is_ours else held
    # With a TorchScript class among the arguments, the packet decides on each call.
    takes_classes = getattr(packet, "_has_torchbind_op_overload", False)
    if takes_classes or not is_cpp_function(function):
        return
    made = None
    for name in reversed(packet.overloads()):
        own = getattr(vars(packet).get(name), "_op", None)
        made = operator(own.entry, function, made) if isinstance(own, operator) else None
    if is_ours:
        torch.jit._builtins._get_builtin_table().pop(id(held), None)
    if made is not None:
        # TorchScript knows the function of a packet by its identity.
        torch.jit._builtins._register_builtin(made, packet._qualified_op_name)
    packet._op = function if made is None else made


# What `__call__` of the classes of torch.ops looks up, where all it does for an operator without
# TorchScript classes is `self._op(*args, **kwargs)`. Checked on 2.13.
_FORWARDING_CALLS: dict[type, tuple[str, ...]] = {
    OpOverload: ("_op",),
    OpOverloadPacket: (
        "_has_torchbind_op_overload",
        "_must_dispatch_in_python",
        "_call_overload_packet_from_python",
        "_op",
    ),
}


def forwarding_classes() -> list[type]:
    """The classes of torch.ops whose objects, when called, just call their `_op`.

    Not those that somebody has given another `__call__`, and none of a PyTorch that does more.
    """
    return [
        cls
        for cls, names in _FORWARDING_CALLS.items()
        if getattr(getattr(vars(cls)["__call__"], "__code__", None), "co_names", None) == names
    ]


def replaced_function(overload: OpOverload) -> Any:
    """What stands where an overload kept its C++ function, or that function."""
    return overload._op


def handle_calls_forward() -> bool:
    """Whether all that calling a handle of torch.library does is to call its overload."""
    code = getattr(vars(CustomOpDef)["__call__"], "__code__", None)
    return getattr(code, "co_names", None) == ("_opoverload",)


@contextlib.contextmanager
def probe_operators() -> Iterator[tuple[str, str]]:
    """Yields the names of two operators with a kernel at CPU; that of the second takes the keys."""

    def kernel() -> None:
        pass

    library = torch.library.Library("_torchop_probe", "FRAGMENT")
    try:
        for name in ("plain", "with_keys"):
            define(library, f"{name}() -> ()", ())  # and nobody who watches definitions sees it
            implement(library, name, "CPU", kernel, with_keyset=name == "with_keys")
        yield "_torchop_probe::plain", "_torchop_probe::with_keys"
    finally:
        library._destroy()


@contextlib.contextmanager
def probe_operator() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yields the name of an operator, and the Python function that is its kernel at CPU."""

    def kernel() -> None:
        pass

    library = torch.library.Library("_torchop_probe", "FRAGMENT")
    try:
        library.define("probe() -> ()")
        library.impl("probe", kernel, "CPU")
        yield "_torchop_probe::probe", kernel
    finally:
        library._destroy()


# --------------------------------------------------------------------------------------------------
# Dynamo

_eval_frame = torch._C._dynamo.eval_frame
_SKIP = _eval_frame._FrameExecStrategy(_eval_frame._FrameAction.SKIP, _eval_frame._FrameAction.SKIP)


def never_traced(function: _Function) -> _Function:
    """Keeps Dynamo from compiling `function`, and whatever runs below it, when called eagerly.

    A kernel that runs below a compiled frame would otherwise be traced as if it were the user's
    program. The mark lives in the code object, so it costs nothing per call, and unlike
    `torch.compiler.disable` it does not import Dynamo.
    """
    _eval_frame.set_code_exec_strategy(function.__code__, _SKIP)
    return function


def registration_site(name: tuple[str, str, str]) -> str:
    """Where an operator was registered, as the dispatcher remembers it."""
    handle = torch._C._dispatch_find_schema_or_throw(f"{name[0]}::{name[1]}", name[2])
    site = re.search(r"registered at (\S+)", handle.debug())
    return f"registered at {site.group(1)}" if site else "registered in C++"


# --------------------------------------------------------------------------------------------------
# opcheck


@functools.cache
def opcheck_error(base: type[Exception]) -> type[Exception]:
    """An exception that is `base`, and PyTorch's own OpCheckError too."""
    from torch.testing._internal.optests import generate_tests

    return type(base.__name__, (base, generate_tests.OpCheckError), {"__module__": "torchop"})


def opcheck_tests() -> Mapping[str, Callable[..., Any]]:
    """PyTorch's checks, by name; imported only when asked for, because they take two seconds."""
    from torch.testing._internal.optests import generate_tests

    return cast("Mapping[str, Callable[..., Any]]", generate_tests.ALL_TEST_UTILS)

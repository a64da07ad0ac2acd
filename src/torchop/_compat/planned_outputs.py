"""Let Inductor plan the memory of results, for operators with an out or in-place form.

A result goes into a planned buffer, or overwrites the first argument if that has no later reader.

Workaround for `torch.Tag.out`, with which Inductor finds an out overload by its schema. On 2.13 it
fails with dynamic shapes (pytorch/pytorch#185503), puts all tensors before the other arguments,
flattens lists, and passes defaults and keyword-only arguments twice. A custom lowering creates the
same Inductor node with the arguments of the call.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

from torchop._compat import import_hooks, inductor_writes, operators, torch_ops

_LOWERING = "torch._inductor.lowering"
_REINPLACE = "torch._inductor.fx_passes.reinplace"
# Functional operator name -> name of another form -> that form, or None while their kernels differ.
_forms: dict[str, dict[str, Callable[[], OpOverload | None]]] = {}


def plan(qualname: str, name: str, form: Callable[[], OpOverload | None]) -> Callable[[], None]:
    """Let Inductor plan the memory of an operator's results, and return a function to undo this.

    Args:
        qualname: the operator that allocates its results.
        name: a form that writes the results into the caller's tensors without reading them, or over
            the first argument without reading an element after writing it.
        form: returns that form while both operators run the same kernels, otherwise None.
    """
    if not _forms:
        for module in (_LOWERING, _REINPLACE):
            import_hooks.when_imported(module, _connect)
    _forms.setdefault(qualname, {})[name] = form
    _add(qualname, name)

    def undo() -> None:
        forms = _forms.get(qualname, {})
        if forms.get(name) is form:
            del forms[name]
        if not forms:
            _forms.pop(qualname, None)

    return undo


def forms_in_graphs(qualname: str) -> list[OpOverload]:
    """Return the operators that new graphs may call in place of this one."""
    config = sys.modules.get("torch._inductor.config")
    divides_at = getattr(config, "custom_should_partition_ops", ())
    # Inductor partitions graphs only at its own nodes, and a user requested it for this operator.
    names = {qualname, qualname.partition(".")[0], f"{qualname}.default"}
    if not names.isdisjoint(divides_at):
        return []
    forms = [form() for form in _forms.get(qualname, {}).values()]
    return [form for form in forms if form is not None]


def _connect() -> None:
    for pair in [(qualname, name) for qualname, forms in _forms.items() for name in forms]:
        # Operators of other libraries may have been deregistered since.
        if all(operators.has_entry(*operators.parts(each)) for each in pair):
            _add(*pair)


def _lowerings() -> dict[OpOverload, Callable[..., Any]] | None:
    """Return the lowerings that take precedence over Inductor's own, if imported and supported."""
    return getattr(sys.modules.get(_LOWERING), "user_lowerings", None)


def _is_inplace(form: OpOverload) -> bool:
    first = form._schema.arguments[0]
    return not first.kwarg_only and first.alias_info is not None


def _add(qualname: str, name: str) -> None:
    lowerings = _lowerings()
    if lowerings is None:
        return
    functional, form = (torch_ops.lookup_overload(*operators.parts(n)) for n in (qualname, name))
    if not _is_inplace(form):
        # A registered lowering, such as autotuning, takes precedence.
        lowerings.setdefault(functional, lambda *args, **kwargs: _lower(functional, args, kwargs))
    elif (module := sys.modules.get(_REINPLACE)) is not None:
        # Inductor's reinplace pass substitutes the in-place form if the argument has no later
        # reader.
        may_overwrite = functools.partial(_may_overwrite, functional, form)
        module.inplaceable_ops[functional] = module.InplaceableOp(form, 0, may_overwrite)


def _may_overwrite(functional: OpOverload, inplace: OpOverload, node: torch.fx.Node) -> bool:
    """Return whether a call may overwrite the first argument, assuming no later reader."""
    config: Any = sys.modules["torch._inductor.config"]
    # Effectful calls have another target, and C++ wrappers cannot call operators without a result.
    if node.target is not functional or config.cpp_wrapper or config.fx_wrapper:
        return False
    if inplace not in forms_in_graphs(functional._name):
        return False
    first, *others = [each.meta.get("val") for each in _inputs(node)]
    if not _look_alike(first, node.meta.get("val")) or not _is_dense(first):
        return False
    # The kernel would overwrite an input if another argument shares this memory.
    storages = {
        _storage(o) if _is_plain(o) else None for o in others if isinstance(o, torch.Tensor)
    }
    if not storages.isdisjoint({_storage(first), None}):
        return False
    if _is_held(node) and not _is_written_back(node):
        return False
    lowerings = _lowerings()
    assert lowerings is not None  # the pass looked the operator up there
    # Inductor's own node claims to return fresh memory, and reuses it for later results.
    if inplace not in lowerings or inductor_writes.is_ours(lowerings[inplace]):
        lowerings[inplace] = lambda *args, **kwargs: _lower_inplace(inplace, args, kwargs)
    return True


def _inputs(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Return all node arguments, including those in lists, with repetitions."""
    found: list[torch.fx.Node] = []
    torch.fx.map_arg((node.args, node.kwargs), found.append)
    return found


def _is_held(node: torch.fx.Node) -> bool:
    """Return whether an in-place call must not write into the first argument.

    The memory outlives the graph, or is viewed as another dtype: Inductor cannot write into a view
    with another dtype.
    """
    kinds = ("placeholder", None), ("get_attr", None), ("call_function", torch.ops.aten.view.dtype)
    held = [n for op, target in kinds for n in node.graph.find_nodes(op=op, target=target)]
    return any(_share_memory(node.args[0], other) for other in held)


def _is_written_back(node: torch.fx.Node) -> bool:
    """Return whether the graph copies the result back, and returns no alias of it.

    Inductor accepts any copy into the first argument, and would drop the result as a graph output.
    """
    first = node.args[0]
    copies = [u for u in node.users if u.target is torch.ops.aten.copy_.default]
    readers = [user for user in node.users if user not in copies]
    return [copy.args for copy in copies] == [(first, node)] and not any(
        reader.op == "output" or _share_memory(node, reader) for reader in readers
    )


def _share_memory(node: Any, other: torch.fx.Node) -> bool:
    value = other.meta.get("val")
    if isinstance(value, torch.Tensor):
        return not _is_plain(value) or _storage(value) == _storage(node.meta["val"])
    return not isinstance(value, (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool))


def _storage(tensor: Any) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


def _look_alike(first: Any, result: Any) -> bool:
    # Compares symbolic sizes without guards.
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # slow import

    if not _is_plain(first) or not _is_plain(result):
        return False
    kinds = [(each.dtype, each.device, each.dim()) for each in (first, result)]
    sizes = [(*each.shape, *each.stride()) for each in (first, result)]
    return kinds[0] == kinds[1] and all(guard_or_false(a == b) for a, b in zip(*sizes, strict=True))


def _is_plain(value: Any) -> bool:
    # Complex tensors are excluded because their conjugate or negative bit may be set.
    is_strided = isinstance(value, torch.Tensor) and value.layout is torch.strided
    return is_strided and not value.is_complex() and not value.is_neg()


def _lower_inplace(inplace: OpOverload, args: Any, kwargs: Any) -> Any:
    """Create the node that overwrites the first argument; return the new value."""
    import torch._inductor.ir  # imports Inductor
    from torch._inductor.virtualized import V  # imports Inductor

    ir: Any = torch._inductor.ir
    with V.graph.fake_mode:
        processed = ir.FallbackKernel.process_kernel(inplace, *args, **kwargs)
    _, tensors, constants, unflatten, _ = _fields(processed)
    _node_classes()[2](unflatten, tensors, constants, inplace)
    # This is a copy if the argument was not realized in memory.
    return tensors[0] if isinstance(tensors[0], ir.TensorBox) else ir.TensorBox(tensors[0])


def _fields(processed: Any) -> Any:
    # Since 2.15, `process_kernel` returns an object.
    return processed if isinstance(processed, tuple) else vars(processed).values()


def _lower(functional: OpOverload, args: Any, kwargs: Any) -> Any:
    """Create the node that writes into planned buffers; None leaves the call to Inductor."""
    import torch._inductor.ir  # imports Inductor
    from torch._inductor.virtualized import V  # imports Inductor

    ir: Any = torch._inductor.ir
    forms = [form for form in forms_in_graphs(functional._name) if not _is_inplace(form)]
    if not forms or V.graph.cpp_wrapper:  # it cannot call operators with `out=`
        return None
    (out_form,) = forms
    names = [a.name for a in out_form._schema.arguments if a.alias_info is not None]
    with V.graph.fake_mode:
        processed = ir.FallbackKernel.process_kernel(functional, *args, **kwargs)
        example, tensors, constants, unflatten, unbacked = _fields(processed)
        results = (example,) if isinstance(example, torch.Tensor) else example
        # Data-dependent sizes cannot be allocated before the kernel runs.
        if unbacked or not all(map(_is_plannable, results)):
            return None
    layouts = [
        ir.FixedLayout(
            result.device,
            result.dtype,
            ir.convert_shape_to_inductor(result.shape),
            ir.convert_shape_to_inductor(result.stride()),
        )
        for result in results
    ]
    single, several, _ = _node_classes()
    if names == ["out"]:
        return ir.TensorBox.create(single(unflatten, layouts[0], tensors, constants, out_form))
    if several is None:
        return None
    node = several(
        ir.MultiOutputLayout(device=results[0].device),
        functional,
        tensors,
        constants,
        unflatten,
        out_op=out_form,
        out_arg_names=names,
    )
    node.outputs = node.out_variant_output_nodes = [
        ir.AllocatingMultiOutput(layout, node, [(tuple, place)])
        for place, layout in enumerate(layouts)
    ]
    boxes = tuple(map(ir.TensorBox.create, node.outputs))
    return boxes if isinstance(example, tuple) else boxes[0]


def _is_plannable(result: torch.Tensor) -> bool:
    return result.layout is torch.strided and _is_dense(result)


def _is_dense(result: Any) -> bool:
    # Does not guard on symbolic sizes.
    from torch._prims_common import is_non_overlapping_and_dense_or_false  # slow import

    return bool(is_non_overlapping_and_dense_or_false(result))


@functools.cache
def _node_classes() -> tuple[Any, Any, Any]:
    """Return the Inductor nodes for one output, several outputs (or None), and in-place calls."""
    from torch._inductor import ir  # imports Inductor
    from torch._inductor.virtualized import V  # imports Inductor

    class Reference:
        def __init__(self, tensor: Any) -> None:
            self.name = tensor.codegen_reference()

        def __repr__(self) -> str:
            return str(self.name)

    def written_args(node: Any) -> list[str]:
        args, kwargs = node._unflatten([*map(Reference, node.inputs)], node.constant_args)
        write: Any = V.graph.wrapper_code.val_to_arg_str
        return [*map(write, args), *(f"{name}={write(kwargs[name])}" for name in kwargs)]

    class Single(ir.ExternKernelOut):
        def __init__(
            self, unflatten: Any, layout: Any, tensors: Any, constants: Any, op: OpOverload
        ) -> None:
            self._unflatten = unflatten
            name = f"torch.ops.{op.namespace}.{op._opname}.{op._overloadname}"
            super().__init__(
                layout, list(tensors), list(constants), python_kernel_name=name, op_overload=op
            )

        def codegen_args(self) -> list[str]:
            return written_args(self)

    class Overwriting(ir.MutatingFirstArgExternKernel):
        def __init__(self, unflatten: Any, tensors: Any, constants: Any, op: OpOverload) -> None:
            self._unflatten = unflatten
            device = tensors[0].get_device()
            super().__init__(
                None,
                ir.NoneLayout(device=device),
                self.unwrap_storage(list(tensors)),
                tuple(constants),
                python_kernel_name=f"torch.ops.{op}",
                op_overload=op,
            )
            V.graph.mark_buffer_mutated(tensors[0].get_name())
            self.name = V.graph.register_buffer(self)
            V.graph.register_operation(self)

        def codegen(self, wrapper: Any) -> None:
            self.codegen_comment(wrapper)
            wrapper.writeline(f"{self.python_kernel_name}({', '.join(written_args(self))})")

    if not hasattr(ir, "ExternKernelMultiOut"):
        return Single, None, Overwriting

    class Several(ir.ExternKernelMultiOut):
        def codegen(self, wrapper: Any) -> None:
            # Inductor does not allocate unread buffers, but the kernel writes them.
            for output in self.outputs:
                V.graph.removed_buffers.discard(output.get_name())
            super().codegen(wrapper)

    return Single, Several, Overwriting

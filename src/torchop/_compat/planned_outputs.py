"""Let Inductor allocate an operator's results, if the operator has an out or in-place form.

An operator's functional form allocates its results. The operator may also have an out form, which
writes the results into given buffers, or an in-place form, which overwrites the first argument. In
compiled programs, Inductor can then call the out form with buffers from its own memory planning, or
the in-place form if nothing reads the first argument later.

PyTorch has a similar mechanism, `torch.Tag.out`, but in 2.13 it does not work for all operators: it
fails with dynamic shapes (pytorch/pytorch#185503), moves all tensors before the other arguments,
flattens lists, and passes defaults and keyword-only arguments twice. So this module registers
lowerings that create the same Inductor nodes, but with correct arguments.
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
# Maps each functional operator to its other forms (in-place and out=). The key of a form is its
# name, and the value is the function `form` that was passed to `plan`.
_forms: dict[str, dict[str, Callable[[], OpOverload | None]]] = {}


def plan(qualname: str, name: str, form: Callable[[], OpOverload | None]) -> Callable[[], None]:
    """Let Inductor call an operator's in-place or out= form, and return a function to undo this.

    `qualname` is the functional operator, and `name` is its out or in-place form. An out form must
    not read the buffers that it writes to, and an in-place form must not read an element of its
    first argument after writing to it. `form()` returns the overload of this form, or None while
    its kernels differ from those of the functional operator.
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
    """Return the in-place and out= forms that Inductor may call in place of `qualname`."""
    config = sys.modules.get("torch._inductor.config")
    divides_at = getattr(config, "custom_should_partition_ops", ())
    # If the user wants Inductor to partition the graph at this operator, leave Inductor's own node
    # in place, because Inductor does not partition at the nodes of this module.
    names = {qualname, qualname.partition(".")[0], f"{qualname}.default"}
    if not names.isdisjoint(divides_at):
        return []
    forms = [form() for form in _forms.get(qualname, {}).values()]
    return [form for form in forms if form is not None]


def _connect() -> None:
    for pair in [(qualname, name) for qualname, forms in _forms.items() for name in forms]:
        # Skip operators that were deregistered before Inductor was imported.
        if all(operators.has_entry(*operators.parts(each)) for each in pair):
            _add(*pair)


def _lowerings() -> dict[OpOverload, Callable[..., Any]] | None:
    """Return Inductor's table of user lowerings.

    Returns None if Inductor is not imported, or if this release has no such table (2.11).
    """
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
        # An existing lowering takes precedence, for example one that the user registered for
        # autotuning.
        lowerings.setdefault(functional, lambda *args, **kwargs: _lower(functional, args, kwargs))
    elif (module := sys.modules.get(_REINPLACE)) is not None:
        # Inductor's reinplace pass replaces the call with a call to the in-place form if nothing
        # reads the first argument later.
        may_overwrite = functools.partial(_may_overwrite, functional, form)
        module.inplaceable_ops[functional] = module.InplaceableOp(form, 0, may_overwrite)


def _may_overwrite(functional: OpOverload, inplace: OpOverload, node: torch.fx.Node) -> bool:
    """Return whether a call may overwrite its first argument, provided no later node reads it."""
    config: Any = sys.modules["torch._inductor.config"]
    # If the operator has a declared side effect, the node's target is a higher-order operator
    # instead of `functional`. With a C++ or FX wrapper, Inductor does not support the node that
    # this module creates. In these cases, do not overwrite the argument.
    if node.target is not functional or config.cpp_wrapper or config.fx_wrapper:
        return False
    if inplace not in forms_in_graphs(functional._name):
        return False
    first, *others = [each.meta.get("val") for each in _inputs(node)]
    if not _have_same_metadata(first, node.meta.get("val")) or not _is_dense(first):
        return False
    # If another argument shares memory with the first, the kernel might overwrite an element that
    # it has yet to read through the other argument.
    storages = {
        _storage(o) if _is_plain(o) else None for o in others if isinstance(o, torch.Tensor)
    }
    if not storages.isdisjoint({_storage(first), None}):
        return False
    if _is_held(node) and not _is_written_back(node):
        return False
    lowerings = _lowerings()
    assert lowerings is not None  # checked by `_add`
    # Replace Inductor's own lowering, which creates a node that declares the result as new memory,
    # so Inductor would reuse that memory for other values.
    if inplace not in lowerings or inductor_writes.is_ours(lowerings[inplace]):
        lowerings[inplace] = lambda *args, **kwargs: _lower_inplace(inplace, args, kwargs)
    return True


def _inputs(node: torch.fx.Node) -> list[torch.fx.Node]:
    found: list[torch.fx.Node] = []
    torch.fx.map_arg((node.args, node.kwargs), found.append)
    return found


def _is_held(node: torch.fx.Node) -> bool:
    """Return whether an in-place call must not write into the first argument of `node`.

    This is the case if the memory belongs to a graph input or constant, or is viewed as another
    dtype, since Inductor cannot write into such a view.
    """
    kinds = ("placeholder", None), ("get_attr", None), ("call_function", torch.ops.aten.view.dtype)
    held = [n for op, target in kinds for n in node.graph.find_nodes(op=op, target=target)]
    return any(_share_memory(node.args[0], other) for other in held)


def _is_written_back(node: torch.fx.Node) -> bool:
    """Return whether the graph copies the result of a call into the call's first argument.

    Returns False if the graph also returns the result or creates a view of it. Inductor does not
    check this: it accepts any copy into the first argument, so it would make the call in place, and
    the returned result would be lost.
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


def _have_same_metadata(first: Any, result: Any) -> bool:
    # `guard_or_false` compares symbolic sizes without adding guards.
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # slow import

    if not _is_plain(first) or not _is_plain(result):
        return False
    kinds = [(each.dtype, each.device, each.dim()) for each in (first, result)]
    sizes = [(*each.shape, *each.stride()) for each in (first, result)]
    return kinds[0] == kinds[1] and all(guard_or_false(a == b) for a, b in zip(*sizes, strict=True))


def _is_plain(value: Any) -> bool:
    # Exclude complex tensors, which may have a lazy conjugation or negation.
    is_strided = isinstance(value, torch.Tensor) and value.layout is torch.strided
    return is_strided and not value.is_complex() and not value.is_neg()


def _lower_inplace(inplace: OpOverload, args: Any, kwargs: Any) -> Any:
    """Create the Inductor node that overwrites the first argument, and return its result."""
    import torch._inductor.ir  # imports Inductor
    from torch._inductor.virtualized import V  # imports Inductor

    ir: Any = torch._inductor.ir
    with V.graph.fake_mode:
        processed = ir.FallbackKernel.process_kernel(inplace, *args, **kwargs)
    _, tensors, constants, unflatten, _ = _fields(processed)
    _node_classes()[2](unflatten, tensors, constants, inplace)
    # If the first argument was not in a buffer yet, `process_kernel` has copied it into one. Either
    # way, the call overwrites the buffer `tensors[0]`.
    return tensors[0] if isinstance(tensors[0], ir.TensorBox) else ir.TensorBox(tensors[0])


def _fields(processed: Any) -> Any:
    # `process_kernel` returns a tuple before 2.15, and an object since then.
    return processed if isinstance(processed, tuple) else vars(processed).values()


def _lower(functional: OpOverload, args: Any, kwargs: Any) -> Any:
    """Create the Inductor node that writes the results into planned buffers.

    Returns None if this is not possible for the call, so that Inductor falls back to the default
    lowering.
    """
    import torch._inductor.ir  # imports Inductor
    from torch._inductor.virtualized import V  # imports Inductor

    ir: Any = torch._inductor.ir
    forms = [form for form in forms_in_graphs(functional._name) if not _is_inplace(form)]
    if not forms or V.graph.cpp_wrapper:  # the C++ wrapper cannot call operators with `out=`
        return None
    (out_form,) = forms
    names = [a.name for a in out_form._schema.arguments if a.alias_info is not None]
    with V.graph.fake_mode:
        processed = ir.FallbackKernel.process_kernel(functional, *args, **kwargs)
        example, tensors, constants, unflatten, unbacked = _fields(processed)
        results = (example,) if isinstance(example, torch.Tensor) else example
        # If a result has data-dependent sizes, use the default lowering, because the buffer cannot
        # be allocated before the call.
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
    # `is_non_overlapping_and_dense` would add guards on symbolic sizes.
    from torch._prims_common import is_non_overlapping_and_dense_or_false  # slow import

    return bool(is_non_overlapping_and_dense_or_false(result))


@functools.cache
def _node_classes() -> tuple[Any, Any, Any]:
    """Return the classes of Inductor nodes for one output, several outputs, and in-place calls.

    The second class is None if this release of PyTorch has no `ExternKernelMultiOut`.
    """
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
            # Inductor removes output buffers that nothing reads. But the kernel writes to all of
            # them, so restore the removed buffers.
            for output in self.outputs:
                V.graph.removed_buffers.discard(output.get_name())
            super().codegen(wrapper)

    return Single, Several, Overwriting

"""Buffers that Inductor plans for the results of operators that can write into them.

PyTorch has `torch.Tag.out` for this, with which Inductor looks for an overload by its schema. In
2.13 it fails with dynamic shapes, puts all tensors before all other arguments, takes lists apart,
and passes defaults and keyword-only arguments twice. So a lowering of our own makes the same node
of Inductor, whose arguments stand as in the call.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

from torchop._compat import import_hooks, operators, torch_ops

_MODULE = "torch._inductor.lowering"
# By the name of the functional operator: the operator to call in place of it and the names of its
# outputs, or None as long as the two do not run the same kernels.
OutForm = Callable[[], "tuple[OpOverload, tuple[str, ...]] | None"]
_forms: dict[str, OutForm] = {}
# What Inductor asks before its own lowerings, once it is imported. None in a release without it.
_lowerings: dict[OpOverload, Callable[..., Any]] | None = None


def plan(qualname: str, out_form: OutForm) -> Callable[[], None]:
    """Lets Inductor allocate the results of an operator, and reuse the memory of dead ones.

    Args:
        qualname: the operator that allocates its results.
        out_form: the operator that writes them into tensors of the caller, which it never reads.

    Returns:
        What undoes it.
    """
    if not _forms:
        import_hooks.when_imported(_MODULE, _connect)
    _forms[qualname] = out_form
    if _lowerings is not None:
        _add(qualname)

    def take_back() -> None:
        if _forms.get(qualname) is out_form:
            del _forms[qualname]

    return take_back


def is_planned(qualname: str) -> bool:
    """Whether a graph that is compiled now would call another operator, with planned outputs."""
    out_form = _forms.get(qualname)
    return out_form is not None and out_form() is not None


def _connect() -> None:
    global _lowerings
    _lowerings = getattr(sys.modules[_MODULE], "user_lowerings", None)
    if _lowerings is not None:
        for qualname in _forms:
            _add(qualname)


def _add(qualname: str) -> None:
    assert _lowerings is not None
    functional = torch_ops.lookup_overload(*operators.parts(qualname))
    # A lowering that somebody registered for the operator, such as autotuning, comes first.
    _lowerings.setdefault(functional, lambda *args, **kwargs: _lower(functional, args, kwargs))


def _lower(functional: OpOverload, args: Any, kwargs: Any) -> Any:
    """Makes the node that writes into planned buffers; None leaves the call to Inductor."""
    import torch._inductor.ir  # imports Inductor
    from torch._inductor.virtualized import V  # imports Inductor

    ir: Any = torch._inductor.ir
    out_form_of = _forms.get(functional._name)
    found = None if out_form_of is None else out_form_of()
    if found is None or V.graph.cpp_wrapper:  # which has no call of an operator with `out=`
        return None
    out_form, names = found
    with V.graph.fake_mode:
        processed = ir.FallbackKernel.process_kernel(functional, *args, **kwargs)
        # Since 2.15, they are the fields of an object.
        fields = processed if isinstance(processed, tuple) else vars(processed).values()
        example, tensors, constants, unflatten, unbacked = fields
        results = (example,) if isinstance(example, torch.Tensor) else example
        # Sizes that only the kernel knows cannot be allocated before it runs.
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
    single, several = _node_classes()
    if names == ("out",):
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
        out_arg_names=list(names),
    )
    node.outputs = node.out_variant_output_nodes = [
        ir.AllocatingMultiOutput(layout, node, [(tuple, place)])
        for place, layout in enumerate(layouts)
    ]
    boxes = tuple(map(ir.TensorBox.create, node.outputs))
    return boxes if isinstance(example, tuple) else boxes[0]


def _is_plannable(result: torch.Tensor) -> bool:
    return result.layout is torch.strided and _is_dense(result)


def _is_dense(result: torch.Tensor) -> bool:
    # Without a guard on the sizes, if they are symbols.
    from torch._prims_common import is_non_overlapping_and_dense_or_false  # costs an import

    return bool(is_non_overlapping_and_dense_or_false(result))


@functools.cache
def _node_classes() -> tuple[Any, Any]:
    """The node of a call with one output, and that with several, if this release has one."""
    from torch._inductor import ir  # imports Inductor
    from torch._inductor.virtualized import V  # imports Inductor

    class Reference:
        def __init__(self, tensor: Any) -> None:
            self.name = tensor.codegen_reference()

        def __repr__(self) -> str:
            return str(self.name)

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
            args, kwargs = self._unflatten([*map(Reference, self.inputs)], self.constant_args)
            write: Any = V.graph.wrapper_code.val_to_arg_str
            return [*map(write, args), *(f"{name}={write(kwargs[name])}" for name in kwargs)]

    if not hasattr(ir, "ExternKernelMultiOut"):
        return Single, None

    class Several(ir.ExternKernelMultiOut):
        def codegen(self, wrapper: Any) -> None:
            # Inductor allocates no buffer that nobody reads, but the kernel writes it.
            for output in self.outputs:
                V.graph.removed_buffers.discard(output.get_name())
            super().codegen(wrapper)

    return Single, Several

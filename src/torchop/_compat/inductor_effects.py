"""Make Inductor run calls with a declared side effect in the order of the trace.

Workarounds for three bugs in the lowering of `with_effects` (torch/_inductor/lowering.py), of which
only the third is left in PyTorch 2.15:

- The lowering makes each call depend on the previous one. But it stores this dependency under the
  name of the call's buffer, whereas `Scheduler.compute_dependencies`
  (torch/_inductor/scheduler.py) looks it up under the name of the operation. So the dependency is
  lost, and passes such as `reorder_for_peak_memory` may reorder the calls.
- An operator with an effect may store its arguments, for example in a log, but Inductor reuses
  the memory of these arguments for later results.
- `Scheduler._codegen` does not write pending kernels before a call without tensors, because the
  call has no device. It then deletes buffers that the pending kernels read.
"""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from torchop._compat import import_hooks

_LOWERING = "torch._inductor.lowering"


@functools.cache
def keep_order() -> None:
    """Install the workaround once Inductor is imported."""
    import_hooks.when_imported(_LOWERING, _install)


def _install() -> None:
    module: Any = sys.modules[_LOWERING]
    target = torch.ops.higher_order.with_effects
    lower = module.lowerings[target]
    if not _is_ordered(module.with_effects):
        lower = functools.partial(_lower_in_order, lower)
    module.lowerings[target] = functools.partial(_lower_without_tensors, lower)


def _is_ordered(lowering: Any) -> bool:
    return "get_operation_name" in inspect.unwrap(lowering).__code__.co_names


def _lower_in_order(lower: Any, token: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    import torch._inductor.ir  # imports Inductor
    from torch._inductor.virtualized import V  # imports Inductor

    graph: Any = V.graph
    for argument in tree_leaves((args, kwargs)):
        if isinstance(argument, torch._inductor.ir.TensorBox):
            argument.realize()
            graph.never_reuse_buffers.add(argument.get_name())
    previous, count = dict(graph.effectful_ops), len(graph.operations)
    result = lower(token, op, *args, **kwargs)
    for effect, call in previous.items():
        if graph.effectful_ops[effect] is not call:
            for operation in graph.operations[count:]:
                # Remove PyTorch's own dependency, because it would also prevent Inductor from
                # freeing the buffer.
                graph.additional_star_deps.pop(operation.get_name(), None)
                name = operation.get_operation_name()
                graph.additional_buffer_deps[name].add(call.get_name())
    return result


def _lower_without_tensors(lower: Any, token: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    from torch._inductor.virtualized import V  # imports Inductor

    operations: list[Any] = V.graph.operations
    count = len(operations)
    result = lower(token, op, *args, **kwargs)
    for operation in operations[count:]:
        if operation.get_device() is None:
            operation.codegen = functools.partial(_write_after_pending, operation.codegen)
    return result


def _write_after_pending(write: Any, wrapper: Any) -> None:
    from torch._inductor.virtualized import V  # imports Inductor

    V.graph.scheduler.flush()
    write(wrapper)

"""Include operators' rules in the keys of PyTorch's persistent caches of compiled graphs."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable
from types import CodeType
from typing import Any

from torch._guards import TracingContext
from torch.fx import GraphModule

from torchop._compat import import_hooks, operators

# Maps the names of operators (None means all) to a cache key and the code objects it covers.
Identify = Callable[[Iterable[str] | None], tuple[str, list[CodeType]]]

# The device type for which our custom pass is registered. Inductor includes the `uuid` of every
# registered pass in the cache key. But no tensor has this device type, so the pass never runs, and
# does not replace a user's pass.
_DEVICE = "torchop"


def identify_operators(identify: Identify) -> None:
    """Include `identify(operator_names)` in each graph's cache key, for the operators in the graph.

    Workaround for pytorch/pytorch#144344 and pytorch/pytorch#160472: PyTorch's keys ignore formulas
    and fake kernels. The caches of AOTAutograd and Inductor share this part of the key. On releases
    without `custom_backend_passes`, this function does nothing, and `uncovered_caches` reports the
    caches.
    """

    def connect() -> None:
        try:
            from torch._inductor.codegen.common import custom_backend_passes  # imports Inductor
            from torch._inductor.custom_graph_pass import CustomGraphModulePass  # imports Inductor
        except ImportError:
            return

        class Identity(CustomGraphModulePass):
            def __call__(self, gm: GraphModule) -> None:
                """Leave the graph unchanged."""

            def uuid(self) -> Any:
                # `uuid` has no argument for the graph, so read it from the caller's frame: a method
                # of `FxGraphHashDetails` (torch/_inductor/codecache.py).
                maker = sys._getframe(1).f_locals.get("self")
                graph = getattr(maker, "gm", None)
                names: list[str] | None = None
                if isinstance(graph, GraphModule):
                    names = [op.name() for op in operators.in_graph(graph)]
                identity, sources = identify(names)
                _note_sources(sources)
                return _DEVICE, identity

        custom_backend_passes[_DEVICE] = Identity()

    import_hooks.when_imported("torch._inductor.codegen.common", connect)


def uncovered_caches() -> dict[str, str]:
    """Return the caches whose keys ignore rules on this PyTorch release, with a remedy for each."""
    common = importlib.import_module("torch._inductor.codegen.common")  # imports Inductor
    uncovered = {}
    if _DEVICE not in getattr(common, "custom_backend_passes", ()):
        uncovered["graphs"] = "set torch.compiler.config.cache_key_tag = torchop.cache_key_tag()"
    if not hasattr(TracingContext(None), "traced_code"):
        uncovered["programs that Dynamo precompiled"] = "precompile them again after a change"
    return uncovered


def _note_sources(sources: list[CodeType]) -> None:
    """Add `sources` to the code on which Dynamo's current trace depends.

    PyTorch loads a precompiled program only if this code is unchanged.
    """
    context = TracingContext.try_get()
    traced: list[CodeType] | None = getattr(context, "traced_code", None)
    if traced is not None:
        traced += [code for code in sources if code not in traced]

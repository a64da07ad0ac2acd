"""The keys of compiled graphs in PyTorch's caches, which outlive a process."""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from types import CodeType
from typing import Any

from torch._guards import TracingContext
from torch._ops import OpOverload, OpOverloadPacket
from torch.fx import GraphModule

from torchop._compat import import_hooks

# Makes an identity of the operators of a graph, given their names, or of all operators; and the
# code that this identity is of.
Identify = Callable[[Iterable[str] | None], tuple[str, list[CodeType]]]

# Inductor keeps passes by the type of device, and asks each for what identifies it. No graph has
# tensors on this one, so the pass never runs, and it takes no place that a user could want.
_DEVICE = "torchop"


def identify_operators(identify: Identify) -> None:
    """Makes the key of every graph depend on what `identify` says of the operators in it.

    The caches of AOT Autograd and of Inductor make their keys of the same parts. In a release of
    PyTorch that has no such passes, nothing is lost but that.
    """

    def connect() -> None:
        try:
            from torch._inductor.codegen.common import custom_backend_passes  # imports Inductor
            from torch._inductor.custom_graph_pass import CustomGraphModulePass  # likewise
        except ImportError:
            return

        class Identity(CustomGraphModulePass):
            def __call__(self, gm: GraphModule) -> None:
                """Changes nothing."""

            def uuid(self) -> Any:
                # Inductor passes no graph, but it asks while it makes the key of one.
                maker = sys._getframe(1).f_locals.get("self")
                graph = getattr(maker, "gm", None)
                names = operators_of(graph) if isinstance(graph, GraphModule) else None
                identity, sources = identify(names)
                _note_sources(sources)
                return _DEVICE, identity

        custom_backend_passes[_DEVICE] = Identity()

    import_hooks.when_imported("torch._inductor.codegen.common", connect)


def blind_caches() -> dict[str, str]:
    """Caches that do not notice a changed rule with this PyTorch, and what to do about it."""
    common = importlib.import_module("torch._inductor.codegen.common")  # imports Inductor
    blind = {}
    if _DEVICE not in getattr(common, "custom_backend_passes", ()):
        blind["graphs"] = "set torch.compiler.config.cache_key_tag = torchop.cache_key_tag()"
    if not hasattr(TracingContext(None), "traced_code"):
        blind["programs that Dynamo precompiled"] = "precompile them again after a change"
    return blind


def operators_of(graph: GraphModule) -> set[str]:
    """The names of the operators that a graph calls, or hands to what calls them."""
    return set(
        itertools.chain.from_iterable(
            _names_of(value)
            for module in graph.modules()
            if isinstance(module, GraphModule)
            for node in module.graph.nodes
            for value in (node.target, *node.args, *node.kwargs.values())
        )
    )


def _names_of(value: object) -> Iterator[str]:
    if isinstance(value, OpOverload):
        yield value._name
    elif isinstance(value, OpOverloadPacket):
        yield from (getattr(value, name)._name for name in value.overloads())


def _note_sources(sources: list[CodeType]) -> None:
    """Tells Dynamo that what it traces depends on this code too, as on that of functions it traced.

    A precompiled program is loaded only if the code is still the same.
    """
    context = TracingContext.try_get()
    traced: list[CodeType] | None = getattr(context, "traced_code", None)
    if traced is not None:
        traced += [code for code in sources if code not in traced]

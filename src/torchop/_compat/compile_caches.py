"""Make the keys of PyTorch's compile caches depend on operators' fake kernels and other rules."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable
from types import CodeType
from typing import Any

from torch._guards import TracingContext
from torch.fx import GraphModule

from torchop._compat import graphs, import_hooks

# A function that takes operator names, or None for all operators. It returns a cache key, and the
# code objects that the key depends on.
Identify = Callable[[Iterable[str] | None], tuple[str, list[CodeType]]]

# Inductor includes the `uuid` of every custom pass in its cache keys, so torchop registers a pass
# whose `uuid` changes when a fake kernel or another rule of an operator is edited. The pass is
# registered for a made-up device type. Since no tensor has this type, the pass never runs, and it
# cannot replace a pass that the user has registered.
_DEVICE = "torchop"


def identify_operators(identify: Identify) -> None:
    """Make the cache key of each compiled graph depend on the rules of the operators in the graph.

    Workaround for pytorch/pytorch#144344 and pytorch/pytorch#160472: PyTorch's cache keys ignore
    the code of rules such as backward formulas and fake kernels, so after a rule has been edited,
    the cache still returns the old graph. Until this is fixed, add `identify(names)` to the key
    that the caches of AOTAutograd and Inductor share, where `names` are the operators in the graph.
    On releases without `custom_backend_passes`, this is a no-op, and `uncovered_caches` lists the
    caches that may return old graphs.
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
                # PyTorch does not pass the graph to `uuid`, so read it from the calling frame,
                # which is a method of `FxGraphHashDetails` (torch/_inductor/codecache.py).
                maker = sys._getframe(1).f_locals.get("self")
                graph = getattr(maker, "gm", None)
                names: list[str] | None = None
                if isinstance(graph, GraphModule):
                    names = [op.name() for op in graphs.operators_in(graph)]
                identity, sources = identify(names)
                _note_sources(sources)
                return _DEVICE, identity, _float_values() if names else []

        custom_backend_passes[_DEVICE] = Identity()

    import_hooks.when_imported("torch._inductor.codegen.common", connect)


def _float_values() -> list[str]:
    """Return the values of the Python floats that are symbols in the trace of this thread.

    Workaround for a bug in AOTAutograd's cache. When a float is passed to a custom operator, its
    value is baked into the compiled graph, and Dynamo guards on the value. But the cache key is
    computed from Dynamo's graph, which contains only a symbol (`autograd_cache_key` in
    torch/_functorch/_aot_autograd/autograd_cache.py). So for another value, Dynamo recompiles the
    function, but the cache returns the graph for the previous value.

    `tensorify_python_scalars` (torch/fx/passes/_tensorify_python_scalars.py) avoids the bug by
    making Dynamo trace a constant, except if the program also multiplies a tensor by the float.
    """
    from torch.utils._sympy.symbol import SymT, symbol_is_type  # imports sympy

    context = TracingContext.try_get()
    shapes = getattr(context and context.fake_mode, "shape_env", None)
    if shapes is None:
        return []
    name = "backed_var_to_val" if hasattr(shapes, "backed_var_to_val") else "var_to_val"  # 2.11
    values = getattr(shapes, name).items()
    return [f"{symbol}={value}" for symbol, value in values if symbol_is_type(symbol, SymT.FLOAT)]


def uncovered_caches() -> dict[str, str]:
    """Return a remedy for each PyTorch cache that returns old graphs after a rule was edited."""
    common = importlib.import_module("torch._inductor.codegen.common")  # imports Inductor
    uncovered = {}
    if _DEVICE not in getattr(common, "custom_backend_passes", ()):
        uncovered["graphs"] = "set torch.compiler.config.cache_key_tag = torchop.cache_key_tag()"
    if not hasattr(TracingContext(None), "traced_code"):
        uncovered["programs that Dynamo precompiled"] = "precompile them again after a change"
    return uncovered


def _note_sources(sources: list[CodeType]) -> None:
    """Record that the program that Dynamo is tracing depends on these code objects.

    PyTorch loads a precompiled program only if all code that it depends on is unchanged.
    """
    context = TracingContext.try_get()
    traced: list[CodeType] | None = getattr(context, "traced_code", None)
    if traced is not None:
        traced += [code for code in sources if code not in traced]

"""Generated examples: each is about one thing, so that the rest of it can be right."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from tests.integration.differential.calls import calls
from tests.integration.differential.generation import operators
from tests.integration.differential.observe import Example
from tests.integration.differential.scripts import scripts
from tests.integration.differential.situations import situations

# Every entry is one share of the examples. A call in which nothing is unusual goes native.
FOCUSES = (
    *["plain"] * 20,
    *["gradient"] * 9,
    *["kernel"] * 5,
    *["result"] * 5,
    *["mutation"] * 4,
    *["argument type"] * 3,
    *("binding", "binding", "subclass", "subclass", *["keys"] * 5, "no tensors"),
    *("operator", "operator", "override", "override", "override", "override", "override"),
    *("mode", "mode", "function mode", "function mode", *["autocast"] * 5),
    *("tangent", "tangent", "tangent", "profiler", "profiler", *["anomaly"] * 4),
)


@st.composite
def examples(draw: DrawFn) -> Example:
    """Examples of everything."""
    focus = draw(st.sampled_from(FOCUSES))
    operator = draw(operators(focus))
    situation = draw(situations(focus))
    if situation == "profiler":  # it sees what asks `supports`, in whichever call comes first
        operator = operator._replace(provider="none")
    return Example(
        operator,
        draw(calls(operator, focus)),
        draw(scripts(focus)),
        situation,
        native_first=draw(st.booleans()),
        afterwards=draw(st.sampled_from(["backward", "backward", *_AFTERWARDS])),
    )


_AFTERWARDS = ("backward twice", "write into inputs", "create_graph")

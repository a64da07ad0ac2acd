"""Generate examples. Most have only one unusual feature, so that their calls succeed."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from tests.integration.differential.calls import calls
from tests.integration.differential.generation import operators
from tests.integration.differential.observe import Example
from tests.integration.differential.scripts import scripts
from tests.integration.differential.situations import situations

# The focus of an example is its unusual feature, which is drawn from this list. So a focus that is
# listed more often gets more examples. "plain" examples have no unusual feature, so their calls are
# native.
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
    focus = draw(st.sampled_from(FOCUSES))
    operator = draw(operators(focus))
    situation = draw(situations(focus))
    # The profiler also records operators that `supports` calls. The two runs would differ, because
    # only the first call of an operator runs `supports`.
    if situation == "profiler":
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

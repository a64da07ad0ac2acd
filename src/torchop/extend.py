"""torchop.extend: building blocks for tools that work on operators.

`torchop.testing` and `torchop.export` are built on this module, and you can use it for checkers,
exporters and rules in other packages too. `import torchop` does not import it, so import it
explicitly, as in `from torchop.extend import Operator`.

Modeled after `jax.extend`.
"""

from torchop._compat.classes import OpOverload
from torchop._core.call import mutated_tensors, named_inputs, named_outputs, values_by_name
from torchop._core.define import all_or_nothing
from torchop._core.observers import check_arguments, observer
from torchop._core.operator import Operator
from torchop._core.registry import OpLike
from torchop._errors import short_repr, short_text, warn
from torchop._schema.forms import Form
from torchop._schema.naming import OpName
from torchop._schema.schema import Argument, Schema

__all__ = [
    "Argument",
    "Form",
    "OpLike",
    "OpName",
    "OpOverload",
    "Operator",
    "Schema",
    "all_or_nothing",
    "check_arguments",
    "mutated_tensors",
    "named_inputs",
    "named_outputs",
    "observer",
    "short_repr",
    "short_text",
    "values_by_name",
    "warn",
]

"""A Sphinx extension that documents operators as functions.

In a package's `conf.py`, after `sphinx.ext.autodoc`::

    extensions = ["sphinx.ext.autodoc", "torchop.sphinx"]

Without this extension, `automodule` with `:members:` skips operators, because `torchop.custom_op`
does not return functions. With it, `automodule` and `autofunction` document each operator as a
function, followed by its schema, kernels and rules.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

# These imports need `type: ignore`, because docutils has no type annotations and Sphinx 9 does not
# declare that this module exports `mock`.
from docutils.nodes import Node  # type: ignore[import-untyped]
from docutils.parsers.rst import directives  # type: ignore[import-untyped]
from docutils.parsers.rst.languages import get_language  # type: ignore[import-untyped]
from docutils.utils import new_document  # type: ignore[import-untyped]
from sphinx.ext.autodoc.mock import mock  # type: ignore[attr-defined]

from torchop import CustomOp, OperatorFamily
from torchop.extend import Operator

if TYPE_CHECKING:
    from sphinx.application import Sphinx

__all__ = ["setup"]

_HANDLES = CustomOp, OperatorFamily


def setup(app: Sphinx) -> dict[str, Any]:
    """Make `automodule` and `autofunction` document operators.

    Sphinx calls this function.

    Args:
        app: the Sphinx application.

    Example: see `how-to/packages` in the documentation.
    """
    app.setup_extension("sphinx.ext.autodoc")
    app.connect("builder-inited", _wrap_automodule)
    app.connect("autodoc-process-docstring", _add_fields)
    return {"parallel_read_safe": True}


def _wrap_automodule(app: Sphinx) -> None:
    # autodoc has two implementations, and an option in `conf.py` selects one. So subclass the
    # automodule directive that is currently registered.
    directive, _ = directives.directive("automodule", get_language("en"), new_document(""))

    class AutomoduleDirective(directive):  # type: ignore[misc, valid-type]
        def run(self) -> list[Node]:
            name = self.arguments[0].strip()
            with mock(self.env.config.autodoc_mock_imports), _as_functions(name):
                nodes: list[Node] = super().run()
            return nodes

    app.add_directive("automodule", AutomoduleDirective, override=True)


@contextlib.contextmanager
def _as_functions(name: str) -> Iterator[None]:
    """Replace a module's operators with functions inside a `with` block.

    Otherwise autodoc would skip them, because it recognizes functions by their type and has no hook
    to document other members as functions.
    """
    try:
        module = importlib.import_module(name)
    except Exception:  # autodoc imports the module again, and reports the error
        yield
        return
    operators = {name: value for name, value in vars(module).items() if isinstance(value, _HANDLES)}
    try:
        for attribute, operator in operators.items():
            setattr(module, attribute, _function(operator))
        yield
    finally:
        for attribute, operator in operators.items():
            setattr(module, attribute, operator)


def _function(operator: Any) -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> Any:
        return operator(*args, **kwargs)

    functools.update_wrapper(function, operator, updated=())  # without the operator's `__dict__`
    return function


def _add_fields(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    handle: Any = obj if isinstance(obj, _HANDLES) else getattr(obj, "__wrapped__", None)
    is_family = isinstance(handle, OperatorFamily)
    if not (is_family or isinstance(handle, CustomOp)):
        return
    if lines and lines[-1].strip():
        lines.append("")
    forms = (handle.functional, handle.out, handle.inplace) if is_family else (handle,)
    operators = [Operator(form, "sphinx") for form in forms if form is not None]
    lines += [f":Schema: ``{operator.schema.text}``" for operator in operators]
    lines.append(f":Kernels: {', '.join(operators[0].kernels) or 'none'}")
    lines.append(f":Rules: {'; '.join(operators[0].rules) or 'none'}")
    lines.append("")

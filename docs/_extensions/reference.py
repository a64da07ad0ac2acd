"""Generate the pages of the reference from docstrings and from the tables in this file."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.parsers.rst.states import Inliner
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.ext.autosummary import autosummary_toc

DOCS = Path(__file__).parents[1]

# Descriptions of objects without a usable docstring: objects of PyTorch, and plain values.
BY_HAND = {
    "torchop.CustomOpDef": """\
.. class:: CustomOpDef

   PyTorch's class of handles, ``torch._library.custom_ops.CustomOpDef``, and the base class of
   `CustomOp`. Operators of `torchop.custom_op` and `torch.library.custom_op` are instances.
""",
    "torchop.wrap_triton": """\
.. function:: wrap_triton(triton_kernel, /)

   Make a Triton kernel traceable inside a `triton_op`. This is `torch.library.wrap_triton`.
""",
    "torchop.derived": """\
.. data:: derived

   In the class of an operator, ``backward = torchop.derived`` derives the gradient formula from
   the operator's function, as `CustomOp.derive_autograd` does.
""",
    "torchop.EffectType": """\
.. class:: EffectType

   PyTorch's kinds of side effects, for `custom_op(effects=...)` and `register_effect`:

   .. attribute:: ORDERED

      Compilers keep every call with this effect, in order.
""",
    "torchop.extend.OpLike": """\
.. data:: OpLike

   The types that name an operator: a handle, ``"ns::name"``, ``"ns::name.overload"``, an
   `OpOverload`, or a packet with one overload.
""",
    "torchop.extend.OpOverload": """\
.. class:: OpOverload

   PyTorch's class of overloads such as ``torch.ops.ns.name.default``, ``torch._ops.OpOverload``.
""",
    "torchop.fallthrough_kernel": """\
.. function:: fallthrough_kernel()

   Pass this function to `impl` to make a dispatch key forward all calls to the next key. It is
   ``torch.library.fallthrough_kernel``, and must not be called.
""",
}

# Signatures and members of classes with a private constructor or private members.
CLASSES = {
    "torchop.CustomOp": ("CustomOp()", ":members:", ":inherited-members: CustomOpDef"),
    "torchop.OperatorFamily": ("OperatorFamily()", ":members:"),
    "torchop.Rule": (
        "Rule",
        ":members: register, lookup, has, origin, validate, missing, of_derived, attach, replaced, "
        "detach, cache_parts",
    ),
    "torchop.Library": (
        'Library(ns, kind, dispatch_key="")',
        ":members: define, impl, fallback, close",
    ),
    "torchop.testing.checking": ("checking()",),
    "torchop.Acceleration": ("Acceleration()", ":members:"),
    "torchop.AcceleratedOperator": ("AcceleratedOperator",),
    "torchop.Recorded": ("Recorded()", ":members: calls, save, load, update"),
    "torchop.testing.CallRecord": ("CallRecord", ":members: example, parts"),
    "torchop.testing.TensorRecord": ("TensorRecord", ":members: example, nbytes"),
    "torchop.testing.TypeRecord": ("TypeRecord",),
    "torchop.Explanation": ("Explanation",),
    "torchop.extend.Argument": ("Argument",),
    "torchop.extend.Form": ("Form",),
    "torchop.extend.OpName": ("OpName", ":members: parse, parse_new, local, packet"),
    "torchop.extend.Operator": (
        "Operator(op, caller)",
        ":members: has_kernel, flat_arguments, flat_function",
    ),
    "torchop.extend.Schema": (
        "Schema(parsed)",
        ":members: parse, fill_defaults, is_backward_compatible",
    ),
}


def see_also() -> dict[str, list[str]]:
    """Map each object to related links: pages that use it often, and the objects of its group."""
    uses: dict[str, Counter[str]] = {}
    for folder in ("tutorials", "how-to", "explanation"):
        for page in sorted((DOCS / folder).glob("*.md")):
            text = page.read_text(encoding="utf-8")
            for name in re.findall(r"\btorchop\.(\w+(?:\.\w+)?)\b", text):
                uses.setdefault(f"torchop.{name}", Counter())[f":doc:`/{folder}/{page.stem}`"] += 1
    pages = {name: [page for page, _ in counts.most_common(4)] for name, counts in uses.items()}
    index = (DOCS / "reference" / "index.md").read_text(encoding="utf-8")
    for block in re.findall(r"\.\. autosummary::\n(.*?)```", index, re.DOTALL):
        names = [f"torchop.{name}" for name in re.findall(r"^   (\w[\w.]*)$", block, re.MULTILINE)]
        if len(names) > 15:  # errors link to their section instead
            continue
        for name in names:
            others = [f":py:obj:`{other}`" for other in names if other != name]
            pages[name] = [*pages.get(name, []), *others]
    return pages


def context() -> dict[str, Any]:
    """Return the variables of the autosummary templates."""
    return {"by_hand": BY_HAND, "classes": CLASSES, "see_also": see_also()}


# --------------------------------------------------------------------------------------------------
# Links


def code_or_link(
    name: str,
    rawtext: str,
    text: str,
    lineno: int,
    inliner: Inliner,
    options: dict[str, Any] | None = None,
    content: object = (),
) -> tuple[list[nodes.Node], list[nodes.system_message]]:
    """Render single backticks in docstrings as code, with a link if the name is documented."""
    literal = nodes.literal(rawtext, text, classes=["py", "code"])
    if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", text):
        return [literal], []
    reference = addnodes.pending_xref(
        rawtext, literal, refdomain="py", reftype="obj", reftarget=text, refwarn=False
    )
    environment = inliner.document.settings.env
    reference["refdoc"] = environment.current_document.docname
    reference["py:module"] = environment.ref_context.get("py:module")
    reference["py:class"] = environment.ref_context.get("py:class")
    return [reference], []


def link_errors(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Append a link to the docstring of an exception, to the section that explains the fix."""
    if what == "exception" and obj.__module__ == "torchop":
        lines += ["", f":error-page:`{obj.__name__}`", ""]


def leave_out_the_operator(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Remove the entry for `op` from the docstring of a handle's method.

    The method shares its docstring with a function that takes the operator as its first argument.
    """
    if what != "method" or not name.startswith("torchop.CustomOp."):
        return
    start = next((i for i, line in enumerate(lines) if line.startswith("    op: ")), None)
    if start is not None:
        del lines[start]
        while lines[start].startswith("        "):
            del lines[start]


def error_page(
    name: str,
    rawtext: str,
    text: str,
    lineno: int,
    inliner: Inliner,
    options: dict[str, Any] | None = None,
    content: object = (),
) -> tuple[list[nodes.Node], list[nodes.system_message]]:
    """Link an exception's name to its section of the errors page."""
    reference = addnodes.pending_xref(
        rawtext,
        nodes.inline("", f"How to fix {text}"),
        refdomain="doc",
        reftype="myst",
        reftarget="reference/errors",
        reftargetid=text.lower(),
        refexplicit=True,
    )
    reference["refdoc"] = inliner.document.settings.env.current_document.docname
    return [reference], []


def leave_out_of_the_sidebar(app: Sphinx, doctree: nodes.document) -> None:
    """Remove the pages of individual objects from the sidebar.

    The tables of the reference already link to these pages, and adding a hundred entries to every
    page's sidebar would take up most of the build time.
    """
    for node in list(doctree.findall(autosummary_toc)):
        node.parent.remove(node)


def begin_with_the_sentence(app: Sphinx, doctree: nodes.document) -> None:
    """Move the first sentence of an object's page above the signature.

    Otherwise, a long signature could push this sentence off the screen. If a decorator has a second
    signature with the same parameters as the first one, remove it as well.
    """
    if not app.env.current_document.docname.startswith("reference/api/"):
        return
    description = doctree.next_node(addnodes.desc)
    if description is None:
        return
    content = description.next_node(addnodes.desc_content)
    if content and isinstance(content[0], nodes.paragraph):
        description.parent.insert(description.parent.index(description), content.pop(0))
    first, *others = (part for part in description if isinstance(part, addnodes.desc_signature))
    for signature in others:
        if _parameter_names(signature) == _parameter_names(first):
            description.remove(signature)


def _parameter_names(signature: nodes.Element) -> list[str]:
    return [
        parameter[0].astext() if parameter.children else ""
        for parameter in signature.findall(addnodes.desc_parameter)
    ]


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_role("code-or-link", code_or_link)
    app.add_role("error-page", error_page)
    app.connect("autodoc-process-docstring", link_errors)
    # Run this before napoleon, which converts docstring sections such as Args to reST.
    app.connect("autodoc-process-docstring", leave_out_the_operator, priority=100)
    app.connect("doctree-read", begin_with_the_sentence)
    app.connect("doctree-read", leave_out_of_the_sidebar, priority=100)  # before it is collected
    return {"parallel_read_safe": True}

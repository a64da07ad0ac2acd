"""What autosummary's pages of the reference hold besides docstrings."""

from __future__ import annotations

import functools
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

# Objects of PyTorch, whose docstrings are not for our readers, and values, which have none.
BY_HAND = {
    "torchop.CustomOpDef": """\
.. class:: CustomOpDef

   PyTorch's class of operators, ``torch._library.custom_ops.CustomOpDef``. A `CustomOp` is one.
   `isinstance(op, torchop.CustomOpDef)` holds for operators that `torchop.custom_op` defined, and
   for those of `torch.library.custom_op`.
""",
    "torchop.wrap_triton": """\
.. function:: wrap_triton(triton_kernel, /)

   Turns a Triton kernel into one that compilers can trace, inside a `triton_op`. It is
   `torch.library.wrap_triton`.
""",
    "torchop.derived": """\
.. data:: derived

   Stands in a class in the place of a backward. It says that the formula is derived, as
   `CustomOp.derive_autograd` does.
""",
    "torchop.EffectType": """\
.. class:: EffectType

   PyTorch's kinds of side effect, for `custom_op(effects=...)` and `register_effect`. There is one:

   .. attribute:: ORDERED

      Compilers keep every call, and keep all calls with this effect in order.
""",
    "torchop.extend.OpLike": """\
.. data:: OpLike

   The type of what names an operator: a handle, ``"ns::name"``, ``"ns::name.overload"``, an
   `OpOverload`, or a packet with one overload.
""",
    "torchop.extend.OpOverload": """\
.. class:: OpOverload

   PyTorch's class of what ``torch.ops.ns.name.overload`` is, ``torch._ops.OpOverload``, which has
   no public name there.
""",
    "torchop.fallthrough_kernel": """\
.. function:: fallthrough_kernel()

   What to pass to `impl` in place of a kernel, so that a dispatch key passes calls on to the next
   one. It is ``torch.library.fallthrough_kernel``, and is not to be called.
""",
}

# How a class is shown where its members and its constructor are not all for users.
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
    """For each object, the pages that use it most, and the others of its group in the reference."""
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
        if len(names) > 15:  # of the errors, the page of errors tells more
            continue
        for name in names:
            others = [f":py:obj:`{other}`" for other in names if other != name]
            pages[name] = [*pages.get(name, []), *others]
    return pages


def context() -> dict[str, Any]:
    """What the templates of autosummary use."""
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
    """What single backticks in docstrings are: code, and a link if it names something known."""
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
    """Ends the docstring of an exception with a link to the page that says what to do."""
    if what == "exception" and obj.__module__ == "torchop":
        lines += ["", f":error-page:`{obj.__name__}` says what to do.", ""]


def leave_out_the_operator(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Takes the operator out of the arguments of a method, which as a function takes it first."""
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
    """A link to the section of an exception on its page of errors."""
    reference = addnodes.pending_xref(
        rawtext,
        nodes.inline("", "The page of errors"),
        refdomain="doc",
        reftype="myst",
        reftarget=_error_pages()[text],
        reftargetid=text.lower(),
        refexplicit=True,
    )
    reference["refdoc"] = inliner.document.settings.env.current_document.docname
    return [reference], []


@functools.cache
def _error_pages() -> dict[str, str]:
    """For each exception, the page that has a section about it."""
    return {
        name: f"reference/errors/{page.stem}"
        for page in (DOCS / "reference" / "errors").glob("*.md")
        for name in re.findall(r"^## (\w+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    }


def leave_out_of_the_sidebar(app: Sphinx, doctree: nodes.document) -> None:
    """Takes the pages of objects out of the tree of contents: the tables link to them.

    A hundred entries are no help in a sidebar, and making one for each page took most of a build.
    """
    for node in list(doctree.findall(autosummary_toc)):
        node.parent.remove(node)


def begin_with_the_sentence(app: Sphinx, doctree: nodes.document) -> None:
    """Puts what an object is for above its signature, which may fill a screen.

    A decorator has two signatures, of which the one for a call repeats all parameters, so only the
    first is shown.
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
    # Before napoleon reads the sections of the docstring.
    app.connect("autodoc-process-docstring", leave_out_the_operator, priority=100)
    app.connect("doctree-read", begin_with_the_sentence)
    app.connect("doctree-read", leave_out_of_the_sidebar, priority=100)  # before it is collected
    return {"parallel_read_safe": True}

"""How Sphinx builds the documentation; `make docs` takes every warning for an error."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_extensions"))

import reference

import torchop

project = "torchop"
author = "The torchop developers"
project_copyright = "2026, The torchop developers"
release = version = torchop.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "torchop.sphinx",
    "chart",
    "markdown_pages",
    "reference",
]
exclude_patterns = ["_build"]
templates_path = ["_templates"]
# Docstrings quote code with single backticks, as Markdown does.
default_role = "code-or-link"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
# A parameter to a line where they would not fit on one.
python_maximum_signature_line_length = 80
# A page for each object, made from the tables of `reference/index.md`.
autosummary_generate = ["reference/index.md"]
autosummary_context = reference.context()
# Lists of the names that we link to, so that the build needs no network.
intersphinx_mapping = {
    "python": ("https://docs.python.org/3/", "_inventories/python.txt"),
    "torch": ("https://docs.pytorch.org/docs/stable/", "_inventories/torch.txt"),
}
# Links to the headings of other pages.
myst_heading_anchors = 3

html_theme = "furo"
html_title = f"torchop {release}"
html_static_path = ["_static"]
html_favicon = "_static/favicon.svg"
html_css_files = ["torchop.css"]
html_search_scorer = str(Path(__file__).parent / "_extensions" / "search_scorer.js")

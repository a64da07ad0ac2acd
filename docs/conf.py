"""The configuration of Sphinx. `make docs` treats warnings as errors."""

import runpy
import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:  # on Python 3.10, Sphinx installs tomli
    import tomli as tomllib

sys.path.insert(0, str(Path(__file__).parent / "_extensions"))

import reference

import torchop
from torchop.testing import _extras

project = "torchop"
author = "The torchop developers"
project_copyright = "2026, The torchop developers"
release = version = torchop.__version__

# Edit links need the URL "Repository" from pyproject.toml, and link previews need "Documentation".
# While a URL is missing there, the pages are simply built without the corresponding links.
_pyproject = Path(__file__).parents[1] / "pyproject.toml"
_addresses = tomllib.loads(_pyproject.read_text(encoding="utf-8"))["project"].get("urls", {})

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinxext.opengraph",
    "torchop.sphinx",
    "markdown_pages",
    "reference",
]
exclude_patterns = ["_build"]
templates_path = ["_templates"]
# Our docstrings mark code with single backticks, as in Markdown, so render those as code.
default_role = "code-or-link"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
# Put each parameter of a longer signature on its own line.
python_maximum_signature_line_length = 80
# Generate a page for each object in the tables of `reference/index.md`.
autosummary_generate = ["reference/index.md"]
autosummary_context = reference.context()
# These inventories are checked in, so the documentation also builds without network access.
intersphinx_mapping = {
    "python": ("https://docs.python.org/3/", "_inventories/python.txt"),
    "torch": ("https://docs.pytorch.org/docs/stable/", "_inventories/torch.txt"),
}
# Give headings an anchor, so that pages can link to each other's headings.
myst_heading_anchors = 3

html_theme = "furo"
html_title = f"torchop {release}"
html_static_path = ["_static"]
html_favicon = "_static/favicon.svg"
html_css_files = ["torchop.css"]
if "Repository" in _addresses:
    html_theme_options = {
        "source_repository": _addresses["Repository"],
        "source_branch": "main",
        "source_directory": "docs/",
    }
html_search_scorer = str(Path(__file__).parent / "_extensions" / "search_scorer.js")

# The title, text and image that a link preview shows for a page.
ogp_site_url = _addresses.get("Documentation", "")
ogp_image = "_static/link.png" if ogp_site_url else None
ogp_image_alt = "The cost of a call with torchop and with torch.library"
ogp_social_cards = {"enable": False}  # drawing a picture for each page takes a minute

# Code blocks have a copy button that leaves out console prompts. Output blocks have none.
copybutton_selector = "div:not(.highlight-output) > div.highlight > pre"
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

# The pages explain how to install torchop from a checkout. Once torchop is on a package index,
# `published` rewrites these instructions while Sphinx reads a page.
published = runpy.run_path(str(Path(torchop.__file__).parents[2] / "hatch_build.py"))["published"]


def setup(app):
    def read(app, page, source):
        source[0] = published(source[0], _extras.ON_INDEX)

    app.connect("source-read", read)

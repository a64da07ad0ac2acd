"""How Sphinx builds the documentation; `make docs` takes every warning for an error."""

import sys
from pathlib import Path

import torchop

sys.path.insert(0, str(Path(__file__).parent / "_extensions"))

project = "torchop"
author = "The torchop developers"
project_copyright = "2026, The torchop developers"
release = version = torchop.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "chart"]
exclude_patterns = ["_build"]
# Docstrings quote code with single backticks, as Markdown does.
default_role = "code"
# The docstrings say what the arguments are; types would make signatures unreadable.
autodoc_typehints = "none"
autodoc_member_order = "bysource"
# Links to the headings of other pages.
myst_heading_anchors = 3

html_theme = "furo"
html_title = f"torchop {release}"
html_static_path = ["_static"]
html_css_files = ["torchop.css"]

"""Run every example of the documentation.

The Python blocks of a page run in order, in one namespace. If a block prints something, an `output`
block right after it must show the same text.

Uses private names.
"""

from __future__ import annotations

import builtins
import contextlib
import doctest
import importlib
import importlib.util
import io
import pkgutil
import pydoc
import subprocess
import sys
import textwrap
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch._dynamo
import torch.compiler.config
from hypothesis import HealthCheck, settings
from markdown_it import MarkdownIt

import torchop
from tests._support.common import PAGES, close_operators, needs_native
from torchop._rules.providers import tuned

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
README = ROOT / "README.md"  # its blocks run one by one, in a test of their own
PLAIN = {"", "bash", "console", "text", "toml"}  # blocks that are not executed
DIRECTIVES = {"{eval-rst}", "{image}", "{include}", "{toctree}"}
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
# Turn off the time limits of Hypothesis, which examples on pages would exceed on a busy machine.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")


# --------------------------------------------------------------------------------------------------
# Collecting and running blocks


class Block(NamedTuple):
    """A `python` or `pycon` block of a page, with the output that the page shows for it."""

    place: str
    line: int  # the index of the first line of code in the page
    language: str
    code: str
    output: str


@pytest.fixture(autouse=True)
def measurements_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Store the measurements of examples in a temporary file, which other tests do not read."""
    monkeypatch.setattr(tuned, "users_table", lambda: tmp_path / "tuning.json")


def collect(path: Path) -> list[Block]:
    """Return the blocks of a page that must run.

    Raises:
        ValueError: the page contains a block that no test would check.
    """
    tokens = MarkdownIt("commonmark").parse(path.read_text(encoding="utf-8"))
    found: list[Block] = []
    for before, token in zip([None, *tokens], tokens, strict=False):
        if token.type == "code_block":
            raise ValueError(f"{path.name}:{token.map[0] + 1}: an indented block is not run")
        if token.type != "fence":
            continue
        place, language = f"{path.name}:{token.map[0] + 1}", token.info.partition(" ")[0]
        if language in {"python", "pycon"}:
            found.append(Block(place, token.map[0] + 1, language, token.content, ""))
        elif language == "output":
            if before is None or before.type != "fence" or before.info != "python":
                raise ValueError(f"{place}: output stands right after the block that prints it")
            found[-1] = found[-1]._replace(output=token.content)
        elif language not in PLAIN | DIRECTIVES:
            raise ValueError(f"{place}: blocks of {language!r} are not run")
    return found


def run_page(path: Path) -> int:
    """Run the blocks of a page, and return their number.

    Raises:
        AssertionError: a block raised an exception, or its output differs from the page.
    """
    page = types.ModuleType("mylib")  # pages define operators as this module would
    page.__file__ = str(path)
    found = collect(path)
    with _as_in_a_fresh_process(page):
        for block in found:
            if block.language == "pycon":
                _run_doctest(
                    doctest.DocTestParser().get_doctest(
                        block.code, vars(page), block.place, str(path), block.line
                    )
                )
            else:
                _run(block, path, page)
    return len(found)


def _run(block: Block, path: Path, page: types.ModuleType) -> None:
    printed = io.StringIO()
    # Add empty lines before the code, so that tracebacks and Dynamo show the lines of the page.
    code = compile("\n" * block.line + block.code, str(path), "exec", dont_inherit=True)
    try:
        with contextlib.redirect_stdout(printed):
            exec(code, vars(page))
    except Exception as error:
        raise AssertionError(f"{block.place} raised {type(error).__name__}: {error}") from error
    if not doctest.OutputChecker().check_output(block.output, printed.getvalue(), FLAGS):
        raise AssertionError(
            f"{block.place} shows\n{block.output or 'nothing'}\nbut printed\n{printed.getvalue()}"
        )


def _run_doctest(test: doctest.DocTest) -> None:
    report = io.StringIO()
    runner = doctest.DocTestRunner(optionflags=FLAGS, verbose=False)
    result = runner.run(test, out=report.write, clear_globs=False)
    assert result.attempted, f"{test.name} holds no example"
    assert not result.failed, f"{test.name}:\n{report.getvalue()}"


@contextlib.contextmanager
def _as_in_a_fresh_process(page: types.ModuleType) -> Iterator[None]:
    """Reset state that other pages may have changed, as if the page ran in a new process."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    sys.modules[page.__name__] = page  # Dynamo and pickle look functions up there
    try:
        with (
            torch._dynamo.config.patch(capture_dynamic_output_shape_ops=False),
            torch.compiler.config.patch(cache_key_tag=""),
        ):
            yield
    finally:
        del sys.modules[page.__name__]
        close_operators(vars(page))


# --------------------------------------------------------------------------------------------------
# Pages


# Pages that show which calls are native, so they need the native extension.
NATIVE = {"accelerate", "build", "class-form", "debugging", "engines", "native-calls"}


NEEDS = {
    "torchop._schema.forms.Form": pytest.mark.needs_torch("2.13", "torch.Tag.out"),
}


def _parameter(page: Path) -> Any:
    marks = [needs_native] * (page.stem in NATIVE)
    return pytest.param(page, id=page.relative_to(ROOT).as_posix(), marks=marks)


@pytest.mark.project
@pytest.mark.parametrize("page", [_parameter(page) for page in PAGES if page != README])
def test_examples_of_page_run(page: Path) -> None:
    run_page(page)


def test_pages_contain_examples() -> None:
    # The test of a page without blocks always passes, so check that `collect` finds blocks.
    counts = {page: len(collect(page)) for page in PAGES}
    lessons = {page for page in PAGES if page.parent.name in {"tutorials", "how-to"}}
    assert len(lessons) >= 15
    reference = {DOCS / "reference" / name for name in ("schema-types.md", "errors.md")}
    for page in {README, DOCS / "index.md"} | lessons | reference:
        assert counts[page] > 0, page
    assert sum(counts.values()) > 60


def test_each_block_of_the_readme_runs_alone(tmp_path: Path) -> None:
    blocks = collect(README)
    assert len(blocks) >= 2
    for block in blocks:
        output = f"```output\n{block.output}```\n" if block.output else ""
        run_page(page_of(tmp_path, f"```{block.language}\n{block.code}```\n{output}"))


def test_readme_and_architecture_are_short() -> None:
    for name, most in (("README.md", 131), ("ARCHITECTURE.md", 220)):
        assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) < most, name


def test_first_screen_of_the_readme_shows_purpose_and_speed() -> None:
    screen = README.read_text(encoding="utf-8").partition("## ")[0]
    assert "turns Python functions into PyTorch operators" in screen
    assert "Why" in screen
    for door in ("--torchop-check", "torchop.accelerate(", "@torchop.custom_op("):
        assert door in screen
    assert "docs/_static/calls.svg" in screen


def test_quick_start_is_short() -> None:
    code = collect(README)[-1].code
    assert "custom_op" in code
    assert "torch.compile" in code
    assert len([line for line in code.splitlines() if line.strip()]) <= 20


def test_quick_start_runs_with_torch_library() -> None:
    code = collect(README)[-1].code.replace("import torchop\n", "")
    code = code.replace("torchop.", "torch.library.").replace(
        ", fullgraph", ", backend='eager', fullgraph"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout == "tensor([0.0833, 0.0370])\n", run.stderr


# --------------------------------------------------------------------------------------------------
# Docstrings


def modules() -> list[str]:
    found = pkgutil.walk_packages(torchop.__path__, "torchop.")
    return ["torchop", *(module.name for module in found)]


def docstring_examples() -> dict[str, doctest.DocTest]:
    """Return the examples in all docstrings of torchop."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    found: dict[str, doctest.DocTest] = {}
    for name in modules():
        for test in finder.find(importlib.import_module(name), name):
            if test.examples:
                test.globs = {"__name__": "docstring"}  # the example must import what it uses
                found[test.name] = test
    return found


EXAMPLES = docstring_examples()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=NEEDS.get(name, ())) for name in EXAMPLES]
)
def test_example_of_docstring_runs(name: str) -> None:
    test = EXAMPLES[name]
    _run_doctest(test)
    close_operators(test.globs)


def test_docstrings_contain_examples() -> None:
    assert {
        "torchop._define.custom_op.custom_op",
        "torchop._define.library.Library",
    } <= set(EXAMPLES)
    assert len(EXAMPLES) >= 15


# --------------------------------------------------------------------------------------------------
# Pages with errors fail


def page_of(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "page.md"
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("```python\n1 / 0\n```\n", r"page.md:1 raised ZeroDivisionError"),
        ("A\n\n```python\nprint(2)\n```\n```output\n3\n```\n", r"page.md:3 shows\n3\n\nbut .*\n2"),
        ("```python\nprint(2)\n```\n", r"shows\nnothing\nbut printed\n2"),
        ("```python\nx = 1\n```\n```output\n1\n```\n", r"shows\n1\n\nbut printed\n$"),
        ("```pycon\n>>> 1 + 1\n3\n```\n", r"Expected:\s+3\s+Got:\s+2\s"),
        ("```pycon\nx = 1\n```\n", r"holds no example"),
        ("- item\n\n  ```python\n  y\n  ```\n", r"NameError: name 'y'"),
        ("```python\nx = 1\n```\n\n> ```python\n> assert x == 2\n> ```\n", r"AssertionError"),
    ],
    ids=["raises", "prints", "hides", "claims", "doctest", "empty", "in a list", "in a quote"],
)
def test_wrong_example_fails(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        run_page(page_of(tmp_path, text))


@pytest.mark.parametrize(
    "text",
    [
        "```py\n1 / 0\n```\n",
        "```Python\n1 / 0\n```\n",
        "```{code-block} python\n1 / 0\n```\n",
        "Text\n\n    1 / 0\n",
        "```output\n3\n```\n",
        "```python\nprint(3)\n```\n\nText\n\n```output\n3\n```\n",
    ],
    ids=["py", "Python", "directive", "indented", "lone output", "far output"],
)
def test_block_that_cannot_be_checked_is_rejected(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match=r"^page.md:\d"):
        run_page(page_of(tmp_path, text))


def test_blocks_of_a_page_share_a_namespace_that_is_removed(tmp_path: Path) -> None:
    text = """
        ```python
        import torch, torchop
        @torchop.custom_op("docs_meta::twice", mutates_args=())
        def twice(x: torch.Tensor) -> torch.Tensor:
            return x + x
        ```
        ```python
        print(twice(torch.ones(1)))
        ```
        ```output
        tensor([2.])
        ```
        ```pycon
        >>> twice(torch.zeros(1))
        tensor([0...])
        ```
    """
    for _ in range(2):  # twice, because a page must remove its operators
        assert run_page(page_of(tmp_path, text)) == 3
    assert not hasattr(torch.ops.docs_meta, "twice")


# --------------------------------------------------------------------------------------------------
# Links to the documentation of other projects


@pytest.mark.parametrize("inventory", ["python", "torch"])
def test_names_of_the_stored_inventories_exist(inventory: str) -> None:
    text = (DOCS / "_inventories" / f"{inventory}.txt").read_text(encoding="utf-8")
    names = [line.split()[0] for line in text.splitlines() if not line.startswith("#")]
    assert len(names) > 20
    assert names == sorted(set(names))
    for name in names:
        assert hasattr(builtins, name) or pydoc.locate(name) is not None, name

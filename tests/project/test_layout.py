"""Packages respect their layers, files are named consistently, and the code stays small.

The tests also check imports inside of functions and under `TYPE_CHECKING`, because readers of the
code follow them too.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import importlib
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import torchop
from tests._support.forking import run_forked

pytestmark = pytest.mark.project

PACKAGE = Path(torchop.__file__).parent
CSRC = PACKAGE / "_native/csrc"
# The layers of packages, from the lowest to the highest. A package may import only packages in
# lower layers.
LAYERS = (
    ("_errors",),
    ("_hooks",),
    ("_compat",),
    ("_schema",),
    ("_core",),
    ("extend",),
    ("_rules",),
    ("_native",),
    ("_define",),
    ("native",),
    ("__init__",),
    ("_accelerate",),
    ("_inspect",),
    ("compat", "testing", "mypy_plugin", "sphinx"),
    ("cli", "export"),
    ("__main__",),
)
LEVELS = {name: level for level, names in enumerate(LAYERS) for name in names}
MOST_ENTRIES, MOST_LINES = 20, 455
# Limits on lines of code, without blank lines, comments and docstrings. A change that exceeds a
# limit must remove other code, or raise the limit and explain this in the commit.
MOST_PYTHON_LINES = 35_779  # in the whole package
MOST_CORE_LINES = 19_105  # in all packages that are not tools
MOST_CPP_LINES = 5_376
# The core must not import tools. Tools use only public names and `torchop.extend`, as third-party
# tools do. If only tools use a file of `_compat`, the file counts as a part of the tools.
TOOLS = (
    "__main__",
    "_accelerate",
    "_inspect",
    "_rules.providers",
    "_rules.user",
    "cli",
    "compat",
    "export",
    "mypy_plugin",
    "sphinx",
    "testing",
)
# These modules of the core may import tools, because they make tools available to users.
OFFERS = {"torchop", "torchop._define.registrations"}
# Tools may import these private modules of the core, for the given reasons.
EXCEPTIONS = {
    "_accelerate": (
        "it enables native calls for operators of other packages",
        {"_compat", "_core.lock", "_core.registry", "_native", "_schema"},
    ),
    "_inspect": (
        "it reports what the rules, the plan and the dispatcher would do with a call",
        {"_compat", "_core.definition", "_core.registry", "_core.user_rule", "_errors", "_native"}
        | {"_rules", "_schema"},
    ),
    "_rules.providers": (
        "the choice between providers is a part of call plans",
        {"_compat", "_core", "_errors", "_hooks", "_rules.kernels", "_schema"},
    ),
    "_rules.user": (
        "they register values in private registries of PyTorch, their functions `register_...` "
        "have the types of the core's, and they report which of torchop's operators lack a value",
        {
            "_compat",
            "_core.registry",
            "_rules.checkpoint_modes",
            "_rules.residuals",
            "_schema.callables",
        },
    ),
    "cli": (
        "it compiles the extension, and forks only while no accelerator is in use",
        {"_compat.devices", "_native.extension"},
    ),
    "compat": (
        "engines name devices by dispatch keys, results may share memory with arguments, and "
        "compilers must not trace a definition",
        {
            "_compat.compilers",
            "_compat.dispatch",
            "_core.define",
            "_core.registry",
            "_define.declare",
            "_errors",
            "_schema.callables",
        },
    ),
    "export": (
        "it compares results of operators in a mode of PyTorch, and reads graphs and schemas",
        {"_compat.classes", "_compat.opaque_types"},
    ),
    "testing": (
        "it drives PyTorch's checks, fake tensors and simulated ranks, checks kernels in calls, "
        "reads declared layouts, and stores measurements in the cache folder",
        {
            "_compat",
            "_core.blocks",
            "_core.checking",
            "_core.contract",
            "_core.lock",
            "_native.extension",
            "_rules.layout",
            "_rules.residuals.handover",
        },
    ),
}
NO_CODE = {
    tokenize.COMMENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
    tokenize.INDENT,
    tokenize.NEWLINE,
    tokenize.NL,
}
# An import inside of a function must have a comment on its line, which gives the reason.
REASON = re.compile(r"#\s*\S")


class Import(NamedTuple):
    """A statement that imports a module of torchop, or a name from a module of torchop."""

    importer: str
    imported: str
    name: str  # empty if the module itself is imported
    line: int
    is_late: bool  # inside of a function
    comment: bool


def sources(package: Path) -> dict[str, Path]:
    """Map the name of each module in a package to its file."""
    modules = {}
    for path in package.rglob("*.py"):
        parts = (package.name, *path.relative_to(package).with_suffix("").parts)
        modules[".".join(parts).removesuffix(".__init__")] = path
    return modules


def imports(package: Path) -> list[Import]:
    """Return every import of one module of the package in another."""
    modules = sources(package)
    return [each for name in modules for each in _imports_of(name, modules)]


@functools.cache
def of_torchop() -> list[Import]:
    return imports(PACKAGE)


def _imports_of(importer: str, modules: dict[str, Path]) -> Iterator[Import]:
    text = modules[importer].read_text(encoding="utf-8")
    lines, tree = text.splitlines(), ast.parse(text)
    if importer == "torchop":  # test_late_names_are_imported_for_type_checkers checks these
        tree.body = [node for node in tree.body if not _is_for_type_checkers(node)]
    for node, is_late in _nodes(tree, is_late=False):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            assert node.level == 0, f"{importer}:{node.lineno}: a relative import"
            # The imported name may itself be a module, in `from package import module`.
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        comment = any(REASON.search(line) for line in lines[node.lineno - 1 : node.end_lineno])
        for name in names:
            imported, _, attribute = (name, "", "") if name in modules else name.rpartition(".")
            if imported in modules:
                yield Import(importer, imported, attribute, node.lineno, is_late, comment)


def _nodes(node: ast.AST, is_late: bool) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child, is_late
        else:
            is_function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            yield from _nodes(child, is_late or is_function)


def _is_for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "typing.TYPE_CHECKING"


def entry_of(module: str) -> str:
    """Return the package or module directly below `torchop` that contains a module."""
    return (module.split(".") + ["__init__"])[1]


def upward(found: list[Import]) -> list[str]:
    """Return the imports that are not allowed, because they are from the same or a higher layer."""
    wrong = []
    for each in found:
        importer, imported = entry_of(each.importer), entry_of(each.imported)
        if importer != imported and LEVELS[importer] <= LEVELS[imported]:
            wrong.append(f"{each.importer}:{each.line} imports {each.imported}")
    return wrong


def circle(found: list[Import]) -> list[str]:
    """Return a cycle of modules that import each other, or an empty list."""
    graph: dict[str, set[str]] = {}
    for each in found:
        if each.importer != each.imported:
            graph.setdefault(each.importer, set()).add(each.imported)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def test_every_entry_has_a_layer() -> None:
    entries = {path.stem for path in PACKAGE.iterdir() if path.name not in ("__pycache__",)}
    assert entries == {*LEVELS, "py"}  # "py" is the file py.typed
    assert len(LEVELS) <= MOST_ENTRIES


def test_no_package_imports_a_higher_layer() -> None:
    assert upward(of_torchop()) == []


def test_imports_have_no_cycle() -> None:
    assert circle(of_torchop()) == []


def test_late_names_are_imported_for_type_checkers() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    (block,) = filter(_is_for_type_checkers, tree.body)
    named: dict[str, tuple[str, ...]] = {}
    for node in block.body:
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            module = node.module.removeprefix("torchop.")
            named[module] = (*named.get(module, ()), *(alias.name for alias in node.names))
    assert named.pop("torchop") == torchop._MODULES
    assert named == torchop._LATE
    assert {name for names in named.values() for name in names} <= set(torchop.__all__)


def modules_of_tools(found: list[Import]) -> dict[str, str]:
    """Map each module that belongs to a tool to the name of the tool.

    If only tools and `torchop` import a file of `_compat`, the file belongs to a tool.
    """
    users: dict[str, set[str]] = {}
    for each in found:
        users.setdefault(each.importer, set())
        users.setdefault(each.imported, set()).add(each.importer)
    tools = {name: tool for name in users if (tool := tool_of(name))}
    files = {name for name in users if name.startswith("torchop._compat.") and users[name]}
    while alone := {n for n in files - tools.keys() if users[n] - OFFERS <= tools.keys()}:
        tools.update(dict.fromkeys(alone, "_compat"))
    return tools


def tool_of(module: str) -> str:
    """Return the entry of `TOOLS` that contains a module, or an empty string."""
    path = module.removeprefix("torchop.")
    return next((tool for tool in TOOLS if f"{path}.".startswith(f"{tool}.")), "")


def of_the_core(found: list[Import]) -> list[Import]:
    """Return the imports in tools that import private names of the core."""
    tools, private = modules_of_tools(found), []
    for each in found:
        path = f"{each.imported}.{each.name}".removeprefix("torchop.").split(".")
        is_private = any(part.startswith("_") and not part.endswith("__") for part in path)
        is_of_a_tool = tools.get(each.importer, "_compat") != "_compat"
        if is_of_a_tool and is_private and each.imported not in tools and not is_public(each):
            private.append(each)
    return private


def is_public(each: Import) -> bool:
    """Return whether `torchop` exports the imported object under the same name."""
    if each.name not in torchop.__all__:
        return False
    module = importlib.import_module(each.imported)
    return getattr(module, each.name) is getattr(torchop, each.name)


def test_core_imports_no_tools() -> None:
    found = of_torchop()
    tools = modules_of_tools(found)
    wrong = [
        f"{each.importer}:{each.line} imports {each.imported}"
        for each in found
        if each.imported in tools and each.importer not in {*tools, *OFFERS}
    ]
    assert wrong == []


def test_tools_use_public_names() -> None:
    found = of_torchop()
    used: dict[str, set[str]] = {tool: set() for tool in EXCEPTIONS}
    unexpected = []
    for each in of_the_core(found):
        tool = tool_of(each.importer)
        _, allowed = EXCEPTIONS.get(tool, ("", set()))
        module = each.imported.removeprefix("torchop.")
        known = {name for name in allowed if f"{module}.".startswith(f"{name}.")}
        used.setdefault(tool, set()).update(known)
        if not known:
            unexpected.append(f"{each.importer}:{each.line} imports {module}.{each.name}")
    assert unexpected == [], "use a public name or torchop.extend, or see EXCEPTIONS"
    assert {tool: allowed for tool, (_, allowed) in EXCEPTIONS.items()} == used


def test_import_of_a_private_name_of_the_core_is_detected() -> None:
    def importing(importer: str, imported: str, name: str) -> Import:
        return Import(f"torchop.{importer}", f"torchop.{imported}", name, 1, False, False)

    private = importing("cli.schema", "_schema.schema", "Schema")
    private_file = importing("cli.schema", "_compat.dispatch", "")
    public = importing("cli.schema", "_errors", "SchemaError")
    extended = importing("cli.schema", "extend", "Schema")
    of_a_tool = importing("cli.schema", "_inspect.explain", "")
    core = importing("_core.registry", "_compat.dispatch", "")
    alone = importing("cli.check", "_compat.on_demand", "")
    found = [private, private_file, public, extended, of_a_tool, core, alone]
    assert of_the_core(found) == [private, private_file]


def test_importing_torchop_imports_only_the_core() -> None:
    program = "import sys, torchop; print(*sys.modules)"
    loaded = run_forked(program).stdout.split()
    tools = {tool_of(name) for name in loaded if name.startswith("torchop.")}
    assert tools == {"", "_rules.providers", "_rules.user"}


def test_core_is_within_its_line_limit() -> None:
    tools = modules_of_tools(of_torchop())
    count = sum(
        python_lines(path.read_text(encoding="utf-8"))
        for name, path in sources(PACKAGE).items()
        if name not in tools and not tool_of(name)  # tools are not part of the core
    )
    assert count <= MOST_CORE_LINES


def test_import_inside_a_function_has_a_comment() -> None:
    late = [each for each in of_torchop() if each.is_late and not each.comment]
    assert [f"{each.importer}:{each.line}" for each in late] == []


def test_files_are_within_the_line_limit() -> None:
    files = {**sources(PACKAGE), **{path.name: path for path in CSRC.iterdir()}}
    lines = {
        name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in files.items()
    }
    assert {name: count for name, count in lines.items() if count > MOST_LINES} == {}


def test_page_about_native_calls_names_every_file() -> None:
    page = PACKAGE.parents[1] / "docs/dev/native-calls.md"
    table = set(re.findall(r"`(\w+)\.(?:cpp|h)`", page.read_text(encoding="utf-8")))
    assert {path.stem for path in CSRC.iterdir()} - table == set()


@functools.cache
def python_lines(text: str) -> int:
    """Return the number of lines of code, without blank lines, comments and docstrings."""
    lines = {
        line
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in NO_CODE
        for line in range(token.start[0], token.end[0] + 1)
    }
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            lines -= set(range(docstring.lineno, (docstring.end_lineno or 0) + 1))
    return len(lines)


def cpp_lines(text: str) -> int:
    """Return the number of lines of code, without blank lines and lines with only a comment."""
    return sum(
        1 for line in text.splitlines() if line.strip() and not line.strip().startswith("//")
    )


def test_package_is_within_its_line_limit() -> None:
    files = sources(PACKAGE).values()
    count = sum(python_lines(path.read_text(encoding="utf-8")) for path in files)
    assert count <= MOST_PYTHON_LINES


def test_cpp_is_within_its_line_limit() -> None:
    count = sum(cpp_lines(path.read_text(encoding="utf-8")) for path in CSRC.iterdir())
    assert count <= MOST_CPP_LINES


def test_comments_and_docstrings_are_not_code() -> None:
    text = '"""A docstring,\nof two lines."""\n\n# a comment\nx = """\nno docstring"""\n'
    assert python_lines(text) == 2
    assert (
        python_lines("def f():\n    'A docstring.'\n    return (\n        1\n    )  # one\n") == 4
    )
    assert cpp_lines("// a comment\n\nint x = 1;  // one\n") == 1


def names_in(tree: str) -> set[str]:
    """Return the names of files and folders in a directory tree of ARCHITECTURE.md."""
    return set(re.findall(r"[a-z_]+", tree))


def test_architecture_names_every_file() -> None:
    text = (PACKAGE.parents[1] / "ARCHITECTURE.md").read_text(encoding="utf-8")
    (tree,) = re.findall(r"```text\ntorchop/\n(.*?)```", text, re.DOTALL)
    modules = {part for name in sources(PACKAGE) for part in name.split(".")[1:]}
    # Leave out the helpers in these packages, which ARCHITECTURE.md does not name.
    packages = ("_compat", "cli", "testing", "_schema.structure", "_rules.", "_define.forms")
    helpers = {
        name.rpartition(".")[2]
        for name in sources(PACKAGE)
        if any(f".{package}" in f".{name.removeprefix('torchop.')}" for package in packages)
    }
    assert modules - helpers - names_in(tree) == set()


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Create a package with two layers, whose imports are all allowed."""
    folder = tmp_path / "torchop"
    for name, text in {
        "__init__.py": "",
        "_errors.py": "",
        "_core/__init__.py": "",
        "_core/definition.py": "from torchop import _errors\n",
        "_rules/__init__.py": "from torchop._core.definition import Definition\n",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    assert upward(imports(folder)) == circle(imports(folder)) == []
    return folder


UPWARD = {
    "at the top": "from torchop._rules import RULES\n",
    "as a module": "from torchop import _rules\n",
    "by its full name": "import torchop._rules\n",
    "inside a function": "def f():\n    from torchop import _rules  # for a reason\n",
    "for type checkers": "if TYPE_CHECKING:\n    from torchop._rules import RULES\n",
}


@pytest.mark.parametrize("text", UPWARD.values(), ids=UPWARD)
def test_import_of_a_higher_layer_is_detected(package: Path, text: str) -> None:
    (package / "_core" / "definition.py").write_text(text)
    (wrong,) = upward(imports(package))
    assert wrong.startswith("torchop._core.definition:")
    assert circle(imports(package)) != []


def test_import_cycle_inside_a_package_is_detected(package: Path) -> None:
    (package / "_core" / "lock.py").write_text(
        "def f():\n    from torchop._core import definition\n"
    )
    (package / "_core" / "definition.py").write_text("from torchop._core import lock\n")
    assert upward(imports(package)) == []
    assert set(circle(imports(package))) == {"torchop._core.lock", "torchop._core.definition"}
    (late,) = [each for each in imports(package) if each.is_late]
    assert not late.comment

"""The contents of wheels and the source distribution, and the installation instructions.

Uses private names.
"""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt

from tests._support import common
from torchop import __main__
from torchop.testing import _extras

pytestmark = pytest.mark.project

wheel = pytest.importorskip("hatchling.builders.wheel")
sdist = pytest.importorskip("hatchling.builders.sdist")
ROOT = Path(__file__).parents[2]
HATCH_BUILD = runpy.run_path(str(ROOT / "hatch_build.py"))
REPOSITORY = "https://example.org/owner/torchop"


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    (built,) = wheel.WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    return zipfile.ZipFile(built)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the source distribution, and return the folder into which it was extracted."""
    folder = tmp_path_factory.mktemp("sdist")
    (built,) = sdist.SdistBuilder(str(ROOT)).build(directory=str(folder))
    with tarfile.open(built) as opened:
        opened.extractall(folder)
    (unpacked,) = (path for path in folder.iterdir() if path.is_dir())
    return unpacked


# --------------------------------------------------------------------------------------------------
# Contents


def tracked(*folders: str) -> set[str]:
    """Return the files in these folders that git tracks."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("these sources are not those of a clone")
    listed = subprocess.check_output(["git", "ls-files", *folders], cwd=ROOT, text=True)
    return {name for name in listed.splitlines() if (ROOT / name).exists()}


def test_wheel_contains_only_the_packages(archive: zipfile.ZipFile) -> None:
    names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert tracked("src") <= {f"src/{name}" for name in names}
    assert {name.partition("/")[0] for name in names} == {"torchop", "pytest_torchop"}
    assert {Path(name).suffix for name in names} == {
        *(".py", ".typed", ".pyi"),
        *(".cpp", ".h"),
    }
    assert "torchop/py.typed" in names


def test_wheel_installs_the_command(archive: zipfile.ZipFile) -> None:
    (file,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
    text = archive.read(file).decode()
    (place,) = re.findall(r"\[console_scripts\]\ntorchop = (\S+)\n", text)
    assert EntryPoint("torchop", place, "console_scripts").load() is __main__.main


def test_source_distribution_contains_all_tracked_files(sources: Path) -> None:
    files = {str(path.relative_to(sources)) for path in sources.rglob("*") if path.is_file()}
    assert tracked() <= files
    assert not [name for name in files if name.startswith(".venv") or name.endswith(".so")]


def test_tests_of_the_source_distribution_run(sources: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        + ["tests/core/test_definition.py", "tests/project/test_readme.py"],
        cwd=sources,
        env={**os.environ, "PYTHONPATH": str(sources / "src"), "TORCHOP_NATIVE": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


# --------------------------------------------------------------------------------------------------
# The page on a package index


def shown(**urls: str) -> str:
    """Return the text that a package index would show if the project had these URLs."""
    metadata: dict[str, Any] = {"version": "1.2.3", "urls": urls}
    HATCH_BUILD["MetadataHook"](str(ROOT), {}).update(metadata)
    return str(metadata["readme"]["text"])


def targets(text: str) -> list[tuple[str, str]]:
    """Return each link and picture on a page, as its kind and its target."""
    tokens = [t for block in MarkdownIt("commonmark").parse(text) for t in block.children or ()]
    links = [("link", str(t.attrs["href"])) for t in tokens if t.type == "link_open"]
    return links + [("picture", str(t.attrs["src"])) for t in tokens if t.type == "image"]


def is_absolute(target: tuple[str, str]) -> bool:
    return target[1].startswith(("https://", "#"))


def test_links_of_the_published_readme_are_absolute() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert not all(map(is_absolute, targets(readme)))
    page = shown(Repository=f"{REPOSITORY}/")
    assert len(targets(page)) == len(targets(readme))
    assert all(map(is_absolute, targets(page)))
    assert ("picture", f"{REPOSITORY}/raw/v1.2.3/docs/_static/calls.svg") in targets(page)
    assert ("link", f"{REPOSITORY}/blob/v1.2.3/docs/how-to/ship.md") in targets(page)


def test_metadata_without_a_repository_has_no_wrong_links(archive: zipfile.ZipFile) -> None:
    assert all(map(is_absolute, targets(shown())))
    (file,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
    written = Parser().parsestr(archive.read(file).decode())
    assert written["Description-Content-Type"] == "text/markdown"
    assert "# torchop" in written.get_payload()
    classifiers = written.get_all("Classifier")
    versions = [c.rpartition(" ")[2] for c in classifiers if re.search(r":: 3\.\d+$", c)]
    assert versions == ["3.10", "3.11", "3.12", "3.13"]
    # No classifier may claim free-threaded Python, which the extension does not support.
    assert not [c for c in classifiers if "Free Threading" in c]


# --------------------------------------------------------------------------------------------------
# Installation instructions

PAGES = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in common.PAGES}
FROM_INDEX = re.compile(r"pip\s+(?:install|wheel)\b[^`\n#]*\s'?torchop\b(?!-)")
FROM_CHECKOUT = re.compile(
    r"pip\s+(?:install|wheel)\b(?![^`\n]* -e )[^`\n]*\s(?:'\.\[\w+\]'|\.(?=[\s`]))|in a checkout of"
)


def places(pattern: re.Pattern[str], on_index: bool) -> set[str]:
    """Return the pages whose text matches the pattern, as on the package index or as in git."""
    published = HATCH_BUILD["published"]
    pages = {name: " ".join(published(text, on_index).split(" ")) for name, text in PAGES.items()}
    return {
        name
        for name, text in pages.items()
        if pattern.search(text.replace("install\n", "install "))
    }


def test_pages_show_the_installation_that_works() -> None:
    assert len(places(FROM_CHECKOUT, on_index=False)) >= 7
    if not _extras.ON_INDEX:
        assert places(FROM_INDEX, on_index=False) == set()


def test_one_switch_changes_every_page() -> None:
    assert places(FROM_CHECKOUT, on_index=True) == set()
    assert places(FROM_INDEX, on_index=True) == places(FROM_CHECKOUT, on_index=False)


def test_messages_show_the_installation_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_extras, "ON_INDEX", False)
    assert _extras.installing("cli") == "pip install '.[cli]' in a checkout of torchop"
    monkeypatch.setattr(_extras, "ON_INDEX", True)
    assert _extras.installing("cli") == "pip install 'torchop[cli]'"


def test_only_one_file_contains_installation_commands() -> None:
    found = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "src").rglob("*.py")
        if re.search(r"pip install", path.read_text(encoding="utf-8"))
    }
    assert found == {"src/torchop/testing/_extras.py"}

"""The key, the flags and the compiler of the extension. Uses private names."""

from __future__ import annotations

import shutil
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

from tests.native.conftest import TINY
from torchop._native.extension import api
from torchop._native.extension import recipe as module
from torchop._native.extension.recipe import (
    compile_flags,
    find_compiler,
    include_flags,
    make_recipe,
    node_fields,
    unknown_nodes,
)
from torchop.native import NativeUnavailableError


@pytest.fixture
def copy(source: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(source, tmp_path / "csrc"))


def test_key_names_the_versions(source: Path) -> None:
    recipe = make_recipe(source)
    assert torch.__version__ in recipe.key
    assert "cpython-3" in recipe.key
    assert recipe.file_name == f"_call_path-{recipe.key}.so"


def test_key_does_not_depend_on_the_folder(source: Path, copy: Path) -> None:
    assert make_recipe(copy).key == make_recipe(source).key


def test_key_changes_with_a_source(source: Path, copy: Path) -> None:
    with (copy / "module.cpp").open("a") as file:
        file.write("\n")
    assert make_recipe(copy).key != make_recipe(source).key


def test_key_changes_when_a_line_moves_to_another_file(copy: Path) -> None:
    (copy / "a.h").write_text("1\n2\n")
    (copy / "b.h").write_text("3\n")
    before = make_recipe(copy).key
    (copy / "a.h").write_text("1\n")
    (copy / "b.h").write_text("2\n3\n")
    assert make_recipe(copy).key != before


def test_key_changes_with_torch(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = make_recipe(source).key
    monkeypatch.setattr(torch, "__version__", "2.13.0+cu130")
    assert make_recipe(source).key != before


def test_key_changes_with_the_commit(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two builds of PyTorch with the same version may differ, but their commits tell them apart."""
    before = make_recipe(source).key
    monkeypatch.setattr(torch.version, "git_version", "f" * 40)
    after = make_recipe(source).key
    assert "-gitffffffffffff-" in after
    assert after != before
    monkeypatch.setattr(torch.version, "git_version", None)
    assert "-gitunknown-" in make_recipe(source).key


def test_key_changes_with_python(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = make_recipe(source).key
    suffix = ".cpython-399-x86_64-linux-gnu.so"
    monkeypatch.setattr(module.importlib.machinery, "EXTENSION_SUFFIXES", [suffix])
    assert make_recipe(source).key != before


def test_key_changes_with_the_flags(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = make_recipe(source).key
    flags = [*compile_flags(), "-O3"]
    monkeypatch.setattr(module, "compile_flags", lambda: flags)
    assert make_recipe(source).key != before


STRUCT = """
struct THPFunction {
  PyObject_HEAD
  // A comment; with a semicolon;
  PyObject* needs_input_grad;
  bool boxed_grads_call = false;
  std::optional<c10::SmallVector<bool, 24>> is_variable_input;
%s
};
struct Another {
  bool other;
};
"""
OTHERS = (
    "to_save non_differentiable dirty_tensors pure_view output_info input_info saved_variables "
    "saved_for_forward cdata"
)


def declare(monkeypatch: pytest.MonkeyPatch, folder: Path, names: str) -> None:
    """Replace PyTorch's header by one whose struct of autograd nodes has these extra fields."""
    header = folder / "torch" / "csrc" / "autograd" / "python_function.h"
    header.parent.mkdir(parents=True)
    header.write_text(STRUCT % "".join(f"  int {name};\n" for name in names.split()))
    monkeypatch.setattr(module, "_headers", lambda: folder)
    monkeypatch.setattr(module, "node_fields", node_fields.__wrapped__)


def test_nodes_of_this_release_are_known() -> None:
    fields = node_fields()
    assert fields is not None
    assert {"needs_input_grad", "saved_variables", "cdata"} <= fields
    assert unknown_nodes() is None
    assert "-DTORCHOP_KNOWS_NODES=1" in compile_flags()


def test_later_release_with_the_same_nodes_is_known(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch, "__version__", "3.0.0")
    declare(monkeypatch, tmp_path, OTHERS)
    assert unknown_nodes() is None


def test_release_with_other_nodes_is_refused_with_the_fields(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.11.0")
    declare(monkeypatch, tmp_path, f"{OTHERS.replace('cdata', '')} hooks")
    assert unknown_nodes() == (
        "the autograd nodes of PyTorch 2.11.0 have the new field hooks, no field cdata, which this "
        "version of torchop does not support"
    )
    assert "-DTORCHOP_KNOWS_NODES=0" in compile_flags()


def test_release_with_an_unreadable_struct_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    declare(monkeypatch, tmp_path, OTHERS)
    header = tmp_path / "torch" / "csrc" / "autograd" / "python_function.h"
    header.write_text("class PyNodeObject;")
    problem = unknown_nodes()
    assert problem is not None
    assert "have no field cdata, no field dirty_tensors" in problem


def test_a_prebuilt_extension_loads_without_the_header(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "_headers", lambda: tmp_path)
    monkeypatch.setattr(module, "node_fields", node_fields.__wrapped__)
    assert unknown_nodes() is None


def test_missing_headers_of_python_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": "/nowhere"})
    with pytest.raises(NativeUnavailableError, match=r"/nowhere/Python\.h.*python3-dev"):
        include_flags()


def test_missing_sources_are_named(tmp_path: Path) -> None:
    with pytest.raises(
        NativeUnavailableError, match=r"contains no C\+\+ sources. Reinstall torchop"
    ):
        make_recipe(tmp_path)


# --------------------------------------------------------------------------------------------------
# The compiler


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    return tmp_path


def install(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(0o700)


def test_cxx_comes_first_and_may_have_several_words(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(path, "c++", "ccache")
    monkeypatch.setenv("CXX", "ccache g++-12")
    assert find_compiler() == [str(path / "ccache"), "g++-12"]


def test_cxx_that_is_not_there_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(path, "c++")
    monkeypatch.setenv("CXX", "icpx")
    with pytest.raises(NativeUnavailableError, match="'icpx' in the environment variable CXX"):
        find_compiler()


@pytest.mark.parametrize("entry", ["", ".", "folder"])
def test_working_directory_is_not_searched(
    entry: str, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The working directory may be a cloned repository that contains a malicious compiler."""
    (tmp_path / "folder").mkdir()
    for folder in (tmp_path, tmp_path / "folder"):
        install(folder, "c++", "icpx")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{entry}:/nowhere:{entry}")
    with pytest.raises(NativeUnavailableError, match="there is no C"):
        find_compiler()
    monkeypatch.setenv("CXX", "icpx")
    with pytest.raises(NativeUnavailableError, match="'icpx' in the environment variable CXX"):
        find_compiler()
    monkeypatch.setenv("CXX", "./icpx")  # but a path that names the working directory is accepted
    assert find_compiler() == [str(tmp_path / "icpx")]


def test_cxx_that_is_no_command(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "g++ '-DX")
    with pytest.raises(NativeUnavailableError, match="CXX is not a command: No closing quotation"):
        find_compiler()


def test_key_changes_with_the_flags_of_the_user_and_not_with_the_compiler(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    keys = [make_recipe(source).key]
    for command in ("clang++", "ccache g++", "g++ -march=native", "g++ -g -O3"):
        monkeypatch.setenv("CXX", command)
        keys.append(make_recipe(source).key)
    assert keys[0] == keys[1] == keys[2]
    assert len(set(keys[2:])) == 3


def test_no_compiler(path: Path) -> None:
    with pytest.raises(NativeUnavailableError, match=r"none of c\+\+, g\+\+, clang\+\+ is in the"):
        find_compiler()


@pytest.mark.skipif(sys.platform != "linux", reason="about how Linux links")
def test_compiler_with_static_libstdcxx_links_pytorchs_shared_one(
    cache_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "csrc"
    source.mkdir()
    writing = (
        "#include <sstream>\nstd::string one() { return (std::ostringstream() << 1).str(); }\n"
    )
    (source / "module.cpp").write_text(f"{TINY}{writing}")
    monkeypatch.setenv("CXX", "c++ -static-libstdc++")
    file = api.build(tmp_path, source=source)
    assert b"libstdc++.so.6" in file.read_bytes()
    # If libstdc++ were linked statically, it would add two megabytes.
    assert file.stat().st_size < 200_000

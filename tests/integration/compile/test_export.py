"""Exported programs with operators: decomposed, saved, and loaded in another process."""

from __future__ import annotations

import io
import textwrap
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import torchop
import torchop.export
from tests._support.common import assert_clean
from tests._support.devices import DEVICE
from tests._support.forking import run_compiling, run_script
from tests.integration.compile.graphs import operators

STRICT = pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])


class _Model(torch.nn.Module):
    def __init__(self, op: Any) -> None:
        super().__init__()
        self.op = op
        self.linear = torch.nn.Linear(3, 3, device=DEVICE)

    def forward(self, x: Tensor) -> Tensor:
        return self.op(self.linear(x)) + 1


@pytest.fixture
def softsign(namespace: str) -> torchop.CustomOp:
    @torchop.custom_op(f"{namespace}::softsign", mutates_args=())
    def softsign(x: Tensor, slope: float = 1.0) -> Tensor:
        return x / (1 + slope * x.abs())

    softsign.register_fake(lambda x, slope=1.0: torch.empty_like(x))
    return softsign


@pytest.fixture
def model(softsign: torchop.CustomOp) -> _Model:
    return _Model(softsign)


@STRICT
def test_export_keeps_a_batch_dimension_dynamic(model, strict):
    dynamic = {"x": {0: torch.export.Dim("batch", min=2)}}
    program = torch.export.export(
        model, (torch.randn(4, 3),), dynamic_shapes=dynamic, strict=strict
    )
    x = torch.randn(7, 3)
    assert_close(program.module()(x), model(x))


@STRICT
def test_decomposition_keeps_the_operator(softsign, model, strict):
    x = torch.randn(2, 3)
    exported = torch.export.export(model, (x,), strict=strict)
    program = exported.run_decompositions()
    assert torch.ops.aten.linear.default in operators(exported.graph_module)
    assert torch.ops.aten.linear.default not in operators(program.graph_module)
    assert operators(program.graph_module).count(softsign.overload) == 1
    assert_close(program.module()(x), model(x))


def test_an_operator_can_be_decomposed_on_request(softsign, model):
    x = torch.randn(2, 3)
    program = torch.export.export(model, (x,)).run_decompositions(
        {softsign.overload: lambda x, slope=1.0: x / (1 + slope * x.abs())}
    )
    assert softsign.overload not in operators(program.graph_module)
    assert_close(program.module()(x), model(x))


@STRICT
def test_a_mutation_survives_export_and_decomposition(namespace, strict):
    @torchop.custom_op(f"{namespace}::add_one", mutates_args={"x"})
    def add_one(x: Tensor) -> None:
        x.add_(1)

    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            add_one(x)
            y = x * 2
            add_one(y)
            return y

    program = torch.export.export(Model(), (torch.zeros(2),), strict=strict)
    for stage in (program, program.run_decompositions()):
        x = torch.zeros(2)
        assert stage.module()(x).tolist() == [3.0, 3.0]
        assert x.tolist() == [1.0, 1.0]


@STRICT
def test_a_size_that_depends_on_data_is_exported(namespace, strict):
    @torchop.custom_op(f"{namespace}::nonzero", mutates_args=())
    def nonzero(x: Tensor) -> Tensor:
        return torch.nonzero(x).squeeze(1)

    @nonzero.register_fake
    def _(x):
        return x.new_empty(torchop.get_ctx().new_dynamic_size(), dtype=torch.int64)

    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nonzero(x) + 1

    program = torch.export.export(Model(), (torch.ones(4),), strict=strict)
    assert program.module()(torch.tensor([0.0, 1.0, 0.0, 1.0])).tolist() == [2, 4]


# --------------------------------------------------------------------------------------------------
# Another process

MODULE = """
    import torch
    import torchop

    @torchop.custom_op("exported_elsewhere::triple", mutates_args=())
    def triple(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    @triple.register_fake
    def _(x):
        return torch.empty_like(x)

    class Model(torch.nn.Module):
        def forward(self, x):
            return triple(x) + 1
"""

SAVE = """
    import sys
    import torch
    import torchop.export
    from triple_module import Model

    program = torch.export.export(Model(), (torch.ones(2),))
    torchop.export.save(program, sys.argv[1], extra_files={"note.txt": "hello"})
    torch.export.save(program, sys.argv[2])
"""

SAVE_IN_SCRIPT = """
    import sys
    import torchop.export

    torchop.export.save(torch.export.export(Model(), (torch.ones(2),)), sys.argv[1])
"""

LOAD = """
    import sys
    import torch
    import torchop.export

    if "--import" in sys.argv:
        import triple_module
    for path in sys.argv[1:3]:
        try:
            extra = {"note.txt": ""}
            program = torchop.export.load(path, extra_files=extra)
            print("loaded", program.module()(torch.ones(2)).tolist(), extra["note.txt"])
        except Exception as error:
            print(type(error).__name__, isinstance(error, RuntimeError), error)
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one program in two files: ours.pt2 from torchop, and stock.pt2 from PyTorch."""
    folder = tmp_path_factory.mktemp("exported")
    (folder / "triple_module.py").write_text(textwrap.dedent(MODULE))
    _run(folder, SAVE, "ours.pt2", "stock.pt2")
    return folder


def _run(folder: Path, script: str, *args: str) -> list[str]:
    result = run_compiling(script, *args, folder=folder)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def test_a_program_runs_in_a_process_that_imported_the_module(saved):
    ours, stock = _run(saved, LOAD, "ours.pt2", "stock.pt2", "--import")
    assert ours == "loaded [4.0, 4.0] hello"
    assert stock.startswith("loaded [4.0, 4.0]")


def test_loading_without_the_module_names_it_and_the_operator(saved):
    ours, stock = _run(saved, LOAD, "ours.pt2", "stock.pt2")
    assert ours.startswith("OperatorNotFoundError True the exported program uses the operator")
    assert "exported_elsewhere::triple, which is not registered in this process" in ours
    assert "Import the module 'triple_module', which defines it, before loading" in ours
    # A file that PyTorch saved does not contain the name of the module, so the message cannot name
    # it.
    assert "exported_elsewhere::triple, which is not registered in this process" in stock
    assert "Import the module that defines it, before loading" in stock


def test_error_says_that_the_saving_script_defined_the_operator(saved):
    script = saved / "script.py"
    script.write_text(textwrap.dedent(MODULE + SAVE_IN_SCRIPT))
    assert_clean(run_script(script, str(saved / "script.pt2")))
    (said,) = _run(saved, LOAD, "script.pt2")
    assert "exported_elsewhere::triple, which is not registered in this process" in said
    assert "The script that saved the program defines it: move it into a module" in said
    assert "__main__" not in said


def _mutating(library: torchop.Library) -> Any:
    @torchop.custom_op(f"{library.ns}::add_one", mutates_args={"x"}, lib=library)
    def add_one(x: Tensor) -> None:
        x.add_(1)

    def forward(x: Tensor) -> Tensor:
        y = x * 2
        add_one(y)
        return y

    return forward


def _with_an_effect(library: torchop.Library) -> Any:
    @torchop.custom_op(f"{library.ns}::log", mutates_args=(), effects="ordered", lib=library)
    def log(x: Tensor) -> None:
        pass

    def forward(x: Tensor) -> Tensor:
        log(x)
        return x * 2 + 1

    return forward


def _in_a_branch(library: torchop.Library) -> Any:
    @torchop.custom_op(f"{library.ns}::thrice", mutates_args=(), lib=library)
    def thrice(x: Tensor) -> Tensor:
        return x * 3

    thrice.register_fake(lambda x: torch.empty_like(x))
    return lambda x: torch.cond(x.sum() > 0, lambda x: thrice(x), lambda x: x.cos(), (x,))


@pytest.mark.parametrize("make", [_mutating, _with_an_effect, _in_a_branch])
def test_operators_inside_higher_order_operators_are_found_too(namespace, make):
    files = io.BytesIO(), io.BytesIO()
    with torchop.Library(namespace, "FRAGMENT") as library:

        class Model(torch.nn.Module):
            forward = staticmethod(make(library))

        program = torch.export.export(Model(), (torch.ones(2),))
        for file, stage in zip(files, (program, program.run_decompositions()), strict=True):
            torchop.export.save(stage, file)
            file.seek(0)
            assert torchop.export.load(file).module()(torch.ones(2)).tolist() == [3.0, 3.0]

    # Closing the library deregistered its operators, so from now on loading fails as in a process
    # that has not imported this module.
    for file in files:
        file.seek(0)
        with pytest.raises(torchop.OperatorNotFoundError) as caught:
            torchop.export.load(file)
        assert f"the operator {namespace}::" in str(caught.value)
        assert f"the module {__name__!r}, which defines it" in str(caught.value)


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # from PyTorch, until 2.12
def test_a_program_can_be_saved_to_and_loaded_from_a_file_object(model):
    x = torch.randn(2, 3)
    file = io.BytesIO()
    torchop.export.save(torch.export.export(model, (x,)), file)
    file.seek(0)
    assert_close(torchop.export.load(file).module()(x), model(x))


@pytest.mark.filterwarnings("ignore::torchop.RedefinitionWarning")
def test_program_can_be_saved_after_redefining_its_operator(namespace):
    schema = "(Tensor x) -> Tensor"

    def define() -> Any:
        op = torchop.custom_op(
            f"{namespace}::double", lambda x: x * 2, mutates_args=(), schema=schema
        )
        op.register_fake(torch.empty_like)
        return op

    x = torch.randn(2, 3)
    program = torch.export.export(_Model(define()), (x,))
    define()
    file = io.BytesIO()
    torchop.export.save(program, file)
    file.seek(0)
    assert_close(torchop.export.load(file).module()(x), program.module()(x))


def test_torch_export_loads_a_program_saved_by_torchop(model, tmp_path):
    x = torch.randn(2, 3)
    torchop.export.save(torch.export.export(model, (x,)), tmp_path / "model.pt2")
    assert_close(torch.export.load(tmp_path / "model.pt2").module()(x), model(x))


@pytest.fixture
def exported(model):
    """A function that saves a program with `content` in place of torchop's list of operators."""
    file = io.BytesIO()
    program = torch.export.export(model, (torch.randn(2, 3),))

    def exported(content, name="torchop_operators.json"):
        torch.export.save(program, file, extra_files={name: content})
        file.seek(0)
        return file

    return exported


@pytest.mark.parametrize(
    "content",
    ["{", "[" * 100_000, "[1]", '{"a::b": 3}'],
    ids=["cut off", "deep", "list", "number"],
)
def test_a_damaged_manifest_is_reported_and_the_program_loaded(exported, content):
    file = exported(content)
    with pytest.warns(
        UserWarning, match=r"entry torchop_operators.json of the file is damaged"
    ) as caught:
        loaded = torchop.export.load(file)
    assert caught[0].filename == __file__
    assert loaded.module()(torch.ones(2, 3)).shape == (2, 3)


@pytest.mark.parametrize("name", ["notes/seen.json", "of_torchop_operators.json"])
def test_operators_named_in_extra_files_are_ignored(exported, name):
    file = exported('{"target": "torch.ops.nobody.has.it"', name)
    assert torchop.export.load(file).module()(torch.ones(2, 3)).shape == (2, 3)


def test_messages_shorten_long_names_of_modules(tmp_path):
    path = tmp_path / "model.pt2"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/models/model.json", '{"target": "torch.ops.nobody.has.it"}')
        manifest = '{"nobody::has.it": "MODULE"}'.replace("MODULE", "m" * 10**6)
        archive.writestr("archive/extra/torchop_operators.json", manifest)
    with pytest.raises(torchop.OperatorNotFoundError, match="the module 'mmm") as caught:
        torchop.export.load(path)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("is_open", [False, True])
def test_a_file_that_is_no_archive(tmp_path, is_open):
    path = tmp_path / "model.pt2"
    path.write_bytes(b"<!DOCTYPE html><html>")
    file = io.BytesIO(path.read_bytes()) if is_open else path
    name = "the file" if is_open else r"'.*model\.pt2'"
    with pytest.raises(
        zipfile.BadZipFile,
        match=rf"load: {name} was not written by .* It starts with b'<!DOCTYPE html><",
    ):
        torchop.export.load(file)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        torchop.export.load(path)

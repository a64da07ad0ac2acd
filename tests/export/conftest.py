"""A fixture that exports a program in every supported format, in another process."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tests._support.forking import run_compiling

MODULE = """
    import torch
    import torchop

    @torchop.custom_op("served::triple", mutates_args=(), residuals={"slope": torch.Tensor})
    def triple(x: torch.Tensor, factor: float = 3.0) -> torch.Tensor:
        if not torchop.records_gradient():  # exported programs record no gradients
            return x * factor
        return torchop.residuals(x * factor, torch.full_like(x, factor))

    @triple.register_fake
    def _(x, factor):
        return torchop.residuals(torch.empty_like(x), torch.empty_like(x))

    def save(ctx, inputs, output, residuals):
        ctx.save_for_backward(residuals.slope)

    @triple.register_autograd(setup_context=save)
    def _(ctx, grad):
        return grad * ctx.saved_tensors[0], None

    @torchop.custom_op("served::add_one.inplace", mutates_args=("x",))
    def add_one(x: torch.Tensor) -> None:
        x.add_(1)

    class Model(torch.nn.Module):
        def forward(self, x):
            y = triple(x)  # only operators that Inductor does not compile
            add_one(y)
            return y

    def ninefold(x):
        return triple(triple(x))
"""

SHIP = r"""
    import pickle
    import re
    import warnings
    import torch
    import torch.package
    import torchop.export
    from served_module import Model, ninefold

    # A package of AOTInductor.
    batch = torch.export.Dim("batch")
    program = torch.export.export(Model(), (torch.ones(2),), dynamic_shapes=({0: batch},))
    configs = {
        # Precompiling the headers does not pay off for one use.
        "aot_inductor.compile_wrapper_opt_level": "O0",
        "aot_inductor.precompile_headers": False,
        "aot_inductor.metadata": {"version": "7"},
    }
    with warnings.catch_warnings(record=True) as caught:
        path = torchop.export.aoti_package(program, "model.pt2", inductor_configs=configs)
    for each in caught:
        if each.filename == "<string>":  # this program
            print(*re.findall(r"(served::[\w.]+) \(see [^)]*served_module.py:", str(each.message)))
    model = torchop.export.load_package(path)
    print(model(torch.ones(3)).tolist(), model.get_metadata()["version"])

    # A pickled graph, and torch.packages with the module's source or only its name.
    with open("graph.pkl", "wb") as file:
        pickle.dump(torch.fx.symbolic_trace(Model()), file)
    for kind in ("extern", "intern"):
        with torch.package.PackageExporter(f"{kind}.zip") as exporter:
            getattr(exporter, kind)("served_module")
            exporter.extern(["torch.**", "torchop.**"])
            exporter.save_pickle("model", "model.pkl", Model())

    # A compiled program in Inductor's cache.
    print(torch.compile(ninefold)(torch.ones(2)).tolist())

    # Pickling the exported program's module fails.
    try:
        pickle.dumps(program.module())
    except Exception:
        print("refused")
"""


def run_in(folder: Path, source: str, **environment: str) -> str:
    done = run_compiling(
        textwrap.dedent(source),
        folder=folder,
        timeout=600,
        TORCHINDUCTOR_CACHE_DIR=str(folder / "inductor"),
        **environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="session")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that contains a module with operators and a model, and the exported files."""
    folder = tmp_path_factory.mktemp("shipped")
    (folder / "served_module.py").write_text(textwrap.dedent(MODULE))
    output = run_in(folder, SHIP)
    assert output.splitlines() == [
        "served::add_one.inplace served::triple",
        "[4.0, 4.0, 4.0] 7",
        "[9.0, 9.0]",
        "refused",
    ]
    return folder

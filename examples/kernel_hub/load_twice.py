"""Load a package for the kernel hub twice, under two build ids, and run both copies."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import torch

import torchop


def load(folder: Path, build_id: str) -> ModuleType:
    """Load a package as a module whose name contains the build id, like the hub's `get_kernel`."""
    name = f"{folder.name}_{build_id}"
    spec = importlib.util.spec_from_file_location(name, folder / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    folder = Path(__file__).parent / "scaled_norm"
    first, second = load(folder, "cpu_3f9c2ab"), load(folder, "cpu_81d04ce")
    x, weight = torch.arange(1.0, 7.0).reshape(2, 3).requires_grad_(), torch.ones(3)
    for build in (first, second):
        torchop.opcheck(build.rms_norm, (x, weight))
        compiled = torch.compile(build.rms_norm, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x, weight), build.rms_norm(x, weight))
        print(f"{build.NAMESPACE}: checked and compiled")
    with first.use_float64():
        for build in (first, second):
            kernels = torchop.providers(f"{build.NAMESPACE}::*")
            chosen = next((kernel.provider for kernel in kernels if kernel.rank == 1), "reference")
            print(f"{build.NAMESPACE}: calls {chosen}")


if __name__ == "__main__":
    main()

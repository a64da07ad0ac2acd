"""Calls to operators of nvalchemi-toolkit-ops.

The operators have up to 40 arguments, and mutate up to 30 of these. Of the package's two hundred
operators, this module calls those that relax the positions of atoms: neighbour lists, a dispersion
correction, two optimizers, and sums over molecules with gradients. To get realistic arguments, it
captures the arguments that the package's own functions pass.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from _case import Case, Package

NAMESPACE = "nvalchemiops"
ATOMS, MOLECULES, SIDE, CUTOFF = 24, 2, 6.0, 2.5


class Captured(TorchDispatchMode):
    """A mode that captures a copy of the arguments in the first call to each operator."""

    def __init__(self) -> None:
        super().__init__()
        self.cases: dict[str, Case] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == NAMESPACE and func._name not in self.cases:
            kept = _copied(args)
            self.cases[func._name] = Case(func._name, lambda: _copied(kept))
        return func(*args, **(kwargs or {}))


def package() -> Package:
    torch.manual_seed(0)
    importlib.import_module("warp").config.quiet = True
    with Captured() as captured:
        _sums()
        _dispersion(_neighbours())
        _fire()
        _lbfgs()
    programs = {
        "sums, differentiated twice": _sums,
        "sums, compiled": lambda: _sums(compiles=True),
        "neighbours": _padded_neighbours,
    }
    return Package("nvalchemiops", (), list(captured.cases.values()), programs=programs)


def _copied(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return _pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), args)


def _sums(compiles: bool = False) -> list[Tensor]:
    """Return sums over molecules and their gradients, and in eager mode also second gradients."""
    ops = importlib.import_module("nvalchemiops.torch.segment_ops")
    torch.manual_seed(2)
    x, y = (torch.randn(ATOMS, 3, requires_grad=True) for _ in range(2))
    molecules = _molecules()

    def sums(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return (
            ops.segmented_sum(x, molecules, MOLECULES),
            ops.segmented_dot(x, y, molecules, MOLECULES),
            ops.segmented_mean(x, molecules, MOLECULES),
        )

    torch.compiler.reset()
    called = torch.compile(sums, backend="aot_eager") if compiles else sums
    results = called(x, y)
    found = list(results)
    for result in results:
        keeps = {"create_graph": not compiles, "retain_graph": True}
        (grad,) = torch.autograd.grad(result.square().sum(), x, **keeps)
        found += [grad, *(() if compiles else torch.autograd.grad(grad.square().sum(), x))]
    return found


def _neighbours() -> tuple[Tensor, Tensor, Tensor]:
    lists = importlib.import_module("nvalchemiops.torch.neighbors.cell_list")
    periodic = torch.tensor([[True, True, True]])
    return lists.cell_list(_positions(), CUTOFF, _cell(1), periodic, max_neighbors=64)


def _padded_neighbours() -> list[Tensor]:
    """Return neighbour lists. Sets shifts to zero where the package leaves them uninitialized."""
    matrix, counts, shifts = _neighbours()
    is_neighbour = torch.arange(matrix.shape[1]) < counts[:, None]
    return [matrix, counts, shifts * is_neighbour[..., None]]


def _dispersion(neighbours: tuple[Tensor, Tensor, Tensor]) -> None:
    dispersion = importlib.import_module("nvalchemiops.torch.interactions.dispersion")
    matrix, _, shifts = neighbours
    elements = 3
    parameters = {
        "rcov": torch.rand(elements) + 0.5,
        "r4r2": torch.rand(elements) + 1.0,
        "c6ab": torch.rand(elements, elements, 5, 5) + 1.0,
        "cn_ref": torch.rand(elements, elements, 5, 5) * 3.0,
    }
    numbers = torch.randint(1, elements, (ATOMS,), dtype=torch.int32)
    known = {"a1": 0.4, "a2": 4.4, "s8": 0.8, "d3_params": parameters, "neighbor_matrix": matrix}
    dispersion.dftd3(_positions(), numbers, **known)
    periodic = {"cell": _cell(1), "neighbor_matrix_shifts": shifts, "compute_virial": True}
    dispersion.dftd3(_positions(), numbers, **known, **periodic)


def _fire() -> None:
    fire = importlib.import_module("nvalchemiops.torch.fire2")
    moving = (_positions(), torch.zeros(ATOMS, 3), torch.randn(ATOMS, 3))
    state = (torch.full((MOLECULES,), 0.09), torch.full((MOLECULES,), 0.05))
    steps = torch.zeros(MOLECULES, dtype=torch.int32)
    fire.fire2_step_coord(*moving, _molecules(), *state, steps)
    cell = (_cell(MOLECULES), torch.zeros(MOLECULES, 3, 3), torch.randn(MOLECULES, 3, 3))
    fire.fire2_step_coord_cell(*moving, *cell, _molecules(), *state, steps)


def _lbfgs() -> None:
    lbfgs = importlib.import_module("nvalchemiops.torch.lbfgs")
    forces, dtype = torch.randn(ATOMS, 3), torch.float32
    state = lbfgs.lbfgs_prepare_state(ATOMS, MOLECULES, dtype=dtype)
    lbfgs.lbfgs_step_coord(_positions(), forces, state, _molecules())
    starts = torch.tensor([0, ATOMS // MOLECULES, ATOMS], dtype=torch.int32)
    state = lbfgs.lbfgs_prepare_state(ATOMS + 2 * MOLECULES, MOLECULES, dtype=dtype)
    cells = lbfgs.lbfgs_prepare_cell_state(starts, _cell(MOLECULES), dtype=dtype)
    stress = torch.randn(MOLECULES, 3, 3)
    lbfgs.lbfgs_step_coord_cell(
        _positions(), _cell(MOLECULES), forces, stress, state, cells, _molecules()
    )


def _positions() -> Tensor:
    torch.manual_seed(1)
    return torch.rand(ATOMS, 3) * SIDE


def _cell(count: int) -> Tensor:
    return (torch.eye(3) * SIDE).expand(count, 3, 3).contiguous()


def _molecules() -> Tensor:
    return torch.arange(ATOMS, dtype=torch.int32) // (ATOMS // MOLECULES)

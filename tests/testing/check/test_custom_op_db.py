"""PyTorch's own database of custom operators: what `check` finds in it, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing._internal.custom_op_db import custom_op_db

from tests._support import combinations
from torchop.testing._check.run import plan_checks, run_check
from torchop.testing._check.table import CHECKS

_STRIDES = "the fake kernel says other strides than NumPy's result has"
# The findings: read, and wrong.
EXPECTED = {
    "NumpyCubeCustomOp": {
        "dtypes.accepted": "NumPy's cube of bool is int64; the fake kernel says bool",
    },
    "NumpyMulCustomOp": {"fake": _STRIDES},
    "NumpyMulScalarCustomOp": {
        "dtypes.accepted": "NumPy's product of int64 and a float is float64",
    },
    "NumpySortCustomOp": {"fake": _STRIDES},
    "NumpyTakeCustomOp": {"fake": _STRIDES},
    "NumpyNonzeroCustomOp": {},
    "NumpyNMSCustomOp": {},
    "NumpyViewCopyCustomOp": {
        "fake": "the fake kernel takes a view, which a transposed tensor does not have",
    },
    "NumpyCatCustomOp": {
        "vmap": "the rule unpacks one of two in_dims",
        "fake": _STRIDES,
    },
    "NumpySplitCopyCustomOp": {},
    "NumpySplitCopyWithIntCustomOp": {},
}


def test_database_is_what_it_was() -> None:
    assert set(EXPECTED) <= {info.name for info in custom_op_db}


@pytest.mark.parametrize("info", custom_op_db, ids=lambda info: info.name)
def test_findings(info: Any, request: pytest.FixtureRequest) -> None:
    """All findings, and none in a quarter of the other checks, unless all are asked for."""
    most = 2 if request.config.getoption(combinations.OPTION) else 1
    samples = list(info.sample_inputs("cpu", torch.float32))[:most]
    examples = [((sample.input, *sample.args), dict(sample.kwargs)) for sample in samples]
    checks = plan_checks(info.op, examples, expected=EXPECTED.get(info.name, {}))
    # What compilers make of them is in PyTorch's own tests.
    checks = [c for c in checks if not c.kind.is_costly]
    its_share = combinations.share(CHECKS, custom_op_db.index(info), 4, request.config)
    checks = [check for check in checks if check.kind in its_share or check.expected is not None]
    results = [run_check(item) for item in checks]
    assert [(r.check, r.message) for r in results if r.outcome == "failed"] == []
    found = {r.check for r in results if r.outcome == "expected failure"}
    assert len(found) == len(EXPECTED.get(info.name, {}))

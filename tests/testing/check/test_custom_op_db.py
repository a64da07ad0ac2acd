"""Check the operators in PyTorch's `custom_op_db`. Some of them have known faults.

Uses private names.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing._internal.custom_op_db import custom_op_db

from tests._support import combinations
from torchop.testing._check.run import plan_checks, run_check
from torchop.testing._check.table import CHECKS

_STRIDES = "the fake kernel says other strides than NumPy's result has"
# Maps each operator with known faults to the checks that fail, with the reason. Each of these
# failures has been confirmed as a bug in the operator.
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


def test_expected_findings_name_existing_operators() -> None:
    assert set(EXPECTED) <= {info.name for info in custom_op_db}


@pytest.mark.parametrize("info", custom_op_db, ids=lambda info: info.name)
def test_findings(info: Any, request: pytest.FixtureRequest) -> None:
    """Run the checks that are expected to fail, and a quarter of the others, which must pass."""
    most = 2 if request.config.getoption(combinations.OPTION) else 1
    samples = list(info.sample_inputs("cpu", torch.float32))[:most]
    examples = [((sample.input, *sample.args), dict(sample.kwargs)) for sample in samples]
    checks = plan_checks(info.op, examples)
    # Leave out the checks that compile, because PyTorch's own tests compile these operators.
    checks = [c for c in checks if not c.kind.is_costly]
    its_share = combinations.share(CHECKS, custom_op_db.index(info), 4, request.config)
    known = EXPECTED.get(info.name, {})
    found = [c for c in checks if any(map(c.is_named, known))]
    checks = [check for check in checks if check.kind in its_share or check in found]
    failed = [r for r in map(run_check, checks) if r.outcome == "failed"]
    assert {r.check: r.message for r in failed}.keys() == {check.name for check in found}

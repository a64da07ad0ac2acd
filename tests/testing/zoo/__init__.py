"""Operators that are wrong on purpose, and right ones: what `check` is measured by.

`python -m tests.testing.zoo` runs every check on each, and stock `opcheck` beside it.
"""

from tests.testing.zoo import (
    declared,
    neighbours,
    neighbours_in_detail,
    right_in_models,
    right_ones,
    right_providers,
    right_unforeseen,
    right_untuned,
    right_untuned_in_use,
    right_untuned_of_types,
    right_with_conditions,
    wrong_contracts,
    wrong_in_detail,
    wrong_in_models,
    wrong_in_use,
    wrong_memory,
    wrong_providers,
    wrong_residuals,
    wrong_subsystems,
    wrong_unforeseen,
    wrong_untuned,
    wrong_untuned_in_use,
)
from tests.testing.zoo.specimen import RIGHT, WRONG, Specimen

__all__ = [
    "RIGHT",
    "WRONG",
    "Specimen",
    "declared",
    "neighbours",
    "neighbours_in_detail",
    "right_in_models",
    "right_ones",
    "right_providers",
    "right_unforeseen",
    "right_untuned",
    "right_untuned_in_use",
    "right_untuned_of_types",
    "right_with_conditions",
    "wrong_contracts",
    "wrong_in_detail",
    "wrong_in_models",
    "wrong_in_use",
    "wrong_memory",
    "wrong_providers",
    "wrong_residuals",
    "wrong_subsystems",
    "wrong_unforeseen",
    "wrong_untuned",
    "wrong_untuned_in_use",
]

"""The programs that reproduce a failure: their literal arguments and imports.

Uses private names.
"""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor

import torchop
from torchop.testing._check.checks import results
from torchop.testing._check.program import write
from torchop.testing.probes import negative_view


def written(args: Any, kwargs: Any = None) -> tuple[str, dict[str, Any]]:
    """Return the program that reproduces a call, and the variables that it defines."""
    program = write(torch.ops.aten.sin.default, results.succeeds, args, kwargs or {}, {}, "c")
    # Replace the call by an assignment of its keyword arguments.
    kept = re.sub(
        r"succeeds\(Call\(torch.ops.aten.sin.default, args(?:, (.*))?\)\)", r"kwargs = \1", program
    )
    kept = kept.replace("kwargs = \n", "kwargs = {}\n")
    names: dict[str, Any] = {"__name__": "program"}
    exec(compile(kept, "program", "exec"), names)
    return program, names


def test_program_is_minimal() -> None:
    x = torch.tensor([1.0, math.nan])
    program = write(
        torch.ops.aten.sin.default, results.same_as_contiguous, (x,), {}, {"what": "it"}, "memory.x"
    )
    assert program.splitlines() == [
        "# memory.x",
        "from math import inf, nan",
        "import torch",
        "from torchop.testing._check.calls import Call",
        "from torchop.testing._check.checks.results import same_as_contiguous",
        "",
        "args = (torch.tensor([1.0, nan]),)",
        "same_as_contiguous(Call(torch.ops.aten.sin.default, args), what='it')",
    ]


def test_program_imports_a_public_probe_from_its_public_module() -> None:
    program = write(torch.ops.aten.sin.default, torchop.testing.opcheck, (), {}, {}, "opcheck")
    assert "from torchop.testing import opcheck\n" in program


TENSORS = {
    "matrix": torch.arange(6.0).reshape(2, 3),
    "scalar": torch.tensor(3),
    "empty": torch.empty(0, 2, dtype=torch.int16),
    "transposed": torch.arange(6.0).reshape(2, 3).t(),
    "offset": torch.arange(6)[2:],
    "strided": torch.arange(8.0)[1::2],
    "expanded": torch.ones(1).expand(3),
    "special": torch.tensor([math.nan, math.inf, -math.inf, -0.0]),
    "half": torch.tensor([0.1, 2.0], dtype=torch.half),
    "bfloat16": torch.tensor([0.1, 2.0], dtype=torch.bfloat16),
    "bool": torch.tensor([True, False]),
    "complex": torch.tensor([1 + 2j, complex(math.nan, 1)]),
    "conjugate": torch.tensor([1 + 2j]).conj(),
    "negative": negative_view(torch.tensor([1.0, 2.0])),
    "grad": torch.ones(2, requires_grad=True),
    "sparse": torch.tensor([[0.0, 1.0]]).to_sparse(),
    "long": torch.arange(1000.0).reshape(10, 100),
}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # PyTorch warns until 2.12
@pytest.mark.parametrize("name", TENSORS)
def test_tensor_is_recreated_exactly(name: str) -> None:
    tensor = TENSORS[name]
    _, names = written((tensor,))
    (again,) = names["args"]
    assert (again.dtype, again.shape, again.layout) == (tensor.dtype, tensor.shape, tensor.layout)
    assert again.requires_grad == tensor.requires_grad
    assert (again.is_conj(), again.is_neg()) == (tensor.is_conj(), tensor.is_neg())
    if tensor.layout is torch.strided:
        assert again.stride() == tensor.stride()
        assert again.storage_offset() == tensor.storage_offset()
    dense, expected = (t.detach().to_dense() for t in (again, tensor))
    torch.testing.assert_close(dense, expected, rtol=0, atol=0, equal_nan=True)


def test_other_arguments_are_recreated_exactly() -> None:
    values = [None, True, 3, 2.5, math.inf, "a\n'b", torch.float16, torch.device("cpu"), [1, [2]]]
    _, names = written((values,), {"format": torch.channels_last})
    assert names["args"] == (values,)
    assert names["kwargs"] == {"format": torch.channels_last}


def test_shared_memory_is_recreated() -> None:
    base = torch.arange(6.0)
    _, names = written((base[:4], [base[2:]], base.clone()))
    first, (second,), third = names["args"]
    first[3] = 9
    assert second[1] == 9
    assert third[3] == 3


def test_repeated_tensor_is_one_variable() -> None:
    x = torch.ones(2)
    _, names = written((x, x))
    assert names["args"][0] is names["args"][1]


def _ours(x: Tensor) -> Tensor:
    return x.clone()


def test_program_imports_the_module_that_defines_the_operator(namespace: str) -> None:
    op = torchop.custom_op(f"{namespace}::imported", _ours, mutates_args=())
    program = write(op.overload, results.succeeds, (torch.ones(1),), {}, {}, "comment")
    assert f"import {__name__}  # defines {op.name}" in program
    assert "# defines" not in written((torch.ones(1),))[0]  # PyTorch defines aten::sin


def test_program_has_a_placeholder_if_the_operator_cannot_be_imported(namespace: str) -> None:
    names: dict[str, Any] = {"__name__": "__main__", "Tensor": Tensor}
    exec("def f(x: Tensor) -> Tensor: return x.clone()", names)
    op = torchop.custom_op(f"{namespace}::typed", names["f"], mutates_args=())
    program = write(op.overload, results.succeeds, (torch.ones(1),), {}, {}, "comment")
    assert f"# Import the module that defines {op.name} here." in program


def test_comment_does_not_become_code() -> None:
    comment = "first\nimport os\r\nraise SystemExit\n" + "x" * 2000
    text = write(torch.ops.aten.sin.default, results.succeeds, (), {}, {}, comment)
    head, _, _ = text.partition("import torch\n")
    assert all(line.startswith("# ") for line in head.splitlines())
    assert len(head) < 700


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool, torch.complex64])
def test_large_tensors_are_replaced_by_random_numbers(dtype: torch.dtype) -> None:
    tensor = (torch.arange(600_000) % 7).to(dtype).view(2, -1).T
    text, names = written((tensor,))
    assert len(text) < 2000
    assert "# 600000 random elements replace those that failed." in text
    (again,) = names["args"]
    assert (again.shape, again.stride(), again.dtype) == (tensor.shape, tensor.stride(), dtype)
    if dtype is torch.int64:
        assert (int(again.min()), int(again.max())) == (0, 6)

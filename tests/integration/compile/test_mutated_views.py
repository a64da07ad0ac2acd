from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._dynamo.exc
from torch import Tensor
from torch.testing import assert_close

import torchop
from tests._support.common import on_both
from tests.integration.compile.graphs import BACKENDS
from tests.integration.compile.mutating import FORMS, define

TYPED_VIEWS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "real": lambda x, z: z.real,
    "imag of a part": lambda x, z: z[1:3].imag,
    "view_as_real": lambda x, z: torch.view_as_real(z),
    "view_as_complex": lambda x, z: torch.view_as_complex(x.view(2, 2)),
    "view of bits": lambda x, z: x.view(torch.int32)[1:],
    "view of halves": lambda x, z: x.view(torch.int16)[::2],
}


@pytest.mark.pairwise
@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", TYPED_VIEWS)
def test_views_of_another_type_are_written(namespace, name, form, backend):
    write = define(form, namespace, torchop)

    def function(x: Tensor, z: Tensor) -> Any:
        target = TYPED_VIEWS[name](x, z)
        result = write(target, torch.ones_like(target))
        return None if result is None else result + 1

    def tensors() -> tuple[Tensor, Tensor]:
        return torch.arange(4.0), torch.arange(4) * (1 + 2j)

    ours, expected = tensors(), tensors()
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    if name == "view_as_complex" and backend == "inductor":
        # Inductor cannot compile any operator that mutates a complex tensor, so expect its error.
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="was not removed"):
            compiled(*ours)
        return
    assert_close(compiled(*ours), function(*expected))
    assert_close(ours, expected)


def test_a_view_of_another_type_with_its_base_is_rejected(namespace):
    @torchop.custom_op(f"{namespace}::both", mutates_args={"a", "b"})
    def both(a: Tensor, b: Tensor) -> None:
        a.add_(1)
        b.mul_(2)

    compiled = torch.compile(lambda z: both(z.real, z.imag), backend="aot_eager", fullgraph=True)
    with pytest.raises(
        torch._dynamo.exc.BackendCompilerFailed,
        match=rf"{namespace}::both was called with mutated arguments that may share .* \(a, b\)",
    ):
        compiled(torch.ones(2, dtype=torch.complex64))


def test_pytorch_gets_the_type_of_a_view_wrong(namespace):
    def scenario(library, namespace):
        types = []

        @library.custom_op(f"{namespace}::op", mutates_args={"x"})
        def op(x: Tensor) -> None:
            types.append(x.dtype)

        @torch.compile(backend="aot_eager", fullgraph=True)
        def function(x: Tensor) -> None:
            op(torch.view_as_complex(x))

        function(torch.ones(2, 2))
        return types

    assert on_both(scenario, namespace) == ([torch.complex64], [torch.float32])

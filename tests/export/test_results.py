"""Creating an AOTInductor package fails if a kernel's results differ from the fake kernel's."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram

import torchop
from tests._support import opaque_types
from tests._support.devices import BACKEND
from torchop.export.packages import aoti_package, load_package
from torchop.export.results import check_results

CONFIGS = {
    "aot_inductor.compile_wrapper_opt_level": "O0",
    "aot_inductor.precompile_headers": False,
}


def _program(function: Callable[[Tensor], Any], x: Tensor, **options: Any) -> ExportedProgram:
    class Inner(torch.nn.Module):
        def forward(self, x: Tensor) -> Any:
            return function(x)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()
            self.register_buffer("count", torch.zeros(1))

        def forward(self, x: Tensor) -> Any:
            assert isinstance(self.count, Tensor)
            self.count.add_(1)
            return self.inner(x)

    return torch.export.export(Model(), (x,), **options)


def _half(x: Tensor) -> Tensor:
    return x[: x.shape[0] // 2].clone()


# For each difference: a schema, a kernel, a fake kernel that does not match the kernel, and the
# error message.
LIES: dict[str, tuple[str, Any, Any, str]] = {
    "shape": (
        "(Tensor x) -> Tensor",
        _half,
        torch.empty_like,
        r"shape \[4, 2\] for output 0, but the kernel returned \[2, 2\]",
    ),
    "dtype": (
        "(Tensor x) -> Tensor",
        lambda x: x.double(),
        torch.empty_like,
        r"dtype torch.float32 for output 0, but the kernel returned torch.float64",
    ),
    "strides": (
        "(Tensor x) -> Tensor",
        lambda x: x.t().contiguous().t(),
        torch.empty_like,
        r"strides \[2, 1\] for output 0, but the kernel returned \[1, 4\]",
    ),
    "dimensions": (
        "(Tensor x) -> Tensor",
        lambda x: x[None].clone(),
        torch.empty_like,
        "number of dimensions 2 for output 0, but the kernel returned 3",
    ),
    "a list": (
        "(Tensor x) -> Tensor[]",
        lambda x: [x.clone()],
        lambda x: [torch.empty_like(x), torch.empty_like(x)],
        r"output 0\[0\], output 0\[1\], but the kernel returned output 0\[0\]",
    ),
    "the second result": (
        "(Tensor x) -> (Tensor, Tensor)",
        lambda x: (x.clone(), _half(x)),
        lambda x: (torch.empty_like(x), torch.empty_like(x)),
        "shape .* for output 1",
    ),
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_kernel_that_differs_from_its_fake_kernel_is_refused(namespace, lie, dynamic):
    schema, kernel, fake, message = LIES[lie]
    op = torchop.custom_op(f"{namespace}::op", kernel, mutates_args=(), schema=schema)
    op.register_fake(fake)
    shapes = ({0: Dim("rows")},) if dynamic else None
    program = _program(lambda x: op(x), torch.ones(4, 2), dynamic_shapes=shapes)
    with pytest.raises(torchop.FakeKernelError, match=message) as caught:
        aoti_package(program)
    assert str(caught.value).startswith(f"{namespace}::op: its fake kernel returned")


def test_results_of_stock_operators_are_compared(namespace):
    with torch.library._scoped_library(namespace, "FRAGMENT") as library:
        library.define("op(Tensor x) -> Tensor")
        library.impl("op", _half, BACKEND)
        library.impl("op", torch.empty_like, "Meta")
        op = getattr(torch.ops, namespace).op
        program = _program(lambda x: op(x).view(x.shape), torch.ones(4, 2))
        with pytest.raises(torchop.FakeKernelError, match=f"{namespace}::op: its fake kernel"):
            aoti_package(program)


def test_the_comparison_leaves_no_trace(namespace):
    @torchop.custom_op(f"{namespace}::op", mutates_args=("x",))
    def op(x: Tensor) -> Tensor:
        return x.add_(torch.rand_like(x)).clone()

    op.register_fake(torch.empty_like)
    x = torch.zeros(4, 2)
    program = _program(lambda x: op(x), x)
    before = torch.get_rng_state()
    check_results(program)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(x, torch.zeros(4, 2))
    assert torch.equal(program.state_dict["count"], torch.zeros(1))


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch.export reads `.grad`
@pytest.mark.parametrize("buffer", ["expanded", "made in inference mode", "transposed"])
def test_buffers_and_inputs_that_cannot_be_written_or_copied(namespace, buffer):
    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    op.register_fake(torch.empty_like)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            with torch.inference_mode(buffer == "made in inference mode"):
                value = torch.zeros(1).expand(3, 3) if buffer == "expanded" else torch.zeros(3, 3)
            self.register_buffer("value", value.t() if buffer == "transposed" else value)

        def forward(self, x: Tensor) -> Tensor:
            return op(self.value) + x

    # Pass an input with an autograd history, which `deepcopy` rejects.
    x = torch.ones(3, 3, requires_grad=True) * 2
    model = Model()
    program = torch.export.export(model, (x,))
    check_results(program)  # a warning would fail the test
    assert program.state_dict["value"].stride() == model.value.stride()


def test_sizes_that_depend_on_data_are_not_compared(namespace):
    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor) -> Tensor:
        return x.nonzero().contiguous()

    @op.register_fake
    def _(x: Tensor) -> Tensor:
        return x.new_empty((torch.library.get_ctx().new_dynamic_size(), x.ndim), dtype=torch.int64)

    check_results(_program(lambda x: op(x), torch.ones(4, 2)))


def test_a_program_that_cannot_run_is_not_compared(namespace):
    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor) -> Tensor:
        raise OSError("no device")

    op.register_fake(torch.empty_like)
    program = _program(lambda x: op(x), torch.ones(4, 2))
    with pytest.warns(UserWarning, match="were not compared .* raised OSError .*: no device"):
        check_results(program)


def test_a_result_that_no_package_can_hold_names_the_operator(namespace):
    schema = "(Tensor x) -> (Tensor, float)"
    op = torchop.custom_op(
        f"{namespace}::op", lambda x: (x.clone(), 0.5), mutates_args=(), schema=schema
    )
    op.register_fake(lambda x: (torch.empty_like(x), 0.5))
    program = _program(lambda x: op(x)[0] * op(x)[1], torch.ones(4, 2))
    with pytest.raises(RuntimeError, match=f"{namespace}::op returns Tensor, float. An operator"):
        aoti_package(program, inductor_configs=CONFIGS)


@pytest.mark.exhaustive  # compiles a package
# Ignore the warning, because this process defines the Python kernels that the package calls.
@pytest.mark.filterwarnings("ignore:.*calls Python kernels:UserWarning")
def test_two_lists_of_tensors(namespace, tmp_path):
    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        return [x + 1], [x + 2, x + 3]

    op.register_fake(lambda x: ([torch.empty_like(x)], [torch.empty_like(x), torch.empty_like(x)]))

    def function(x: Tensor) -> list[Tensor]:
        first, second = op(x)
        return [*first, *second]

    program = _program(function, torch.ones(4, 2), dynamic_shapes=({0: Dim("rows")},))
    path = aoti_package(program, tmp_path / "model.pt2", inductor_configs=CONFIGS)
    results = load_package(path)(torch.ones(3, 2))
    assert [result[0, 0].item() for result in results] == [2, 3, 4]


def test_constants_that_cannot_be_read_again_are_refused(namespace, tmp_path):
    @torchop.custom_op(f"{namespace}::scale", mutates_args=())
    def scale(x: Tensor, factor: opaque_types.Constant) -> Tensor:
        return x * factor.number

    scale.register_fake(lambda x, factor: torch.empty_like(x))

    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return scale(x, opaque_types.Constant(3))

    program = torch.export.export(Model(), (torch.ones(2),))
    path = tmp_path / "model.pt2"
    for write in (torchop.export.save, torchop.export.aoti_package):
        with pytest.raises(TypeError, match=r"cannot store the constant .* of the class Constant"):
            write(program, path)
    assert not path.exists()


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("mutates", [False, True])
def test_numbers_that_packages_cannot_contain_are_refused(namespace, tmp_path, value, mutates):
    @torchop.custom_op(f"{namespace}::clamp", mutates_args=("x",) if mutates else ())
    def clamp(x: Tensor, limits: list[float]) -> Tensor:
        return x.clamp(max=limits[0])

    clamp.register_fake(lambda x, limits: torch.empty_like(x))

    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return clamp(x, [value])

    program = torch.export.export(Model(), (torch.ones(2),))
    path = tmp_path / "model.pt2"
    for written in (program, program.run_decompositions({})):
        with pytest.raises(ValueError, match=rf"{namespace}.*{value}.*Pass None instead"):
            torchop.export.aoti_package(written, path)
    assert not path.exists()

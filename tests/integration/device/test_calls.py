"""Native calls on a device behave like dispatched calls and like calls of torch.library."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Optional

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor

from tests._support.common import needs_native
from tests._support.devices import STOCK_AUTOCASTS_ALL
from tests.integration.device import arms, target
from tests.integration.device.arms import error_of
from tests.integration.device.target import FIRST, SECOND, TYPE

pytestmark = needs_native

Define = Callable[..., Any]


def ones(device: str = SECOND, **options: Any) -> Tensor:
    return torch.ones(2, device=device, **options)


def scale(define: Define, **options: Any) -> Any:
    """Define an operator that multiplies, and whose kernel and rules note the current stream."""

    @define("scale", mutates_args=(), **options)
    def scale(x: Tensor, by: float = 2.0) -> Tensor:
        target.note(f"kernel at {target.current_place()}")
        return x * by

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        target.note(f"setup_context at {target.current_place()}")
        ctx.save_for_backward(output)
        ctx.by = inputs[1]

    def backward(ctx: Any, grad: Tensor) -> Any:
        target.note(f"backward at {target.current_place()}")
        assert ctx.saved_tensors[0].device == grad.device
        return grad * ctx.by, None

    scale.register_autograd(backward, setup_context=setup_context)
    scale.register_fake(lambda x, by=2.0: torch.empty_like(x))
    return scale


UNARY = "(Tensor x) -> Tensor"


def _double(x: Tensor) -> Tensor:
    return x * 2


@functools.cache
def side_stream() -> torch.Stream:
    """Return the same stream in all three runs, because new streams have different numbers."""
    return torch.Stream(SECOND)


def plain(define: Define) -> Any:
    op = scale(define)
    return [op(ones()), op(ones(FIRST), 3.0), op(x=ones()), op(ones("cpu"))]


def through_torch_ops(define: Define) -> Any:
    op = scale(define)
    packet = getattr(torch.ops, op._namespace).scale
    return [packet(ones()), packet.default(ones()), packet(ones(), by=3.0)]


def kernels_by_device(define: Define) -> Any:
    @define("where", mutates_args=(), device_types="cpu")
    def where(x: Tensor) -> Tensor:
        return x + 1

    where.register_kernel(TYPE)(lambda x: x + 2)
    return [where(ones()), where(ones("cpu"))]


def two_devices_of_a_type(define: Define) -> Any:
    @define("pick", mutates_args=())
    def pick(x: Tensor, y: Tensor) -> Tensor:
        return y.clone()

    return [pick(ones(FIRST), ones(SECOND)), pick(ones(SECOND), ones(FIRST))]


def a_number_on_the_host(define: Define) -> Any:
    @define("add", mutates_args=())
    def add(x: Tensor, y: Tensor) -> Tensor:
        return x + y

    number = torch.tensor(2.0)
    return [add(ones(), number), add(number, ones()), error_of(lambda: add(ones(), ones("cpu")))]


def the_current_device_and_stream(define: Define) -> Any:
    op = scale(define)
    x = ones(requires_grad=True)
    with target.module().device(SECOND), target.module().stream(side_stream()):
        y = op(x)
        y.register_hook(lambda grad: target.note(f"hook at {target.current_place()}"))
    target.note(f"after at {target.current_place()}")
    y.sum().backward()
    return [y, x.grad]


def gradients(define: Define) -> Any:
    op = scale(define)
    x = ones(requires_grad=True)
    y = op(op(x), 3.0)
    (first,) = torch.autograd.grad((y * y).sum(), x, create_graph=True)
    first.sum().backward()
    z = ones(FIRST, requires_grad=True)
    (op(z).sum().to(SECOND) + op(x).sum()).backward()
    return [y, first, x.grad, z.grad]


def a_gradient_on_the_host(define: Define) -> Any:
    """The formula returns a CPU gradient, which autograd sums to the shape of the input.

    Autograd moves the sum to the device if it is 0-dim, and raises otherwise.
    """
    results: list[Any] = []
    for shape in ((), (3,)):
        op = define("number" + "s" * len(shape), _double, mutates_args=(), schema=UNARY)
        op.register_autograd(lambda ctx, grad: torch.ones(3))
        x = torch.ones(shape, device=SECOND, requires_grad=True)
        op(x)
        if shape:
            results.append(isinstance(error_of(op(x).sum().backward), RuntimeError))
        else:
            op(x).backward()
            results.append(x.grad)
    return results


def threads(define: Define) -> Any:
    op = scale(define)
    results: list[Any] = [None, None]

    def work(number: int) -> None:
        with target.module().device(number % target.COUNT):
            x = ones(TYPE, requires_grad=True)
            for _ in range(20):
                y = op(x, float(number))
            y.sum().backward()
            results[number] = y, x.grad

    op(ones())  # prepare the operator in the main thread
    for number in range(2):
        thread = threading.Thread(target=work, args=(number,))
        thread.start()
        thread.join()
    return results


def autocast_with_a_rule(define: Define) -> Any:
    op = scale(define)
    op.register_autocast(TYPE, torch.bfloat16)
    with torch.autocast(TYPE, torch.float16):
        inside = op(ones())
        with torch.autocast(TYPE, enabled=False):
            off = op(ones())
    with torch.autocast("cpu", torch.bfloat16):
        other = op(ones())

    @define("see", mutates_args=())
    def see(x: Tensor, number: Tensor) -> Tensor:
        seen.append((x.dtype, number.dtype))
        return x + number

    see.register_autocast(TYPE, torch.bfloat16)
    seen: list[Any] = []
    # Autocast for this device type casts only the first argument, because the second is on the CPU.
    with torch.autocast(TYPE, torch.float16):
        mixed = see(ones(), torch.tensor(2.0))
    return [inside, off, other, op(ones()), mixed, seen]


def autocast_without_a_rule(define: Define) -> Any:
    @define("product", mutates_args=())
    def product(x: Tensor) -> Tensor:
        return x @ x

    with torch.autocast(TYPE, torch.bfloat16):
        return product(torch.ones(2, 2, device=TYPE))


def a_device_argument(define: Define) -> Any:
    @define("make", mutates_args=())
    def make(n: int, device: torch.device) -> Tensor:
        return torch.full((n,), 2.0, device=device)

    @define("make_like", mutates_args=())
    def make_like(x: Tensor, device: Optional[torch.device] = None) -> Tensor:
        return torch.full(x.shape, 2.0, device=device or x.device)

    device = torch.device(SECOND)
    return [
        make(2, device),
        make(2, torch.device("cpu")),
        make_like(ones()),
        make_like(ones(FIRST), device),
        make_like(ones("cpu"), device=device),
    ]


def a_default_device(define: Define) -> Any:
    @define("append", mutates_args=())
    def append(x: Tensor) -> Tensor:
        return x + torch.ones(2)

    with torch.device(SECOND):
        # PyTorch runs the kernel without the mode that sets the default device, so the kernel's new
        # tensor is on the CPU.
        inside = append(torch.ones(2, device="cpu"))
        wrong = error_of(lambda: append(torch.ones(2)))
    return [inside, wrong, error_of(lambda: append(ones())), append(ones("cpu"))]


def mutation(define: Define) -> Any:
    @define("add_", mutates_args=("x", "others"))
    def add_(x: Tensor, others: list[Tensor], y: Tensor) -> None:
        for tensor in (x, *others):
            tensor.add_(y)

    x, other, base = ones(), ones(FIRST), torch.ones(2, 2, device=SECOND)
    add_(x, [], ones())
    add_(base[0], [x], ones())
    with torch.inference_mode():
        inference = ones()
        add_(inference, [], ones())
    return [x, other, base, inference]


def lists_and_optional_tensors(define: Define) -> Any:
    @define("total", mutates_args=())
    def total(xs: list[Tensor], y: Optional[Tensor] = None) -> tuple[Tensor, list[Tensor]]:
        result = sum(xs[1:], xs[0].clone())
        return (result if y is None else result + y), [x * 2 for x in xs]

    x = ones(requires_grad=True)
    total.register_autograd(
        lambda ctx, grad, grads: ([grad + g * 2 for g in grads], None),
        setup_context=lambda ctx, inputs, output: None,
    )
    result, parts = total([x, ones()], ones())
    (result.sum() + parts[0].sum()).backward()
    return [total([ones(), ones()]), result, parts, x.grad]


def no_formula(define: Define) -> Any:
    @define("opaque", mutates_args=())
    def opaque(x: Tensor) -> Tensor:
        return x * 2

    x = ones(requires_grad=True)
    return [opaque(x).requires_grad, opaque(x.detach())]


def views_of_conjugates(define: Define) -> Any:
    op = scale(define)
    z = torch.view_as_complex(torch.tensor([[1.0, 2.0]], device=TYPE))
    return [op(z.conj()), op(z.conj().imag), op(z)]


def transforms(define: Define) -> Any:
    op = scale(define)
    op.register_vmap(lambda info, in_dims, x, by=2.0: (op(x, by), 0))
    rows = torch.ones(3, 2, device=SECOND)
    return [torch.vmap(op)(rows), torch.func.functionalize(op)(rows)]


def a_checkpoint(define: Define) -> Any:
    op = scale(define)
    x = ones(requires_grad=True)

    def body(x: Tensor) -> Tensor:
        return op(torch.nn.functional.dropout(op(x), 0.5))

    for reentrant in (False, True):
        y = torch.utils.checkpoint.checkpoint(body, x, use_reentrant=reentrant)
        y.sum().backward()
    return [y, x.grad]


def compiled(define: Define) -> Any:
    op = scale(define)
    x = ones(requires_grad=True)
    program = torch.compile(lambda x: op(x) + 1, backend="aot_eager", fullgraph=True)
    program(x.detach())  # compile first, because AOT Autograd then calls `op` under a mode
    program(x.detach())
    y = program(x)
    program(x).sum().backward()
    return [y, x.grad]


def exported(define: Define) -> Any:
    op = scale(define)

    class Module(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return op(x)

    program = torch.export.export(Module(), (ones(),))
    return [program.module()(ones()), "scale" in str(program.graph)]


# Maps each scenario to the number of calls, by counter, that its run with native calls must make.
# None means that at least one call must be native.
SCENARIOS: dict[Callable[[Define], Any], dict[str, int] | None] = {
    plain: {"native": 4},
    through_torch_ops: {"native": 2},  # the first call of `packet` is not native
    kernels_by_device: {"native": 2},
    two_devices_of_a_type: {"native": 2},
    a_number_on_the_host: {"backends": 3},
    the_current_device_and_stream: {"gradient": 1},
    gradients: {"native": 3, "gradient": 1},
    a_gradient_on_the_host: {"native": 2, "gradient": 2},
    threads: None,
    autocast_with_a_rule: None,
    autocast_without_a_rule: {"native": 1},
    a_device_argument: {"native": 3, "backends": 2},
    a_default_device: {"function_mode": 2, "native": 4},
    mutation: {"native": 3},
    lists_and_optional_tensors: {"native": 1, "gradient": 1},
    no_formula: None,
    views_of_conjugates: {"keys": 2, "native": 1},
    transforms: {"mode": 3},
    a_checkpoint: None,
    compiled: None,
    exported: None,
}


ON_ACCELERATORS = (
    the_current_device_and_stream,
    threads,
    a_number_on_the_host,
    a_gradient_on_the_host,
    a_default_device,
)
LACKING = {
    **dict.fromkeys(ON_ACCELERATORS, target.needs_accelerator),
    mutation: pytest.mark.needs_torch("2.13", "stock counts what its kernel writes"),
    autocast_with_a_rule: pytest.mark.xfail(
        not STOCK_AUTOCASTS_ALL and target.TYPE not in ("cpu", "cuda"),
        reason="torch.library knows autocast of two devices",
        strict=True,
    ),
}


@pytest.mark.parametrize(
    "scenario",
    [pytest.param(s, marks=LACKING.get(s, ()), id=s.__name__) for s in SCENARIOS],
)
def test_native_dispatched_and_stock_runs_agree(
    namespace: str, scenario: Callable[[Define], Any]
) -> None:
    native, dispatched, stock = (
        run(scenario, namespace) for run in (arms.native, arms.dispatched, arms.stock)
    )
    assert native.outcome == dispatched.outcome
    assert native.outcome == stock.outcome
    assert native.trace == dispatched.trace
    assert not native.waits() - stock.waits()
    expected = SCENARIOS[scenario]
    # Don't compare the counts on the CPU, where no call falls back to the dispatcher because of its
    # device.
    if target.TYPE == "cpu":
        return
    if expected is None:
        assert native.calls["native"] > 0
    else:
        assert native.calls == expected

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import pytest
import torch
import torch.library
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import torchop
from tests._support.devices import TYPE
from torchop import CustomOp

VALUES = {"flop_formula": lambda x: 7}


def define(namespace: str) -> CustomOp[..., Tensor]:
    @torchop.custom_op(f"{namespace}::project", mutates_args=())
    def project(x: Tensor, weight: Tensor, scale: float = 1.0) -> Tensor:
        return x @ weight * scale

    project.register_fake(lambda x, weight, scale: x.new_empty(x.shape[0], weight.shape[1]))
    return project


def flops(x: torch.Size, weight: torch.Size, scale: float) -> int:
    return 2 * x[0] * x[1] * weight[1] + (x[0] * weight[1] if scale != 1.0 else 0)


def counted(function: Callable[..., Any], *args: Any, **kwargs: Any) -> int:
    with FlopCounterMode(display=False) as counter:
        function(*args, **kwargs)
    return counter.get_total_flops()


X, WEIGHT = torch.ones(2, 3), torch.ones(3, 5)


def test_counter_uses_the_formula(namespace: str) -> None:
    project = define(namespace)
    assert project.register_flop_formula(flops) is flops
    assert counted(project, X, WEIGHT) == 60
    assert counted(project, X, WEIGHT, 2.0) == 70
    assert counted(project, X, weight=WEIGHT, scale=2.0) == 70
    assert counted(getattr(torch.ops, namespace).project, X, WEIGHT) == 60
    module = torch.nn.Linear(3, 3)
    with FlopCounterMode(display=False) as counter:
        project(module(X), WEIGHT)
    names = {str(packet): count for packet, count in counter.get_flop_counts()["Global"].items()}
    assert names == {"aten.addmm": 36, f"{namespace}.project": 60}


@pytest.mark.parametrize("overload", ["", ".other"])
def test_an_operator_without_a_formula_is_reported_once(namespace: str, overload: str) -> None:
    name = f"{namespace}::square{overload}"
    square = torchop.custom_op(
        name, lambda x: x * x, schema="(Tensor x) -> Tensor", mutates_args=()
    )
    with pytest.warns(UserWarning, match=f"^{name}: FlopCounterMode counts 0 operations"):
        assert counted(square, X) == 0
    assert counted(square, X) == 0  # warnings are errors here
    assert counted(square.overload, X) == 0
    square.register_flop_formula(lambda x: 7)
    assert counted(square, X) == 7


def test_operators_of_pytorch_and_of_its_custom_op_are_not_reported(namespace: str) -> None:
    @torch.library.custom_op(f"{namespace}::square", mutates_args=())
    def square(x: Tensor) -> Tensor:
        return x * x

    assert counted(lambda: square(X) + X.sin()) == 0


def test_a_formula_may_see_the_result_and_the_tensors(namespace: str) -> None:
    project = define(namespace)
    project.register_flop_formula(lambda x, weight, scale, out_shape: out_shape.numel())
    assert counted(project, X, WEIGHT) == 10
    project.register_flop_formula(
        lambda x, weight, scale, *, out_val: x.element_size() * out_val.numel(), get_raw=True
    )
    assert counted(project, X, WEIGHT) == 40
    project.register_flop_formula(lambda *args, **kwargs: len(args) + len(kwargs))
    assert counted(project, X, WEIGHT) == 4, "as PyTorch's own are called: with out_shape"


class Split(NamedTuple):
    halves: list[Tensor]
    rest: Tensor | None


def test_a_formula_sees_a_result_in_its_structure(namespace: str) -> None:
    @torchop.custom_op(f"{namespace}::split", mutates_args=())
    def split(x: Tensor, rest: Literal["keep", "drop"] = "drop") -> Split:
        return Split([x[:1].clone(), x[1:].clone()], x + 1 if rest == "keep" else None)

    seen: list[Any] = []

    def formula(x: torch.Size, rest: str, *, out_shape: Split) -> int:
        seen.append(out_shape)
        return 0 if out_shape.rest is None else out_shape.rest.numel()

    split.register_flop_formula(formula)
    x = torch.ones(3)
    assert [counted(split, x, "keep"), counted(split, x)] == [3, 0]
    assert seen == [Split([(1,), (2,)], (3,)), Split([(1,), (2,)], None)]  # type: ignore[list-item,arg-type]

    def raw(x: Tensor, rest: str, *, out_val: Split) -> int:
        return sum(half.numel() for half in out_val.halves)

    split.register_flop_formula(raw, get_raw=True)
    assert counted(split, x) == 3


def test_other_forms_count_like_the_operator(namespace: str) -> None:
    project = define(namespace)
    project.register_flop_formula(flops)
    # Adding an overload changes the hash of the packet, under which torch.utils.flop_counter stores
    # the formula, so PyTorch no longer finds it. torchop must still find it.
    project.derive_out()
    assert counted(project, X, WEIGHT) == 60
    assert counted(project.out, X, WEIGHT, 2.0, out=torch.empty(2, 5)) == 70


def test_overloads_have_formulas_of_their_own(namespace: str) -> None:
    torchop.define(f"{namespace}::sum", "(Tensor x) -> Tensor")
    torchop.define(f"{namespace}::sum.dim", "(Tensor x, int dim) -> Tensor")
    torchop.define(f"{namespace}::sum.keep", "(Tensor x, *, bool keep) -> Tensor")
    torchop.impl(f"{namespace}::sum", TYPE, lambda x: x.sum())
    torchop.impl(f"{namespace}::sum.dim", TYPE, lambda x, dim: x.sum(dim))
    torchop.impl(f"{namespace}::sum.keep", TYPE, lambda x, *, keep: x.sum(0, keep))
    rule = torchop.get_rule("flop_formula")
    rule.register(f"{namespace}::sum", lambda x: 1)
    rule.register(f"{namespace}::sum.dim", lambda x, dim: 2)
    rule.register(f"{namespace}::sum.keep", lambda x, *, keep: 3)
    packet = getattr(torch.ops, namespace).sum
    counts = (
        counted(packet, X),
        counted(packet, X, 0),
        counted(packet, X, dim=0),
        counted(packet, X, keep=True),
    )
    assert counts == (1, 2, 2, 3)


def test_a_call_that_saves_residuals_counts_like_the_others(namespace: str) -> None:
    def double(x: Tensor) -> tuple[Tensor, Tensor]:
        return torchop.residuals((x * 2, x * 3), x.clone())

    op = torchop.custom_op(f"{namespace}::op", double, mutates_args=(), residuals={"copy": Tensor})
    op.register_autograd(
        lambda ctx, grad, other: grad * 2 + other * 3,
        setup_context=lambda ctx, inputs, output, residuals: None,
    )
    x = X.clone().requires_grad_()
    with pytest.warns(UserWarning, match=f"^{namespace}::op: FlopCounterMode counts 0"):
        assert counted(op, x) == 0
    op.register_flop_formula(lambda x, out_shape: sum(shape.numel() for shape in out_shape))
    with FlopCounterMode(display=False) as counter:
        op(x)[0].sum()
    names = {str(packet): count for packet, count in counter.get_flop_counts()["Global"].items()}
    assert names == {f"{namespace}.op": 2 * X.numel()}
    own = {getattr(torch.ops, namespace).op__with_residuals: lambda x, out_shape: len(out_shape)}
    with FlopCounterMode(display=False, custom_mapping=own) as counter:
        op(x)
    assert counter.get_total_flops() == 3


def test_deregistered_operators_leave_the_registry(namespace: str) -> None:
    project = define(namespace)
    project.register_flop_formula(flops)
    with FlopCounterMode(display=False) as started_before:
        again = define(namespace)
        again(X, WEIGHT)
    assert started_before.get_total_flops() == 0
    assert all(namespace not in str(packet) for packet in flop_registry)
    again.register_flop_formula(flops)
    assert counted(again, X, WEIGHT) == 60
    assert sum(namespace in str(packet) for packet in flop_registry) == 1
    again._definition.deregister("over")
    assert all(namespace not in str(packet) for packet in flop_registry)


def test_closing_the_library_removes_the_formula(namespace: str) -> None:
    project = define(namespace)
    library = torchop.Library(namespace, "FRAGMENT")
    torchop.get_rule("flop_formula").register(project, flops, lib=library)
    # PyTorch stores the formula in a dict under the packet. Defining another overload outside of
    # torchop changes the packet's hash, but closing the library must still remove the formula.
    stock = torch.library.Library(namespace, "FRAGMENT")
    stock.define("project.other(Tensor x) -> Tensor")
    library.close()
    assert all(namespace not in str(packet) for packet in flop_registry)
    with pytest.warns(UserWarning, match=f"^{namespace}::project: FlopCounterMode counts 0"):
        assert counted(project, X, WEIGHT) == 0
    stock._destroy()


def test_a_formula_of_another_library_stays(namespace: str) -> None:
    before = flop_registry[torch.ops.aten.mm]
    with pytest.raises(RuntimeError, match=r"aten::mm has a FLOP formula already.*custom_mapping"):
        torchop.get_rule("flop_formula").register("aten::mm", lambda self, mat2: 1)
    assert flop_registry[torch.ops.aten.mm] is before
    assert not torchop.get_rule("flop_formula").has("aten::mm")


def test_a_formula_takes_the_arguments_and_returns_an_int(namespace: str) -> None:
    project = define(namespace)
    with pytest.raises(
        torchop.RuleSignatureError, match=r"a FLOP formula is called with \(x, weight, scale\)"
    ):
        project.register_flop_formula(lambda x: 1)
    with pytest.raises(torchop.RuleSignatureError, match="must be a function, got 3"):
        project.register_flop_formula(3)  # type: ignore[type-var]
    project.register_flop_formula(lambda x, weight, scale: 1.5)
    with pytest.raises(torchop.ResultError, match=r"::project: the FLOP formula must .*got 1\.5"):
        counted(project, X, WEIGHT)

"""check_sharding passes for correct sharding rules, and fails for incorrect ones."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import torchop
from torchop.testing import OpCheckError, check_sharding

X = torch.arange(24.0).reshape(4, 6).cos()


def save_inputs(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def define(namespace: str, schema: str, function: Any, fake: Any = None, **options: Any) -> Any:
    mutates = ("x",) if "!" in schema else ()
    op = torchop.custom_op(f"{namespace}::op", function, schema=schema, mutates_args=mutates)
    op.register_fake(fake or torch.empty_like)
    return op


def sine(namespace: str) -> Any:
    op = define(namespace, "(Tensor x) -> Tensor", torch.sin)
    op.register_autograd(lambda ctx, g: g * ctx.saved_tensors[0].cos(), setup_context=save_inputs)
    return op


def matmul(namespace: str) -> Any:
    op = define(
        namespace,
        "(Tensor a, Tensor b) -> Tensor",
        torch.mm,
        lambda a, b: a.new_empty(a.shape[0], b.shape[1]),
    )

    def formula(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return op(grad, b.t()), op(a.t(), grad)

    op.register_autograd(formula, setup_context=save_inputs)
    return op


def softmax(namespace: str) -> Any:
    return define(namespace, "(Tensor x) -> Tensor", lambda x: x.softmax(-1))


def largest(namespace: str) -> Any:
    return define(
        namespace, "(Tensor x) -> Tensor", lambda x: x.amax(-1), lambda x: x.new_empty(x.shape[:-1])
    )


def added(x: Tensor, y: Tensor) -> None:
    x.add_(y)


def adding(namespace: str) -> Any:
    return define(namespace, "(Tensor(a!) x, Tensor y) -> ()", added, lambda x, y: None)


Definer = Callable[[str], Any]
RIGHT: dict[str, tuple[Definer, str, dict[str, Any], tuple[Any, ...], int]] = {
    "pointwise": (sine, "pointwise", {}, (X.requires_grad_(False),), 4),
    "its gradient": (sine, "pointwise", {}, (X.clone().requires_grad_(),), 4),
    "matmul": (
        matmul,
        "b k, k n -> b n",
        {"reduce": {"k": "sum"}, "linear": (0, 1)},
        (X.clone().requires_grad_(), X.t().clone().requires_grad_()),
        16,
    ),
    "softmax": (softmax, "... d -> ... d", {"whole": "d"}, (X,), 4),
    "uneven": (sine, "pointwise", {}, (X[:3, :5].clone().requires_grad_(),), 4),
    "one row": (sine, "pointwise", {}, (X[:1].clone().requires_grad_(),), 4),
    "maximum": (largest, "... d -> ...", {"reduce": {"d": "max"}}, (X,), 4),
    "integers": (largest, "... d -> ...", {"reduce": {"d": "max"}}, (X.mul(9).int(),), 3),
}


@pytest.mark.parametrize(("definer", "rule", "options", "args", "count"), RIGHT.values(), ids=RIGHT)
def test_right_rules_pass(
    namespace: str, definer: Definer, rule: str, options: Any, args: Any, count: int
) -> None:
    op = definer(namespace)
    op.register_sharding(rule, **options)
    assert check_sharding(op, args) == (count, [], 0)


WRONG: dict[str, tuple[Definer, str, dict[str, Any], tuple[Any, ...], str]] = {
    "softmax is not pointwise": (
        softmax,
        "pointwise",
        {},
        (X,),
        r"with x: S\(1\) result 0 is wrong, placed S\(1\): .*\(1 of 4 placements are wrong\)",
    ),
    "a maximum is no sum": (
        largest,
        "... d -> ...",
        {"reduce": {"d": "sum"}},
        (X,),
        r"with x: S\(1\) result 0 is wrong, placed P\(sum\)",
    ),
    "a sine is not linear": (
        sine,
        "... -> ...",
        {"linear": (0,)},
        (X,),
        r"with x: P\(sum\) result 0 is wrong",
    ),
    "shapes": (
        largest,
        "... d -> ... d",
        {},
        (X,),
        r"with x: R t\d+::op: the sharding rule .*dimensions of different size",
    ),
}


@pytest.mark.parametrize(
    ("definer", "rule", "options", "args", "message"), WRONG.values(), ids=WRONG
)
def test_wrong_rules_are_found(
    namespace: str, definer: Definer, rule: str, options: Any, args: Any, message: str
) -> None:
    op = definer(namespace)
    op.register_sharding(rule, **options)
    with pytest.raises(OpCheckError, match=rf"^check_sharding\({namespace}::op, .*{message}"):
        check_sharding(op, args)


def test_nan_results_of_all_ranks_agree(namespace: str) -> None:
    op = define(
        namespace, "(Tensor x) -> Tensor", lambda x: x.mean(-1), lambda x: x.new_empty(x.shape[:-1])
    )
    op.register_sharding("... d -> ...", reduce={"d": "avg"})
    assert check_sharding(op, (X[:, :0],)).placements == 4


def test_wrong_gradients_are_found(namespace: str) -> None:
    op = define(namespace, "(Tensor x) -> Tensor", lambda x: x * x.shape[0])
    op.register_autograd(lambda ctx, g: g * 4 if g.shape[0] == 4 else g, setup_context=None)
    op.register_sharding("b d -> b d", whole="b")
    assert check_sharding(op, (X.clone().requires_grad_(),)).placements == 4

    @op.register_autograd
    def _(ctx: Any, grad: Any) -> Any:
        return grad * (4 if not hasattr(grad, "placements") else 3)

    expected = "with x: R the gradient of x is wrong, placed R: "
    with pytest.raises(OpCheckError, match=expected):
        check_sharding(op, (X.clone().requires_grad_(),))


def test_written_arguments_are_compared_and_not_redistributed(namespace: str) -> None:
    op = adding(namespace)
    op.register_sharding("..., ... ->")
    report = check_sharding(op, (X, X.exp()))
    assert report.placements == 12
    assert report.refused == [f"x: P(sum), y: {y}" for y in ("R", "S(0)", "S(1)", "P(sum)")]
    op = torchop.custom_op(
        f"{namespace}::c",
        lambda x: (x.sub_(x.sum(-1, keepdim=True)), None)[1],
        schema="(Tensor(a!) x) -> ()",
        mutates_args=("x",),
    )
    op.register_fake(lambda x: None)
    op.register_sharding("pointwise")
    with pytest.raises(OpCheckError, match=r"with x: S\(1\) the written x is wrong"):
        check_sharding(op, (X,))


@dataclasses.dataclass(frozen=True)
class Options:
    scale: Tensor
    power: float = 2.0


def test_structures_lists_and_several_mesh_dimensions_are_supported(namespace: str) -> None:
    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(xs: list[Tensor], options: Options) -> tuple[Tensor, Tensor]:
        total = xs[0] + xs[1]
        return total * options.scale**options.power, total.sum(-1)

    op.register_fake(lambda xs, options: (torch.empty_like(xs[0]), xs[0].new_empty(xs[0].shape[0])))
    op.register_sharding("[b d], d -> b d, b", reduce={"d": "sum"})
    report = check_sharding(op, ([X, X.exp()], Options(X[0].exp())), mesh=(2, 2), limit=40)
    assert report.placements == 40
    assert report.skipped == 16 * 16 * 9 - 40


def test_opcheck_checks_the_rule(namespace: str) -> None:
    op = softmax(namespace)
    assert "test_sharding" not in torchop.opcheck(op, (X,))
    op.register_sharding("... d -> ... d", whole="d")
    assert torchop.opcheck(op, (X,))["test_sharding"] == "SUCCESS"
    assert torchop.opcheck(op, (X,), test_utils="test_sharding") == {"test_sharding": "SUCCESS"}
    op.register_sharding("pointwise")
    with pytest.raises(OpCheckError, match=r"test_sharding of .* with x: S\(1\) result 0 is wrong"):
        torchop.opcheck(op, (X,))


def test_excepthook_is_unchanged(namespace: str) -> None:
    before = sys.excepthook
    op = sine(namespace)
    op.register_sharding("pointwise")
    check_sharding(op, (X,))
    assert sys.excepthook is before
    with pytest.raises(ValueError, match="no argument is a tensor"):
        check_sharding(op, (1,))
    assert sys.excepthook is before


def test_call_that_cannot_be_checked_is_rejected(namespace: str) -> None:
    op = sine(namespace)
    with pytest.raises(torchop.MissingRuleError, match="has no sharding rule"):
        check_sharding(op, (X,))
    op.register_sharding("pointwise")
    with pytest.raises(ValueError, match=r"compilers cannot trace simulated ranks.*torchrun"):
        check_sharding(op, (X,), backend="aot_eager")
    optional = define(f"{namespace}b", "(Tensor? x) -> Tensor", lambda x: torch.ones(2))
    optional.register_sharding("replicate")
    with pytest.raises(ValueError, match="no argument is a tensor"):
        check_sharding(optional, (None,))


def test_arguments_must_be_a_tuple(namespace: str) -> None:
    op = define(namespace, "(Tensor x) -> Tensor", torch.sin)
    op.register_sharding("pointwise")
    with pytest.raises(TypeError, match=r"args must be a tuple.*got Tensor. For one .* \(x,\)"):
        check_sharding(op, X)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"kwargs must be a dict.*got Tensor. All others go into"):
        check_sharding(op, (X,), X)  # type: ignore[arg-type]

import warnings
from typing import List, NamedTuple, Optional

import pytest
import torch
from torch import Tensor

import torchop
from tests._support.common import on_both
from tests.rules.support import assert_only_torchop_rejects

X = torch.arange(6.0).reshape(2, 3)


def define(namespace, library=torchop):
    @library.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor, n: int = 2) -> Tensor:
        return x * n

    return op


def rule(info, in_dims, x, n=2):
    return x * n, in_dims[0]


# --------------------------------------------------------------------------------------------------
# Registration


def test_last_registered_rule_applies(namespace):
    op = define(namespace)
    op.register_vmap(rule)
    assert torch.equal(torch.vmap(op)(X), X * 2)
    op.register_vmap(lambda info, in_dims, x, n: (x * 5, in_dims[0]))
    assert torch.equal(torch.vmap(op)(X), X * 5)


def test_decorator_returns_the_function(namespace):
    def scenario(library, namespace):
        return define(namespace, library).register_vmap()(rule)

    both = on_both(scenario, namespace)
    assert both.ours is rule
    assert both.stock is None


@pytest.mark.parametrize(
    "wrong", [lambda x, n: x, lambda info, in_dims: None, lambda info, in_dims, x, *, n: x]
)
def test_function_with_other_parameters_is_refused(namespace, wrong):
    assert_only_torchop_rejects(
        namespace,
        lambda library, namespace: define(namespace, library).register_vmap(wrong),
        torchop.RuleSignatureError,
        f"{namespace}::op: a vmap rule is called with (info, in_dims, x, n)",
    )


def test_operator_with_keyword_only_tensors_takes_no_rule(namespace):
    with torchop.Library(namespace, "FRAGMENT") as library:
        library.define("op(Tensor x, *, Tensor y) -> Tensor")
        with pytest.raises(NotImplementedError, match="kwarg-only Tensor args"):
            torchop.register_vmap(f"{namespace}::op", lambda *args, **kwargs: None, lib=library)


# --------------------------------------------------------------------------------------------------
# Arguments of a rule


@pytest.mark.parametrize(
    ("in_dims", "expected"),
    [((0, None), (0, None)), ((1, None), (1, None)), ((-1, None), (1, None))],
)
def test_rule_sees_where_each_argument_is_mapped_over(namespace, in_dims, expected):
    seen = []
    op = define(namespace)

    def rule(info, dims, x, n):
        seen.append((info.batch_size, info.randomness, dims, x.shape))
        return x * n, dims[0]

    op.register_vmap(rule)
    result = torch.vmap(op, in_dims, out_dims=in_dims[0], randomness="same")(X, 3)
    assert torch.equal(result, X * 3)
    assert seen == [(X.shape[in_dims[0]], "same", expected, X.shape)]


def test_rule_sees_the_structure_of_a_list(namespace):
    seen = []

    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(xs: List[Tensor], y: Optional[Tensor] = None) -> Tensor:
        return torch.stack(xs).sum(0)

    @op.register_vmap
    def _(info, in_dims, xs, y):
        seen.append(in_dims)
        return xs[0] + xs[1], 0

    assert torch.equal(torch.vmap(lambda x: op([x, X[0]], x))(X), X + X[0])
    assert seen == [([0, None], 0)]


def test_rule_sees_keyword_only_arguments(namespace):
    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor, *, scale: float = 2.0) -> Tensor:
        return x * scale

    op.register_vmap(lambda info, in_dims, x, *, scale: (x * scale, in_dims[0]))
    assert torch.equal(torch.vmap(lambda x: op(x, scale=3.0))(X), X * 3)
    assert torch.equal(torch.vmap(op)(X), X * 2)


def test_rule_is_not_called_without_mapped_arguments(namespace):
    op = define(namespace)
    op.register_vmap(lambda info, in_dims, x, n: (_ for _ in ()).throw(AssertionError))
    assert torch.equal(torch.vmap(lambda x: x + op(X[0]))(X), X + X[0] * 2)


def test_nested_vmap_calls_the_rule_at_each_level(namespace):
    levels = []
    op = define(namespace)

    def rule(info, in_dims, x, n):
        levels.append(info.batch_size)
        return op(x, n), in_dims[0]

    op.register_vmap(rule)
    assert torch.equal(torch.vmap(torch.vmap(op))(X), X * 2)
    assert levels == [3, 2]


def test_rule_may_mutate_an_argument(namespace):
    @torchop.custom_op(f"{namespace}::op", mutates_args=("x",))
    def op(x: Tensor) -> None:
        x.add_(1)

    op.register_vmap(lambda info, in_dims, x: (op(x), None))
    x = X.clone()
    torch.vmap(op, out_dims=None)(x)
    assert torch.equal(x, X + 1)


def test_exception_of_a_rule_passes_through_and_the_operator_stays_usable(namespace):
    op = define(namespace)

    @op.register_vmap
    def _(info, in_dims, x, n):
        raise ZeroDivisionError("in the rule")

    with pytest.raises(ZeroDivisionError, match="in the rule"):
        torch.vmap(op)(X)
    op.register_vmap(rule)
    assert torch.equal(torch.vmap(op)(X), X * 2)


# --------------------------------------------------------------------------------------------------
# Results of a rule


@pytest.mark.parametrize("out_dim", [0, 1, -1, None])
def test_output_is_mapped_over_where_the_rule_says(namespace, out_dim):
    op = define(namespace)
    moved = X[0] if out_dim is None else X.movedim(0, out_dim)
    op.register_vmap(lambda info, in_dims, x, n: (moved.clone(), out_dim))
    expected = X[0].expand(2, 3) if out_dim is None else X
    assert torch.equal(torch.vmap(op)(X), expected)


@pytest.mark.parametrize(
    "returned",
    [
        ((X.clone(), X * 2), 0),
        ((X.clone(), X * 2), (0, 0)),
        ([X.clone(), X * 2], [0, 0]),
        ((X.clone(), X.T * 2), (0, 1)),
    ],
)
def test_dimensions_may_be_given_once_or_for_each_output(namespace, returned):
    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.clone(), x.clone()

    op.register_vmap(lambda info, in_dims, x: returned)
    first, second = torch.vmap(op)(X)
    assert torch.equal(first, X)
    assert torch.equal(second, X * 2)


@pytest.mark.parametrize("dims", [0, [0, 0]])
def test_list_of_outputs_is_mapped_over(namespace, dims):
    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor) -> List[Tensor]:
        return [x.clone(), x.clone()]

    op.register_vmap(lambda info, in_dims, x: ([x.clone(), x * 2], dims))
    first, second = torch.vmap(op)(X)
    assert torch.equal(first, X)
    assert torch.equal(second, X * 2)


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (X, "to have two returns, an output and out_dims"),
        ((X, 0, 0), "to have two returns"),
        (None, "to have two returns"),
        (("x", 0), "the vmap rule must return a Tensor"),
        (((X, X, X), 0), "the vmap rule must return a Tensor"),
        ((X, 5), "out_dims=5 for an output of 2 dimensions"),
        ((X, "0"), "out_dims='0' for an output of 2 dimensions"),
        ((X, (0, 0)), r"out_dims=\(0, 0\) for an output of 2 dimensions"),
        ((X[:1], 0), r"out_dims=0 for an output of shape \[1, 3\] in a batch of size 2"),
    ],
)
def test_wrong_result_of_a_rule_names_the_operator_and_the_mistake(namespace, returned, words):
    op = define(namespace)
    op.register_vmap(lambda info, in_dims, x, n: returned)
    with pytest.raises(torchop.ResultError, match=f"{namespace}::op: .*{words}"):
        torch.vmap(op)(X)


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (lambda info, in_dims, x, n: (x, in_dims[0]), "output 0 is input 'x' itself"),
        (lambda info, in_dims, x, n: (x.view(x.shape), 0), "output 0 shares memory with input 'x'"),
    ],
)
def test_a_rule_that_returns_its_input_is_refused(namespace, rule, words):
    op = define(namespace)
    op.register_vmap(rule)
    message = rf"{namespace}::op: vmap rule: {words}, in a call with 'x' of shape \[2, 3\]"
    with pytest.raises(torchop.AliasError, match=message):
        torch.vmap(op)(X)
    compiled = torch.compile(torch.vmap(op), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="vmap rule: output 0"):
        compiled(X)


def test_a_rule_that_returns_its_input_is_refused_in_nested_transforms(namespace):
    op = define(namespace)
    op.register_vmap(lambda info, in_dims, x, n: (x, in_dims[0]))
    with pytest.raises(torchop.AliasError, match=f"{namespace}::op: vmap rule: output 0 is input"):
        torch.vmap(torch.vmap(op))(X[None])
    op.register_vmap(lambda info, in_dims, x, n: (x.clone(), in_dims[0]))
    assert torch.equal(torch.vmap(torch.vmap(op))(X[None]), X[None])


def test_a_rule_of_an_operator_with_views_may_return_them(namespace):
    @torchop.custom_op(f"{namespace}::view", mutates_args=(), schema="(Tensor(a) x) -> Tensor(a)")
    def view(x):
        return x.view(-1)

    view.register_vmap(lambda info, in_dims, x: (x.view(x.shape), in_dims[0]))
    assert torch.equal(torch.vmap(view)(X), X)


@pytest.mark.parametrize("outputs", [(X,), (X, X, X), X])
def test_wrong_number_of_outputs_of_a_rule_is_refused(namespace, outputs):
    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.clone(), x.clone()

    op.register_vmap(lambda info, in_dims, x: (outputs, 0))
    with pytest.raises(torchop.ResultError, match=r"must return 2 values \(Tensor, Tensor\)"):
        torch.vmap(op)(X)


# --------------------------------------------------------------------------------------------------
# Without a rule


def test_operator_without_a_rule_runs_once_for_each_element(namespace):
    shapes = []

    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor) -> Tensor:
        shapes.append(tuple(x.shape))
        return x * 2

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some releases of PyTorch warn that vmap is slow
        assert torch.equal(torch.vmap(op)(X), X * 2)
    assert shapes == [(3,), (3,)]


WITHOUT_FALLBACK = {
    "(Tensor(a!) x) -> ()": lambda x: None,
    "(Tensor(a!) x) -> Tensor": lambda x: x + 1,
    "(Tensor[] x) -> Tensor": lambda x: x[0] + 1,
    "(Tensor x) -> Tensor[]": lambda x: [x + 1],
    "(Tensor x) -> int": lambda x: 1,
}


@pytest.mark.parametrize("packet", ["op", "op.over"])
@pytest.mark.parametrize("schema", WITHOUT_FALLBACK)
def test_calls_that_need_a_rule_raise_the_fix(namespace, schema, packet):
    name = f"{namespace}::{packet}"
    mutated = ("x",) if "!" in schema else ()
    op = torchop.custom_op(name, WITHOUT_FALLBACK[schema], mutates_args=mutated, schema=schema)
    call = (lambda x: op([x])) if "[] x" in schema else op
    fix = rf"Register a rule with register_vmap\('{name}', rule\)"
    with pytest.raises(RuntimeError, match=f"^Batching rule not implemented for {name}, .*{fix}"):
        torch.vmap(call)(X.clone())


def test_structured_results_that_need_a_rule_raise_the_fix(namespace):
    class Normalized(NamedTuple):
        y: Tensor
        mean: Optional[Tensor]

    @torchop.custom_op(f"{namespace}::normalize", mutates_args=())
    def normalize(x: Tensor, keep: bool = False) -> Normalized:
        return Normalized(x * 2, x.mean() if keep else None)

    fix = rf"Register a rule with register_vmap\('{namespace}::normalize', rule\)"
    with pytest.raises(RuntimeError, match=fix):
        torch.vmap(normalize)(X)
    normalize.register_vmap("sequential")
    assert torch.equal(torch.vmap(lambda x: normalize(x, True).mean)(X), X.mean(1))


def test_missing_rule_of_a_called_operator_is_not_blamed_on_the_caller(namespace):
    inner = torchop.custom_op(
        f"{namespace}::op_inner",
        lambda x: [x + 1],
        mutates_args=(),
        schema="(Tensor x) -> Tensor[]",
    )
    op = torchop.custom_op(
        f"{namespace}::op", lambda x: x + 1, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    op.register_vmap(lambda info, in_dims, x: (inner(x)[0], in_dims[0]))
    with pytest.raises(
        RuntimeError, match=f"^Batching rule not implemented for {namespace}::op_inner,"
    ):
        torch.vmap(torch.vmap(op))(X)


def test_rule_for_an_operator_of_a_library(namespace):
    with torchop.Library(namespace, "FRAGMENT") as library:
        library.define("op(Tensor x, int n=2) -> Tensor")
        library.impl("op", lambda x, n=2: x * n, "CompositeExplicitAutograd")
        op = getattr(torch.ops, namespace).op
        torchop.register_vmap(op, rule, lib=library)
        assert torch.equal(torch.vmap(op)(X), X * 2)

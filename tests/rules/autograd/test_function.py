import gc
import weakref
from typing import List, Optional

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from tests._support.common import on_both
from tests.rules.support import leaf, save_inputs
from tests.rules.support import with_formula as define


def total(xs: List[Tensor], scale: float = 1.0) -> Tensor:
    return torch.stack(xs).sum(0) * scale


def total_with_gaps(xs: List[Optional[Tensor]]) -> Tensor:
    return torch.stack([x for x in xs if x is not None]).sum(0)


def keep_structure(ctx, inputs, output):
    ctx.present = [x is not None for x in inputs[0]]


# --------------------------------------------------------------------------------------------------
# Lists of inputs


def test_none_may_replace_the_gradients_of_a_list(namespace):
    def scenario(library, namespace):
        op = define(namespace, total, lambda ctx, grad: (None, None), library=library)
        x = leaf()
        (op([x, x]).sum() + x.sum()).backward()
        return x.grad.tolist()

    both = on_both(scenario, namespace)
    assert both.ours == [1, 1]
    assert isinstance(both.stock, RuntimeError)


def test_tensor_of_a_list_that_requires_no_grad_may_get_none(namespace):
    op = define(namespace, total, lambda ctx, grad: ([grad, None], None))
    x = leaf()
    op([x, torch.ones(2)]).sum().backward()
    assert x.grad.tolist() == [1, 1]


def test_tensors_in_a_list_with_none_get_their_gradients(namespace):
    def scenario(library, namespace):
        def backward(ctx, grad):
            return ([grad * 3 if present else None for present in ctx.present],)

        op = define(namespace, total_with_gaps, backward, keep_structure, library)
        x = leaf()
        op([None, x, None, torch.ones(2)]).sum().backward()
        return x.grad.tolist()

    both = on_both(scenario, namespace)
    assert both.ours == [3, 3]
    assert both.stock != [3, 3]


def test_list_without_a_tensor_that_requires_grad_records_nothing(namespace):
    op = define(namespace, total_with_gaps, lambda ctx, grad: (None,), keep_structure)
    assert not op([None, torch.ones(2)]).requires_grad
    assert op([None, leaf()]).requires_grad


# --------------------------------------------------------------------------------------------------
# ctx


def everything(x: Tensor, ys: List[Tensor], n: int = 1, z: Optional[Tensor] = None) -> Tensor:
    return x + sum(ys)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((leaf(), [torch.ones(2)]), (True, [False], False, False)),
        (
            (torch.ones(2), [leaf(), torch.ones(2), leaf()]),
            (False, [True, False, True], False, False),
        ),
        ((leaf(), [], 5), (True, [], False, False)),
        ((leaf(), [], 5, leaf()), (True, [], False, True)),
    ],
)
def test_needs_input_grad_has_the_structure_of_all_arguments(namespace, arguments, expected):
    seen = []

    def backward(ctx, grad):
        seen.append(ctx.needs_input_grad)
        return (None,) * len(ctx.needs_input_grad)

    op = define(namespace, everything, backward)
    op(*arguments).sum().backward()
    assert seen == [expected]


def read_twice(ctx, grad):
    (x,) = ctx.saved_tensors
    (again,) = ctx.saved_tensors
    assert again is x
    return grad * (x + again)


def square(x: Tensor) -> Tensor:
    return x * x


def selective():
    return create_selective_checkpoint_contexts(
        lambda ctx, op, *args, **kwargs: CheckpointPolicy.PREFER_RECOMPUTE
    )


@pytest.mark.parametrize("options", [{}, {"context_fn": selective}], ids=["plain", "selective"])
def test_saved_tensors_may_be_read_twice_under_checkpointing(namespace, options):
    def scenario(library, namespace):
        op = define(namespace, square, read_twice, save_inputs, library)
        x = leaf(3.0)
        checkpoint(lambda x: op(x.sin()).sum(), x, use_reentrant=False, **options).backward()
        return x.grad

    both = on_both(scenario, namespace)
    expected = 2 * torch.tensor([3.0, 3.0]).sin() * torch.tensor([3.0, 3.0]).cos()
    torch.testing.assert_close(both.ours, expected)
    assert isinstance(both.stock, AssertionError | RuntimeError)


def cubes(x: Tensor) -> List[Tensor]:
    return [x * x * x, x.clone()]


@pytest.mark.parametrize("function", [square, cubes])
def test_saved_inputs_and_outputs_die_with_the_result(namespace, function):
    class Token:
        pass

    tokens = []

    def setup_context(ctx, inputs, output):
        ctx.token = Token()
        tokens.append(weakref.ref(ctx.token))
        ctx.save_for_backward(*inputs, *(output if isinstance(output, list) else [output]))

    op = define(namespace, function, lambda ctx, grad: None, setup_context)
    result = op(leaf())
    assert tokens[0]() is not None
    gc.disable()  # the context must be freed by reference counting alone
    try:
        del result
        assert tokens[0]() is None
    finally:
        gc.enable()


FORMULAS = {
    "saved_tensors": lambda ctx, grad: grad * ctx.saved_tensors[0],
    "attribute": lambda ctx, grad: grad * ctx.factor,
}


@pytest.mark.parametrize("formula", FORMULAS.values(), ids=FORMULAS)
def test_a_formula_that_reads_unsaved_tensors_raises(namespace, formula):
    op = define(namespace, square, formula)
    with pytest.raises((IndexError, AttributeError)) as raised:
        op(leaf()).sum().backward()
    said = " ".join([str(raised.value), *getattr(raised.value, "__notes__", ())])
    assert f"the formula of {namespace}::op has no setup_context" in said
    assert "setup_context(ctx, inputs, output)" in said
    assert "GeneratedBackwardFor" not in said


def test_other_errors_of_a_formula_are_unchanged(namespace):
    op = define(namespace, square, lambda ctx, grad: grad[7, 7])
    with pytest.raises(IndexError) as raised:
        op(leaf()).sum().backward()
    assert not getattr(raised.value, "__notes__", ())

"""In calls that record a gradient, kernels return residuals, which the backward uses."""

import contextlib
import functools
import inspect

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import torchop
from tests._support.devices import TYPE
from tests.rules.support import leaf_of
from torchop import AliasError, ForwardModeError, MissingFormulaError, ResultError


def save(ctx, inputs, output, residuals):
    ctx.save_for_backward(residuals.softmax)
    ctx.scale = inputs[1]


def backward(ctx, grad):
    (softmax,) = ctx.saved_tensors
    return grad.unsqueeze(-1) * softmax * ctx.scale, None


class LogSumExp:
    """An operator with a residual: log-sum-exp, whose kernel also returns the softmax.

    The kernel appends the value of `records_gradient` to `told`.
    """

    def __init__(self, name, *, formula=backward, setup_context=save, **options):
        self.told = []

        def logsumexp(x: Tensor, scale: float = 1.0) -> Tensor:
            self.told.append(torchop.records_gradient())
            output = (x * scale).logsumexp(-1)
            if not torchop.records_gradient():
                return output
            return torchop.residuals(output, (x * scale).softmax(-1))

        def fake(x, scale=1.0):
            return torchop.residuals(x.new_empty(x.shape[:-1]), torch.empty_like(x))

        residuals = {"softmax": Tensor}
        self.op = torchop.custom_op(
            name, logsumexp, mutates_args=(), residuals=residuals, **options
        )
        self.op.register_fake(fake)
        if formula is not None:
            self.op.register_autograd(formula, setup_context=setup_context)

    def taken(self):
        told, self.told = self.told, []
        return told


@pytest.fixture
def lse(namespace):
    return LogSumExp(f"{namespace}::lse")


def gradient_of(function, x):
    return torch.autograd.grad(function(x).sum(), x)[0]


def graphs(function, x, *, training):
    found = []

    def compiler(graph, examples):
        found.append({node.target for node in graph.graph.nodes if node.op == "call_function"})
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=compiler, bw_compiler=compiler)
    y = torch.compile(function, fullgraph=True, backend=backend)(x)
    if training:
        y.sum().backward()
    return found


def test_callers_get_the_result_without_residuals(lse):
    x = torch.randn(2, 3)
    assert str(inspect.signature(lse.op)) == "(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor"
    assert lse.op.schema.returns[0].type.kind() == "TensorType"
    assert_close(lse.op(x, 2.0), (x * 2).logsumexp(-1))
    assert_close(lse.op.__wrapped__(x), x.logsumexp(-1))


def test_kernel_can_check_whether_a_gradient_is_recorded(lse):
    x = leaf_of([1.0, 2.0])
    for _ in range(3):  # the first call that records a gradient uses the dispatcher
        assert_close(gradient_of(lse.op, x), x.softmax(-1))
    assert lse.taken() == [True] * 3
    lse.op(x.detach())
    with torch.no_grad():
        lse.op(x)
    with torch.inference_mode():
        lse.op(x)
    assert lse.taken() == [False] * 3
    assert not torchop.records_gradient()


def test_a_kernel_inside_of_another_is_not_recorded(namespace, lse):
    told = []

    def outer(x: Tensor) -> Tensor:
        told.append(torchop.records_gradient())
        output = lse.op(x).exp()
        told.append(torchop.records_gradient())
        return torchop.residuals(output, x.clone())

    op = torchop.custom_op(
        f"{namespace}::outer", outer, mutates_args=(), residuals={"copy": Tensor}
    )
    op.register_autograd(
        lambda ctx, grad: grad * ctx.saved_tensors[0].exp(),
        setup_context=lambda ctx, inputs, output, residuals: ctx.save_for_backward(*residuals),
    )
    x = leaf_of([1.0, 2.0])
    for _ in range(2):
        assert_close(gradient_of(op, x), x.exp())
    assert told == [True] * 4
    assert lse.taken() == [False] * 2


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("trains", [True, False])
def test_a_kernel_without_residuals_inside_of_another_records_nothing(namespace, native, trains):
    """The inner operator has no residuals, so `records_gradient` is False in its kernel.

    This also holds if autograd records the inner call.
    """
    told = []

    def inner(x: Tensor) -> Tensor:
        told.append(torchop.records_gradient())
        return x.exp()

    plain = torchop.custom_op(f"{namespace}::inner", inner, mutates_args=())
    plain.register_fake(inner)
    plain.register_autograd(lambda ctx, grad: grad)

    def outer(x: Tensor) -> Tensor:
        with torch.enable_grad():
            output = plain(x.detach().requires_grad_(trains)).detach()
        told.append(torchop.records_gradient())
        return torchop.residuals(output, output.clone())

    op = torchop.custom_op(f"{namespace}::op", outer, mutates_args=(), residuals={"copy": Tensor})
    op.register_fake(outer)
    op.register_autograd(
        lambda ctx, grad: grad * ctx.saved_tensors[0],
        setup_context=lambda ctx, inputs, output, residuals: ctx.save_for_backward(*residuals),
    )
    x = leaf_of([1.0, 2.0])
    for _ in range(3):
        with contextlib.nullcontext() if native else torchop.native.disabled():
            assert_close(gradient_of(op, x), x.exp())
        assert told == [False, True]
        told.clear()
    op(x.detach())
    with FakeTensorMode() as mode:
        op(mode.from_tensor(x)).sum()
    assert told == [False, False, False, True]
    assert not torchop.records_gradient()


def test_a_kernel_that_raises_leaves_nothing_behind(namespace):
    class BrokenError(Exception):
        pass

    told = []

    def fail(x: Tensor) -> Tensor:
        told.append(torchop.records_gradient())
        if x.sum() < 0:
            raise BrokenError
        return torchop.residuals(x.clone(), x.clone())

    op = torchop.custom_op(f"{namespace}::fail", fail, mutates_args=(), residuals={"x": Tensor})
    op.register_autograd(
        lambda ctx, grad: grad, setup_context=lambda ctx, inputs, output, residuals: None
    )
    for _ in range(2):
        with pytest.raises(BrokenError):
            op(leaf_of([-1.0]))
        assert not torchop.records_gradient()
        op(torch.ones(1))
        op(leaf_of([1.0]))
    assert told == [True, False, True] * 2


def test_formula_without_residuals_has_no_cost(namespace):
    op = LogSumExp(
        f"{namespace}::plain",
        formula=lambda ctx, grad: (grad.unsqueeze(-1) * ctx.saved_tensors[0].softmax(-1), None),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
    )
    x = leaf_of([1.0, 2.0])
    assert_close(gradient_of(op.op, x), x.softmax(-1))
    assert op.taken() == [False]


def test_forms_of_a_family(namespace):
    def double(x: Tensor) -> Tensor:
        return torchop.residuals(x * 2, torch.full_like(x, 2))

    op = torchop.custom_op(f"{namespace}::op", double, mutates_args=(), residuals={"two": Tensor})
    op.register_autograd(
        lambda ctx, grad: grad * ctx.saved_tensors[0],
        setup_context=lambda ctx, inputs, output, residuals: ctx.save_for_backward(*residuals),
    )
    x = leaf_of([1.0])
    y = x * 1
    op.derive_inplace()(y)
    assert gradient_of(lambda x: y, x) == 2
    assert op.derive_out()(torch.ones(1), out=torch.empty(1)) == 2


# --------------------------------------------------------------------------------------------------
# Compiled and exported programs


def test_training_graphs_have_the_training_form(lse):
    op = getattr(torch.ops, lse.op.name.partition("::")[0])
    x = torch.randn(4, 3, requires_grad=True)
    forward, back = graphs(lambda x: lse.op(x, 2.0) * 2, x, training=True)
    assert op.lse__with_residuals.default in forward
    assert op.lse.default not in forward | back
    assert_close(x.grad, 4 * (2 * x).softmax(-1))


def test_inference_graphs_contain_the_plain_operator(lse):
    op = getattr(torch.ops, lse.op.name.partition("::")[0])
    with torch.no_grad():
        (forward,) = graphs(lambda x: lse.op(x) * 2, torch.randn(4, 3), training=False)
    assert op.lse.default in forward
    assert op.lse__with_residuals.default not in forward

    class Module(torch.nn.Module):
        def forward(self, x):
            return lse.op(x, 2.0)

    program = torch.export.export(Module(), (torch.randn(4, 3, requires_grad=True),))
    for each in (program, program.run_decompositions()):
        targets = {node.target for node in each.graph.nodes}
        assert op.lse.default in targets
        assert op.lse__with_residuals.default not in targets


def test_a_checkpoint_runs_the_kernel_again(lse):
    x = torch.randn(4, 3, requires_grad=True)
    for use_reentrant in (True, False):
        x.grad = None
        checkpoint(lse.op, x, use_reentrant=use_reentrant).sum().backward()
        assert_close(x.grad, x.softmax(-1))
    assert lse.taken() == [False, True, True, True]


@pytest.mark.parametrize("policy", ["save", "recompute"])
def test_a_policy_decides_whether_a_compiled_checkpoint_recomputes(lse, policy):
    lse.op.register_checkpoint_policy(policy)
    x = torch.randn(4, 3, requires_grad=True)
    context_fn = torch.utils.checkpoint.create_selective_checkpoint_contexts

    def region(x):
        return lse.op(x.sin()).cos()

    def call(x):
        return checkpoint(region, x, use_reentrant=False, context_fn=lambda: context_fn([]))

    assert_close(gradient_of(call, x), gradient_of(lambda x: x.sin().logsumexp(-1).cos(), x))
    assert len(lse.taken()) == (1 if policy == "save" else 2)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("kind", ["list", "function"])
@pytest.mark.filterwarnings("ignore:.*context_fn is passed.*")
def test_the_policy_of_a_region_names_the_operator(namespace, kind, backend):
    # Use a new name for each case, because PyTorch's caches identify an operator by its name.
    lse = LogSumExp(f"{namespace}::{kind}_{backend}")
    seen = set()

    def policy(ctx, op, *args, **kwargs):
        seen.add(op)
        must_save = op is lse.op.overload
        return CheckpointPolicy.MUST_SAVE if must_save else CheckpointPolicy.PREFER_RECOMPUTE

    region = [lse.op.overload] if kind == "list" else policy
    contexts = functools.partial(create_selective_checkpoint_contexts, region)

    def call(x):
        return checkpoint(
            lambda x: lse.op(x.sin()).cos(), x, use_reentrant=False, context_fn=contexts
        )

    x = torch.randn(4, 3, requires_grad=True)
    compiled = torch.compile(call, backend=backend, fullgraph=True) if backend else call
    assert_close(gradient_of(compiled, x), gradient_of(lambda x: x.sin().logsumexp(-1).cos(), x))
    assert len(lse.taken()) == 1
    assert kind == "list" or lse.op.overload in seen
    assert not any("with_residuals" in op.name() for op in seen)


def test_hooks_pack_residuals(lse):
    packed = []

    def pack(tensor):
        packed.append(tensor.shape)
        return tensor.numpy()

    x = torch.randn(4, 3, requires_grad=True)
    expected = x.detach().softmax(-1)
    for _ in range(2):
        with torch.autograd.graph.saved_tensors_hooks(pack, torch.from_numpy):
            assert_close(gradient_of(lse.op, x), expected)
    assert packed == [(4, 3)] * 2


# --------------------------------------------------------------------------------------------------
# Transforms, forms, devices


def test_transforms(lse):
    x = torch.randn(4, 3)
    assert_close(torch.func.grad(lambda x: lse.op(x).sum())(x), x.softmax(-1))
    assert_close(torch.func.vmap(torch.func.grad(lse.op))(x), x.softmax(-1))
    assert_close(torch.func.jacrev(lse.op)(x[0]), x[0].softmax(-1))
    output, pull = torch.func.vjp(lse.op, x)
    assert_close(pull(torch.ones_like(output))[0], x.softmax(-1))

    def value(x):
        return torch.func.grad_and_value(lambda x: lse.op(x).sum())(x)[1]

    assert_close(torch.func.grad(value)(x), x.softmax(-1))


def test_a_numpy_formula(namespace):
    def numpy_backward(ctx, grad):
        (softmax,) = ctx.saved_tensors
        result = np.expand_dims(grad.numpy(), -1) * softmax.numpy()
        return torch.from_numpy(result), None

    op = LogSumExp(f"{namespace}::numpy", formula=numpy_backward).op
    x = torch.randn(4, 3, requires_grad=True)
    for _ in range(2):
        assert_close(gradient_of(op, x), x.softmax(-1))
    with pytest.raises(torchop.TracingError, match=r"parameters for the .* residuals"):
        torch.func.grad(lambda x: op(x).sum())(x.detach())


# --------------------------------------------------------------------------------------------------
# Second derivatives


SECOND = "depends on a residual with an unknown derivative.*from saved inputs"


def _twice(function, x):
    (gradient,) = torch.autograd.grad(function(x), x, create_graph=True)
    torch.autograd.grad(gradient[0], x)


@pytest.mark.parametrize("before", [lambda x: x, lambda x: x * 2], ids=["leaf", "computed"])
def test_a_second_derivative_through_a_residual_is_refused(lse, before):
    x = torch.randn(3, requires_grad=True)
    for _ in range(2):
        with pytest.raises(MissingFormulaError, match=SECOND):
            _twice(lambda x: lse.op(before(x)), x)
    twice = torch.func.grad(lambda x: torch.func.grad(lambda x: lse.op(before(x)))(x)[0])
    with pytest.raises(MissingFormulaError, match=SECOND):
        twice(x.detach())


def test_residual_stored_as_a_ctx_attribute_is_rejected(namespace):
    """torchop rejects the attribute, because it could not detect second derivatives through it.

    Computing a second derivative through a residual raises an error only if `setup_context` saved
    the residual with `save_for_backward`.
    """

    def kernel(x: Tensor) -> Tensor:
        return torchop.residuals(x.clone(), x > 0, x * 2)

    residuals = {"mask": Tensor, "slope": Tensor}
    op = torchop.custom_op(f"{namespace}::op", kernel, mutates_args=(), residuals=residuals)

    def hide(ctx, inputs, output, residuals):
        ctx.mask = residuals.mask
        ctx.slope = residuals.slope

    op.register_autograd(lambda ctx, grad: grad * ctx.slope, setup_context=hide)
    for _ in range(2):
        with pytest.raises(torchop.GradientError, match=r"as ctx\.slope.* ctx\.save_for_backward"):
            op(leaf_of([1.0]))

    def keep(ctx, inputs, output, residuals):
        ctx.mask = residuals.mask
        ctx.save_for_backward(residuals.slope)

    op.register_autograd(
        lambda ctx, grad: grad * ctx.saved_tensors[0] * ctx.mask, setup_context=keep
    )
    for _ in range(2):
        x = leaf_of([1.0])
        (gradient,) = torch.autograd.grad(op(x), x, create_graph=True)
        assert gradient.item() == 2.0
        with pytest.raises(MissingFormulaError, match="depends on a residual"):
            gradient.backward()


@pytest.mark.parametrize("view", [lambda t: t.view(1, -1), lambda t: t[:]], ids=["shape", "all"])
def test_a_view_of_a_residual_is_guarded(namespace, view):
    op = torchop.custom_op(
        f"{namespace}::op",
        lambda x: torchop.residuals(x * x, x + x),
        schema="(Tensor x) -> Tensor",
        mutates_args=(),
        residuals={"slope": Tensor},
    )
    op.register_autograd(
        lambda ctx, grad: grad * ctx.saved_tensors[0].view_as(grad),
        setup_context=lambda ctx, inputs, output, residuals: ctx.save_for_backward(
            view(residuals.slope)
        ),
    )
    for _ in range(3):
        x = leaf_of([3.0])
        (gradient,) = torch.autograd.grad(op(x), x, create_graph=True)
        assert gradient.item() == 6.0
        with pytest.raises(MissingFormulaError, match="depends on a residual"):
            gradient.backward()


def test_a_second_derivative_computes_a_residual_from_inputs(namespace):
    def setup_context(ctx, inputs, output, residuals):
        ctx.save_for_backward(residuals.softmax, inputs[0])
        ctx.scale = inputs[1]

    def formula(ctx, grad):
        softmax, x = ctx.saved_tensors
        if torch.is_grad_enabled():
            softmax = (x * ctx.scale).softmax(-1)
        return grad.unsqueeze(-1) * softmax * ctx.scale, None

    op = LogSumExp(f"{namespace}::twice", formula=formula, setup_context=setup_context).op
    x = torch.randn(3, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradgradcheck(op, x)
    expected = torch.func.hessian(lambda x: x.logsumexp(-1))(x.detach())
    assert_close(torch.func.jacrev(torch.func.jacrev(op))(x.detach()), expected)


def test_forward_mode_is_refused_where_a_residual_would_lose_its_tangent(lse):
    x = torch.randn(3)
    lse.op.register_jvp(
        lambda ctx, tangent, _: (ctx.saved_tensors[0] * tangent).sum(-1),
    )
    _, tangent = torch.func.jvp(lse.op, (x,), (torch.ones(3),))
    assert_close(tangent, torch.ones(()))
    with pytest.raises(ForwardModeError, match="does not support forward-mode"):
        torch.func.hessian(lse.op)(x)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x.requires_grad_(), torch.ones(3))
        with pytest.raises(
            ForwardModeError,
            match=r"dual tensors that require grad.*residuals, and residuals have no tangents",
        ):
            lse.op(dual)


# --------------------------------------------------------------------------------------------------
# Mistakes


def returning(namespace, kernel, types=None, **options):
    op = torchop.custom_op(
        f"{namespace}::op",
        kernel,
        schema="(Tensor x) -> Tensor",
        mutates_args=(),
        residuals=types or {"first": Tensor},
        **options,
    )
    op.register_autograd(
        lambda ctx, grad: grad, setup_context=lambda ctx, inputs, output, residuals: None
    )
    return op


def test_undeclared_residuals(namespace):
    op = torchop.custom_op(
        f"{namespace}::op",
        lambda x: torchop.residuals(x.clone(), x),
        schema="(Tensor x) -> Tensor",
        mutates_args=(),
    )
    message = r"returned a torchop\.residuals\(\.\.\.\)\. Only operators that declare residuals"
    for _ in range(2):
        with pytest.raises(ResultError, match=message):
            op(torch.ones(2))


WRONG_RESULTS = {
    "no residuals": (lambda x: x.clone(), ResultError, "returned 0 of 1 residuals"),
    "too many": (
        lambda x: torchop.residuals(x.clone(), x.clone(), x.clone()),
        ResultError,
        "returned 2 of 1 residuals",
    ),
    "another type": (
        lambda x: torchop.residuals(x.clone(), 3),
        ResultError,
        "for the residuals in .* must return a Tensor",
    ),
    "an input": (
        lambda x: torchop.residuals(x.clone(), x),
        AliasError,
        "a residual shares memory with input 'x'",
    ),
    "a view": (
        lambda x: torchop.residuals(x.clone(), x[:1]),
        AliasError,
        "a residual shares memory with input 'x'",
    ),
}


@pytest.mark.parametrize("case", WRONG_RESULTS)
def test_wrong_residuals(namespace, case):
    kernel, error, message = WRONG_RESULTS[case]
    op = returning(namespace, kernel)
    for _ in range(2):
        with pytest.raises(error, match=f"{namespace}::op.*{message}"):
            op(leaf_of([1.0, 2.0]))
    op(torch.ones(2))  # without a gradient, residuals are not checked


def test_residuals_that_share_memory_with_results(namespace):
    def output_itself(x):
        y = x.clone()
        return torchop.residuals(y, y)

    def twice(x):
        y = x.clone()
        return torchop.residuals(x.clone(), y, y)

    for name, kernel, types, place in (
        ("a", output_itself, {"a": Tensor}, "output 0"),
        ("b", twice, {"a": Tensor, "b": Tensor}, "another one"),
    ):
        op = returning(f"{namespace}{name}", kernel, types)
        for _ in range(2):
            with pytest.raises(AliasError, match=f"a residual shares memory with {place}"):
                op(leaf_of([1.0]))


def test_a_fake_kernel_that_forgets_a_residual(lse):
    lse.op.register_fake(lambda x, scale=1.0: x.new_empty(x.shape[:-1]))
    compiled = torch.compile(lse.op, fullgraph=True, backend="aot_eager")
    compiled(torch.ones(3))
    with pytest.raises(Exception, match="every kernel and fake kernel must return"):
        compiled(leaf_of([1.0, 2.0]))


WRONG_DECLARATIONS = {
    "no mapping": ({"residuals": [Tensor]}, "expects the types of the residuals by their names"),
    "nothing": ({"residuals": {}}, "expects the types of the residuals by their names"),
    "a wrong name": ({"residuals": {"1st": Tensor}}, "valid identifiers"),
    "an unknown type": ({"residuals": {"x": torch.nn.Module}}, "unsupported type"),
    "a write": (
        {"residuals": {"x": Tensor}, "mutates_args": ("x",)},
        "residuals require a functional operator",
    ),
}


@pytest.mark.parametrize("case", WRONG_DECLARATIONS)
def test_wrong_declarations(namespace, case):
    options, message = WRONG_DECLARATIONS[case]

    def compute(x: Tensor) -> Tensor:
        return x.clone()

    with pytest.raises(torchop.SchemaError, match=f"{namespace}::op: .*{message}"):
        torchop.custom_op(f"{namespace}::op", compute, **{"mutates_args": (), **options})
    assert not hasattr(getattr(torch.ops, namespace), "op")


# --------------------------------------------------------------------------------------------------
# Calls from inside other calls and contexts


def test_provider_without_residuals_is_rejected_if_they_are_needed(lse):
    lse.op.register_kernel(TYPE, lambda x, scale: x.logsumexp(-1), provider="bare")
    lse.op.set_priority(["bare"])
    lse.op(torch.ones(2))
    with pytest.raises(ResultError, match="every kernel and fake kernel must return"):
        lse.op(leaf_of([1.0, 2.0]))

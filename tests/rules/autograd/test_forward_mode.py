"""Forward-mode formulas, under every transform that uses them."""

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap

import torchop
from tests._support.common import on_both
from tests._support.devices import BACKEND
from tests.rules.support import save_inputs

X = torch.linspace(0.5, 2.0, 4, dtype=torch.double)
Y = torch.linspace(-1.0, 1.0, 4, dtype=torch.double)


def reference(x, y):
    return x.sin() * y, x + y * y


def define(namespace, library=torchop):
    """Define sin(x) * y and x + y². Its formulas for forward and reverse mode share a context."""

    @library.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return reference(x, y)

    op.register_fake(lambda x, y: (torch.empty_like(x), torch.empty_like(x)))
    return op


def differentiable(namespace):
    op = define(namespace)
    op.register_vmap("sequential")

    def backward(ctx, g, h):
        x, y = ctx.saved_tensors
        return g * x.cos() * y + h, g * x.sin() + 2 * h * y

    def tangents(ctx, dx, dy):
        x, y = ctx.saved_tensors
        return dx * x.cos() * y + dy * x.sin(), dx + 2 * y * dy

    op.register_autograd(backward, setup_context=save_inputs, jvp=tangents)
    return op


def dual(function, *inputs):
    with forward_ad.dual_level():
        output = function(*(forward_ad.make_dual(x, torch.ones_like(x)) for x in inputs))
        return forward_ad.unpack_dual(output)


def total(f):
    return lambda *inputs: sum(output.square().sum() for output in f(*inputs))


TRANSFORMS = {
    "jvp": lambda f: jvp(f, (X, Y), (Y, X)),
    "jvp of one input": lambda f: jvp(lambda x: f(x, Y), (X,), (Y,)),
    "jacfwd": lambda f: jacfwd(f, argnums=(0, 1))(X, Y),
    "hessian": lambda f: hessian(total(f), argnums=(0, 1))(X, Y),
    "jacrev of jacfwd": lambda f: jacrev(jacfwd(f))(X, Y),
    "jacfwd of jacfwd": lambda f: jacfwd(jacfwd(f), argnums=1)(X, Y),
    "jacfwd three times": lambda f: jacfwd(jacfwd(jacfwd(f)))(X[:2], Y[:2]),
    "jvp of grad": lambda f: jvp(grad(total(f)), (X, Y), (Y, X)),
    "grad of jvp": lambda f: grad(lambda x: jvp(f, (x, Y), (X, x))[1][0].sum())(X),
    "vjp of jvp": lambda f: vjp(lambda x: jvp(f, (x, Y), (X, Y))[1], X)[1]((X, Y)),
    "vmap of jacfwd": lambda f: vmap(jacfwd(f), (0, None))(torch.stack([X, 2 * X]), Y),
    "jvp of vmap": lambda f: jvp(vmap(f), (X, Y), (Y, X)),
    "linearize": lambda f: linearize(f, X, Y)[1](Y, X),
    "dual tensors": lambda f: dual(lambda x, y: f(x, y)[0], X, Y),
    "dual tensors without grad": lambda f: torch.no_grad()(dual)(
        lambda x, y: f(x, y)[1], X.clone().requires_grad_(), Y
    ),
}


# torch.func.linearize folds constants, for which torch.fx issues this warning.
@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning")
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_tangents_equal_the_references(namespace, transform):
    torch.testing.assert_close(transform(differentiable(namespace)), transform(reference))


def test_gradients_of_dual_tensors(namespace):
    op = differentiable(namespace)

    def second(f):
        x = X.clone().requires_grad_()
        primal, tangent = dual(lambda x: f(x, Y)[0], x)
        assert primal.requires_grad
        return primal, torch.autograd.grad(primal.sum() + tangent.sum(), x)

    torch.testing.assert_close(second(op), second(reference))

    def third(f):
        x = X.clone().requires_grad_()
        with forward_ad.dual_level():
            y = f(forward_ad.make_dual(x, Y), Y)[0]
            (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            tangent = forward_ad.unpack_dual(gradient).tangent
            return tangent, torch.autograd.grad(tangent.sum(), x)

    torch.testing.assert_close(third(op), third(reference))


def test_gradients_of_dual_tensors_in_lists_with_numbers(namespace):
    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(xs: list[Tensor], n: int) -> tuple[list[Tensor], int, Tensor]:
        return [x**n for x in xs], n, xs[0] + n

    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[0])
        ctx.n = inputs[1]

    op.register_autograd(
        lambda ctx, gs, n, g: (
            [gx * ctx.n * x ** (ctx.n - 1) for gx, x in zip(gs, ctx.saved_tensors, strict=True)],
            None,
        ),
        setup_context=setup_context,
        jvp=lambda ctx, dxs, n: (
            [dx * ctx.n * x ** (ctx.n - 1) for dx, x in zip(dxs, ctx.saved_tensors, strict=True)],
            None,
            dxs[0],
        ),
    )

    def second(f):
        x = X.clone().requires_grad_()
        _, tangent = dual(lambda x: f([x, Y], 3)[0][0], x)
        return tangent, torch.autograd.grad(tangent.sum(), x)

    expected = second(lambda xs, n: ([x**n for x in xs], n, xs[0] + n))
    torch.testing.assert_close(second(op), expected)


def test_torch_library_has_a_tangent_of_zero_instead(namespace):
    def scenario(library, namespace):
        op = define(namespace, library)
        return jvp(lambda x: op(x, Y)[1], (X,), (X,))[1]

    both = on_both(scenario, namespace)
    assert isinstance(both.ours, NotImplementedError)
    assert not both.stock.any()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_forward_mode_inside_a_compiled_program(namespace, backend):
    op = differentiable(namespace)

    def program(f):
        return lambda x, y: (jvp(f, (x, y), (y, x))[1], jacfwd(f)(x, y))

    compiled = torch.compile(program(op), fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(X, Y), program(reference)(X, Y))


def test_dual_tensors_are_not_part_of_the_compiled_graph(namespace):
    op = differentiable(namespace)

    def program(f):
        return lambda x: dual(lambda x: f(x, Y)[0], x)[1]

    whole = torch.compile(program(op), fullgraph=True, backend="eager")
    with pytest.raises(
        Exception, match=r"torch.func.jvp\s+inside the function, or use dual tensors outside"
    ):
        whole(X)
    torch._dynamo.reset()
    broken = torch.compile(program(op), backend="eager")
    torch.testing.assert_close(broken(X), program(reference)(X))


# --------------------------------------------------------------------------------------------------
# Arguments and results of a formula


def test_arguments_that_are_no_tensors_lists_and_defaults(namespace):
    seen = []

    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(
        xs: list[Tensor], sizes: list[int], y: Tensor | None = None, n: int = 3, *, scale: float
    ) -> tuple[list[Tensor], Tensor]:
        return [x * n * scale for x in xs], torch.tensor(n)

    def setup_context(ctx, inputs, keyword_only_inputs, output):
        seen.append((inputs, keyword_only_inputs, output, ctx.needs_input_grad))
        ctx.factor = inputs[3] * keyword_only_inputs["scale"]

    @op.register_jvp(setup_context=setup_context)
    def _(ctx, *tangents):
        seen.append(tangents)
        return [tangent * ctx.factor for tangent in tangents[0]], None

    (outputs, number), (tangents, none) = jvp(
        lambda x: op([X, x], [1], scale=0.5), (X,), (torch.ones_like(X),)
    )
    assert torch.equal(outputs[1], X * 1.5)
    assert torch.equal(tangents[1], torch.full_like(X, 1.5))
    assert not tangents[0].any()
    assert number == 3
    assert none == 0
    (inputs, keywords, _, needs), tangents_seen = seen
    assert inputs[1:] == ([1], None, 3)
    assert keywords == {"scale": 0.5}
    assert needs == ([False, True], False, False, False)
    assert tangents_seen[1:] == (None, None, None)


def test_missing_tangents_are_zeros_unless_the_formula_wants_none(namespace):
    tangents_seen = []

    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        return x * y

    op.register_jvp(lambda ctx, *tangents: tangents_seen.append(tangents) or tangents[0])
    call = (lambda x: op(x, Y, torch.tensor(0)), (X,), (X,))
    jvp(*call)
    assert not tangents_seen[-1][1].any()
    assert tangents_seen[-1][2] is None
    op.register_jvp(
        lambda ctx, *tangents: tangents_seen.append(tangents) or tangents[0],
        setup_context=lambda ctx, inputs, output: ctx.set_materialize_grads(False),
    )
    jvp(*call)
    assert tangents_seen[-1][1:] == (None, None)


def test_outputs_that_are_constant(namespace):
    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x * 2, x.argmax(), x.sign()

    op.register_jvp(
        lambda ctx, dx: (dx * 2, None, dx),
        setup_context=lambda ctx, inputs, output: ctx.mark_non_differentiable(*output[1:]),
    )
    with forward_ad.dual_level():
        outputs = op(forward_ad.make_dual(X, Y))
        tangents = [forward_ad.unpack_dual(output).tangent for output in outputs]
    assert torch.equal(tangents[0], 2 * Y)
    assert tangents[1:] == [None, None]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize("convert", [Tensor.to_sparse, Tensor.to_sparse_csr])
def test_tensors_that_cannot_be_dual_have_no_tangent(namespace, convert):
    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor, y: Tensor) -> Tensor:
        return x * 2

    x, other = torch.ones(2, 3), convert(torch.ones(2, 3))
    op.register_autograd(
        lambda ctx, grad: (grad * 2, None), jvp=lambda ctx, tangent, other: tangent * 2
    )
    with forward_ad.dual_level():
        assert op(x, other).tolist() == (x * 2).tolist()
        dual = op(forward_ad.make_dual(x, x * 3), other)
        assert forward_ad.unpack_dual(dual).tangent.tolist() == (x * 6).tolist()


def test_writing_into_a_result_leaves_the_tangent_of_the_input(namespace):
    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor) -> Tensor:
        return x.clone()

    for formula in (lambda ctx, dx: dx, lambda ctx, dx: dx.view(-1)):
        op.register_jvp(formula)
        tangent = torch.ones(4, dtype=torch.double)
        with forward_ad.dual_level():
            y = op(forward_ad.make_dual(X, tangent))
            y.mul_(5)
            assert torch.equal(forward_ad.unpack_dual(y).tangent, torch.full_like(X, 5))
        assert torch.equal(tangent, torch.ones_like(X))


def test_an_operator_of_another_library(namespace):
    with torchop.Library(namespace, "FRAGMENT") as library:
        library.define("op(Tensor x) -> Tensor")
        library.impl("op", lambda x: x.sin(), BACKEND)
        op = torch.ops.__getattr__(namespace).op
        torchop.register_jvp(
            f"{namespace}::op",
            lambda ctx, dx: dx * ctx.saved_tensors[0].cos(),
            setup_context=lambda ctx, inputs, output: ctx.save_for_forward(*inputs),
            lib=library,
        )
        assert torch.equal(jvp(op, (X,), (Y,))[1], X.cos() * Y)


def test_the_inplace_form_follows_the_functional_operator(namespace):
    @torchop.custom_op(f"{namespace}::sine", mutates_args=())
    def sine(x: Tensor) -> Tensor:
        return x.sin()

    sine.register_jvp(
        lambda ctx, dx: dx * ctx.saved_tensors[0].cos(),
        setup_context=lambda ctx, inputs, output: ctx.save_for_forward(*inputs),
    )
    sine_ = sine.derive_inplace()
    result, tangent = jvp(lambda x: sine_(x * 2), (X,), (Y,))
    torch.testing.assert_close(result, (2 * X).sin())
    torch.testing.assert_close(tangent, 2 * Y * (2 * X).cos())


# --------------------------------------------------------------------------------------------------
# Errors


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda x: x, r"incorrect number of tangents \(expected 2, got 1\)"),
        (lambda x: (x, x, x), r"incorrect number of tangents \(expected 2, got 3\)"),
        (lambda x: (x[:1], x), r"for output 0: expected a tensor of shape \[4\] .* shape \[1\]"),
        (lambda x: (x, x.float()), "for output 1: expected .*float64.* got one of .*float32"),
        (lambda x: (x, 0.0), "for output 1: expected .*, or None, got float"),
    ],
)
def test_wrong_tangents_are_refused(namespace, returned, message):
    op = define(namespace)
    op.register_jvp(lambda ctx, dx, dy: returned(dx))
    with pytest.raises(torchop.GradientError, match=f"{namespace}::op: jvp returned .*{message}"):
        jvp(op, (X, Y), (X, Y))


def test_wrong_tangents_of_numbers_and_lists_are_refused(namespace):
    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor) -> tuple[list[Tensor], Tensor]:
        return [x.clone(), x.clone()], x.argmax()

    for returned, message in (
        (([X], None), "for output 0: expected None or a list of 2, got list"),
        (([X, 1], None), r"for output 0\[1\]: expected a tensor"),
        ((None, X), "for output 1: expected None, because it has no derivative"),
    ):
        op.register_jvp(lambda ctx, dx, returned=returned: returned)
        with pytest.raises(torchop.GradientError, match=message):
            jvp(op, (X,), (X,))


def test_a_formula_with_other_parameters_is_refused(namespace):
    op = define(namespace)
    expected = r"op: jvp is called with \(ctx, tangent_of_x, tangent_of_y\)"
    for register in (op.register_jvp, lambda f: op.register_autograd(lambda ctx, g, h: g, jvp=f)):
        with pytest.raises(torchop.RuleSignatureError, match=expected):
            register(lambda ctx, dx: dx)
    with pytest.raises(torchop.RuleSignatureError, match="setup_context is called with"):
        op.register_jvp(lambda ctx, dx, dy: dx, setup_context=lambda ctx: None)
    assert "autograd" not in repr(op)
    assert "jvp" not in repr(op)


@pytest.mark.parametrize(
    "schema",
    ["(Tensor(a!) x) -> ()", "(Tensor(a!) x) -> Tensor(a!)", "(Tensor(a) x) -> Tensor(a)"],
)
def test_operators_that_are_not_functional_are_refused(namespace, schema):
    op = torchop.custom_op(
        f"{namespace}::op",
        lambda x: x,
        mutates_args=("x",) if "!" in schema else (),
        schema=schema,
    )
    with pytest.raises(RuntimeError, match=r"register jvp for non-functional operator .*::op"):
        op.register_jvp(lambda ctx, dx: dx)


def test_tensors_that_forward_mode_cannot_follow_are_refused(namespace):
    with torchop.Library(namespace, "FRAGMENT") as library:
        library.define("op(Tensor x, *, Tensor y) -> Tensor")
        with pytest.raises(NotImplementedError, match="does not support kwarg-only Tensor args"):
            torchop.register_jvp(f"{namespace}::op", lambda ctx, dx: dx, lib=library)


@pytest.mark.parametrize("key", ["Autograd", "CompositeImplicitAutograd"])
def test_gradients_of_other_libraries_are_not_lost(namespace, key):
    with torchop.Library(namespace, "FRAGMENT") as library:
        library.define("op(Tensor x) -> Tensor")
        library.impl("op", lambda x: x.sin(), key)
        name = f"{namespace}::op"
        with pytest.raises(RuntimeError, match=f"gradients that the kernel at {key} computes"):
            torchop.register_jvp(name, lambda ctx, dx: dx, lib=library)
        torchop.register_autograd(
            name, lambda ctx, g: g * 3, jvp=lambda ctx, dx: dx * 3, lib=library
        )
        torchop.register_jvp(name, lambda ctx, dx: dx * 5, lib=library)
        library.impl("op", lambda x: x.sin(), BACKEND)
        assert torch.equal(jvp(torch.ops.__getattr__(namespace).op, (X,), (Y,))[1], Y * 5)


def test_without_a_formula_the_error_says_how_to_register_one(namespace):
    op = define(namespace)
    with pytest.raises(torchop.ForwardModeError, match=rf"register_jvp\('{namespace}::op', jvp"):
        jvp(op, (X, Y), (X, Y))

"""With compile="inline", compilers trace through an operator's function. Uses private names."""

import contextlib
import copy
import functools
import io

import pytest
import torch
import torch._dynamo
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import torchop
from tests.integration.compile.graphs import fresh_compiler, operators
from torchop._compat import registries
from torchop._compat.classes import FunctionalTensorMode
from torchop._rules.kernels.rule import KernelRule

X = torch.linspace(-1.0, 1.0, 4)


@pytest.fixture(autouse=True)
def _fresh_compiler():
    with fresh_compiler():
        yield


class Aot:
    """A backend that records the operators in the graph that AOTAutograd gives to a compiler."""

    __name__ = "aot"

    def __init__(self, **options):
        self.targets = []
        self._compile = aot_autograd(fw_compiler=self._keep, bw_compiler=self._keep, **options)

    def __call__(self, graph, inputs):
        return self._compile(graph, inputs)

    def _keep(self, graph, inputs):
        self.targets += [str(target) for target in operators(graph)]
        self.text = graph.code
        return make_boxed_func(graph.forward)


def define(namespace, compile="inline"):
    @torchop.custom_op(f"{namespace}::op", mutates_args=(), compile=compile)
    def op(x: Tensor, scale: float = 2.0) -> Tensor:
        result = torch.empty_like(x)
        result.copy_(x.sin())
        return result * scale

    return op


def run(op, *args, **options):
    backend = Aot()
    result = torch.compile(op, fullgraph=True, backend=backend, **options)(*args)
    return result, backend.targets


def test_a_definition_that_only_writes_has_the_rule_of_inlining(namespace):
    def negate_(x: Tensor) -> None:
        x.neg_()

    options = {"mutates_args": ("x",), "effects": "none"}
    op = torchop.custom_op(f"{namespace}::op", negate_, compile="inline", **options)
    launching = torchop.triton_op(f"{namespace}::launching", negate_, mutates_args=("x",))
    assert registries.torch_dispatch_rule(op.name, FunctionalTensorMode) is not None
    x = X.clone()
    assert "aten.neg.default" in run(lambda x: op(x), x)[1]
    assert torch.equal(x, -X)
    assert launching._definition.rule(KernelRule).registered is None


# --------------------------------------------------------------------------------------------------
# Graphs and programs


def test_a_compiler_sees_the_body_and_the_program_the_operator(namespace):
    op = define(namespace)
    result, targets = run(op, X)
    torch.testing.assert_close(result, X.sin() * 2)
    assert "aten.sin.default" in targets
    assert not any(namespace in target for target in targets)
    assert repr(op).endswith("; fake; inlined by compilers>")
    seen = []
    torch._dynamo.reset()
    torch.compile(op, backend=lambda graph, _: seen.extend(operators(graph)) or graph)(X)
    assert seen == [op.overload]


@pytest.mark.parametrize(
    ("choice", "inlined"),
    [
        ({"aot": "inline"}, True),
        ({"aot": "inline", "inductor": "opaque"}, True),
        ({"inductor": "inline"}, False),
        ({"aot": "opaque", "inductor": "inline"}, False),
    ],
)
def test_the_backend_decides(namespace, choice, inlined):
    op = define(namespace, choice)
    result, targets = run(op, X)
    torch.testing.assert_close(result, X.sin() * 2)
    assert (f"{namespace}.op.default" not in targets) is inlined
    assert (targets == [f"{namespace}.op.default"]) is not inlined


def test_inductor_fuses_the_body(namespace):
    for choice, calls in (({"inductor": "inline"}, 0), ("opaque", 1)):
        op = define(f"{namespace}_{calls}", choice)
        op.register_fake(like="x")
        compiled = torch.compile(lambda x, op=op: op(x + 1) * 2, fullgraph=True)
        result, (code, *_) = run_and_get_code(compiled, X)
        torch.testing.assert_close(result, (X + 1).sin() * 4)
        assert (f"torch.ops.{namespace}_{calls}" in code) is bool(calls)


def test_an_exported_program_holds_the_operator(namespace):
    op = define(namespace)

    class Module(torch.nn.Module):
        def forward(self, x):
            return op(x + 1)

    program = torch.export.export(Module(), (X,))
    assert op.overload in operators(program.graph_module)
    assert op.overload in operators(program.run_decompositions().graph_module)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file)
    assert op.overload in operators(loaded.graph_module)
    result, targets = run(copy.deepcopy(loaded.module()), X)
    torch.testing.assert_close(result, (X + 1).sin() * 2)
    assert "aten.sin.default" in targets


def test_shapes_stay_symbolic(namespace):
    op = define(namespace)
    compiled = torch.compile(op, fullgraph=True, backend=(backend := Aot()), dynamic=True)
    for n in (3, 4, 5):
        x = torch.randn(n)
        torch.testing.assert_close(compiled(x), x.sin() * 2)
    assert backend.targets.count("aten.sin.default") == 1


# --------------------------------------------------------------------------------------------------
# Together with other rules


def test_gradients_follow_the_registered_formula(namespace):
    op = define(namespace)
    op.register_autograd(
        lambda ctx, g: (g * 100 * ctx.saved_tensors[0], None),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
    )
    x = X.clone().requires_grad_()
    result, targets = run(op, x)
    result.sum().backward()
    torch.testing.assert_close(x.grad, 100 * X)
    assert not any(namespace in target for target in targets)
    assert "aten.sin.default" in targets


def test_the_function_is_the_fake_kernel_until_there_is_another(namespace):
    op = define(namespace)
    assert op(torch.empty(3, device="meta")).shape == (3,)
    op.register_fake(lambda x, scale: x.new_empty(7))
    assert op(torch.empty(3, device="meta")).shape == (7,)


def test_a_function_that_only_writes_is_the_fake_kernel_too(namespace):
    @torchop.custom_op(f"{namespace}::op", mutates_args={"out"}, compile="inline")
    def op(x: Tensor, out: Tensor) -> None:
        if x.shape != out.shape:
            raise ValueError("the shapes differ")
        out.copy_(x)

    for device, mode in (("cpu", FakeTensorMode()), ("meta", contextlib.nullcontext())):
        with mode:
            x = torch.empty(3, device=device)
            assert op(x, torch.empty(3, device=device)) is None
            with pytest.raises(ValueError, match="the shapes differ"):
                op(x, torch.empty(4, device=device))


def test_user_rule_for_the_functional_trace_replaces_it(namespace):
    op = define(namespace)

    @op.register_torch_dispatch(FunctionalTensorMode)
    def _(mode, func, types, args, kwargs):
        with mode:
            return args[0] * 10

    assert torch.equal(run(op, X)[0], X * 10)
    assert "inlined" not in repr(op)


def test_vmap_inside_a_compiled_program(namespace):
    op = define(namespace)
    op.register_vmap("sequential")
    result, targets = run(torch.vmap(op), X[:, None])
    torch.testing.assert_close(result, X[:, None].sin() * 2)
    assert not any(namespace in target for target in targets)


def test_mutation(namespace):
    @torchop.custom_op(f"{namespace}::op", mutates_args=("x", "maybe"), compile="inline")
    def op(x: Tensor, maybe: Tensor | None, y: Tensor) -> Tensor:
        x.add_(y)
        if maybe is not None:
            maybe.copy_(x)
        return y * 3

    def program(x, y):
        z = x * 1
        result = op(x[1:], z[:3], y[1:]) + op(x[1:], None, y[1:])
        return result + z[1:], x

    x, y = X.clone(), X.clone()
    expected_x = x.clone()
    expected = program(expected_x, y)
    result, targets = run(program, x, y)
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(x, expected_x)
    assert not any(namespace in target for target in targets)


@pytest.mark.parametrize("tag", ["inplace", "out"])
def test_tagged_operators(namespace, tag):
    if tag == "inplace":
        schema = "(Tensor(a!) x, Tensor y) -> Tensor(a!)"
    else:
        schema = "(Tensor y, *, Tensor(a!) x) -> Tensor(a!)"

    def body(**arguments):
        return arguments["x"].copy_(arguments["y"].exp())

    op = torchop.custom_op(
        f"{namespace}::op",
        (lambda x, y: body(x=x, y=y)) if tag == "inplace" else (lambda y, *, x: body(x=x, y=y)),
        mutates_args=("x",),
        schema=schema,
        compile="inline",
    )

    def program(x, y):
        written = op(x, y) if tag == "inplace" else op(y, x=x)
        return written + 1, x * 2

    x = torch.zeros(4)
    result, targets = run(program, x, X)
    torch.testing.assert_close(result, (X.exp() + 1, X.exp() * 2))
    torch.testing.assert_close(x, X.exp())
    assert not any(namespace in target for target in targets)


def test_the_tag_for_compile_caches_changes_with_the_function(namespace):
    def first(x: Tensor) -> Tensor:
        return x + 1

    def second(x: Tensor) -> Tensor:
        return x + 2

    tags = set()
    for function in (first, second):
        function.__qualname__ = "function"
        op = torchop.custom_op(f"{namespace}::op", function, mutates_args=(), compile="inline")
        op.register_fake(torch.empty_like)
        tags.add(torchop.cache_key_tag())
    assert len(tags) == 2


# --------------------------------------------------------------------------------------------------
# Errors


@pytest.mark.parametrize("choice", ["inlined", None, {"inductor": "yes"}, ["inline"]])
def test_invalid_compile_option_is_rejected(namespace, choice):
    with pytest.raises(ValueError, match=f"{namespace}::op: compile expects 'opaque', 'inline'"):
        define(namespace, choice)
    assert not hasattr(torch.ops.__getattr__(namespace), "op")


def test_an_effect_is_refused(namespace):
    with pytest.raises(ValueError, match="the effect would only happen during tracing"):
        torchop.custom_op(
            f"{namespace}::op",
            lambda x: None,
            mutates_args=(),
            schema="(Tensor x) -> ()",
            effects="ordered",
            compile="inline",
        )


def test_an_effect_declared_later_keeps_the_call(namespace):
    op = define(namespace)
    op.register_effect("ordered")
    targets = run(op, X)[1]
    assert "aten.sin.default" not in targets


def test_a_body_that_reads_data_is_refused(namespace):
    @torchop.custom_op(f"{namespace}::op", mutates_args=(), compile="inline")
    def op(x: Tensor) -> Tensor:
        return torch.from_numpy(x.numpy() + 1)

    assert torch.equal(op(X), X + 1)
    expected = (
        f"{namespace}::op: the function cannot be traced, because it reads the data of a tensor"
    )
    with pytest.raises(torchop.TracingError, match=expected):
        op(torch.empty(3, device="meta"))
    op.register_fake(like="x")
    with pytest.raises(Exception, match=expected):
        run(op, X)


@pytest.mark.parametrize("body", [lambda x: x, lambda x: x.view(-1)])
def test_a_body_that_returns_its_input_is_refused_as_in_eager_mode(namespace, body):
    op = torchop.custom_op(
        f"{namespace}::op", body, mutates_args=(), schema="(Tensor x) -> Tensor", compile="inline"
    )
    op.register_fake(like="x")
    with pytest.raises(torchop.AliasError):
        op(X)
    with pytest.raises(Exception, match="Every output of an operator must be a fresh tensor"):
        run(op, X)


# --------------------------------------------------------------------------------------------------
# Training


def _gate(x: Tensor, y: Tensor) -> Tensor:
    return x * torch.sigmoid(y)


def _scaled(x: Tensor, y: Tensor, *, scale: float = 2.0) -> Tensor:
    return (x * scale).tanh() * y.exp()


def _two(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x * y, (x + y).sin()


def _with_indices(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    values, indices = torch.stack([x, y]).max(0)
    return values, indices


def _of_list(x: Tensor, y: list[Tensor]) -> Tensor:
    return x * torch.stack(y).prod(0)


def _to_list(x: Tensor, y: Tensor) -> list[Tensor]:
    return [x * y, x / (y * y + 1)]


def _without_optional(x: Tensor, y: Tensor, z: Tensor | None = None) -> Tensor:
    return x * y if z is None else x * y * z


BODIES = (_gate, _scaled, _two, _with_indices, _of_list, _to_list, _without_optional)


def _loss(result):
    results = result if isinstance(result, (tuple, list)) else [result]
    return sum((each * (n + 1)).sin().sum() for n, each in enumerate(results))


def gradients(function, *inputs):
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    return torch.autograd.grad(_loss(function(*leaves)), leaves)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("body", BODIES)
def test_a_derived_formula_is_inlined_in_training(namespace, body, dynamic):
    op = torchop.custom_op(f"{namespace}::op", body, mutates_args=(), compile="inline")
    op.derive_autograd()

    def program(x, y):
        return op(x + 1, [y, y.cos()] if body is _of_list else y)

    inputs = (X, X.flip(0) / 3)
    backend = Aot()
    compiled = torch.compile(program, fullgraph=True, backend=backend, dynamic=dynamic)
    torch.testing.assert_close(gradients(compiled, *inputs), gradients(program, *inputs))
    assert not any(namespace in target for target in backend.targets)


def test_inductor_fuses_the_body_in_training(namespace):
    op = torchop.custom_op(f"{namespace}::op", _gate, mutates_args=(), compile="inline")
    op.derive_autograd()
    compiled = torch.compile(lambda x, y: op(x + 1, y) * 2, fullgraph=True)
    found, code = run_and_get_code(lambda: gradients(compiled, X, X))
    torch.testing.assert_close(found, gradients(lambda x, y: op(x + 1, y) * 2, X, X))
    assert len(code) == 2
    assert not any(f"torch.ops.{namespace}" in text for text in code)


@pytest.mark.parametrize("choice", [{"inductor": "inline"}, "opaque"])
def test_other_backends_call_the_helper_operators(namespace, choice):
    op = torchop.custom_op(f"{namespace}::op", _gate, mutates_args=(), compile=choice)
    op.register_fake(like="x")
    op.derive_autograd()
    backend = Aot()
    compiled = torch.compile(lambda x, y: op(x, y), fullgraph=True, backend=backend)
    torch.testing.assert_close(gradients(compiled, X, X), gradients(op, X, X))
    assert f"{namespace}.op__training.default" in backend.targets


def test_an_input_that_affects_no_output_has_a_gradient_of_zero(namespace):
    @torchop.custom_op(f"{namespace}::op", mutates_args=(), compile="inline")
    def op(x: Tensor, y: Tensor) -> Tensor:
        return x * y.shape[0]

    op.derive_autograd()
    compiled = torch.compile(lambda x, y: op(x, y), fullgraph=True, backend=Aot())
    torch.testing.assert_close(gradients(compiled, X, X), gradients(op, X, X))


def test_a_body_that_leaves_autograd_raises_as_in_eager_mode(namespace):
    @torchop.custom_op(f"{namespace}::op", mutates_args=(), compile="inline")
    def op(x: Tensor) -> Tensor:
        return x.detach().sin()

    op.derive_autograd()
    for function in (op, torch.compile(lambda x: op(x), fullgraph=True, backend=Aot())):
        with pytest.raises(torchop.GradientError, match="left autograd"):
            gradients(lambda x, f=function: f(x) * x, X)


def test_random_numbers_are_the_same_in_the_backward(namespace):
    @torchop.custom_op(
        f"{namespace}::op",
        mutates_args=(),
        compile="inline",
        tags=(torch.Tag.nondeterministic_seeded,),
    )
    def op(x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(x, 0.5)

    op.derive_autograd()
    for backend in ("aot_eager", "inductor"):
        x = torch.ones(500, requires_grad=True)
        result = torch.compile(lambda x: op(op(x)), fullgraph=True, backend=backend)(x)
        result.sum().backward()
        assert torch.equal(result.detach(), x.grad)
        assert 0 < (result == 0).sum() < 500
        torch._dynamo.reset()


def test_autocast_applies_to_the_inlined_body(namespace):
    @torchop.custom_op(f"{namespace}::op", mutates_args=(), compile="inline")
    def op(x: Tensor, y: Tensor) -> Tensor:
        return x @ y

    op.derive_autograd()

    def program(x, y):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return op(x.sin(), y)

    inputs = (torch.randn(4, 4), torch.randn(4, 4))
    compiled = torch.compile(program, fullgraph=True, backend=Aot())
    assert compiled(*inputs).dtype is torch.bfloat16
    torch.testing.assert_close(gradients(compiled, *inputs), gradients(program, *inputs))


def test_transforms_in_a_compiled_program_are_inlined(namespace):
    op = torchop.custom_op(f"{namespace}::op", _gate, mutates_args=(), compile="inline")
    op.derive_autograd()

    def program(x):
        return torch.func.grad(lambda x: op(x, x).sum())(x)

    result, targets = run(program, X)
    torch.testing.assert_close(result, program(X))
    assert not any(namespace in target for target in targets)


def test_residuals_of_an_inlined_operator_are_inlined(namespace):
    @torchop.custom_op(
        f"{namespace}::op", mutates_args=(), compile="inline", residuals={"exp": Tensor}
    )
    def op(x: Tensor) -> Tensor:
        exp = x.exp()
        return torchop.residuals(exp + 1, exp) if torchop.records_gradient() else exp + 1

    op.register_autograd(
        lambda ctx, grad: grad * ctx.saved_tensors[0] * 100,
        setup_context=lambda ctx, inputs, output, residuals: ctx.save_for_backward(residuals.exp),
    )
    backend = Aot()
    compiled = torch.compile(lambda x: op(x * 2), fullgraph=True, backend=backend)
    torch.testing.assert_close(gradients(compiled, X), gradients(lambda x: op(x * 2), X))
    assert not any(namespace in target for target in backend.targets)
    assert backend.targets.count("aten.exp.default") <= 2  # the partitioner may recompute it
    torch.testing.assert_close(compiled(X), (X * 2).exp() + 1)


def _in_region(function, context_fn=None):
    options = {} if context_fn is None else {"context_fn": context_fn}
    return lambda x: checkpoint(function, x, use_reentrant=False, **options)


SELECTIVE = functools.partial(create_selective_checkpoint_contexts, [])
REGIONS = {
    "no region": lambda function: function,
    "checkpoint": _in_region,
    "selective": lambda function: _in_region(function, SELECTIVE),
}


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("policy", ["save", "recompute"])
@pytest.mark.parametrize(
    ("choice", "derived"), [("inline", False), ("inline", True), ("opaque", False)]
)
def test_an_inlined_call_is_saved_or_recomputed(namespace, choice, derived, policy, region):
    @torchop.custom_op(f"{namespace}::op", mutates_args=(), compile=choice)
    def op(x: Tensor) -> Tensor:
        return torch.special.gammaln(x + 2).sin()

    op.register_fake(like="x")
    if derived:
        op.derive_autograd()
    else:
        op.register_autograd(
            lambda ctx, g: g * (1 - ctx.saved_tensors[0] ** 2),
            setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
        )
    op.register_checkpoint_policy(policy)
    backend = Aot(partition_fn=min_cut_rematerialization_partition)
    program = REGIONS[region](lambda x: op(x * 2).sin())
    compiled = torch.compile(lambda x: program(x.cos()), fullgraph=True, backend=backend)
    expected = gradients(lambda x: op(x.cos() * 2).sin(), X)
    torch.testing.assert_close(gradients(compiled, X), expected)
    names = ("aten.lgamma.default", f"{namespace}.op.default")
    runs = sum(target in names for target in backend.targets)
    assert runs == (1 if policy == "save" else 2)


def test_a_region_that_must_recompute_decides_for_an_inlined_call(namespace):
    op = torchop.custom_op(f"{namespace}::op", _gate, mutates_args=(), compile="inline")
    op.derive_autograd()
    op.register_checkpoint_policy("save")
    seen = []

    def policy(ctx, called, *args, **kwargs):
        seen.append(called)
        return CheckpointPolicy.MUST_RECOMPUTE

    backend = Aot(partition_fn=min_cut_rematerialization_partition)
    context = functools.partial(create_selective_checkpoint_contexts, policy)
    program = _in_region(lambda x: op(x, x).sin(), context)
    compiled = torch.compile(program, fullgraph=True, backend=backend)
    torch.testing.assert_close(gradients(compiled, X), gradients(program, X))
    assert op.overload in seen
    assert backend.targets.count("aten.sigmoid.default") == 2

"""With compile="inline", compilers trace through an operator's function. Uses private names."""

import contextlib
import copy
import io

import pytest
import torch
import torch._dynamo
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode

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

    def __init__(self):
        self.targets = []
        self._compile = aot_autograd(fw_compiler=self._keep, bw_compiler=self._keep)

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


def test_a_definition_replaces_no_rule_that_it_just_registered(namespace, monkeypatch):
    registered, register = [], registries.register_torch_dispatch

    def record(name, cls, function):
        registered.append((name, cls))
        register(name, cls, function)

    monkeypatch.setattr(registries, "register_torch_dispatch", record)

    def negate_(x: Tensor) -> None:
        x.neg_()

    op = torchop.custom_op(
        f"{namespace}::op", negate_, mutates_args=("x",), effects="none", compile="inline"
    )
    launching = torchop.triton_op(f"{namespace}::launching", negate_, mutates_args=("x",))
    assert (op.name, FunctionalTensorMode) in registered
    assert len(registered) == len(set(registered))
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

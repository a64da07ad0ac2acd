import gc
import traceback
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch._library.simple_registry import singleton
from torch._library.utils import Kernel
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.testing._internal.two_tensor import TwoTensor

import torchop
from tests._support.common import on_both
from tests.rules.support import assert_only_torchop_rejects, on_fake, on_meta, on_symbols
from tests.rules.support import cloning as define

EVERYWHERE = pytest.mark.parametrize("run", [on_meta, on_fake, on_symbols])
TRACED = pytest.mark.parametrize("run", [on_fake, on_symbols])


@EVERYWHERE
def test_fake_kernel_describes_the_output(namespace, run):
    op = define(namespace)
    op.register_fake(lambda x: x.new_empty(7, dtype=torch.float64))
    result = run(op)
    assert result.shape == (7,)
    assert result.dtype is torch.float64


@EVERYWHERE
def test_last_registered_fake_kernel_applies(namespace, run):
    op = define(namespace)
    op.register_fake(lambda x: x.new_empty(7))
    op.register_fake(lambda x: x.new_empty(9))
    assert run(op).shape == (9,)


def test_decorator_with_parentheses_is_torchops_own(namespace):
    def scenario(library, namespace):
        define(namespace, library).register_fake()(lambda x: torch.empty_like(x))
        return "accepted"

    both = on_both(scenario, namespace)
    assert both.ours == "accepted"
    assert isinstance(both.stock, TypeError)


@pytest.mark.parametrize("fake", [lambda: None, lambda x, y: x, lambda x, *, n: x])
def test_function_without_the_parameters_of_the_operator_is_refused(namespace, fake):
    assert_only_torchop_rejects(
        namespace,
        lambda library, namespace: define(namespace, library).register_fake(fake),
        torchop.RuleSignatureError,
        "a fake kernel is called with (x), but",
    )


def test_fake_kernel_that_is_no_function_is_refused(namespace):
    assert_only_torchop_rejects(
        namespace,
        lambda library, namespace: define(namespace, library).register_fake("same shape"),
        TypeError,
        "must be a function, got 'same shape' of type str",
    )


@EVERYWHERE
def test_exception_of_a_fake_kernel_passes_through(namespace, run):
    op = define(namespace)

    @op.register_fake
    def _(x):
        raise ZeroDivisionError("in the fake kernel")

    with pytest.raises(ZeroDivisionError, match="in the fake kernel"):
        run(op)
    op.register_fake(lambda x: torch.empty_like(x))
    assert run(op).shape == (3,)


@EVERYWHERE
def test_exception_of_a_fake_kernel_names_the_operator(namespace, run):
    inner, outer = define(f"{namespace}_inner"), define(namespace)

    @inner.register_fake
    def fake(x):
        raise ValueError("three words here")

    outer.register_fake(lambda x: inner(x))
    with pytest.raises(ValueError, match="three words here") as raised:
        run(outer)
    place = f"{__file__}:{fake.__code__.co_firstlineno}"
    text = "".join(traceback.format_exception(raised.value))
    assert f"in the fake kernel of {namespace}_inner::op, {place}" in text
    assert f"in the fake kernel of {namespace}::op, {__file__}" in text


def test_kernel_for_the_meta_device_serves_meta_tensors_and_the_fake_kernel_the_others(namespace):
    op = define(namespace)
    op.register_fake(lambda x: x.new_empty(7))
    op.register_kernel("meta")(lambda x: x.new_empty(9))
    assert on_meta(op).shape == (9,)
    assert on_fake(op).shape == (7,)


def test_meta_kernel_of_another_packages_operator_serves_meta_tensors(namespace):
    torchop.define(f"{namespace}::op", "(Tensor x) -> Tensor")
    op = getattr(torch.ops, namespace).op
    torchop.register_kernel(op, "meta", lambda x: x.new_empty(9))
    with pytest.raises(RuntimeError, match="already has a DispatchKey::Meta implementation"):
        torchop.register_fake(op, lambda x: x.new_empty(7), allow_override=False)
    torchop.register_fake(op, lambda x: x.new_empty(7))
    assert on_meta(op).shape == (9,)
    assert on_fake(op).shape == (7,)


def test_kernel_for_the_meta_device_serves_fake_tensors_without_a_fake_kernel(namespace):
    later = define(namespace)
    later.register_kernel("meta")(lambda x: x.new_empty(9))
    defined = torchop.custom_op(
        f"{namespace}::of_meta",
        lambda x: x.new_empty(9),
        mutates_args=(),
        device_types="meta",
        schema="(Tensor x) -> Tensor",
    )
    for op in (later, defined):
        assert on_meta(op).shape == (9,)
        assert on_fake(op).shape == (9,)
        op.register_fake(lambda x: x.new_empty(7))
        assert on_meta(op).shape == (9,)
        assert on_fake(op).shape == (7,)


# --------------------------------------------------------------------------------------------------
# A missing fake kernel


@pytest.mark.parametrize("devices", [None, "cpu", "meta"])
def test_kernel_never_runs_on_sparse_fake_tensors(namespace, devices):
    op = define(namespace, device_types=devices)
    mode = FakeTensorMode()
    with pytest.raises(torchop.MissingFakeError, match=f"no fake impl registered for {namespace}"):
        op(mode.from_tensor(torch.ones(3).to_sparse()))


def test_missing_fake_kernel_is_reported_once(namespace, capfd):
    with FakeTensorMode():
        pic = torch.ones(3)
    with pytest.raises(torchop.MissingFakeError):
        define(namespace)(pic)
    assert capfd.readouterr().err == ""  # PyTorch would also log an exception that it raises itself


def test_operator_without_results_needs_no_fake_kernel_on_several_devices(namespace):
    @torchop.custom_op(f"{namespace}::show", mutates_args=(), effects="ordered")
    def show(x: Tensor, y: Tensor) -> None: ...

    with FakeTensorMode():
        assert show(torch.ones(3), torch.ones(3, device="cuda")) is None


@EVERYWHERE
def test_missing_fake_kernel_is_reported_with_the_one_to_write(namespace, run):
    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor, n: int = 2, *, flag: bool = False) -> tuple[Tensor, list[Tensor], int]:
        return x.clone(), [x.clone()], 3

    with pytest.raises(RuntimeError, match="no fake impl registered") as caught:
        run(op)
    assert isinstance(caught.value, torchop.MissingFakeError)
    message = str(caught.value)
    assert f"@torchop.register_fake('{namespace}::op')" in message
    assert "def _(x, n, *, flag):" in message
    assert "return torch.empty_like(x), [torch.empty_like(x)], ...\n" in message


@EVERYWHERE
def test_fake_kernel_that_the_message_shows_works(namespace, run):
    op = define(namespace)
    with pytest.raises(torchop.MissingFakeError) as caught:
        run(op)
    code = str(caught.value).partition("\n\n")[2].replace("\n    ", "\n").removeprefix("    ")
    exec(code, {"torchop": torchop, "torch": torch})
    assert run(op).shape == (3,)


@EVERYWHERE
def test_operator_that_only_mutates_needs_no_fake_kernel(namespace, run):
    @torchop.custom_op(f"{namespace}::op", mutates_args=("x",))
    def op(x: Tensor) -> None:
        x.add_(1)

    assert run(op) is None


@EVERYWHERE
@pytest.mark.parametrize("effects", ["ordered", "none"])
def test_operator_that_only_has_an_effect_needs_no_fake_kernel(namespace, run, effects):
    @torchop.custom_op(f"{namespace}::op", mutates_args=(), effects=effects)
    def op(x: Tensor) -> None:
        pass

    assert run(op) is None


@EVERYWHERE
@pytest.mark.filterwarnings("ignore::torchop.SchemaWarning")
def test_operator_without_results_mutation_or_effect_needs_a_fake_kernel(namespace, run):
    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor) -> None:
        pass

    message = r"no fake impl .*, nor an effect\. .*::op returns nothing .* effects=\"none\"\."
    with pytest.raises(torchop.MissingFakeError, match=message):
        run(op)


# --------------------------------------------------------------------------------------------------
# Results of a fake kernel


@EVERYWHERE
def test_fake_kernel_that_returns_its_input_describes_a_new_tensor(namespace, run):
    def scenario(library, namespace):
        seen = []
        op = define(namespace, library)
        op.register_fake(lambda x: seen.append(x) or x)
        return run(op), seen[-1]

    both = on_both(scenario, namespace)
    output, seen = both.stock
    assert output is seen
    output, seen = both.ours
    assert output is not seen
    assert (output.shape, output.dtype, output.device) == (seen.shape, seen.dtype, seen.device)


@EVERYWHERE
def test_fake_kernel_that_returns_one_tensor_twice_describes_two(namespace, run):
    def scenario(library, namespace):
        @library.custom_op(f"{namespace}::op", mutates_args=())
        def op(x: Tensor) -> tuple[Tensor, Tensor]:
            return x * 2, x * 3

        op.register_fake(lambda x: (torch.empty_like(x),) * 2)
        return run(op)

    both = on_both(scenario, namespace)
    assert both.stock[0] is both.stock[1]
    assert both.ours[0] is not both.ours[1]


@TRACED
def test_fake_kernel_that_returns_a_real_tensor_is_refused(namespace, run):
    real = torch.ones(3)

    def scenario(library, namespace):
        op = define(namespace, library)
        op.register_fake(lambda x: real)
        return run(op)

    both = on_both(scenario, namespace)
    assert both.stock is real
    assert isinstance(both.ours, torchop.FakeKernelError)
    assert f"{namespace}::op: output 0 of the fake kernel is a real tensor" in str(both.ours)


@EVERYWHERE
@pytest.mark.parametrize("result", [None, 3, (), "x"])
def test_fake_kernel_that_returns_no_tensor_is_refused(namespace, run, result):
    op = define(namespace)
    op.register_fake(lambda x: result)
    with pytest.raises(torchop.ResultError, match="fake kernel must return a Tensor"):
        run(op)


def test_a_real_input_with_a_meta_tensor_does_not_return_uninitialized_memory(namespace):
    def scenario(library, namespace):
        @library.custom_op(f"{namespace}::op", mutates_args=())
        def op(x: Tensor, y: Tensor) -> Tensor:
            return x + y

        op.register_fake(lambda x, y: torch.empty_like(x))
        return op(torch.ones(3), torch.ones(3, device="meta"))

    both = on_both(scenario, namespace)
    assert both.stock.device.type == "cpu"
    assert isinstance(both.ours, torchop.FakeKernelError)
    assert "Put all tensors on one device" in str(both.ours)


def test_a_fake_kernel_that_forgets_the_device_raises(namespace):
    op = define(namespace)
    op.register_fake(lambda x: torch.empty(x.shape))
    with pytest.raises(torchop.FakeKernelError, match=r"on the device of an input .*new_empty"):
        op(torch.ones(3, device="meta"))


# --------------------------------------------------------------------------------------------------
# Libraries


def test_fake_kernel_that_must_not_be_replaced_stays(namespace):
    op = define(namespace)
    op.register_fake(lambda x: x.new_empty(7))
    with pytest.raises(
        RuntimeError, match=r"already has a fake impl registered at .*test_rule\.py"
    ):
        torchop.register_fake(op, lambda x: x.new_empty(9), allow_override=False)
    assert on_meta(op).shape == (7,)


def test_meta_kernel_of_a_library_is_replaced_only_on_request(namespace):
    with torchop.Library(namespace, "FRAGMENT") as library:
        library.define("op(Tensor x) -> Tensor")
        library.impl("op", lambda x: x.new_empty(7), "Meta")
        op = getattr(torch.ops, namespace).op
        with pytest.raises(RuntimeError, match="already has a DispatchKey::Meta implementation"):
            torchop.register_fake(op, lambda x: x.new_empty(9), lib=library, allow_override=False)
        assert on_meta(op).shape == (7,)
        torchop.register_fake(op, lambda x: x.new_empty(9), lib=library)
        assert on_meta(op).shape == (9,)


def test_operator_that_decomposes_takes_no_fake_kernel(namespace):
    with torchop.Library(namespace, "FRAGMENT") as library:
        library.define("op(Tensor x) -> Tensor")
        library.impl("op", lambda x: x.sin(), "CompositeImplicitAutograd")
        with pytest.raises(RuntimeError, match="CompositeImplicitAutograd kernel, so it decomp"):
            torchop.register_fake(f"{namespace}::op", lambda x: x, lib=library)


@pytest.mark.parametrize("end", ["close", "collect"])
def test_fake_kernel_lives_as_long_as_its_library(namespace, end):
    with torchop.Library(namespace, "FRAGMENT") as home:
        home.define("op(Tensor x) -> Tensor")
        op = getattr(torch.ops, namespace).op
        torchop.register_fake(op, lambda x: x.new_empty(7), lib=home)
        guest = torchop.Library(namespace, "IMPL")
        torchop.register_fake(op, lambda x: x.new_empty(9), lib=guest)
        assert on_fake(op).shape == (9,)
        if end == "close":
            guest.close()
        else:
            del guest
            gc.collect()
        assert on_fake(op).shape == (7,)
        assert on_meta(op).shape == (7,)


def test_fake_kernel_source_is_the_functions_location(namespace):
    def fake(x):
        return torch.empty_like(x)

    def scenario(library, namespace):
        define(namespace, library).register_fake(fake)
        entry = torch._library.simple_registry.singleton.find(f"{namespace}::op")
        return entry.fake_impl.kernel.source

    both = on_both(scenario, namespace)
    expected = f"{__file__}:{fake.__code__.co_firstlineno}"
    assert both.ours == expected
    assert both.stock != expected


# --------------------------------------------------------------------------------------------------
# Calls that bypass FakeTensor's dispatch


def count_cache_bypasses(call) -> int:
    before = sum(FakeTensorMode.cache_info().bypasses.values())
    call()
    return sum(FakeTensorMode.cache_info().bypasses.values()) - before


@TRACED
def test_call_bypasses_the_fake_tensor_cache(namespace, run):
    def scenario(library, namespace):
        op = define(namespace, library)
        op.register_fake(lambda x: x.new_empty(7))
        return count_cache_bypasses(lambda: run(op))

    both = on_both(scenario, namespace)
    assert both.ours == 0 < both.stock


def watched(namespace):
    """Define an operator that doubles, and a list that records the calls of its fake kernel."""
    calls = []

    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor) -> Tensor:
        return x * 2

    op.register_fake(lambda x: calls.append(x) or torch.empty_like(x))
    return op, calls


def test_known_constant_values_are_propagated(namespace):
    op, calls = watched(namespace)
    with FakeTensorMode():
        assert op(torch.tensor(3.0)).item() == 6.0
    assert calls == []


def test_real_tensor_propagation_works(namespace):
    op, calls = watched(namespace)
    with torch._functorch.config.patch(fake_tensor_propagate_real_tensors=True):
        mode = FakeTensorMode(shape_env=ShapeEnv())
    x = mode.from_tensor(torch.ones(3))
    with mode:
        result = op(x)
    assert torch.equal(result.real_tensor, torch.full((3,), 2.0))
    assert len(calls) == 1


def test_tensor_without_fake_mode_or_of_another_mode(namespace):
    op, calls = watched(namespace)
    x = torch.ones(3)
    with FakeTensorMode(), pytest.raises(AssertionError, match="convert all Tensors to FakeTensor"):
        op(x)
    with FakeTensorMode(allow_non_fake_inputs=True):
        made = op(x)
        assert type(made) is FakeTensor
    with FakeTensorMode(), pytest.raises(AssertionError, match="Mixing fake modes"):
        op(made)
    assert [type(x) for x in calls] == [FakeTensor]


def test_torch_dispatch_of_a_subclass_with_fake_tensors_runs_first(namespace):
    op, calls = watched(namespace)
    with FakeTensorMode():
        assert type(op(TwoTensor(torch.empty(3), torch.empty(3)))) is TwoTensor
    assert [type(x) for x in calls] == [FakeTensor] * 2


def test_a_fake_kernel_registered_on_top_is_run(namespace):
    op, calls = watched(namespace)
    fakes = singleton.find(f"{namespace}::op").fake_impl.kernels
    fakes.append(Kernel(lambda x: x.new_empty(9), "somebody else"))
    assert on_fake(op).shape == (9,)
    assert calls == []
    fakes.pop()
    on_fake(op)
    assert len(calls) == 1


def test_decomposition_is_used_for_symbolic_sizes(namespace):
    op, calls = watched(namespace)
    overload = op._opoverload
    torch._decomp.decomposition_table[overload] = lambda x: x.new_empty(9)
    try:
        mode = FakeTensorMode(shape_env=ShapeEnv())
        x = mode.from_tensor(torch.ones(3, 4), symbolic_context=None, source=ConstantSource("x"))
        with mode:
            assert x._has_symbolic_sizes_strides
            assert op(x).shape == (9,)
    finally:
        del torch._decomp.decomposition_table[overload]
    assert calls == []


def test_recorded_profiles_are_used(namespace):
    op, calls = watched(namespace)
    profiles = SimpleNamespace(data={op._opoverload}, generic_fake_kernel=lambda op, mode, x: x)
    with torch._dynamo.config.patch(_custom_ops_profile=profiles):
        on_fake(op)
    assert calls == []


def test_a_rule_for_the_mode_is_run_instead(namespace):
    op, calls = watched(namespace)

    @op.register_torch_dispatch(FakeTensorMode)
    def _(mode, func, types, args, kwargs):
        with mode:
            return args[0].new_empty(9)

    assert on_fake(op).shape == (9,)
    # A fake kernel that is registered later does not replace the rule for the mode.
    op.register_fake(lambda x: x.new_empty(7))
    assert on_fake(op).shape == (9,)
    assert calls == []


@EVERYWHERE
@pytest.mark.parametrize(
    "transform",
    [
        lambda x: torch.func.vjp(torch.sin, x)[1](x)[0],
        lambda x: torch.func.jvp(torch.sin, (x,), (x,))[1],
        lambda x: torch.vmap(torch.sin)(x),
    ],
    ids=["vjp", "jvp", "vmap"],
)
def test_fake_kernel_may_use_transforms(namespace, run, transform):
    op = define(namespace)
    op.register_fake(transform)
    assert run(op).shape == run(torch.sin).shape


ATTRIBUTES = {"requires_grad": False, "grad_fn": None, "is_leaf": True}


@TRACED
@pytest.mark.parametrize("attribute", ATTRIBUTES)
def test_fake_kernel_must_not_depend_on_requires_grad(namespace, run, attribute):
    op = define(namespace)
    plain = ATTRIBUTES[attribute]

    @op.register_fake
    def _(x):
        return torch.empty_like(x) if getattr(x, attribute) is plain else x.new_empty(())

    assert run(op).dim() == run(torch.sin).dim()
    expected = rf"{namespace}::op: the outputs of the fake kernel depend on {attribute} of an input"
    with pytest.raises(torchop.FakeKernelError, match=expected):
        run(lambda x: op(x.clone().requires_grad_().sin()))


@TRACED
def test_fake_kernel_may_read_requires_grad(namespace, run):
    op, read = define(namespace), []

    @op.register_fake
    def _(x):
        read.append(x.requires_grad)
        return x.new_empty(x.shape[0] + 1)

    assert run(lambda x: op(x.clone().requires_grad_())).dim() == 1
    assert read[0]


def test_new_sizes_of_a_fake_kernel_that_reads_requires_grad(namespace):
    op = define(namespace)

    @op.register_fake
    def _(x):
        assert x.requires_grad in (True, False)
        return x.new_empty(torchop.get_ctx().new_dynamic_size())

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(lambda x: op(x) + 1, backend="eager", fullgraph=True)
        assert compiled(torch.ones(3, requires_grad=True)).tolist() == [2, 2, 2]

"""opcheck runs the same checks as torch.library.opcheck, under the same names."""

from __future__ import annotations

import re
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal import custom_op_db

import torchop

CHECKS = [
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
]


def double(x: Tensor) -> Tensor:
    return x * 2


@pytest.fixture
def op(namespace: str) -> Any:
    handle = torchop.custom_op(f"{namespace}::double", double, mutates_args=())
    handle.register_fake(lambda x: torch.empty_like(x))
    handle.register_autograd(lambda ctx, grad: grad * 2)
    return handle


# Since PyTorch 2.15, torch.library.opcheck itself reads `.grad`, which warns.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_result_equals_the_result_of_torch_library(op: Any) -> None:
    args = (torch.randn(3, requires_grad=True),)
    assert torchop.opcheck(op, args) == torch.library.opcheck(op, args)
    assert torchop.opcheck(op, args) == dict.fromkeys(CHECKS, "SUCCESS")
    assert torchop.opcheck(op, args, test_utils="test_schema") == {"test_schema": "SUCCESS"}
    assert "test_aot_dispatch_static" in torchop.opcheck(op, args, test_utils="ALL")


def test_operator_may_be_passed_in_every_form(op: Any) -> None:
    packet = getattr(getattr(torch.ops, op._namespace), op._name)
    for given in (op, op.name, op.overload, packet, f"{op.name}.default"):
        assert torchop.opcheck(given, (torch.ones(2),), test_utils=CHECKS[:1])


def test_value_that_is_not_an_operator_is_rejected() -> None:
    with pytest.raises(ValueError, match="expected an operator"):
        torchop.opcheck(torch.sin, (torch.ones(2),))  # type: ignore[arg-type]
    with pytest.raises(torchop.OperatorNotFoundError, match="does not exist"):
        torchop.opcheck("nobody::defined_this", ())


def test_unknown_check_is_refused(op: Any) -> None:
    with pytest.raises(ValueError, match="test_utils to be subset of"):
        torchop.opcheck(op, (torch.ones(2),), test_utils="test_everything")


def test_arguments_must_be_a_tuple(op: Any) -> None:
    with pytest.raises(TypeError, match="args must be a tuple"):
        torchop.opcheck(op, torch.ones(2))  # type: ignore[arg-type]


def test_single_tolerance_is_rejected(op: Any) -> None:
    with pytest.raises(ValueError, match="you must specify both"):
        torchop.opcheck(op, (torch.ones(2),), rtol=0.1)


@pytest.mark.parametrize("device", ["meta", "fake"])
def test_inputs_without_data_are_refused(op: Any, device: str) -> None:
    if device == "meta":
        x = torch.empty(2, device="meta")
    else:
        with torch._subclasses.FakeTensorMode():
            x = torch.empty(2)
    with pytest.raises(ValueError, match="input 'x' has no data"):
        torchop.opcheck(op, (x,))


def test_replaced_operator_is_refused(op: Any) -> None:
    torchop.custom_op(op.name, double, mutates_args=())
    with pytest.raises(torchop.OperatorGoneError, match="was replaced"):
        torchop.opcheck(op, (torch.ones(2),))


@pytest.mark.parametrize("library", [torchop, torch.library])
def test_integer_results_may_precede_floating_point_results(namespace: str, library: Any) -> None:
    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.long(), x * 2

    op.register_fake(lambda x: (x.long(), x * 2))
    op.register_autograd(lambda ctx, _, grad: (2 if type(grad) is Tensor else 3) * grad)

    def check() -> Any:
        x = torch.ones(2, requires_grad=True)
        return library.opcheck(op, (x,), test_utils="test_aot_dispatch_dynamic")

    if library is torch.library:
        with pytest.raises(Exception, match="Float can't be cast to the desired output type Long"):
            check()
    else:
        # The formula returns a different gradient when it is traced, which the check must notice.
        with pytest.raises(torchop.testing.OpCheckError, match=r"Gradients of .* Make the formula"):
            check()
        op.register_autograd(lambda ctx, _, grad: 2 * grad)
        assert check() == {"test_aot_dispatch_dynamic": "SUCCESS"}


@pytest.mark.parametrize("library", [torchop, torch.library])
def test_tolerances_of_zero_mean_exactly_equal(namespace: str, library: Any) -> None:
    calls = 0

    def drifts(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return x + calls * 1e-6

    op = torchop.custom_op(f"{namespace}::op", drifts, mutates_args=(), schema="(Tensor x)->Tensor")
    op.register_fake(lambda x: torch.empty_like(x))

    def check(tolerance: float) -> Any:
        return library.opcheck(
            op,
            (torch.ones(2),),
            test_utils="test_aot_dispatch_dynamic",
            rtol=tolerance,
            atol=tolerance,
        )

    check(1e-3)
    if library is torch.library:
        check(0)  # passes, because 0 is mistaken for no tolerance
    else:
        with pytest.raises(torchop.testing.OpCheckError, match="eager-mode PyTorch vs AOT"):
            check(0)


def test_float8_inputs_are_checked(namespace: str) -> None:
    def keeps(x: Tensor) -> Tensor:
        return x.clone()

    def writes(x: Tensor) -> Tensor:
        x.view(torch.uint8).add_(1)
        return x.clone()

    x = torch.ones(4).to(torch.float8_e4m3fn)
    good = torchop.custom_op(f"{namespace}::good", keeps, mutates_args=())
    bad = torchop.custom_op(f"{namespace}::bad", writes, mutates_args=())
    assert torchop.opcheck(good, (x,), test_utils="test_schema")
    with pytest.raises(torchop.testing.OpCheckError, match="Argument x is not defined as mutable"):
        torchop.opcheck(bad, (x,), test_utils="test_schema")


_WRONG_FAKES = {
    "shape": lambda x: x.new_empty(x.shape[0] + 1),
    "dtype": lambda x: x.new_empty(x.shape, dtype=torch.double),
    "number of dimensions": lambda x: x.new_empty(x.shape[0], 1),
}


@pytest.mark.parametrize("wrong", _WRONG_FAKES)
def test_wrong_fake_kernel_is_found(namespace: str, wrong: str) -> None:
    op = torchop.custom_op(f"{namespace}::double", double, mutates_args=())
    op.register_fake(_WRONG_FAKES[wrong])
    with pytest.raises(torchop.testing.OpCheckError, match="test_faketensor"):
        torchop.opcheck(op, (torch.randn(3),))


def test_wrong_strides_are_found(namespace: str) -> None:
    op = torchop.custom_op(
        f"{namespace}::flip", lambda x: x.clone().t(), mutates_args=(), schema="(Tensor x)->Tensor"
    )
    op.register_fake(lambda x: x.new_empty(x.shape[1], x.shape[0]))
    with pytest.raises(torchop.testing.OpCheckError, match="Stride mismatch"):
        torchop.opcheck(op, (torch.randn(3, 4),))


def test_gradients_registered_at_a_backend_key_are_found(namespace: str) -> None:
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * 0.5

    with torchop.Library(namespace, "FRAGMENT") as library:
        library.define("op(Tensor x) -> Tensor")
        library.impl("op", Function.apply, "CPU")
        library.impl("op", lambda x: x.clone(), "Meta")
        with pytest.raises(torchop.testing.OpCheckError, match="does not have an autograd kernel"):
            torchop.opcheck(f"{namespace}::op", (torch.randn(2, requires_grad=True),))


def test_failures_can_be_collected(namespace: str) -> None:
    def writes(x: Tensor) -> Tensor:
        x.add_(1)
        return x.clone()

    op = torchop.custom_op(f"{namespace}::op", writes, mutates_args=())
    op.register_fake(lambda x: torch.empty_like(x))
    result = torchop.opcheck(op, (torch.zeros(2),), raise_exception=False)
    assert isinstance(result["test_schema"], RuntimeError)
    assert result["test_faketensor"] == "SUCCESS"


def test_failure_after_a_wrong_fake_kernel_names_it(namespace: str) -> None:
    def longer(x: Tensor) -> Tensor:
        return x.new_empty(x.shape[0] + 1)

    op = torchop.custom_op(f"{namespace}::op", double, mutates_args=())
    op.register_fake(longer)
    op.register_autograd(
        lambda ctx, grad: grad * ctx.saved_tensors[0],
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    result = torchop.opcheck(op, (torch.ones(3, requires_grad=True),), raise_exception=False)
    assert "mismatched tensor metadata" in str(result["test_faketensor"])
    failure = result["test_aot_dispatch_dynamic"]
    assert isinstance(failure, torchop.testing.OpCheckError)
    assert "for the same reason as test_faketensor. Correct the fake kernel first" in str(failure)


def test_error_is_also_an_error_of_torch_library(namespace: str) -> None:
    from torch.testing._internal.optests import OpCheckError

    op = torchop.custom_op(f"{namespace}::double", double, mutates_args=())
    for error in (OpCheckError, torchop.testing.OpCheckError):
        with pytest.raises(error, match=f"test_faketensor of {namespace}::double"):
            torchop.opcheck(op, (torch.randn(3),))


def _database_of_ours() -> Any:
    """Run the source of PyTorch's `custom_op_db` with torchop in place of torch.library."""
    source = Path(custom_op_db.__file__).read_text()
    source = re.sub(r"\btorch\.library\b", "torchop", source)
    source = source.replace("_torch_testing", "torchop_testing")
    module = types.ModuleType("torchop_custom_op_db")
    sys.modules[module.__name__] = module
    exec(compile("import torchop\n" + source, module.__name__, "exec"), module.__dict__)
    return module


@pytest.mark.filterwarnings("ignore:.*create_unbacked_symint:FutureWarning")
def test_pytorchs_database_of_operators_passes() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torchop.SchemaWarning)
        database = _database_of_ours().custom_op_db
    assert len(database) >= 10
    for info in database:
        supported = info.supported_dtypes("cpu")
        dtype = torch.float32 if torch.float32 in supported else min(supported, key=str)
        samples = list(info.sample_inputs("cpu", dtype, requires_grad=info.supports_autograd))
        assert samples
        for sample in samples[:2]:  # the other samples differ only in their shapes
            torchop.opcheck(info.op, (sample.input, *sample.args), sample.kwargs)


# --------------------------------------------------------------------------------------------------
# Examples


def test_registered_examples_are_used_without_arguments(namespace: str) -> None:
    @torchop.custom_op(f"{namespace}::first", mutates_args=())
    def first(x: Tensor, count: int = 1) -> Tensor:
        return x[:count].clone()

    first.register_fake(lambda x, count: x.new_empty(1))  # incorrect unless count is 1
    with pytest.raises(torchop.MissingRuleError, match=r"::first has no examples\. Pass sample"):
        torchop.opcheck(first)
    first.register_examples(lambda: [(torch.ones(3),), {"x": torch.ones(3), "count": 1}])
    assert set(torchop.opcheck(first).values()) == {"SUCCESS"}
    assert torchop.opcheck(first, kwargs={"x": torch.ones(2)}, test_utils="test_schema") == {
        "test_schema": "SUCCESS"
    }
    first.register_examples(lambda: [(torch.ones(3), 2), (torch.ones(3),)])
    with pytest.raises(torchop.testing.OpCheckError, match=r"test_faketensor of .*::first failed"):
        torchop.opcheck(first.name, test_utils=["test_schema", "test_faketensor"])
    results = torchop.opcheck(
        first, test_utils=["test_schema", "test_faketensor"], raise_exception=False
    )
    assert results["test_schema"] == "SUCCESS"
    assert isinstance(results["test_faketensor"], Exception), "the failure of the first example"


# --------------------------------------------------------------------------------------------------
# Operators with out= whose result depends on the previous contents of out


def define_out(namespace: str, write: Callable[[Tensor, Tensor], object]) -> torchop.CustomOp:
    @torchop.custom_op(
        f"{namespace}::op",
        mutates_args=("out",),
        schema="(Tensor x, *, Tensor(a!) out) -> Tensor(a!)",
    )
    def op(x: Tensor, *, out: Tensor) -> Tensor:
        write(x, out)
        return out

    return op


def _leaves_the_first(x: Tensor, out: Tensor) -> None:
    out[1:] = x[1:]


def _clears_by_multiplying(x: Tensor, out: Tensor) -> None:
    out.mul_(0).add_(x)


WRONG = {
    "reads": lambda x, out: out.add_(x),
    "leaves a part": _leaves_the_first,
    "writes nothing": lambda x, out: None,
}
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", WRONG)
def test_dependence_on_previous_contents_is_detected(namespace, name, dtype):
    op = define_out(namespace, WRONG[name])
    with pytest.raises(
        torchop.testing.OpCheckError,
        match=rf"'out' of {namespace}::op\(.*depends on its previous contents.*"
        r"Write every element without reading it; or mutate a plain argument, without the tag",
    ):
        torchop.opcheck(
            op,
            (torch.zeros(3, dtype=dtype),),
            {"out": torch.zeros(3, dtype=dtype)},
            test_utils="test_schema",
        )


def test_clearing_by_multiplication_is_detected_because_nan_remains(namespace):
    op = define_out(namespace, _clears_by_multiplying)
    with pytest.raises(torchop.testing.OpCheckError, match="depends on its previous contents"):
        torchop.opcheck(op, (torch.ones(3),), {"out": torch.zeros(3)}, test_utils="test_schema")


RIGHT = {
    "writes all": lambda x, out: out.copy_(x * 2),
    "draws random numbers": lambda x, out: out.copy_(torch.rand(x.shape)),
    "writes in two steps": lambda x, out: out.zero_().add_(x),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", RIGHT)
def test_operator_that_only_writes_its_output_passes(namespace, name, dtype):
    op = define_out(namespace, RIGHT[name])
    x, out = torch.ones(3, dtype=dtype), torch.ones(3, dtype=dtype)
    torchop.opcheck(op, (x,), {"out": out}, test_utils="test_schema")
    assert torch.equal(out, x)  # opcheck ran the kernel on a copy of out


def test_nondeterministic_output_passes(namespace):
    calls = iter(range(100))
    op = define_out(namespace, lambda x, out: out.fill_(next(calls)))
    torchop.opcheck(op, (torch.ones(3),), {"out": torch.zeros(3)}, test_utils="test_schema")


def test_message_names_the_output_that_is_read(namespace):
    @torchop.custom_op(
        f"{namespace}::op",
        mutates_args=("a", "b"),
        schema="(Tensor x, *, Tensor(a!) a, Tensor(b!) b) -> (Tensor(a!), Tensor(b!))",
    )
    def op(x: Tensor, *, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return a.copy_(x), b.add_(x)

    with pytest.raises(torchop.testing.OpCheckError, match="failed: 'b' of"):
        torchop.opcheck(
            op,
            (torch.ones(2),),
            {"a": torch.zeros(2), "b": torch.zeros(2)},
            test_utils="test_schema",
        )


def test_operator_without_the_tag_may_read_its_written_argument(namespace):
    @torchop.custom_op(f"{namespace}::op", mutates_args=("out",))
    def op(x: Tensor, out: Tensor) -> None:
        out.add_(x)

    torchop.opcheck(op, (torch.ones(2), torch.zeros(2)), test_utils="test_schema")


def test_setup_context_may_call_functions_that_pytorch_cannot_inspect(namespace: str) -> None:
    """PyTorch's check of the schema raised "Cannot inspect value of type Device"."""
    op = torchop.custom_op(f"{namespace}::op", double, mutates_args=())

    @op.register_autograd(
        setup_context=lambda ctx, inputs, output: setattr(ctx, "a", inputs[0].detach().numpy())
    )
    def _(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2

    torchop.opcheck(op, (torch.ones(2, requires_grad=True),), test_utils="test_schema")

"""opcheck: checks the contract of an operator that compilers rely on."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchop._compat import dispatch, optests, simulated_ranks
from torchop._rules.user.examples import make_examples
from torchop._rules.user.sharding import SHARDING
from torchop.extend import Form, Operator, OpLike, OpOverload, short_repr
from torchop.testing._check.calls import Call
from torchop.testing._check.checks.results import keeps_its_schema
from torchop.testing._errors import OpCheckError
from torchop.testing._samples import Sample, inside_a_graph, sample_of, without_refused_gradients
from torchop.testing.probes import copies, leaves, tensors_of

DEFAULT_TEST_UTILS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)
# PyTorch's checks take a tolerance of 0 for "not given"; this one has the effect of 0.
_TINY = 5e-324
# Ours, for operators with a sharding rule, beside those of PyTorch.
_SHARDING = "test_sharding"
_PLACEMENTS = 100


def opcheck(
    op: OpLike,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    test_utils: str | Sequence[str] = DEFAULT_TEST_UTILS,
    raise_exception: bool = True,
    atol: float | None = None,
    rtol: float | None = None,
) -> dict[str, str | Exception]:
    """Checks an operator on sample inputs: its schema, fake kernel, formula and compilation.

    Call it with inputs of every kind that matters: each device and dtype, empty and non-contiguous
    tensors, and tensors that require grad if the operator can be trained. It does not check whether
    results or gradients are right; use `torch.testing.assert_close` and `torch.autograd.gradcheck`
    for that.

    Args:
        op: the operator: a handle, `"ns::name"`, `"ns::name.overload"`, an `OpOverload`, or a
            packet with one overload.
        args: the positional arguments. Without these and `kwargs`, the operator is checked on each
            of its examples (`CustomOp.register_examples`). For a handle, pass the arguments of the
            function; otherwise, those of the schema.
        kwargs: the keyword arguments.
        test_utils: the names of the checks to run, or `"ALL"`: `test_schema`,
            `test_autograd_registration`, `test_faketensor`, `test_aot_dispatch_dynamic`,
            `test_aot_dispatch_static`, and `test_sharding`. The last one is
            `torchop.testing.check_sharding` on two simulated ranks; by default it runs if the
            operator has a sharding rule and the process does not belong to a process group.
        raise_exception: whether to raise the first failure; otherwise it is in the result.
        atol: the absolute tolerance of comparisons; goes with `rtol`. 0 means exactly equal.
        rtol: the relative tolerance of comparisons; goes with `atol`.

    Returns:
        For each check `"SUCCESS"` or, with `raise_exception=False`, the exception.

    Raises:
        MissingRuleError: there are neither arguments nor examples.
        OpCheckError: a check failed.
        ValueError: an argument has another form, or an input has no data.

    Example:
        >>> import torch, torchop
        >>> torchop.opcheck("aten::sin", (torch.randn(3),), test_utils="test_schema")
        {'test_schema': 'SUCCESS'}

    If a call would refuse to write into a tensor because it requires grad, opcheck detaches that
    tensor, or copies it if it is a leaf and the operator is in-place. So samples that require grad
    can still be checked.

    The checks are those of `torch.library.opcheck`. With each of them, the inputs are also compared
    bit for bit before and after the call, as `torchop.testing.checking` does for a whole program.
    `test_schema` also finds memory shared through NumPy.
    """
    if (rtol is None) is not (atol is None):
        raise ValueError(
            "opcheck(op, ...): if you specify one of rtol/atol, you must specify both."
        )
    operator = Operator(op, "opcheck")
    if args is None and kwargs is None:
        return _check_examples(
            op, test_utils=test_utils, raise_exception=raise_exception, atol=atol, rtol=rtol
        )
    args = () if args is None else args
    schema, overload = operator.schema, operator.overload
    checks = _checks(test_utils, overload)
    given = sample_of(operator, "opcheck", args, kwargs)
    sample = without_refused_gradients(schema, *given)
    tolerances = {"rtol": _TINY if rtol == 0 else rtol, "atol": _TINY if atol == 0 else atol}
    results: dict[str, str | Exception] = {}
    # Undeclared mutation is always checked, with the first of the checks that were asked for.
    exact = "test_schema" if "test_schema" in checks else next(iter(checks), None)
    for check in checks:
        try:
            if check == exact:
                record = Call(overload, *sample).record
                problem = record.error or record.mutation
                if problem is not None:
                    raise problem
            if check == _SHARDING:
                from torchop.testing._sharding import check_sharding  # for start-up time

                check_sharding(overload, *sample, limit=_PLACEMENTS)
            elif check != "test_schema" or _stock_can_compare(sample):
                run = functools.partial(optests.opcheck_tests()[check], **tolerances)
                _run(check, run, operator, given, sample)
            if check == "test_schema":
                keeps_its_schema(Call(overload, *sample))
            results[check] = "SUCCESS"
        except Exception as error:
            if raise_exception:
                # Also the class that users of torch.library.opcheck catch.
                failure = optests.opcheck_error(OpCheckError)
                raise failure(
                    f"opcheck(op, ...): {check} of {operator.name} failed: {error}"
                    f"{_what_to_do(error)}"
                ) from error
            results[check] = error
    return results


def _what_to_do(error: Exception) -> str:
    """What PyTorch's checks do not tell of a failure: which of two is whose, and the fix."""
    if "found mismatched tensor metadata" in str(error):
        text = " The first is the kernel's, and the fake kernel must return the same."
        strides = re.search(r"Strides are \(([\d, ]+)\) and", str(error))
        steps = (
            [] if strides is None else [int(step) for step in strides[1].split(",") if step.strip()]
        )
        if steps and steps == sorted(steps, reverse=True):
            text += (
                " If the kernel returns a contiguous tensor whatever the strides of x are: "
                'register_fake(like="x", memory_format=torch.contiguous_format).'
            )
        return text
    if "Gradients of the operator are different in eager-mode PyTorch vs" in str(error):
        return " Make the formula the same where it is traced, or register one."
    if "different in eager-mode PyTorch vs" in str(error):
        return " Draw random numbers with torch.rand and the like."
    return ""


def _check_examples(op: OpLike, **options: Any) -> dict[str, str | Exception]:
    """Checks an operator on all its examples; of each check, the first failure is the result."""
    results: dict[str, str | Exception] = {}
    op = Operator(op, "opcheck").handle or op  # whose calls they are, also where it is named
    for args, kwargs in make_examples(op):
        for check, result in opcheck(op, args, kwargs, **options).items():
            if not isinstance(results.get(check), Exception):
                results[check] = result
    return results


def _run(check: str, run: Any, operator: Operator, sample: Sample, accepted: Sample) -> None:
    """Runs one of PyTorch's checks on the sample, or on the accepted one if it calls with that."""
    schema, overload = operator.schema, operator.overload
    if check == "test_autograd_registration" and dispatch.has_kernel(overload.name(), "Autograd"):
        return  # PyTorch's check says so too, but raises on most devices before it comes to that

    def floating_first(*args: Any, **kwargs: Any) -> Any:
        """The operator, with its floating-point results before its other results.

        PyTorch's check adds up all results in place, and refuses to add a float to a sum of
        integers.
        """
        result = overload(*args, **kwargs)
        kinds = {_is_exact(tensor) for tensor in tensors_of(result)}
        return sorted(leaves(result), key=_is_exact) if len(kinds) > 1 else result

    def on_copies(*args: Any, **kwargs: Any) -> Any:
        """The operator, as a function that writes into no argument.

        Since 2.15 the check makes the copies outside of what it differentiates, and then asks for
        the gradients of what was overwritten.
        """
        copies, keywords = inside_a_graph(schema, args, kwargs)
        return overload(*copies, **keywords)

    with warnings.catch_warnings():
        # The compiler asks every tensor for its gradient, those inside a graph too.
        warnings.filterwarnings("ignore", "The .grad attribute", UserWarning)
        if check.startswith("test_aot_dispatch") and schema.form is not Form.INPLACE:
            run(floating_first, *accepted)
        elif check == "test_faketensor":
            # PyTorch's copies of negative and conjugate views are no such views, so a kernel that
            # takes contiguous tensors would be given one with gaps.
            run(overload, *copies(accepted), copy_inputs=False)
        elif schema.form is not Form.INPLACE or check == "test_schema":
            run(overload, *accepted)
        elif check == "test_autograd_registration":
            run(overload, *inside_a_graph(schema, *sample), copy_inputs=False)
        else:
            run(on_copies, *sample)


def _is_exact(value: Any) -> bool:
    return not (isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()))


def _checks(test_utils: str | Sequence[str], op: OpOverload) -> tuple[str, ...]:
    all_checks = (*optests.opcheck_tests(), _SHARDING)
    if test_utils in ("ALL", DEFAULT_TEST_UTILS):
        can_simulate = SHARDING.has(op) and not simulated_ranks.has_process_group()
        checks = all_checks[:-1] if test_utils == "ALL" else DEFAULT_TEST_UTILS
        return (*checks, _SHARDING) if can_simulate else checks
    checks = (test_utils,) if isinstance(test_utils, str) else tuple(test_utils)
    if not set(checks) <= set(all_checks):
        raise ValueError(
            f"opcheck(op, ..., test_utils={short_repr(test_utils)}), expected test_utils to be "
            f"subset of {all_checks}."
        )
    return checks


def _stock_can_compare(sample: Sample) -> bool:
    # PyTorch's schema check uses allclose and reads storages, which these do not support.
    return not any(
        tensor.layout is not torch.strided or str(tensor.dtype).startswith("torch.float8")
        for tensor in tensors_of(sample)
    )

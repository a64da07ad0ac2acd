"""`opcheck`, which checks that compilers and other PyTorch subsystems can use an operator."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchop._compat import autocasting, classes, dispatch, opaque_types, optests, simulated_ranks
from torchop._rules.user.examples import make_examples
from torchop._rules.user.sharding import SHARDING
from torchop.extend import Form, Operator, OpLike, OpOverload, short_repr
from torchop.testing._check.calls import Call
from torchop.testing._check.checks.results import keeps_its_schema
from torchop.testing._errors import OpCheckError
from torchop.testing._samples import Sample, inside_a_graph, sample_of, without_refused_gradients
from torchop.testing.probes import copies, leaves, mapped, tensors_of

DEFAULT_TEST_UTILS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)
# PyTorch's checks ignore a tolerance of 0, so pass the smallest positive float instead.
_TINY = 5e-324
# A check that torchop adds to PyTorch's checks, for operators with a sharding rule.
_SHARDING = "test_sharding"
_PLACEMENTS = 100  # the maximum number of combinations of placements that `test_sharding` tries


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
    """Check the schema, fake kernel, autograd formula and compilation of an operator.

    Call `opcheck` with representative inputs: each device and dtype, empty and non-contiguous
    tensors and, if the operator has an autograd formula, tensors that require grad. `opcheck` does
    not check that results and gradients are correct. Use `torch.testing.assert_close` for results,
    and `torch.autograd.gradcheck` for gradients.

    Args:
        op: the operator: a handle, `"ns::name"`, `"ns::name.overload"`, an `OpOverload`, or a
            packet with one overload.
        args: the positional arguments of the call. If `op` is a handle, pass the arguments of its
            Python function. Otherwise, pass the arguments in the schema. If both `args` and
            `kwargs` are omitted, the examples from `CustomOp.register_examples` are used.
        kwargs: the keyword arguments of the call.
        test_utils: the names of the checks to run, or `"ALL"`. The checks are `test_schema`,
            `test_autograd_registration`, `test_faketensor`, `test_aot_dispatch_dynamic`,
            `test_aot_dispatch_static`, and `test_sharding`. `test_sharding` calls
            `torchop.testing.check_sharding` on two simulated ranks. By default it runs if the
            operator has a sharding rule and the process does not belong to a process group.
        raise_exception: whether to raise the first failure. If False, failures are returned.
        atol: the absolute tolerance of comparisons; requires `rtol`. 0 means exactly equal.
        rtol: the relative tolerance of comparisons; requires `atol`.

    Returns:
        A dict that maps the name of each check to `"SUCCESS"`. With `raise_exception=False`, it
        maps each check that failed to its exception.

    Raises:
        MissingRuleError: no arguments were passed, and no examples are registered.
        OpCheckError: a check failed.
        ValueError: an argument is invalid, or an input has no data.

    Example:
        >>> import torch, torchop
        >>> torchop.opcheck("aten::sin", (torch.randn(3),), test_utils="test_schema")
        {'test_schema': 'SUCCESS'}

    Arguments that the operator writes to may also require grad. `opcheck` detaches these tensors
    or, for an in-place operator, clones them.

    `opcheck` runs the checks of `torch.library.opcheck`. In addition, it compares the inputs bit
    for bit before and after a call, like `torchop.testing.checking`, and `test_schema` also detects
    results that share memory with an input through NumPy.
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
    # Look for undeclared mutations in a single check, because once is enough: in `test_schema`, or
    # else in the first check.
    exact = "test_schema" if "test_schema" in checks else next(iter(checks), None)
    for check in checks:
        try:
            if check == exact:
                record = Call(overload, *sample).record
                problem = record.error or record.mutation
                if problem is not None:
                    raise problem
            if check == _SHARDING:
                from torchop.testing._sharding import check_sharding  # slow to import

                check_sharding(overload, *sample, limit=_PLACEMENTS)
            elif check != "test_schema" or _stock_can_compare(sample):
                run = functools.partial(optests.opcheck_tests()[check], **tolerances)
                _run(check, run, operator, given, sample)
            if check == "test_schema":
                keeps_its_schema(Call(overload, *sample))
            results[check] = "SUCCESS"
        except Exception as error:
            if raise_exception:
                # Raise an exception that callers can catch both as OpCheckError and as the
                # exception of torch.library.opcheck.
                failure = optests.opcheck_error(OpCheckError)
                raise failure(
                    f"opcheck(op, ...): {check} of {operator.name} failed: {error}"
                    f"{_what_to_do(error)}"
                ) from error
            results[check] = _after_wrong_fake(check, error, results)
    return results


def _after_wrong_fake(check: str, error: Exception, results: Mapping[str, Any]) -> Exception:
    """Return the failure of a check, pointing to the fake kernel if that is the likely cause."""
    if not check.startswith("test_aot_dispatch") or not isinstance(
        results.get("test_faketensor"), Exception
    ):
        return error
    failure = optests.opcheck_error(OpCheckError)(
        f"{check} probably fails for the same reason as test_faketensor. Correct the fake kernel "
        f"first. {error}"
    )
    failure.__cause__ = error
    return failure


def _what_to_do(error: Exception) -> str:
    """Return advice to append to the error message of one of PyTorch's checks, if any."""
    if "found mismatched tensor metadata" in str(error):
        text = " The kernel returned the first. Make the fake kernel return the same metadata."
        strides = re.search(r"Strides are \(([\d, ]+)\) and", str(error))
        steps = (
            [] if strides is None else [int(step) for step in strides[1].split(",") if step.strip()]
        )
        if steps and steps == sorted(steps, reverse=True):
            text += (
                " If the kernel returns a contiguous tensor for all strides of x: "
                'register_fake(like="x", memory_format=torch.contiguous_format).'
            )
        return text
    if "Gradients of the operator are different in eager-mode PyTorch vs" in str(error):
        return " Make the formula compute the same when it is traced, or register a formula."
    if "different in eager-mode PyTorch vs" in str(error):
        return " To draw random numbers, use PyTorch's generators."
    return ""


def _check_examples(op: OpLike, **options: Any) -> dict[str, str | Exception]:
    """Run the checks on all examples, and return the first failure of each check, or "SUCCESS"."""
    results: dict[str, str | Exception] = {}
    op = Operator(op, "opcheck").handle or op  # examples contain the arguments of the handle
    for args, kwargs in make_examples(op):
        for check, result in opcheck(op, args, kwargs, **options).items():
            if not isinstance(results.get(check), Exception):
                results[check] = result
    return results


def _run(check: str, run: Any, operator: Operator, sample: Sample, accepted: Sample) -> None:
    """Run one of PyTorch's checks.

    `accepted` is a copy of `sample` in which the tensors that must not require grad are detached.
    Pass `accepted` to the check. Only for an in-place operator, pass `sample` itself to all checks
    except `test_schema` and `test_faketensor`.
    """
    schema, overload = operator.schema, operator.overload
    if check == "test_autograd_registration" and dispatch.has_kernel(overload.name(), "Autograd"):
        # With an Autograd kernel, the check always passes. Skip it, because it raises an error for
        # devices that it does not support.
        return

    def floating_first(*args: Any, **kwargs: Any) -> Any:
        """Call the operator, and return floating-point results before other results.

        PyTorch's check adds all results to the first one in place, which fails if the first one is
        an integer tensor and another one is floating-point. This function also leaves out objects
        of opaque types, because PyTorch's check cannot compare them.
        """
        result = overload(*args, **kwargs)
        if any(map(_is_object, classes.tree_leaves(result))):
            result = tuple(leaves(result))
        kinds = {_is_exact(tensor) for tensor in tensors_of(result)}
        return sorted(leaves(result), key=_is_exact) if len(kinds) > 1 else result

    def on_copies(*args: Any, **kwargs: Any) -> Any:
        """Call the operator with copies of the arguments that it writes to.

        Since PyTorch 2.15, the check calls the operator first and then computes gradients with
        respect to its arguments, so the operator must not overwrite them.
        """
        copies, keywords = inside_a_graph(schema, args, kwargs)
        return overload(*copies, **keywords)

    with warnings.catch_warnings():
        # The compiler reads .grad of every tensor, which emits a warning for non-leaf tensors.
        warnings.filterwarnings("ignore", "The .grad attribute", UserWarning)
        if check.startswith("test_aot_dispatch") and schema.form is not Form.INPLACE:
            run(floating_first, *accepted)
        elif check == "test_faketensor":
            # Make the copies here, because PyTorch would copy negative and conjugate views into
            # plain tensors with different strides.
            # PyTorch runs the kernel with autocast disabled (see `autocasting.state_of_kernel`), so
            # disable it for the fake kernel as well.
            with autocasting.restored(()):
                run(overload, *copies(accepted), copy_inputs=False)
        elif check == "test_schema":
            try:
                run(overload, *accepted)
            except TypeError as error:
                # `SchemaCheckMode` (torch/_subclasses/schema_check_mode.py) fails for functions
                # such as `Tensor.numpy`, which `setup_context` may call, so repeat the check
                # without gradients.
                if not str(error).startswith("Cannot inspect value of type "):
                    raise
                run(overload, *mapped(accepted, Tensor.detach))
        elif schema.form is not Form.INPLACE:
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
    # PyTorch's schema check fails for three kinds of arguments: torch.allclose does not support
    # float8 tensors, sparse tensors have no storage, and `add_argument_values`
    # (torch/csrc/utils/schema_info.cpp) tries to convert the attributes of opaque objects.
    return not any(
        tensor.layout is not torch.strided or str(tensor.dtype).startswith("torch.float8")
        for tensor in tensors_of(sample)
    ) and not any(map(_is_object, classes.tree_leaves(sample)))


def _is_object(value: Any) -> bool:
    return opaque_types.is_by_reference(type(value))

"""The registration of formulas: for backward, for forward mode, or derived."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch.library

from torchop._core.lock import registration_lock
from torchop._core.registry import OpLike, resolve
from torchop._errors import RuleSignatureError
from torchop._rules.autograd import forward_mode
from torchop._rules.autograd.checks import (
    check_derivable,
    check_has_gradient,
    check_no_autograd_function,
)
from torchop._rules.autograd.contiguous_grads import with_contiguous_grads
from torchop._rules.autograd.formula import Formula, SetupContext
from torchop._rules.autograd.rule import AutogradRule
from torchop._schema.callables import (
    Function,
    Lambda,
    asks_for_residuals,
    check_setup_context,
    check_signature,
    decorator_or_call,
    keyword_only,
)


@keyword_only
def register_autograd(
    op: OpLike,
    backward: Function | Lambda | None = None,
    /,
    *,
    setup_context: SetupContext | None = None,
    jvp: Callable[..., Any] | None = None,
    backward_kernel: Callable[..., Any] | None = None,
    contiguous_grads: bool = False,
    lib: torch.library.Library | None = None,
) -> Function:
    """Registers the backward formula of an operator.

    Args:
        op: the operator: a handle, `"ns::name"`, `"ns::name.overload"`, an `OpOverload`, or a
            packet with one overload.
        backward: `backward(ctx, *grads)`. It gets one gradient for each output (a list for an
            output that is a list) and returns one value for each input: a tensor of its shape, None
            where there is no gradient, or a list of these for a list of tensors. It must consist of
            operators that PyTorch knows. One that reads data, as NumPy does, works in eager calls,
            and raises an error in a compiler's trace, in a transform of `torch.func` and on
            DTensors, where a `backward_kernel` works. Without it, a decorator is returned.
        setup_context: `setup_context(ctx, inputs, output)`, called after the kernel, to save on
            `ctx` what `backward` needs; with keyword-only arguments in the schema,
            `setup_context(ctx, inputs, keyword_only_inputs, output)`. Arguments that the caller
            omitted have their defaults. With one more parameter, `residuals`, it gets what the
            kernel returned for the backward alone, with an attribute for each; see
            `torchop.residuals`.
        jvp: the formula for forward mode, as in `register_jvp`, with the same `setup_context`.
        backward_kernel: in place of `backward` and `setup_context`, one function, which becomes an
            operator of its own, `name__backward_kernel`. It takes a gradient for each result, and
            then what its parameters name: arguments of the operator, `output` (`output_0` and so on
            if there are several) and residuals. It returns the gradient of each tensor of the
            arguments, in the order of the schema, in fresh memory; a list for a list. Its
            annotations are those of an operator, structures included.
            The gradients look like the arguments, unless you register another fake kernel for it.
        contiguous_grads: whether `backward`, or the `backward_kernel`, gets every gradient in
            `torch.contiguous_format`, as by `grad.contiguous()`: a copy of a gradient that is
            expanded, narrowed, transposed or lazily conjugated, and any other gradient itself. Set
            it if a kernel reads the memory of gradients without their strides: `loss.sum()` passes
            a gradient of stride 0, and `torch.cat` passes a part of a larger one.
        lib: the library whose lifetime the registration shares; by default it stays for good.

    Returns:
        `backward`; without it, a decorator, or None with a `backward_kernel`.

    Raises:
        NotImplementedError: the operator has keyword-only tensors.
        OperatorNotFoundError: the operator is not defined.
        RuleSignatureError: a function does not take the arguments it will be called with.
        RuntimeError: the operator returns nothing, or views, or all that it writes into.

    An operator in the in-place form returns its first argument: `backward` gets the gradient of the
    new value and returns that of the old one, and `setup_context` sees the new value in both
    `inputs` and `output`. Arguments that an operator in another form mutates must not require grad
    when it is called, as the statistics of a batch norm do not; their gradient is None.

    Example:
        >>> import torch, torchop
        >>> @torchop.custom_op("docs::square", mutates_args=())
        ... def square(x: torch.Tensor) -> torch.Tensor:
        ...     return x * x
        >>> def setup_context(ctx, inputs, output):
        ...     ctx.save_for_backward(*inputs)
        >>> @torchop.register_autograd("docs::square", setup_context=setup_context)
        ... def backward(ctx, grad):
        ...     (x,) = ctx.saved_tensors
        ...     return 2 * x * grad
        >>> x = torch.tensor([3.0], requires_grad=True)
        >>> square(x).backward()
        >>> x.grad
        tensor([6.])

    The idea is `torch.library.register_autograd`.
    """
    rule = resolve(op, "register_autograd", lib).rule(AutogradRule)
    if backward_kernel is not None:
        if backward is not None or setup_context is not None:
            raise RuleSignatureError(
                f"{rule.definition}: register_autograd takes a backward_kernel, or backward and "
                "setup_context, not both."
            )
        register(rule, backward_kernel, jvp=jvp, is_kernel=True, contiguous_grads=contiguous_grads)
        return cast(Function, None)
    return decorator_or_call(
        lambda function: register(
            rule, function, setup_context, jvp, contiguous_grads=contiguous_grads
        ),
        backward,
    )


@keyword_only
def register_jvp(
    op: OpLike,
    jvp: Function | Lambda | None = None,
    /,
    *,
    setup_context: SetupContext | None = None,
    lib: torch.library.Library | None = None,
) -> Function:
    """Registers the formula of an operator for forward mode: the tangents of its outputs.

    `torch.func.jvp`, `jacfwd`, `hessian`, `linearize` and dual tensors use it. A formula of
    differentiable operators can be differentiated again, in both modes.

    Args:
        op: the operator: a handle, `"ns::name"`, `"ns::name.overload"`, an `OpOverload`, or a
            packet with one overload.
        jvp: `jvp(ctx, *tangents)`. It gets one tangent for each positional input: zeros for a
            tensor that has none (None after `ctx.set_materialize_grads(False)`), None for an
            argument that is not a tensor, a list for a list. It returns one tangent for each
            output, of its shape and dtype, or None. Without it, a decorator is returned.
        setup_context: as in `register_autograd`; by default, that of `register_autograd` is used.
            Tensors that it saves with `ctx.save_for_forward` or `ctx.save_for_backward` are in
            `ctx.saved_tensors` for `jvp`.
        lib: the library whose lifetime the registration shares; by default it stays for good.

    Returns:
        `jvp`; without it, a decorator.

    Raises:
        NotImplementedError: the operator takes tensors in places that forward mode cannot follow.
        OperatorNotFoundError: the operator is not defined.
        RuleSignatureError: a function does not take the arguments it will be called with.
        RuntimeError: the operator mutates or views an argument, or returns nothing; or another
            library registered a kernel for autograd, which would be replaced.

    Example:
        >>> import torch, torchop
        >>> @torchop.custom_op("docs::sine", mutates_args=())
        ... def sine(x: torch.Tensor) -> torch.Tensor:
        ...     return torch.sin(x)
        >>> def setup_context(ctx, inputs, output):
        ...     ctx.save_for_forward(*inputs)
        >>> @torchop.register_jvp("docs::sine", setup_context=setup_context)
        ... def _(ctx, tangent):
        ...     (x,) = ctx.saved_tensors
        ...     return tangent * x.cos()
        >>> torch.func.jvp(sine, (torch.zeros(1),), (torch.full((1,), 3.0),))
        (tensor([0.]), tensor([3.]))

    The idea is `jvp` of `torch.autograd.Function`.
    """
    rule = resolve(op, "register_jvp", lib).rule(AutogradRule)
    return decorator_or_call(lambda function: rule.register_jvp(function, setup_context), jvp)


def register(
    rule: AutogradRule,
    backward: Callable[..., Any],
    setup_context: SetupContext | None = None,
    jvp: Callable[..., Any] | None = None,
    *,
    is_kernel: bool = False,
    contiguous_grads: bool = False,
) -> None:
    """Makes `backward` the formula, and `jvp`, if there is one, that of forward mode.

    Compilers do not trace a kernel, which needs no `setup_context`.
    """
    definition = rule.definition
    check_has_gradient(definition)
    check_no_autograd_function(definition, backward)
    if jvp is not None:
        jvp, _ = definition.convention.jvp(jvp, None)
        forward_mode.check_jvp(definition, jvp)
    if is_kernel:
        from torchop._rules.residuals.backward_kernel import BackwardKernel  # start-up time

        backward, setup_context = BackwardKernel(definition, backward).formula()
    else:
        backward, setup_context = definition.convention.formula(backward, setup_context)
    grads = (f"grad_{i}" for i in range(len(definition.schema.returns)))
    check_signature(f"{definition}: backward", backward, ("ctx", *grads))
    check_setup_context(definition, setup_context, bool(definition.schema.keyword_only))
    training = None
    if asks_for_residuals(setup_context):
        training = rule.training_form()
    if contiguous_grads:
        backward = with_contiguous_grads(backward)
    formula = Formula(definition, backward, setup_context, training)
    with registration_lock:
        if training is not None:
            training.differentiate(backward, formula.setup)
        rule.update(
            None if rule.installed else rule.install,
            formula=formula,
            tangents=rule.tangents if jvp is None else (jvp, None),
        )


def derive_autograd(op: OpLike, /) -> None:
    """Derives the backward formula from the body, with PyTorch's autograd.

    A call saves its inputs. In eager mode, `backward` runs the kernel of the device again and
    differentiates it, also more than once. A compiled graph has one operator for the forward,
    `name__training`, and one for the backward, `name__backward`. Both use the same random numbers
    and the same dtypes of autocast.

    Raises:
        GradientError: a `RuntimeError`: the operator mutates, aliases or has an effect;
            or operators with these two names exist already.
        NotImplementedError: it takes or returns tensors in places that autograd cannot follow.

    An input on which no output depends has a gradient of zeros. If autograd cannot follow the
    body, because it uses NumPy or detaches tensors, the backward raises `GradientError`.
    Numbers that the body reads, as in `x.item()`, have no gradient.

    Example:
        >>> import torch, torchop
        >>> @torchop.custom_op("docs::wave", mutates_args=())
        ... def wave(x: torch.Tensor) -> torch.Tensor:
        ...     return x.sin() if x.mean() > 0 else x.cos()
        >>> wave.derive_autograd()
        >>> x = torch.zeros(2, requires_grad=True)
        >>> wave(x).sum().backward()
        >>> x.grad
        tensor([-0., -0.])

    The idea is `torch.utils.checkpoint.checkpoint`.
    """
    from torchop._rules.autograd.derived import graph_operators  # most programs have none

    rule = resolve(op, "derive_autograd").rule(AutogradRule)
    definition = rule.definition
    check_derivable(definition, decomposes=rule.decomposition is not None)
    check_has_gradient(definition)
    with registration_lock:
        rule.update(formula=graph_operators.derived_formula(definition))

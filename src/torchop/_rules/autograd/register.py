"""The public functions `register_autograd`, `register_jvp` and `derive_autograd`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch.library

from torchop._compat import compilers
from torchop._core.lock import registration_lock
from torchop._core.registry import OpLike, resolve
from torchop._errors import RuleSignatureError
from torchop._rules.autograd import forward_mode
from torchop._rules.autograd.checks import (
    check_derivable,
    check_has_gradient,
    check_no_autograd_function,
)
from torchop._rules.autograd.contiguous_grads import with_contiguous_grads, with_declared_grads
from torchop._rules.autograd.formula import Formula, SetupContext
from torchop._rules.autograd.rule import AutogradRule
from torchop._schema.callables import (
    Function,
    Lambda,
    check_setup_context,
    check_signature,
    decorator_or_call,
    keyword_only,
    takes_residuals,
)


@keyword_only
@compilers.eager_only
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
    """Register the backward formula of an operator.

    Args:
        op: the operator, as its handle (the object that `custom_op` returned), `"ns::name"`,
            `"ns::name.overload"`, an `OpOverload`, or a packet with one overload.
        backward: the formula, called as `backward(ctx, *grads)`. It receives one gradient for each
            output and returns one gradient for each input: a tensor of the input's shape, or None.
            The gradient of a list of tensors is a list. The formula must consist of PyTorch
            operators. A formula that reads data, for example with NumPy, works only in eager mode;
            pass it as `backward_kernel` instead to support compilers, `torch.func` transforms and
            DTensor. If `backward` is omitted, a decorator is returned.
        setup_context: a function that is called after the kernel, to save values on `ctx` for
            `backward`. The signature is `setup_context(ctx, inputs, output)`, or
            `setup_context(ctx, inputs, keyword_only_inputs, output)` if the schema has keyword-only
            arguments. Arguments that the call omits have their default values. If the function has
            an additional parameter `residuals`, it receives an object with the kernel's residuals
            as attributes (see `torchop.residuals`).
        jvp: the forward-mode formula, as in `register_jvp`. It uses the same `setup_context`.
        backward_kernel: a function that computes the gradients, in place of `backward` and
            `setup_context`. It becomes the kernel of a new operator, `name__backward_kernel`. Its
            first parameters are the gradients of the outputs, and the names of the other parameters
            select the values to save: arguments, residuals, and `output` (`output_0`, `output_1`,
            ... if there are several outputs). The function returns the gradients of all tensor
            arguments in the order of the schema, in newly allocated memory. The gradient of a list
            of tensors is a list. The function may use the same type annotations as the kernel of an
            operator, including structures. It may take the gradients of a structured result as an
            instance of the result's class, and return an instance of any class whose fields are
            named like the arguments, or like the fields of a structured argument. The default fake
            kernel of the new operator returns tensors with the metadata of the arguments.
        contiguous_grads: whether to make all gradients contiguous before passing them to `backward`
            or `backward_kernel`. Set this for kernels that ignore strides, because autograd may
            pass other gradients: the gradient from `loss.sum()` is expanded and has strides of 0,
            and the gradient from `torch.cat` is a slice of a larger tensor. Gradients that are
            already contiguous are not copied.
        lib: the library that owns the registration, so that closing it removes the registration. By
            default, the registration is permanent.

    Returns:
        `backward`, or a decorator if `backward` is omitted. None if `backward_kernel` is given.

    Raises:
        NotImplementedError: the operator has keyword-only tensors.
        OperatorNotFoundError: the operator is not defined.
        RuleSignatureError: a function does not accept the arguments that it would receive.
        RuntimeError: the operator returns nothing, returns views, or returns only tensors that it
            mutates.

    For an in-place operator, `backward` maps the gradient of the new value of the first argument to
    the gradient of the old value, and `setup_context` receives the new value, both in `inputs` and
    as `output`. If any other operator mutates an argument, such as the running statistics of batch
    norm, this argument must not require grad, and its gradient is None.

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

    Modeled after `torch.library.register_autograd`.
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
@compilers.eager_only
def register_jvp(
    op: OpLike,
    jvp: Function | Lambda | None = None,
    /,
    *,
    setup_context: SetupContext | None = None,
    lib: torch.library.Library | None = None,
) -> Function:
    """Register the forward-mode formula of an operator, which computes the output tangents.

    The formula is used by `torch.func.jvp`, `jacfwd`, `hessian` and `linearize`, and for dual
    tensors. If it consists of differentiable operators, higher derivatives work in both forward and
    reverse mode.

    Args:
        op: the operator, as its handle (the object that `custom_op` returned), `"ns::name"`,
            `"ns::name.overload"`, an `OpOverload`, or a packet with one overload.
        jvp: the formula, called as `jvp(ctx, *tangents)`. It receives one tangent for each
            positional input: zeros if the tensor has no tangent (or None after
            `ctx.set_materialize_grads(False)`), None for an input that is not a tensor, and a list
            for a list of tensors. It returns one tangent for each output, with the output's shape
            and dtype, or None. If `jvp` is omitted, a decorator is returned.
        setup_context: a function that saves values on `ctx`, as in `register_autograd`. By default,
            the `setup_context` of the backward formula is called. `ctx.saved_tensors` contains the
            tensors passed to `ctx.save_for_forward`, or to `ctx.save_for_backward` if
            `save_for_forward` was not called.
        lib: the library that owns the registration, so that closing it removes the registration. By
            default, the registration is permanent.

    Returns:
        `jvp`, or a decorator if `jvp` is omitted.

    Raises:
        NotImplementedError: forward mode does not support a tensor type in the schema.
        OperatorNotFoundError: the operator is not defined.
        RuleSignatureError: a function does not accept the arguments that it would receive.
        RuntimeError: the operator mutates an argument, returns a view or returns nothing, or the
            registration would replace an autograd kernel of another library.

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

    Modeled after the `jvp` method of `torch.autograd.Function`.
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
    """Register the backward formula, and optionally the forward-mode formula.

    If `is_kernel` is true, `backward` is a backward kernel, which takes the saved values as
    arguments and therefore needs no `setup_context`.
    """
    definition = rule.definition
    check_has_gradient(definition)
    check_no_autograd_function(definition, backward)
    if jvp is not None:
        jvp, _ = definition.convention.jvp(jvp, None)
        forward_mode.check_jvp(definition, jvp)
    if is_kernel:
        from torchop._rules.residuals.backward_kernel import BackwardKernel  # rarely used

        backward, setup_context = BackwardKernel(definition, backward).formula()
    else:
        backward, setup_context = definition.convention.formula(
            with_declared_grads(backward), setup_context
        )
    grads = (f"grad_{i}" for i in range(len(definition.schema.returns)))
    check_signature(f"{definition}: backward", backward, ("ctx", *grads))
    check_setup_context(definition, setup_context, bool(definition.schema.keyword_only))
    training = None
    if takes_residuals(setup_context):
        training = rule.training_form()
    if contiguous_grads:
        backward = with_contiguous_grads(backward)
    formula = Formula(definition, backward, setup_context, training)
    rules = ["backward formula"] if jvp is None else ["backward formula", "forward-mode formula"]
    with definition.registered.registering(*rules), registration_lock:
        if training is not None:
            training.differentiate(backward, formula.setup)
        rule.update(
            rule.install,
            formula=formula,
            tangents=rule.tangents if jvp is None else (jvp, None),
        )


@compilers.eager_only
def derive_autograd(op: OpLike, /) -> None:
    """Derive the backward formula by differentiating the kernel with PyTorch's autograd.

    A call saves its inputs, and in eager mode, the backward pass runs the kernel again and
    differentiates it. Both runs of the kernel use the same random numbers and autocast settings,
    and higher derivatives work too. Compiled graphs call two helper operators instead:
    `name__training` in the forward pass and `name__backward` in the backward pass. But if the
    operator is defined with `compile="inline"`, compilers differentiate the operators in the
    kernel.

    Raises:
        GradientError: the operator mutates or aliases arguments or has an effect, or one of the
            helper operators is already defined. This error is a `RuntimeError`.
        NotImplementedError: autograd does not support a tensor type in the schema.

    The gradient of an input that does not affect any output is zero. If the kernel computes an
    output outside of autograd, for example with NumPy or `detach`, the backward pass raises
    `GradientError`. A Python number that the kernel reads from a tensor, as in `x.item()`, is
    treated as a constant.

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

    Modeled after `torch.utils.checkpoint.checkpoint`.
    """
    from torchop._rules.autograd.derived import graph_operators  # rarely used

    rule = resolve(op, "derive_autograd").rule(AutogradRule)
    definition = rule.definition
    check_derivable(definition, decomposes=rule.decomposition is not None)
    check_has_gradient(definition)
    formula = graph_operators.derived_formula(definition)
    with definition.registered.registering("backward formula"):
        rule.update(formula=formula)

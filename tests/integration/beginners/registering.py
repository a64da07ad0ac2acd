from __future__ import annotations

import torch

import torchop
from tests.integration.beginners.mistake import mistake, scale_of


@mistake(TypeError, cause="is called with (x, factor)", fix="Give it these parameters")
def fake_kernel_with_other_parameters(n: str) -> None:
    @scale_of(n).register_fake
    def _(x, factor, bias):
        return torch.empty_like(x)


@mistake(
    ValueError,
    cause="got unexpected type for op: function",
    fix="the handle that custom_op returned",
)
def fake_kernel_of_a_function(n: str) -> None:
    def mylib_scale(x):
        return 2 * x

    @torchop.register_fake(mylib_scale)  # type: ignore[arg-type]
    def _(x):
        return torch.empty_like(x)


@mistake(ValueError, cause="expected an operator", fix="register_fake('mylib::crop', ...)")
def fake_kernel_of_nothing(n: str) -> None:
    @torchop.register_fake  # type: ignore[arg-type]
    def _(x):
        return torch.empty_like(x)


@mistake(RuntimeError, cause="does not exist", fix="did you mean '{n}::scale'?")
def fake_kernel_with_a_typo(n: str) -> None:
    scale_of(n)

    @torchop.register_fake(f"{n}::scael")
    def _(x, factor):
        return torch.empty_like(x)


@mistake(TypeError, cause="by keyword only", fix="write setup_context=keep")
def setup_context_by_position(n: str) -> None:
    def keep(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    scale_of(n).register_autograd(lambda ctx, grad: (grad, None), keep)


@mistake(TypeError, cause="setup_context is called with (ctx, inputs, output)", fix="Give it these")
def setup_context_with_the_inputs(n: str) -> None:
    def keep(ctx, x):
        ctx.save_for_backward(x)

    scale_of(n).register_autograd(lambda ctx, grad: (grad, None), setup_context=keep)


@mistake(TypeError, cause="got the class Double", fix="Pass Double.backward and setup_context=")
def formula_that_is_an_autograd_function(n: str) -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def backward(ctx, grad):
            return 2 * grad

    scale_of(n).register_autograd(Double)


@mistake(TypeError, cause="takes the device types first", fix="Write @register_kernel('cpu')")
def kernel_without_a_device(n: str) -> None:
    @scale_of(n).register_kernel
    def scale_on_cpu(x, factor):
        return x * factor


@mistake(
    ValueError, cause="got torch.float16 of type dtype", fix="device_type as a str such as 'cuda'"
)
def autocast_with_the_dtype_first(n: str) -> None:
    scale_of(n).register_autocast(torch.float16, "cuda")


@mistake(
    TypeError,
    cause="got only torch.float16",
    fix="Write both, as in register_autocast('cuda', torch.float16)",
)
def autocast_without_a_device(n: str) -> None:
    scale_of(n).register_autocast(torch.float16)


@mistake(
    TypeError,
    cause="missing one of 'device_type' and 'cast_inputs', because it got only 'cpu'",
    fix="Write both, as in register_autocast('cuda', torch.float16)",
)
def autocast_without_a_dtype(n: str) -> None:
    scale_of(n)
    torchop.register_autocast(f"{n}::scale", "cpu")

"""The class form with the names of the first design: save_for_backward, and an opaque backward."""

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import torchop


def define(namespace):
    @torchop.operator(f"{namespace}::op")
    class op:
        residuals = {"cosine": Tensor}  # noqa: RUF012  (as a class of the design has it)

        @staticmethod
        def forward(x: Tensor, scale: float = 2.0) -> Tensor:
            y = np.sin(x.numpy() * np.float32(scale))
            if not torchop.records_gradient():
                return torch.from_numpy(y)
            return torchop.residuals(torch.from_numpy(y), (x * scale).cos())

        @staticmethod
        def fake(x, scale=2.0):
            return torchop.residuals(torch.empty_like(x), torch.empty_like(x))

        @staticmethod
        def save_for_backward(inputs, output, residuals):
            return residuals.cosine, inputs[1]

        @staticmethod
        def backward(grad_output, saved):
            cosine, scale = saved
            return torch.from_numpy(grad_output.numpy() * cosine.numpy() * np.float32(scale)), None

    return op


def test_a_class_with_residuals(namespace):
    op = define(namespace)
    x = torch.tensor([0.5, 1.0], requires_grad=True)
    compiled = torch.compile(op, fullgraph=True, backend="aot_eager")
    for function in (op, op, compiled):
        (gradient,) = torch.autograd.grad(function(x).sum(), x)
        assert_close(gradient, 2 * (2 * x).cos().detach())
    assert_close(op(x.detach()), (2 * x).sin().detach())


def test_a_class_without_residuals_saves_one_tensor(namespace):
    @torchop.operator(f"{namespace}::op")
    class op:
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x.exp()

        @staticmethod
        def save_for_backward(inputs, output):
            return output

        @staticmethod
        def backward(grad_output, saved):
            return torch.from_numpy(grad_output.numpy() * saved.numpy())

    x = torch.tensor([0.5], requires_grad=True)
    for _ in range(2):
        assert_close(torch.autograd.grad(op(x), x)[0], x.exp().detach())


@pytest.mark.parametrize(
    "more", [{"setup_context": staticmethod(print)}, {"backward": torchop.derived}]
)
def test_members_that_exclude_each_other(namespace, more):
    members = {
        "forward": staticmethod(lambda x: x),
        "save_for_backward": staticmethod(lambda inputs, output: output),
        "backward": staticmethod(lambda grad, saved: grad),
    }
    with pytest.raises(torchop.OperatorClassError, match=r"'save_for_backward'.* Remove one"):
        torchop.operator(f"{namespace}::op")(type("wrong", (), {**members, **more}))


def test_a_backward_kernel(namespace):
    class cube:
        residuals = {"slope": Tensor}  # noqa: RUF012

        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return torchop.residuals(x**3, 3 * x**2)

        @staticmethod
        def backward_kernel(grad: Tensor, slope: Tensor) -> Tensor:
            return grad * slope

    op = torchop.operator(f"{namespace}::op")(cube)
    x = torch.tensor([2.0], requires_grad=True)
    for _ in range(2):
        assert torch.autograd.grad(op(x), x)[0].item() == 12.0
    assert "slope" in str(getattr(torch.ops, namespace).op__backward_kernel.default._schema)
    cube.backward = staticmethod(lambda ctx, grad: grad)
    with pytest.raises(torchop.RuleSignatureError, match="takes a backward_kernel, or backward"):
        torchop.operator(f"{namespace}::both")(cube)
    assert not hasattr(getattr(torch.ops, namespace), "both")


def test_a_backward_that_takes_no_saved_values(namespace):
    class wrong:
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x.exp()

        @staticmethod
        def save_for_backward(inputs, output):
            return output

        @staticmethod
        def backward(grad_output):
            return grad_output

    with pytest.raises(
        torchop.RuleSignatureError, match=r"op: backward is called with \(grad_0, saved\)"
    ):
        torchop.operator(f"{namespace}::op")(wrong)
    assert not hasattr(getattr(torch.ops, namespace), "op")


class Sine:
    """The class of the first design, as it was written there but for the base class."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return torch.from_numpy(np.sin(x.numpy()))

    @staticmethod
    def forward_abstract(x):
        return torch.empty_like(x)

    @staticmethod
    def save_for_backward(args, output):
        return args[0]

    @staticmethod
    def backward(grad_output, saved):
        return torch.from_numpy(grad_output.numpy() * np.cos(saved.numpy()))

    @staticmethod
    def backward_abstract(grad_output, saved):
        return torch.empty_like(saved)


def test_what_is_different_from_the_first_design(namespace):
    """Three things: a name, a member that is not needed, and how a class is made an operator."""
    # A member is what PyTorch calls it since: torch.library has no "abstract" any more. A name that
    # nobody knows is refused instead of doing nothing.
    with pytest.raises(torchop.OperatorClassError, match="has the member 'forward_abstract'"):
        torchop.operator(f"{namespace}::sine")(Sine)
    members = {**vars(Sine), "fake": Sine.__dict__["forward_abstract"]}
    del members["forward_abstract"]
    # The gradients of an opaque backward look like the inputs, so nobody has to say it.
    with pytest.raises(torchop.OperatorClassError, match="has the member 'backward_abstract'"):
        torchop.operator(f"{namespace}::sine")(type("Sine", (), dict(members)))
    del members["backward_abstract"]
    # The design registered a subclass under a name made of its module, and called `Sine.apply`. A
    # name is given here, because graphs and files have it, and the class becomes the operator.
    sine = torchop.operator(f"{namespace}::sine")(type("Sine", (), members))
    x = torch.tensor([0.5, 1.0], requires_grad=True)
    for function in (sine, sine, torch.compile(sine, fullgraph=True, backend="aot_eager")):
        assert_close(torch.autograd.grad(function(x).sum(), x)[0], x.cos().detach())
    # Backward is an operator too, which compilers do not look into.
    assert hasattr(getattr(torch.ops, namespace), "sine__opaque_backward")
    # As in the design, it has no derivative.
    with pytest.raises(RuntimeError, match=r"the formula of \w+::sine is differentiated here"):
        torch.autograd.grad(sine(x).sum(), x, create_graph=True)

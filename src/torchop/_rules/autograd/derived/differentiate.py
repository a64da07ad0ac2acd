"""The gradients of an operator, by running its body under PyTorch's autograd."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name

from torchop._compat import autograd, dispatch, functorch
from torchop._core.contract import tensors_in
from torchop._core.definition import Definition
from torchop._errors import DerivedFormulaError, MissingFormulaError
from torchop._rules.autograd.derived.replay import replayed
from torchop._rules.autograd.derived.saved_call import SavedCall
from torchop._rules.autograd.gradients import is_differentiable

Result = TypeVar("Result")


def body_gradients(
    definition: Definition,
    call: SavedCall,
    tensors: Sequence[Tensor],
    needed: Sequence[bool],
    grad_outputs: Sequence[Tensor | None],
    surroundings: Tensor | None,
    *,
    create_graph: bool,
) -> list[Tensor]:
    """Runs the body of a call again, and differentiates it.

    Args:
        definition: the operator.
        call: the arguments, without their tensors.
        tensors: the tensors among the arguments.
        needed: for each of them, whether it needs a gradient.
        grad_outputs: one for each output that is a tensor, those in lists included; None for zero.
        surroundings: those of the first run of the body, packed.
        create_graph: whether the gradients are to be differentiated in turn.

    Returns:
        A gradient for each tensor that needs one; zeros where no output depends on it.
    """
    with _inputs_for_rerun(call, tensors, needed, surroundings) as inputs:
        args, kwargs = call.with_tensors(inputs)
        result = differentiable(definition, lambda: body_of(definition, args, kwargs))
    sources = [tensor for tensor, need in zip(inputs, needed, strict=True) if need]
    outputs = list(output_tensors(definition.schema.returns, result))
    received = [
        (index, output, grad)
        for index, (output, grad) in enumerate(zip(outputs, grad_outputs, strict=True))
        if output is not None and grad is not None and is_differentiable(output)
    ]
    recorded = [(output, grad) for _, output, grad in received if output.requires_grad]
    if not recorded:
        indices = [index for index, _, _ in received]
        refuse_left_autograd(definition, call, tensors, needed, indices, surroundings)
    with autograd.above_autograd():
        return differentiable(
            definition, lambda: input_gradients(recorded, sources, create_graph=create_graph)
        )


def input_gradients(
    outputs: Sequence[tuple[Tensor, Tensor]], inputs: Sequence[Tensor], *, create_graph: bool
) -> list[Tensor]:
    """The gradients of inputs: zeros where no output depends on one.

    Args:
        outputs: tensors that require grad, each with its gradient.
        inputs: tensors that require grad.
        create_graph: whether the gradients are to be differentiated in turn.
    """
    gradients: Sequence[Tensor | None] = [None] * len(inputs)
    if outputs:
        gradients = torch.autograd.grad(
            [output for output, _ in outputs],
            inputs,
            [grad for _, grad in outputs],
            allow_unused=True,
            create_graph=create_graph,
        )
    return [
        torch.zeros_like(tensor) if gradient is None else gradient
        for tensor, gradient in zip(inputs, gradients, strict=True)
    ]


@contextlib.contextmanager
def _inputs_for_rerun(
    call: SavedCall,
    tensors: Sequence[Tensor],
    needed: Sequence[bool],
    surroundings: Tensor | None,
) -> Iterator[list[Tensor]]:
    """Yields inputs for the body, in the surroundings of its first run."""
    args, kwargs = call.with_tensors(tensors)
    with (
        # Under vmap of the backward alone, the random numbers are those of the one forward.
        functorch.without_randomness_of_vmap(),
        replayed(surroundings, (*args, *kwargs.values())),
        autograd.above_autograd(),
    ):
        yield [body_input(t) if need else t for t, need in zip(tensors, needed, strict=True)]


def body_input(tensor: Tensor) -> Tensor:
    """An alias of an input, as the input of the body's graph.

    One input of a call may depend on another. The gradient of the second must not include what
    flows to it through the first, so the graph of the body starts at aliases.
    """
    if tensor.requires_grad:
        alias: Tensor = torch.ops.aten.alias.default(tensor)
        if alias.requires_grad:  # false for a tensor of a transform that has ended
            return alias
    # Not detach(), which also drops the tangents of forward mode.
    with torch.no_grad(), functorch.leaves_may_be_made():
        leaf: Tensor = torch.ops.aten.alias.default(tensor)
        return leaf.requires_grad_()


def body_of(definition: Definition, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Runs the kernel that serves these arguments, with the checks of a dispatched call."""
    kernels = definition.dispatcher_kernels
    for_every_device = kernels[dispatch.kernel_key("default")]
    tensors = list(tensors_in((*args, *kwargs.values())))
    if any(tensor.layout is not torch.strided for tensor in tensors):
        return for_every_device(*args, **kwargs)
    # As in the dispatcher, a CPU scalar beside a CUDA tensor runs on CUDA.
    device_type = min({t.device.type for t in tensors}, key=lambda name: name == "cpu")
    return kernels.get(dispatch.dispatch_key_name(device_type), for_every_device)(*args, **kwargs)


def output_tensors(returns: Sequence[str], result: Any) -> Iterator[Tensor | None]:
    """The tensors of a result in the order of the schema, those in lists included."""
    results = result if len(returns) > 1 else (result,)
    for kind, value in zip(returns, results, strict=True):
        if isinstance(value, (list, tuple)):
            yield from value
        elif "Tensor" in kind:
            yield value


def differentiable(definition: Definition, run: Callable[[], Result]) -> Result:
    """Runs the body, or its backward, with errors that say why it cannot be differentiated.

    Raises:
        DerivedFormulaError: the body reads data in a way that autograd refuses, or calls an
            operator without a formula.
    """
    try:
        return run()
    except RuntimeError as error:
        if "on Tensor that requires grad" in str(error):
            raise left_autograd(definition, f"its body reads data ({error})") from error
        if isinstance(error, MissingFormulaError) or "no autograd formula was registered" in str(
            error
        ):
            problem = f"its body calls an operator without one ({error})"
            raise left_autograd(definition, problem) from error
        raise


def refuse_left_autograd(
    definition: Definition,
    call: SavedCall,
    tensors: Sequence[Tensor],
    needed: Sequence[bool],
    received: Sequence[int],
    surroundings: Tensor | None,
) -> None:
    """Refuses outputs that depend on inputs in ways that autograd did not record.

    An output may really be independent of them, in which case its gradient is zero. To tell the
    two cases apart, the body runs once more under `Watching`. This happens only where no gradient
    flows.

    Raises:
        DerivedFormulaError: naming the function that left autograd.
    """
    if not received:
        return
    with _inputs_for_rerun(call, tensors, needed, surroundings) as inputs:
        args, kwargs = call.with_tensors(inputs)
        with Watching(inputs) as watching:
            result = body_of(definition, args, kwargs)
    outputs = list(output_tensors(definition.schema.returns, result))
    for index in received:
        function = watching.left(outputs[index])
        if function is not None:
            raise left_autograd(
                definition,
                f"output {index} depends on the inputs, but its body left autograd in {function}",
            )


def left_autograd(definition: Definition, problem: str) -> DerivedFormulaError:
    return DerivedFormulaError(
        f"{definition}: its formula is derived by differentiating its body, which PyTorch's "
        f"autograd cannot follow: {problem}. Write the body in operators that PyTorch can "
        f"differentiate; or write the formula, register_autograd({str(definition)!r}, backward, "
        "setup_context=...), with opaque=True if that is not traceable either; or call it in "
        "torch.no_grad(), or on x.detach(), if its outputs are not differentiable."
    )


# Functions that hand the data of a tensor to other libraries.
_HANDS_OUT = {"numpy", "__array__", "__dlpack__", "data_ptr", "untyped_storage", "storage"}


class Watching(TorchFunctionMode):
    """Follows what a function computes from tensors that require grad without autograd knowing.

    Numbers such as `x.item()` are not followed: most of them decide what is computed, not its
    value. A tensor that another library made, as with `torch.from_numpy`, has no inputs that could
    be followed: every new tensor counts as such a one, once data was handed out.
    """

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        # By id, each tensor and the function in which it left autograd. Holding on to the tensors
        # keeps their ids from being used again.
        self._seen: dict[int, tuple[Tensor, str | None]] = {id(t): (t, None) for t in inputs}
        self._handed_out: str | None = None

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", str(func))
        inputs = list(_tensors((*args, *(kwargs or {}).values())))
        origin = next(filter(None, map(self.left, inputs)), None)
        if origin is None and any(tensor.requires_grad for tensor in inputs):
            origin = resolve_name(func) or name
        if name in _HANDS_OUT:
            self._handed_out = self._handed_out or origin
        for tensor in _tensors((result,)):
            has_left = is_differentiable(tensor) and not _reads_metadata_only(name)
            self._seen.setdefault(id(tensor), (tensor, origin if has_left else None))
        return result

    def left(self, tensor: Any) -> str | None:
        """The function in which the value of a tensor left autograd; None if it did not."""
        if not isinstance(tensor, Tensor) or tensor.requires_grad:
            return None
        return self._seen.get(id(tensor), (tensor, self._handed_out))[1]


def _reads_metadata_only(name: str) -> bool:
    """Whether a function reads the shape and dtype of a tensor, but not its values."""
    return name.endswith("_like") or name.startswith("new_")


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)

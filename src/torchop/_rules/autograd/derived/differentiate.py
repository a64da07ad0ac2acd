"""The gradients of an operator, by running its body under PyTorch's autograd."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name

from torchop._compat import autograd, dispatch, functorch
from torchop._core.contract import storage_of
from torchop._core.definition import Definition
from torchop._core.snapshot import version_of
from torchop._errors import GradientError, MissingFormulaError
from torchop._rules.autograd.derived.replay import replayed
from torchop._rules.autograd.derived.saved_call import SavedCall
from torchop._rules.autograd.gradients import is_differentiable
from torchop._rules.kernels.rule import KernelRule

Result = TypeVar("Result")
# The tensors among the results of a body, given its inputs.
Run = Callable[[list[Tensor]], "Sequence[Tensor | None]"]


class Rerun(NamedTuple):
    """A call whose body runs a second time, to be differentiated."""

    definition: Definition
    call: SavedCall
    tensors: Sequence[Tensor]
    # For each of the tensors, whether it needs a gradient.
    needed: Sequence[bool]
    # Those of the first run, packed.
    state: Tensor | None

    def within(self, run: Callable[[list[Tensor]], Result]) -> Result:
        """What `run` returns of tensors for the body, in the ambient state of its first run."""
        args, kwargs = self.call.with_tensors(self.tensors)

        def run_with_inputs() -> Result:
            pairs = zip(self.tensors, self.needed, strict=True)
            return run([_body_input(tensor) if need else tensor for tensor, need in pairs])

        # Under vmap of the backward alone, the random numbers are those of the one forward.
        with functorch.without_randomness_of_vmap(), autograd.above_autograd():
            return replayed(self.definition, self.state, (*args, *kwargs.values()), run_with_inputs)

    def run(self, inputs: Sequence[Tensor]) -> tuple[Any, ...]:
        """The results of the kernel that serves these inputs, checked as those of other calls."""
        args, kwargs = self.call.with_tensors(inputs)
        # Not the operator, which autograd would record as one.
        kernels = self.definition.dispatcher_kernels
        key = every = dispatch.kernel_key("default")
        # The keys of the devices are those of dense tensors.
        if all(tensor.layout is torch.strided for tensor in inputs):
            # As in the dispatcher, a CPU scalar beside a CUDA tensor runs on CUDA.
            device_type = min({t.device.type for t in inputs}, key=lambda name: name == "cpu")
            key = dispatch.dispatch_key_name(device_type)
        rule = self.definition.rule(KernelRule)
        if rule.providers is not None:  # whose kernels autograd need not be able to follow
            result = rule.run_reference(key, args, kwargs)
        else:
            result = kernels.get(key, kernels[every])(*args, **kwargs)
        return result if len(self.definition.schema.returns) > 1 else (result,)

    def outputs(self, inputs: Sequence[Tensor]) -> list[Tensor | None]:
        """The tensors among these results, those in lists included."""
        return list(output_tensors(self.definition.schema.returns, self.run(inputs)))

    def gradients(
        self,
        grad_outputs: Sequence[Tensor | None],
        *,
        create_graph: bool,
        run: Run | None = None,
    ) -> list[Tensor]:
        """The gradient of each tensor that needs one; zeros where no output depends on it.

        `grad_outputs` has one for each tensor that is an output, or in a list; None is zero. `run`
        returns these outputs; without it, the body does.
        """
        run = run or self.outputs
        inputs, outputs = differentiable(
            self.definition, lambda: self.within(lambda inputs: (inputs, run(inputs)))
        )
        sources = list(itertools.compress(inputs, self.needed))
        recorded, unrecorded = by_history(outputs, grad_outputs)
        self.refuse_left_autograd(unrecorded, run)
        with autograd.above_autograd():
            if create_graph:
                # If no gradient goes on beyond the call, as after torch.func.vjp, these are
                # constants: their graph would end at the leaves that were made for the body.
                constants = [tensor for tensor in sources if tensor.is_leaf]
                create_graph = any(
                    _is_recorded(tensor)
                    for tensor in (*(grad for _, grad in recorded), *inputs)
                    if not any(tensor is constant for constant in constants)
                )
            return differentiable(
                self.definition,
                lambda: input_gradients(recorded, sources, create_graph=create_graph),
            )

    def refuse_left_autograd(self, unrecorded: Sequence[tuple[int, Tensor]], run: Run) -> None:
        """Refuses outputs that depend on inputs in ways that autograd did not record.

        `unrecorded` has the index and the gradient of outputs of `run` that have no history. One of
        them may really be independent of the inputs; then its gradient is dropped. To tell the two
        cases apart, the body runs once more under `Watching`. A gradient of zeros, which compilers
        pass for an output that nobody used, is dropped in either case.
        """
        received = [index for index, grad in unrecorded if not _is_zero(grad)]
        if not received:
            return
        watched = Watching()
        outputs = self.within(lambda inputs: watched.run(run, inputs))
        for index in received:
            function = watched.left(outputs[index])
            if function is not None:
                raise _left_autograd(
                    self.definition,
                    f"output {index} depends on the inputs, but its body left autograd in "
                    f"{function}",
                )


def by_history(
    outputs: Sequence[Tensor | None], grads: Sequence[Tensor | None]
) -> tuple[list[tuple[Tensor, Tensor]], list[tuple[int, Tensor]]]:
    """The outputs with a history and their gradients; of those without, index and gradient.

    Outputs that got no gradient, or can have none, are in neither.
    """
    recorded: list[tuple[Tensor, Tensor]] = []
    unrecorded: list[tuple[int, Tensor]] = []
    for index, (output, grad) in enumerate(zip(outputs, grads, strict=True)):
        if output is None or grad is None or not is_differentiable(output):
            continue
        if output.requires_grad:
            recorded.append((output, grad))
        else:
            unrecorded.append((index, grad))
    return recorded, unrecorded


def input_gradients(
    outputs: Sequence[tuple[Tensor, Tensor]], inputs: Sequence[Tensor], *, create_graph: bool
) -> list[Tensor]:
    """The gradients of inputs, given outputs with theirs; zeros where no output depends on one."""
    gradients: Sequence[Tensor | None] = [None] * len(inputs)
    if outputs:
        gradients = autograd.input_gradients(outputs, inputs, create_graph)
    return [
        torch.zeros_like(tensor) if gradient is None else gradient
        for tensor, gradient in zip(inputs, gradients, strict=True)
    ]


def _is_zero(gradient: Tensor) -> bool:
    try:
        return gradient.layout is torch.strided and not gradient.any()
    except RuntimeError:  # a batch of gradients, whose values nobody may read
        return False


def _body_input(tensor: Tensor) -> Tensor:
    """An alias of an input, as the input of the body's graph.

    One input of a call may depend on another. The gradient of the second must not include what
    flows to it through the first, so the graph of the body starts at aliases.
    """
    if tensor.requires_grad:
        alias: Tensor = torch.ops.aten.alias.default(tensor)
        if alias.requires_grad:  # false for a tensor of a transform that has ended
            return alias
    return functorch.make_leaf(tensor)


def _is_recorded(tensor: Tensor) -> bool:
    """Whether autograd records what is computed of a tensor.

    A tensor of a transform that has ended does not say that the one in it requires grad.
    """
    if not functorch.is_wrapped(tensor):
        return tensor.requires_grad
    alias: Tensor = torch.ops.aten.alias.default(tensor)
    return alias.requires_grad


def output_tensors(returns: Sequence[str], results: Sequence[Any]) -> Iterator[Tensor | None]:
    """The tensors among results, or their gradients, those in lists included."""
    for kind, value in zip(returns, results, strict=True):
        if "Tensor" in kind:
            yield from value if isinstance(value, (list, tuple)) else (value,)


def differentiable(definition: Definition, run: Callable[[], Result]) -> Result:
    """Runs the body, or its backward, with errors that say why it cannot be differentiated."""
    try:
        return run()
    except RuntimeError as error:
        if "on Tensor that requires grad" in str(error):
            raise _left_autograd(definition, f"its body reads data ({error})") from error
        missing = "no autograd formula was registered" in str(error)
        if missing or isinstance(error, MissingFormulaError):
            problem = f"its body calls an operator without one ({error})"
            raise _left_autograd(definition, problem) from error
        raise


def _left_autograd(definition: Definition, problem: str) -> GradientError:
    return GradientError(
        f"{definition}: its formula is derived by differentiating its body, which PyTorch's "
        f"autograd cannot follow: {problem}. Write the body in operators that PyTorch can "
        f"differentiate; or write the formula, register_autograd({str(definition)!r}, backward, "
        "setup_context=...), or with backward_kernel=... if the formula reads data too; or call it "
        "in torch.no_grad(), or on x.detach(), if its outputs are not differentiable."
    )


# Functions that hand the data of a tensor to other libraries.
_HANDS_OUT = {"numpy", "__array__", "__dlpack__", "data_ptr", "untyped_storage", "storage"}


class Watching(TorchFunctionMode):
    """Follows what a function computes from tensors that require grad without autograd knowing.

    Numbers such as `x.item()` are not followed: most of them decide what is computed, not its
    value. A tensor that another library made, as with `torch.from_numpy`, has no inputs that could
    be followed: every new tensor counts as such a one, once data was handed out.
    """

    def __init__(self) -> None:
        super().__init__()
        # By id, each tensor and the function in which it left autograd. Holding on to the tensors
        # keeps their ids from being used again.
        self._seen: dict[int, tuple[Tensor, str | None]] = {}
        # By memory, which views share, the same of what was written into tensors made before.
        self._written: dict[int, str] = {}
        self._handed_out: str | None = None

    def run(self, function: Callable[[list[Tensor]], Result], inputs: list[Tensor]) -> Result:
        """What the function returns of these inputs, while it is followed."""
        self._seen.update({id(tensor): (tensor, None) for tensor in inputs})
        with self:
            return function(inputs)

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        inputs = list(_tensors((*args, *(kwargs or {}).values())))
        versions = list(map(version_of, inputs))
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", str(func))
        origin = next(filter(None, map(self.left, inputs)), None)
        if origin is None and any(tensor.requires_grad for tensor in inputs):
            origin = resolve_name(func) or name
        if name in _HANDS_OUT:
            self._handed_out = self._handed_out or origin
        for tensor in _tensors((result,)):
            # Such functions read the shape and dtype of a tensor, but not its values.
            is_just_like = name.endswith("_like") or name.startswith("new_")
            has_left = is_differentiable(tensor) and not is_just_like
            self._seen.setdefault(id(tensor), (tensor, origin if has_left else None))
        for tensor, version in zip(inputs, versions, strict=True):
            # As with results, what is written into indices and masks only decides what is computed.
            has_left = is_differentiable(tensor) and not tensor.requires_grad
            if origin and has_left and version_of(tensor) != version:
                self._written.setdefault(_memory_of(tensor), origin)
        return result

    def left(self, tensor: Any) -> str | None:
        """The function in which the value of a tensor left autograd; None if it did not."""
        if not isinstance(tensor, Tensor) or tensor.requires_grad:
            return None
        _, origin = self._seen.get(id(tensor), (tensor, self._handed_out))
        return origin or self._written.get(_memory_of(tensor))


def _memory_of(tensor: Tensor) -> int:
    # What wraps a tensor has no memory of its own.
    is_plain = type(tensor) is Tensor and not functorch.is_wrapped(tensor)
    return storage_of(tensor) if is_plain else id(tensor)


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)

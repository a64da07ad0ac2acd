from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name

from torchop._compat import autograd, dispatch, functorch
from torchop._compat.classes import tree_leaves
from torchop._core.call import as_tuple
from torchop._core.contract import storage_of, version_of
from torchop._core.definition import Definition
from torchop._errors import GradientError, MissingFormulaError
from torchop._rules.autograd.derived.repeats import check_repeats
from torchop._rules.autograd.derived.replay import replayed
from torchop._rules.autograd.derived.saved_call import SavedCall
from torchop._rules.autograd.gradients import is_differentiable
from torchop._rules.kernels.rule import KernelRule

Result = TypeVar("Result")
Run = Callable[[list[Tensor]], "Sequence[Tensor | None]"]


class Rerun(NamedTuple):
    definition: Definition
    call: SavedCall
    tensors: Sequence[Tensor]
    needed: Sequence[bool]  # for each tensor
    state: Tensor | None  # the packed ambient state of the first run

    def in_saved_state(self, run: Callable[[list[Tensor]], Result]) -> Result:
        """Call `run` with inputs that require grad, in the ambient state of the forward pass.

        The ambient state consists of the states of random number generators and settings such as
        autocast.
        """
        args, kwargs = self.call.with_tensors(self.tensors)

        def run_with_inputs() -> Result:
            pairs = zip(self.tensors, self.needed, strict=True)
            return run([_body_input(tensor) if need else tensor for tensor, need in pairs])

        # If only the backward pass runs under vmap, all elements of the batch must draw the same
        # random numbers as the forward pass, so ignore vmap's `randomness` argument.
        with functorch.without_randomness_of_vmap(), autograd.above_autograd():
            return replayed(self.definition, self.state, (*args, *kwargs.values()), run_with_inputs)

    def run(self, inputs: Sequence[Tensor]) -> tuple[Any, ...]:
        args, kwargs = self.call.with_tensors(inputs)
        # Call the kernel and not the operator. Autograd would record a call to the operator as a
        # single node, and not the operators in its body.
        kernel_at = self.definition.registered.kernel
        key = every = dispatch.kernel_key("default")
        # Look up the kernel of a device only if all tensors are dense, because `dispatch_key_name`
        # returns keys for dense tensors. Otherwise, call the kernel that is registered for all
        # devices.
        if all(tensor.layout is torch.strided for tensor in inputs):
            # If tensors are on the CPU and on another device, use the other device's kernel.
            device_type = min({t.device.type for t in inputs}, key=lambda name: name == "cpu")
            key = dispatch.dispatch_key_name(device_type)
        rule, kernel = self.definition.rule(KernelRule), kernel_at(key) or kernel_at(every)
        if rule.providers is not None or kernel is None:
            # Kernels of providers (alternative implementations) may not be differentiable, so run
            # the reference kernel. If there is no kernel, this runs the backend's fallback.
            result = rule.run_reference(key, args, kwargs)
        else:
            result = kernel(*args, **kwargs)
        return as_tuple(self.definition.schema, result)

    def outputs(self, inputs: Sequence[Tensor]) -> list[Tensor | None]:
        return list(output_tensors(self.definition.schema.returns, self.run(inputs)))

    def gradients(
        self,
        grad_outputs: Sequence[Tensor | None],
        *,
        create_graph: bool,
        run: Run | None = None,
    ) -> list[Tensor]:
        """Return the gradient of each tensor that needs one.

        If no output depends on a tensor, the gradient is zero. `grad_outputs` contains the gradient
        of each output tensor, including tensors in lists, where None means zero. `run` computes the
        outputs. By default, it runs the kernel.
        """
        run = run or self.outputs
        inputs, outputs = differentiable(
            self.definition, lambda: self.in_saved_state(lambda inputs: (inputs, run(inputs)))
        )
        check_repeats(self.definition, self.call, outputs, lambda: self.in_saved_state(run))
        sources = list(itertools.compress(inputs, self.needed))
        recorded, unrecorded = by_history(outputs, grad_outputs)
        self.check_unrecorded(unrecorded, run)
        with autograd.above_autograd():
            if create_graph:
                # `_body_input` creates leaves for tensors that have no autograd graph, as after
                # `torch.func.vjp`. These leaves require grad, but no caller can differentiate with
                # respect to them. So record the gradients only if another tensor requires grad.
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

    def check_unrecorded(self, unrecorded: Sequence[tuple[int, Tensor]], run: Run) -> None:
        """Raise if an output depends on the inputs, but autograd did not record the dependency.

        To find these outputs, run the body again in a mode that tracks dependencies. Outputs with a
        gradient of zero, which compilers pass for unused outputs, need no check.

        `unrecorded` contains the index and the gradient of each output without an autograd history.
        """
        received = [index for index, grad in unrecorded if not _is_zero(grad)]
        if not received:
            return
        mode = DependencyMode()
        outputs = self.in_saved_state(lambda inputs: mode.run(run, inputs))
        for index in received:
            function = mode.left_autograd_in(outputs[index])
            if function is not None:
                raise _left_autograd(
                    self.definition,
                    f"output {index} depends on the inputs, but the body left autograd in "
                    f"{function}",
                )


def by_history(
    outputs: Sequence[Tensor | None], grads: Sequence[Tensor | None]
) -> tuple[list[tuple[Tensor, Tensor]], list[tuple[int, Tensor]]]:
    """Separate outputs with an autograd history from outputs without one.

    Return pairs (output, gradient) for outputs with a history, and pairs (index, gradient) for the
    others. Ignore outputs without a gradient.
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
    except RuntimeError:  # a batched tensor in vmap cannot be converted to a bool
        return False


def _body_input(tensor: Tensor) -> Tensor:
    """Return an alias of an input. The autograd graph of the body starts at this alias.

    The caller may have computed an input `b` from another input `a`. Without aliases, the gradient
    of `a` would include the gradient that flows from `b` back to `a`, outside of the body.
    """
    if tensor.requires_grad:
        alias: Tensor = torch.ops.aten.alias.default(tensor)
        if alias.requires_grad:  # false if the tensor belongs to a transform that has ended
            return alias
    return functorch.make_leaf(tensor)


def _is_recorded(tensor: Tensor) -> bool:
    """Return whether autograd records operations on a tensor.

    `requires_grad` is unreliable if the tensor belongs to a torch.func transform that has ended, so
    check `requires_grad` of an alias.
    """
    if not functorch.is_wrapped(tensor):
        return tensor.requires_grad
    alias: Tensor = torch.ops.aten.alias.default(tensor)
    return alias.requires_grad


def output_tensors(returns: Sequence[str], results: Sequence[Any]) -> Iterator[Tensor | None]:
    """Yield the tensors among the results of a call, or among their gradients.

    Tensors in lists are yielded too.
    """
    for kind, value in zip(returns, results, strict=True):
        if "Tensor" in kind:
            yield from value if isinstance(value, (list, tuple)) else (value,)


def differentiable(definition: Definition, run: Callable[[], Result]) -> Result:
    """Call `run`, and raise a clearer error if the operator's body is not differentiable."""
    try:
        return run()
    except RuntimeError as error:
        if "on Tensor that requires grad" in str(error):
            raise _left_autograd(definition, f"the body reads data ({error})") from error
        missing = "no autograd formula was registered" in str(error)
        if missing or isinstance(error, MissingFormulaError):
            problem = f"the body calls an operator without a formula ({error})"
            raise _left_autograd(definition, problem) from error
        raise


def _left_autograd(definition: Definition, problem: str) -> GradientError:
    return GradientError(
        f"{definition}: the derived formula cannot differentiate the body of the operator: "
        f"{problem}. Write the body with operators that PyTorch can differentiate, or register a "
        f"formula with register_autograd({str(definition)!r}, backward, setup_context=...). If the "
        "formula reads data too, use backward_kernel=... instead. If the outputs are not "
        "differentiable, call the operator in torch.no_grad() or on x.detach()."
    )


# The Tensor methods through which other libraries, such as NumPy, access a tensor's data.
_EXPORTS_DATA = {"numpy", "__array__", "__dlpack__", "data_ptr", "untyped_storage", "storage"}


class DependencyMode(TorchFunctionMode):
    """Finds tensors that depend on the inputs but have no autograd history.

    Python numbers such as `x.item()` are not tracked, because most programs use them to select a
    computation, not as values.

    If another library such as NumPy creates a tensor, the origin of the data is unknown. So once
    the body has passed a tensor's data to another library, assume that every tensor of unknown
    origin depends on that tensor.
    """

    def __init__(self) -> None:
        super().__init__()
        # Maps the id of each tensor to the tensor, and to the function that computed it from the
        # inputs without autograd, if any. Storing the tensor prevents reuse of the id.
        self._seen: dict[int, tuple[Tensor, str | None]] = {}
        # Maps each storage to the function that wrote to it in place without autograd.
        self._written: dict[int, str] = {}
        # The function that passed data to another library, such as NumPy, if the data depends on
        # the inputs. None as long as no such data was exported.
        self._exported: str | None = None

    def run(self, function: Callable[[list[Tensor]], Result], inputs: list[Tensor]) -> Result:
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
        inputs = _tensors((args, kwargs))
        versions = list(map(version_of, inputs))
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", str(func))
        origin = next(filter(None, map(self.left_autograd_in, inputs)), None)
        if origin is None and any(tensor.requires_grad for tensor in inputs):
            origin = resolve_name(func) or name
        if name in _EXPORTS_DATA:
            self._exported = self._exported or origin
        for tensor in _tensors(result):
            # Functions such as `zeros_like` and `new_zeros` do not read the values of a tensor, so
            # their results do not depend on it.
            is_just_like = name.endswith("_like") or name.startswith("new_")
            is_tracked = is_differentiable(tensor) and not is_just_like
            self._seen.setdefault(id(tensor), (tensor, origin if is_tracked else None))
        for tensor, version in zip(inputs, versions, strict=True):
            # Integer tensors, such as indices and masks, only select a computation, so they are not
            # tracked.
            is_tracked = is_differentiable(tensor) and not tensor.requires_grad
            if origin and is_tracked and version_of(tensor) != version:
                self._written.setdefault(_memory_of(tensor), origin)
        return result

    def left_autograd_in(self, tensor: Any) -> str | None:
        """Return the function that computed a tensor's value without autograd, if any."""
        if not isinstance(tensor, Tensor) or tensor.requires_grad:
            return None
        _, origin = self._seen.get(id(tensor), (tensor, self._exported))
        return origin or self._written.get(_memory_of(tensor))


def _memory_of(tensor: Tensor) -> int:
    # Tensor subclasses and tensors in torch.func transforms may have no storage.
    is_plain = type(tensor) is Tensor and not functorch.is_wrapped(tensor)
    return storage_of(tensor) if is_plain else id(tensor)


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]

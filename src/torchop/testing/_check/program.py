"""Write a program that reproduces a failure by running the probe on literal arguments."""

from __future__ import annotations

import base64
import io
import math
import sys
import textwrap
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from torchop._inspect.registrant import modules_of
from torchop.extend import OpName, OpOverload
from torchop.testing import probes
from torchop.testing._check.calls import Call

# Tensors with more elements than this are serialized with `torch.save` instead of as literals.
_MOST_ELEMENTS = 400
# `torch.tensor` infers these dtypes from literals, so the program does not pass `dtype` for them.
_DTYPES_OF_LITERALS = (torch.float32, torch.int64, torch.bool, torch.complex64)
# Tensors with more bytes than this are replaced with random tensors, to keep the program short.
_MOST_BYTES = 2**18


def write(
    op: OpOverload,
    probe: Any,
    args: Any,
    kwargs: Any,
    options: dict[str, Any],
    comment: str,
    provider: str | None = None,
) -> str:
    """Return the source of a program that runs a probe on a call.

    If `provider` is given, the program selects the kernel of this provider, such as "triton".
    """
    tensors = _Arguments((args, kwargs, options))
    call_args, call_kwargs = tensors.text(args), tensors.text(kwargs)
    values = {name: tensors.text(value) for name, value in options.items()}
    keywords = "".join(f", {name}={value}" for name, value in values.items())
    call = f"torch.ops.{op}, args, {call_kwargs}" if kwargs else f"torch.ops.{op}, args"
    home = "torchop.testing" if is_public(probe) else probe.__module__
    imports = {"import torch", f"from {home} import {probe.__name__}", *tensors.imports}
    if not is_public(probe):
        imports.add(f"from {Call.__module__} import {Call.__name__}")
        call = f"{Call.__name__}({call})"
    call = f"{probe.__name__}({call}{keywords})"
    if provider is not None:
        imports.add("import torchop")
        call = f'with torchop.priority({{"{op.name()}": ["{provider}"]}}):\n    {call}'
    lines = [
        *textwrap.wrap(
            " ".join(comment.split())[:600], 96, initial_indent="# ", subsequent_indent="# "
        ),
        *sorted(imports, key=_place_among_imports),
        *_definition(op),
        "",
        *tensors.lines,
        f"args = {_broken(call_args)}",
        call,
    ]
    return "\n".join(lines) + "\n"


def is_public(probe: Any) -> bool:
    """Return whether a probe is a public function of `torchop.testing`, like `check_sharding`.

    Public probes take an operator and its arguments, whereas all other probes take a `Call`.
    """
    return getattr(sys.modules["torchop.testing"], probe.__name__, None) is probe


def _place_among_imports(line: str) -> tuple[bool, str]:
    module = line.split()[1]
    return module.partition(".")[0] not in sys.stdlib_module_names, module


def _broken(text: str) -> str:
    if len(text) < 88 or text[0] != "(":
        return text
    for start in ("torch.tensor(", "memory_", "tensor_", "probes."):
        text = text.replace(f", {start}", f",\n    {start}")
    return f"(\n    {text[1:-1].rstrip(',')},\n)"


def _definition(op: OpOverload) -> list[str]:
    modules = [
        module
        for module in modules_of(OpName.parse(op.name()))
        if getattr(sys.modules[module], "__spec__", None) is not None
        # Exclude modules such as torch.library, because every operator is registered through them.
        and (module.partition(".")[0] not in ("torch", "torchop") or "_internal" in module)
    ]
    if modules or op.namespace in ("aten", "prims", "prim"):
        return [f"import {module}  # defines {op.name()}" for module in modules]
    return ["", f"# Import the module that defines {op.name()} here."]


class _Arguments:
    """Convert arguments to source code, preserving which tensors share memory."""

    def __init__(self, values: Any) -> None:
        self.lines: list[str] = []
        self.imports: set[str] = set()
        # Maps objects to the names of variables in the program. The key is ("tensor", id) for a
        # tensor that is passed more than once, and ("memory", address) for memory that several
        # tensors share.
        self._variables: dict[tuple[str, int], str] = {}
        tensors = probes.tensors_of(values)
        self._repeated = {n for n, k in Counter(map(id, tensors)).items() if k > 1}
        distinct = {
            id(t): t for t in tensors if probes.is_plain(t) and not t.is_neg() and t.numel()
        }.values()
        addresses = Counter(t.untyped_storage().data_ptr() for t in distinct)
        self._shared = {address for address, k in addresses.items() if k > 1}

    def text(self, value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, tuple):
            items = ", ".join(map(self.text, value))
            return f"({items},)" if len(value) == 1 else f"({items})"
        if isinstance(value, list):
            return f"[{', '.join(map(self.text, value))}]"
        if isinstance(value, dict):
            return f"{{{', '.join(f'{k!r}: {self.text(v)}' for k, v in value.items())}}}"
        if isinstance(value, (float, complex)):
            return self._number(value)
        if isinstance(value, torch.device):
            return f'torch.device("{value}")'
        if isinstance(value, torch.Generator):
            return f'torch.Generator("{value.device}").manual_seed({value.initial_seed()})'
        if value is None or isinstance(
            value, (bool, int, str, torch.dtype, torch.layout, torch.memory_format)
        ):
            return repr(value)
        return self._pickled(value)

    def _number(self, value: Any) -> str:
        if isinstance(value, complex):
            return f"complex({self._number(value.real)}, {self._number(value.imag)})"
        if isinstance(value, float) and not math.isfinite(value):
            self.imports.add("from math import inf, nan")
        return repr(value)

    def _tensor(self, tensor: torch.Tensor) -> str:
        if id(tensor) not in self._repeated:
            return self._new_tensor(tensor)
        return self._variable("tensor", id(tensor), lambda: self._new_tensor(tensor))

    def _variable(self, kind: str, key: int, text: Callable[[], str]) -> str:
        if (kind, key) not in self._variables:
            value = text()
            name = self._variables[kind, key] = f"{kind}_{len(self._variables)}"
            self.lines.append(f"{name} = {value}")
        return self._variables[kind, key]

    def _new_tensor(self, tensor: torch.Tensor) -> str:
        if tensor.requires_grad:
            return f"{self._new_tensor(tensor.detach())}.requires_grad_()"
        if tensor.layout is not torch.strided or type(tensor) is not torch.Tensor:
            return self._pickled(tensor)
        if tensor.is_neg():
            self.imports.add("from torchop.testing import probes")
            return f"probes.negative_view({self._new_tensor(tensor.resolve_neg())})"
        if tensor.is_conj():
            return f"{self._new_tensor(tensor.conj())}.conj()"
        memory = tensor.untyped_storage()
        address = memory.data_ptr()
        is_whole = (
            tensor.is_contiguous()
            and not tensor.storage_offset()
            and memory.nbytes() == tensor.numel() * tensor.element_size()
        )
        if is_whole and address not in self._shared:
            return self._elements(tensor)
        base = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(memory)
        start = (
            self._variable("memory", address, lambda: self._elements(base))
            if address in self._shared
            else self._elements(base)
        )
        place = f"{tuple(tensor.shape)}, {tensor.stride()}, {tensor.storage_offset()}"
        return f"{start}.as_strided({place})"

    def _elements(self, tensor: torch.Tensor) -> str:
        dtype, device = tensor.dtype, tensor.device
        end = f', device="{device}"' if device.type != "cpu" else ""
        if not tensor.numel():
            return f"torch.empty({tuple(tensor.shape)}, dtype={dtype}{end})"
        try:
            if tensor.nbytes > _MOST_BYTES:
                return self._random(tensor)
            if tensor.numel() > _MOST_ELEMENTS:
                return self._pickled(tensor)
            text = self.text(tensor.tolist())
        except (RuntimeError, TypeError):
            return self._pickled(tensor)
        kind = "" if dtype in _DTYPES_OF_LITERALS else f", dtype={dtype}"
        return f"torch.tensor({text}{kind}{end})"

    def _random(self, tensor: torch.Tensor) -> str:
        """Return code that creates a random tensor with the same range of values.

        If the tensor holds indices, the limited range keeps the random numbers valid indices.
        """
        shape, dtype, limits = tuple(tensor.shape), tensor.dtype, ""
        numbers = probes.widened(tensor)
        numbers = numbers if dtype.is_complex else numbers[numbers.isfinite()]
        if not dtype.is_complex and dtype is not torch.bool and numbers.numel():
            low, high = numbers.min().item(), numbers.max().item()
            high += 0 if dtype.is_floating_point else 1
            limits = f", low={low!r}, high={high!r}" if low < high else ""
        self.lines.append(f"# {tensor.numel()} random elements replace those that failed.")
        return (
            f'torch.testing.make_tensor({shape}, dtype={dtype}, device="{tensor.device}"{limits})'
        )

    def _pickled(self, value: Any) -> str:
        buffer = io.BytesIO()
        torch.save(value, buffer)
        self.imports |= {"import base64", "import io"}
        data = base64.b64encode(buffer.getvalue()).decode()
        return f'torch.load(io.BytesIO(base64.b64decode("{data}")), weights_only=False)'

"""Functions in C as the kernels of operators, where C++ code of Inductor calls these.

A function has the calling convention of tvm-ffi, because kernel libraries have it already, and a
value says there what it is: its dtype, sizes, strides and device. Of bare pointers nobody could
check that. The function allocates nothing, so compiled code calls another operator than its author
defined: one that takes the results too, and whose kernel `c_functions.cpp` makes of the function.
Inductor gets their sizes from the fake kernel, as ever, and plans their memory.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

import torchop
from torchop._compat import on_demand, planned_outputs
from torchop.extend import Operator, OpName, OpOverload

# What the convention has a value for: these, None, and arrays of numbers and text.
_KINDS = re.compile(
    r"(Optional\[)?((List\[)?(bool|float|int|number|str)|Device|ScalarType|Tensor)\]*"
)
SOURCE = Path(__file__).with_suffix(".cpp")


class CFunction(NamedTuple):
    """A function, and what it is the kernel of.

    Attributes:
        library: the path of its library.
        texts: its symbol there; the namespace and the name of the operator; the type of the device.
    """

    library: str
    texts: tuple[str, str, str, str]


def register_c_function(
    op: Any, library: str | os.PathLike[str], function: str, device_type: str = "cpu"
) -> None:
    """Registers a function in C as what compiled code in C++ calls in place of an operator.

    That is the code of `torch.compile(..., options={"cpp_wrapper": True})`, and packages of
    AOTInductor, which run without Python then. All other calls run the kernel in Python as ever,
    which may call the same function. An operator may have a function for each device type.

    The function has the calling convention of tvm-ffi. It takes the arguments of the operator, and
    then a tensor for each result, into which it writes. It returns nothing, and has to check what
    it is given, because tensors may have any dtype and strides. On a device with streams, it uses
    the one that `TVMFFIEnvGetStream` returns, which is PyTorch's.

    Args:
        op: the operator: a handle, `"ns::name"`, `"ns::name.overload"`, an `OpOverload`, or a
            packet with one overload. It returns fresh tensors, which its fake kernel describes, or
            it writes into arguments and returns nothing.
        library: the path of the shared library.
        function: the name by which tvm-ffi exports it, without the `__tvm_ffi_` before it.
        device_type: the type of the device whose tensors it takes.

    Raises:
        SchemaError: a `ValueError`: the operator takes or returns what no function can.
        ArgumentError: a `TypeError`: the library has no such function.
        OSError: the library cannot be loaded.

    Example:
        >>> import torch, torchop, torchop.export
        >>> @torchop.out_op("docs::twice", like="x")
        ... def twice(x: torch.Tensor, *, out: torch.Tensor) -> None:
        ...     torch.mul(x, 2, out=out)
        >>> torchop.export.register_c_function(
        ...     twice.functional, "kernels.so", "twice"
        ... )  # doctest: +SKIP

    The idea is `jax.ffi.register_ffi_target`.
    """
    C_FUNCTIONS.register(op, os.fspath(library), function=function, device_type=device_type)


class _CFunctions(torchop.Rule[dict[str, CFunction]]):
    """The functions of an operator, by the type of the device."""

    def validate(
        self, op: OpOverload, value: Any, function: str = "", device_type: str = "cpu"
    ) -> dict[str, CFunction]:
        schema = Operator(op, self.name).schema
        wrong = [a.name for a in schema.arguments if not _KINDS.fullmatch(a.kind)]
        if wrong:
            raise torchop.SchemaError(
                f"{op._name}: no function in C takes the argument {wrong[0]!r}, because the "
                f"calling convention of tvm-ffi has no value for its type: {schema}."
            )
        is_plain = schema.is_functional and set(schema.returns) == {"Tensor"}
        if not is_plain and not (schema.is_mutable and schema.returns_nothing):
            raise torchop.SchemaError(
                f"{op._name}: a function in C writes into tensors that it is given, so its "
                "operator returns fresh tensors alone, or writes into arguments and returns "
                f"nothing. In a family, that is the functional operator. Got {schema}."
            )
        library, symbol = os.path.abspath(value), f"__tvm_ffi_{function}"
        if not hasattr(ctypes.CDLL(library), symbol):
            raise torchop.ArgumentError(
                f"{op._name}: {library} has no function {function!r}, because it exports no "
                f"{symbol}. Export it, with TVM_FFI_DLL_EXPORT_TYPED_FUNC."
            )
        namespace, _, name = str(stand_in_of(op)).partition("::")
        device = torch.device(device_type).type
        before = self.lookup(op) if self.has(op) else {}
        return {**before, device: CFunction(library, (symbol, namespace, name, device))}

    def attach(self, op: OpOverload) -> None:
        _stand_ins[op] = _StandIn(op, self.lookup(op))

    def replaced(self, op: OpOverload) -> None:
        _stand_ins[op].use(self.lookup(op))

    def detach(self, op: OpOverload) -> None:
        _stand_ins.pop(op).end()

    def cache_parts(self, value: dict[str, CFunction]) -> Iterable[object]:
        yield sorted(value)


C_FUNCTIONS = _CFunctions("c_function")


def functions_in(names: Iterable[OpName], device_type: str) -> dict[OpName, CFunction]:
    """The functions among the operators that compiled code calls on a device, by their names."""
    functions = {each.name: each.functions for each in _stand_ins.values()}
    return {n: functions[n][device_type] for n in names if device_type in functions.get(n, ())}


def stand_in_of(op: OpOverload) -> OpName:
    """The name of the operator that code in C++ calls in place of one with functions."""
    name = OpName.parse(op._name)
    return name._replace(name=f"{name.name}__c_function")


class _StandIn:
    """An operator that takes the results of another one too, with functions as its kernels."""

    def __init__(self, op: OpOverload, functions: dict[str, CFunction]) -> None:
        self.name = stand_in_of(op)
        schema = Operator(op, "c_function").schema
        text = schema.written
        arguments = [text[text.index("(") + 1 : text.rindex(") -> ")]] if schema.arguments else []
        if schema.returns and not schema.keyword_only:
            arguments.append("*")
        results = range(len(schema.returns))
        arguments += (f"Tensor(result{place}!) c_function_out{place}" for place in results)
        self._library = torchop.Library(op.namespace, "FRAGMENT")
        self._library.define(f"{str(self.name).partition('::')[2]}({', '.join(arguments)}) -> ()")
        torchop.register_fake(str(self.name), lambda *args, **kwargs: None, lib=self._library)
        self._overload = Operator(self.name, "c_function").overload
        self.functions: dict[str, CFunction] = {}
        self._kernels: dict[str, Any] = {}  # those in C++, by device type, once they are needed
        self.use(functions)
        self._forget = planned_outputs.plan(op._name, str(self.name), lambda: self._overload)

    def use(self, functions: dict[str, CFunction]) -> None:
        """Makes functions the kernels; the first call of each loads it."""
        before, self.functions = self.functions, functions
        for device_type, function in functions.items():
            if device_type not in before:
                load = functools.partial(self._load_and_call, device_type)
                torchop.register_kernel(str(self.name), device_type, load, lib=self._library)
            elif before[device_type] != function:
                self._take_back(device_type)

    def _load_and_call(self, device_type: str, /, *args: Any, **kwargs: Any) -> None:
        with _loading:  # once, because of two kernels nobody would take the first one back
            if device_type not in self._kernels:
                function = self.functions[device_type]
                library = ctypes.c_void_p(ctypes.CDLL(function.library)._handle)
                texts = map(str.encode, function.texts)
                self._kernels[device_type] = _adapter().torchop_register(library, *texts)
        self._overload(*args, **kwargs)

    def _take_back(self, device_type: str) -> None:
        with _loading:
            if (kernel := self._kernels.pop(device_type, None)) is not None:
                _adapter().torchop_take_back(kernel)

    def end(self) -> None:
        self._forget()
        for device_type in self.functions:
            self._take_back(device_type)
        self._library.close()


_stand_ins: dict[OpOverload, _StandIn] = {}
_loading = threading.Lock()


@functools.cache
def _adapter() -> Any:
    """What makes functions kernels, compiled for the first of them."""
    library = on_demand.load_cpp(SOURCE.read_text(encoding="utf-8"), tvm_ffi().find_include_path())
    library.torchop_register.restype = ctypes.c_void_p
    library.torchop_take_back.argtypes = [ctypes.c_void_p]
    return library


def tvm_ffi() -> Any:
    """What tvm-ffi says of where its files are."""
    try:
        from tvm_ffi import libinfo  # which few users have
    except ImportError as error:
        raise ImportError(
            "a function in C is compiled with the headers of tvm-ffi, whose calling convention it "
            "has. Install the package apache-tvm-ffi, which brings them."
        ) from error
    return libinfo

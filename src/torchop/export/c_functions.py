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
from torchop.extend import Operator, OpLike, OpName, OpOverload

# What the convention has a value for: these, None, and arrays of tensors, numbers and text.
_KINDS = re.compile(
    r"(Optional\[)?((List\[)?(bool|float|int|number|str|Tensor|Optional\[Tensor)"
    r"|Device|ScalarType)\]*"
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
    op: OpLike,
    library: str | os.PathLike[str],
    function: str,
    device_type: str = "cpu",
    *,
    lib: torch.library.Library | None = None,
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
        lib: the library whose lifetime the registration shares; by default, it stays as long as the
            operator.

    Raises:
        SchemaError: a `ValueError`: the operator takes or returns what no function can.
        ArgumentError: a `TypeError`: the library has no such function, or the device has no memory.
        OperatorNotFoundError: nobody defined the operator.
        OSError: the library cannot be loaded.
        RuntimeError: a device type that PyTorch does not know.

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
    rule = _rule_of(torch.device(device_type).type)
    rule.register(op, os.fsdecode(library), lib=lib, function=function)


class _CFunctionRule(torchop.Rule[CFunction]):
    """The functions of operators for one type of device."""

    def __init__(self, device_type: str) -> None:
        super().__init__(f"c_function_{device_type}")
        self.device_type = device_type

    def validate(self, op: OpOverload, value: str, function: str = "") -> CFunction:
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
        if self.device_type == "meta":
            raise torchop.ArgumentError(
                f"{op._name}: no function in C runs on the device meta, because it has no memory. "
                "Name the device whose tensors the function takes, such as 'cpu'."
            )
        library, symbol = os.path.abspath(value), f"__tvm_ffi_{function}"
        if not hasattr(ctypes.CDLL(library), symbol):
            raise torchop.ArgumentError(
                f"{op._name}: {library} has no function {function!r}, because it exports no "
                f"{symbol}. Export it, with TVM_FFI_DLL_EXPORT_TYPED_FUNC."
            )
        namespace, _, name = str(stand_in_of(op)).partition("::")
        return CFunction(library, (symbol, namespace, name, self.device_type))

    def of_derived(self, op: OpOverload, kind: str, origin: OpOverload, value: CFunction) -> Any:
        # That companion takes the same arguments, but beside a list that may hold None.
        takes_the_same = len(op._schema.arguments) == len(origin._schema.arguments)
        if kind != "mutable" or not takes_the_same:
            return NotImplemented
        symbol, *_, device_type = value.texts
        namespace, _, name = str(stand_in_of(op)).partition("::")
        return value._replace(texts=(symbol, namespace, name, device_type))

    def attach(self, op: OpOverload) -> None:
        stand_in = _stand_ins.get(op) or _StandIn(op)
        stand_in.add(self.device_type, self.lookup(op))
        _stand_ins[op] = stand_in

    def replaced(self, op: OpOverload) -> None:
        _stand_ins[op].kernels[self.device_type].use(self.lookup(op))

    def detach(self, op: OpOverload) -> None:
        if not _stand_ins[op].remove(self.device_type):
            del _stand_ins[op]

    def cache_parts(self, value: CFunction) -> Iterable[object]:
        yield self.name


_rule_of = functools.cache(_CFunctionRule)


def functions_in(names: Iterable[OpName], device_type: str) -> dict[OpName, CFunction]:
    """The functions among the operators that compiled code calls on a device, by their names."""
    kernels = {each.name: each.kernels for each in _stand_ins.values()}
    return {n: kernels[n][device_type].function for n in names if device_type in kernels.get(n, ())}


def has_functions(op: OpOverload) -> bool:
    """Whether code in C++ calls another operator in place of this one."""
    return op in _stand_ins


def stand_in_of(op: OpOverload) -> OpName:
    """The name of the operator that code in C++ calls in place of one with functions."""
    name = OpName.parse(op._name)
    return name._replace(name=f"{name.name}__c_function")


class _StandIn:
    """An operator that takes the results of another one too, with functions as its kernels."""

    def __init__(self, op: OpOverload) -> None:
        self.name = stand_in_of(op)
        schema = Operator(op, "c_function").schema
        arguments = schema.written_arguments
        if schema.returns and not schema.keyword_only:
            arguments.append("*")
        results = range(len(schema.returns))
        arguments += (f"Tensor(result{place}!) c_function_out{place}" for place in results)
        self._library = torchop.Library(op.namespace, "FRAGMENT")
        self._library.define(f"{str(self.name).partition('::')[2]}({', '.join(arguments)}) -> ()")
        torchop.register_fake(str(self.name), lambda *args, **kwargs: None, lib=self._library)
        overload = self._overload = Operator(self.name, "c_function").overload
        self.kernels: dict[str, _Kernel] = {}
        self._forget = planned_outputs.plan(op._name, str(self.name), lambda: overload)

    def add(self, device_type: str, function: CFunction) -> None:
        try:
            self.kernels[device_type] = _Kernel(self._overload, function)
        except BaseException:
            self.remove(device_type)
            raise

    def remove(self, device_type: str) -> bool:
        """Takes a kernel back; ends the operator with the last of them, and returns False then."""
        if (kernel := self.kernels.pop(device_type, None)) is not None:
            kernel.end()
        if not self.kernels:
            self._forget()
            self._library.close()
        return bool(self.kernels)


class _Kernel:
    """A function as the kernel of an operator for a type of device; the first call loads it."""

    def __init__(self, overload: OpOverload, function: CFunction) -> None:
        self.function = function
        self._overload = overload
        self._registered: Any = None  # the kernel in C++
        self._library = torchop.Library(overload.namespace, "FRAGMENT")
        device_type = function.texts[-1]
        torchop.register_kernel(overload, device_type, self._load_and_call, lib=self._library)

    def _load_and_call(self, /, *args: Any, **kwargs: Any) -> None:
        with _loading:  # once, because of two kernels nobody would take the first one back
            if self._registered is None:
                library = ctypes.c_void_p(ctypes.CDLL(self.function.library)._handle)
                texts = map(str.encode, self.function.texts)
                self._registered = _adapter().torchop_register(library, *texts)
        self._overload(*args, **kwargs)

    def use(self, function: CFunction) -> None:
        """Makes another function the kernel."""
        with _loading:
            self.function, registered, self._registered = function, self._registered, None
            if registered is not None:
                _adapter().torchop_take_back(registered)

    def end(self) -> None:
        self.use(self.function)
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

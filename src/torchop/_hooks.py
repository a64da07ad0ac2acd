"""Hooks through which lower layers call `_native` and `_define`, which they must not import.

`_native` and `_define` replace the variables of this module later, so always read them as
attributes, as in `_hooks.extension`. A module that runs `from torchop._hooks import extension`
would keep the default value forever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


class NoExtension:
    """Replaces the C++ extension until the extension is loaded.

    This class defines the functions of the C++ extension (see `_native/_call_path.pyi`) that lower
    layers call. Each of them returns a value that makes the caller fall back to Python code.
    """

    Choice: Any = None
    Operator: Any = None
    make_backward: Any = None

    @staticmethod
    def is_evidently_fresh(args: Any, kwargs: Any, result: Any, like: Any = None, /) -> bool:
        """Return True if a result is known to share no memory with the arguments.

        If `like` is given, the result must also have the same metadata as `like`.
        """
        return False

    @staticmethod
    def are_plain(gradients: Any, count: int, ctx: Any, /) -> bool:
        """Return True if the gradients are known to match the inputs of the autograd node `ctx`.

        If this returns False, the caller checks each gradient in Python.
        """
        return False

    @staticmethod
    def pack_plain(values: Any, latest: Any, count: int, /) -> Any:
        """Pack random generator states and settings into a tensor.

        If this returns None, the caller packs them in Python.
        """
        return None

    @staticmethod
    def keep_memory(
        defined: Iterable[str], implemented: Iterable[str], frees_functions: bool, /
    ) -> Callable[[], None]:
        """Keep memory alive for running calls, until the caller calls the returned function.

        PyTorch frees memory during deregistration that running calls may still read. So call this
        function before deregistering operators, and call the returned function afterwards. This
        default is a no-op.
        """
        return lambda: None


# The C++ extension module, once it is loaded.
extension: Any = NoExtension
# A function that counts the calls of operators, so that `_native` starts compiling the extension
# only after many calls. `_native` sets it while it counts. At all other times it is None, so that
# the only overhead of a call is a check for None.
count_call: Callable[[], None] | None = None
# The class of operator handles (the objects that `custom_op` returns). Set by `_define`.
handle_type: Any = None
# Called before an operator's rules are compiled into a call plan. The caller does not hold the
# registration lock.
before_plan: Callable[[Any], None] = lambda definition: None  # noqa: E731 (replaced later)
# Called when an operator's call plan is invalidated. The caller holds the registration lock.
plan_outdated: Callable[[Any], None] = lambda definition: None  # noqa: E731 (replaced later)

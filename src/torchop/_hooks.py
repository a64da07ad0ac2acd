"""What `_native` and `_define` set for the layers below them, with defaults in Python.

A native call must notice changes in lower layers, and these layers call functions of the C++
extension where it is loaded. Read each value as `_hooks.extension`, and not by `from ... import`,
because the extension is loaded later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any


class NoExtension:
    """Stand-in for the functions of `_native/_call_path.pyi` that lower layers call."""

    Choice: Any = None
    Operator: Any = None
    make_backward: Any = None

    @staticmethod
    def is_evidently_fresh(args: Any, kwargs: Any, result: Any, like: Any = None, /) -> bool:
        """Return whether a result is certainly fresh; Python cannot count the users of a storage.

        With `like`, the result must also have the metadata of that tensor.
        """
        return False

    @staticmethod
    def are_plain(gradients: Any, count: int, ctx: Any, /) -> bool:
        """Return whether gradients certainly fit the inputs; otherwise the caller checks each."""
        return False

    @staticmethod
    def pack_plain(values: Any, latest: Any, count: int, /) -> Any:
        """Return the state of generators and settings packed; None to read them one by one."""
        return None

    @staticmethod
    def running() -> Iterator[Any]:
        """Yield the entries of the calls of this thread that have no Python frame."""
        return iter(())

    @staticmethod
    def hold_calls(qualnames: Iterable[str], /) -> object:
        """Keep new calls of operators out of the dispatcher while the result lives."""
        return None

    @staticmethod
    def end_calls(qualnames: Iterable[str], /) -> None:
        """Wait for the calls of operators that are in the dispatcher."""


# The extension module, once it is loaded.
extension: Any = NoExtension
# The class of handles, of which the extension makes a subclass. `_define` sets it.
handle_type: Any = None
# Makes the `Follower` of a definition that `custom_op` did not make. `_native` sets it.
new_follower: Callable[[Any], Any] = lambda definition: None  # noqa: E731 (a value to replace)

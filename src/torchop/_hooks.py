"""Values that `_native` and `_define` set for the layers below them, with Python defaults.

Lower layers call functions of the C++ extension, and notify native calls of changes. Access these
values as attributes, such as `_hooks.extension`, and not with `from ... import`, because the
extension is loaded later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any


class NoExtension:
    """Python fallbacks for the functions of `_native/_call_path.pyi` that lower layers call."""

    Choice: Any = None
    Operator: Any = None
    make_backward: Any = None

    @staticmethod
    def is_evidently_fresh(args: Any, kwargs: Any, result: Any, like: Any = None, /) -> bool:
        """Return whether a result certainly shares no memory with other tensors.

        Always False here, because only C++ can count the tensors that use a storage. With `like`,
        the result must also have the metadata of this tensor.
        """
        return False

    @staticmethod
    def are_plain(gradients: Any, count: int, ctx: Any, /) -> bool:
        """Return whether gradients certainly fit the inputs; if not, the caller checks each."""
        return False

    @staticmethod
    def pack_plain(values: Any, latest: Any, count: int, /) -> Any:
        """Return the packed state of generators and settings, or None to read them one by one."""
        return None

    @staticmethod
    def running() -> Iterator[Any]:
        """Yield the entries of this thread's calls that have no Python frame."""
        return iter(())

    @staticmethod
    def hold_calls(qualnames: Iterable[str], /) -> object:
        """Keep new calls of operators out of the dispatcher until the result is freed."""
        return None

    @staticmethod
    def end_calls(qualnames: Iterable[str], /) -> None:
        """Wait until no other thread is inside a dispatcher call of these operators."""


# The extension module, once it is loaded.
extension: Any = NoExtension
# The class of handles, set by `_define`. The extension creates a subclass.
handle_type: Any = None
# Creates the `Follower` of another package's operator. Set by `_native`.
new_follower: Callable[[Any], Any] = lambda definition: None  # noqa: E731 (a value to replace)

"""Variables that `_native` and `_define` set for the layers below them, which cannot import them.

The defaults are Python implementations for use without the C++ extension. Read the variables as
attributes, such as `_hooks.extension`, because they are set after lower layers are imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any


class NoExtension:
    """Python versions of the functions in `_native/_call_path.pyi` that lower layers call."""

    Choice: Any = None
    Operator: Any = None
    make_backward: Any = None

    @staticmethod
    def is_evidently_fresh(args: Any, kwargs: Any, result: Any, like: Any = None, /) -> bool:
        """Return whether a result certainly shares no memory with the arguments.

        Returns False if this is not certain. With `like`, the result must also have the metadata of
        that tensor.
        """
        return False

    @staticmethod
    def are_plain(gradients: Any, count: int, ctx: Any, /) -> bool:
        """Return whether the gradients certainly fit the inputs. If False, check each of them."""
        return False

    @staticmethod
    def pack_plain(values: Any, latest: Any, count: int, /) -> Any:
        """Return the packed generator states and settings, or None if they must be packed here."""
        return None

    @staticmethod
    def running() -> Iterator[Any]:
        """Yield the entries of the native calls that this thread is running."""
        return iter(())

    @staticmethod
    def hold_calls(qualnames: Iterable[str], /) -> object:
        """Block new calls to operators before they enter the dispatcher.

        Calls continue when the returned object is freed.
        """
        return None

    @staticmethod
    def end_calls(qualnames: Iterable[str], /) -> None:
        """Wait until no other thread is inside a dispatcher call to these operators."""


# The extension module after it was loaded, else the defaults.
extension: Any = NoExtension
# The class of operator handles. Set by `_define`.
handle_type: Any = None
# Creates the `Follower` of a definition for another package's operator. Set by `_native`.
new_follower: Callable[[Any], Any] = lambda definition: None  # noqa: E731 (replaced later)

"""Cache the outputs of fake kernels, with the keys and entries of FakeTensorMode's own cache.

`FakeTensorMode._cached_dispatch_impl` (torch/_subclasses/fake_tensor.py) only caches calls to
PyTorch's own operators, because the fake kernel of any other operator may depend on more than its
arguments (`_validate_cache_key`). The functions here reuse the rest of that implementation, which
handles symbolic sizes and rejects arguments and outputs that cannot be cached.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch._subclasses._fake_tensor_utils import _CacheKeyState
from torch._subclasses.fake_tensor import FakeTensorMode

from torchop._compat import autocasting
from torchop._compat.classes import OpOverload

_NAMES = (
    "_cache_key",
    "_validate_output_for_cache_entry",
    "_get_output_info_for_cache_entry",
    "_output_from_cache_entry",
)
_IS_SUPPORTED = all(hasattr(FakeTensorMode, name) for name in _NAMES)
# Before 2.15, `_output_from_cache_entry` also takes the operator as an argument, but only uses it
# for views.
_TAKES_OPERATOR = (
    _IS_SUPPORTED
    and "func" in inspect.signature(FakeTensorMode._output_from_cache_entry).parameters
)
_MOST_ENTRIES = 10_000

Cache = dict[Any, Any]


def cached_outputs(
    cache: Cache,
    owner: object,
    mode: Any,
    op: OpOverload,
    args: Any,
    kwargs: Any,
    run: Callable[[], Any],
) -> Any:
    """Return `run()`, or the same outputs recreated from an earlier call with equal input metadata.

    Cache entries for symbolic sizes are stored in the ShapeEnv, since they are valid only together
    with its guards. All other entries are stored in `cache`. The key of an entry includes `owner`,
    so callers with different owners share no entries.
    """
    if not _IS_SUPPORTED or not mode.cache_enabled:
        return run()
    state = _CacheKeyState(mode.shape_env)
    try:
        metadata = mode._cache_key(state, op, args, kwargs)
    except fake_tensor._BypassDispatchCache:
        return run()
    environment: Any = state.shape_env if state.cache_on_shape_env() else None
    entries: Cache = cache if environment is None else environment.fake_tensor_cache
    key = (owner, autocasting.state_of_kernel(), metadata)
    entry = entries.get(key)
    if entry is None:
        output = run()
        with contextlib.suppress(fake_tensor._BypassDispatchCache):
            if len(cache) >= _MOST_ENTRIES:
                cache.clear()
            entry = _entry(mode, state, metadata, op, args, kwargs, output)
            metadata.strip_shape_env()  # as in `_set_cache_key`, to avoid reference cycles
            entries[key] = entry
        return output
    return entry(mode, state, metadata, op, args)


def _entry(
    mode: Any, state: Any, key: Any, op: OpOverload, args: Any, kwargs: Any, output: Any
) -> Callable[..., Any]:
    """Return the cache entry of a call: a function that recreates the outputs of its fake kernel.

    Raise `_BypassDispatchCache` if the outputs cannot be recreated, for example because the fake
    kernel created a symbol for a data-dependent size.
    """
    cls = type(output)
    if not issubclass(cls, (torch.Tensor, tuple, list)):
        raise fake_tensor._BypassDispatchCache("not a tensor")
    is_single = issubclass(cls, torch.Tensor)
    items = [output] if is_single else list(output)
    for item in items:
        if not isinstance(item, torch.Tensor):  # None, a number, or a list in a tuple
            raise fake_tensor._BypassDispatchCache("not a tensor")
        mode._validate_output_for_cache_entry(state, key, op, args, kwargs, item)
    infos = [
        mode._get_output_info_for_cache_entry(state, key, op, args, kwargs, item) for item in items
    ]
    if any(info.inplace_idx is not None for info in infos) or len(set(map(id, items))) < len(items):
        raise fake_tensor._BypassDispatchCache("aliases")

    entry = fake_tensor._DispatchCacheValidEntry(tuple(infos), is_output_tuple=True)

    def outputs(mode: Any, state: Any, key: Any, op: OpOverload, args: Any) -> Any:
        operator = (op,) if _TAKES_OPERATOR else ()
        made = mode._output_from_cache_entry(state, entry, key, *operator, args)
        return made[0] if is_single else cls(made)

    return outputs

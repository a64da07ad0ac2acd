"""copied_bytes counts the bytes that a compiled function copies because an operator mutates."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
import torch
import torch._dynamo.exc
from torch import Tensor

import torchop
from torchop.testing import copied_bytes

SIZE = 8 * 4 * 4  # bytes of a cache


@pytest.fixture
def write(namespace: str) -> Any:
    @torchop.custom_op(f"{namespace}::write", mutates_args=("cache",))
    def write(cache: Tensor, row: Tensor) -> None:
        cache[0] = row

    return write


def _inputs() -> tuple[Tensor, Tensor]:
    return torch.zeros(8, 4), torch.ones(4)


def _twice(write: Any, cache: Tensor, row: Tensor) -> Tensor:
    write(cache, row)
    before = cache.sum()
    write(cache, row + 1)
    return before * 2


def test_nothing_is_copied_if_the_old_value_is_not_read_later(write: Any) -> None:
    def read_after(cache: Tensor, row: Tensor) -> Tensor:
        write(cache, row)
        write(cache[1:], row)
        return cache.sum()

    cache, row = _inputs()
    assert copied_bytes(read_after, cache, row) == {}
    assert copied_bytes(torch.compile(read_after), cache, row=row) == {}
    assert copied_bytes(torch.add, cache, row) == {}
    assert cache.count_nonzero() == 0, "the function was run"


def test_read_between_two_writes_copies_twice(write: Any) -> None:
    def twice(cache: Tensor, row: Tensor) -> Tensor:
        return _twice(write, cache, row)

    cache, row = _inputs()
    assert copied_bytes(twice, cache, row) == {"cache": 2 * SIZE}
    assert copied_bytes(twice, row=row, cache=cache) == {"cache": 2 * SIZE}
    assert cache.count_nonzero() == 0, "the function was run"
    # copied_bytes predicts the copies without generating code. Check that the code makes them.
    _, (code,) = torch._inductor.utils.run_and_get_code(torch.compile(twice), cache, row)
    assert code.count("empty_strided_cpu((32, ), (1, )") == 1


def test_result_names_list_items_buffers_and_computed_tensors(write: Any) -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cache", torch.zeros(8, 4))

        def forward(self, row: Tensor) -> Tensor:
            return _twice(write, self.cache, row)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList([Layer()])

        def forward(self, row: Tensor) -> Tensor:
            return self.layers[0](row)

    def listed(caches: list[Tensor], row: Tensor) -> Tensor:
        return _twice(write, caches[1], row)

    def computed(x: Tensor, row: Tensor) -> Tensor:
        cache = x * 2
        before = cache + 1
        write(cache, row)
        return before * cache

    cache, row = _inputs()
    assert copied_bytes(Model(), row) == {"layers.0.cache": 2 * SIZE}
    assert copied_bytes(listed, [cache, cache.clone()], row) == {"caches[1]": 2 * SIZE}
    assert copied_bytes(computed, cache, row) == {f"{write.name}.cache": SIZE}


def test_copies_by_functional_helper_operators_are_counted(namespace: str) -> None:
    @torchop.custom_op(f"{namespace}::sums", mutates_args=("cache",))
    def sums(row: Tensor, cache: Tensor) -> list[Tensor]:
        return [cache.add_(row).sum()]

    sums.register_fake(lambda row, cache: [cache.new_empty(())])
    cache, row = _inputs()
    assert copied_bytes(sums, row, cache) == {"cache": 2 * SIZE}


def test_copies_made_by_the_program_are_not_counted(write: Any) -> None:
    def on_a_copy(cache: Tensor, row: Tensor) -> Tensor:
        cache = cache.clone()
        write(cache, row)
        return cache

    def stored(cache: Tensor, row: Tensor) -> None:
        cache.copy_(row + 1)

    assert copied_bytes(on_a_copy, *_inputs()) == {}
    assert copied_bytes(stored, *_inputs()) == {}


def test_symbolic_sizes_have_the_values_of_the_call(write: Any) -> None:
    def twice(cache: Tensor, row: Tensor) -> Tensor:
        return _twice(write, cache, row)

    cache, row = _inputs()
    torch._dynamo.mark_dynamic(cache, 0)
    assert copied_bytes(twice, cache, row) == {"cache": 2 * SIZE}


def test_function_with_a_graph_break_raises(write: Any) -> None:
    def broken(cache: Tensor, row: Tensor) -> None:
        write(cache, row)
        torch._dynamo.graph_break()

    with pytest.raises(torch._dynamo.exc.Unsupported):
        copied_bytes(broken, *_inputs())
    assert copied_bytes(lambda: None) == {}


def test_copies_into_a_declared_layout_are_counted(namespace):
    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Annotated[Tensor, torchop.contiguous]) -> Tensor:
        return x.clone()

    op.register_fake(torch.empty_like)
    x = torch.ones(4, 8)
    assert copied_bytes(lambda x: op(x) + 1, x) == {}
    assert copied_bytes(lambda x: op(x) + 1, x.t()) == {"x": 128}
    assert copied_bytes(lambda x: op(x.sin().t()) + 1, x) == {f"{namespace}::op.x": 128}

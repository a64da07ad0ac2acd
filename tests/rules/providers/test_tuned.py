"""With the order `"tuned"`, the providers are tried in the order of their measured times.

The measurements are read from tables on disk. Uses private names.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import torchop
from tests._support.devices import TYPE
from torchop._core.lock import registration_lock
from torchop._rules.providers import measurements, tuned
from torchop._rules.providers.measurements import Measured, Measurement


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("TORCHOP_CACHE_DIR", str(folder))
    monkeypatch.setattr(tuned, "_own", [])
    with registration_lock:
        tuned.forget()
    yield folder
    with registration_lock:
        tuned.forget()


@pytest.fixture
def scale(namespace: str) -> Any:
    @torchop.custom_op(f"{namespace}::scale", mutates_args=(), priority=["tuned", "fast"])
    def scale(x: Tensor, factor: float = 2.0) -> Tensor:
        return x * factor

    @scale.register_kernel(TYPE, provider="fast", supports=lambda x, factor: x.ndim == 1)
    def _(x, factor):
        return x * factor

    @scale.register_kernel(TYPE, provider="tiled", configs=[{"tile": 1}, {"tile": 2}])
    def _(x, factor, tile):
        return (x * factor).clone() if tile == 2 else x * factor

    return scale


def measured(op: Any, *names: str, sizes: Any = ((5, 8),), **changes: Any) -> Measurement:
    """Create a measurement in which these kernels took 1, 2, ... microseconds, in this order."""
    kernels = []
    for us, name in enumerate(names, start=1):
        provider, _, tile = name.partition("=")
        config = {"tile": int(tile)} if tile else {}
        kernels.append(Measured(provider, config, digest(op, provider), us, (us, us)))
    stars = ", ".join("*" * len(sizes))
    made = Measurement(
        str(op._opoverload.name()),
        tuned.device_name([torch.ones(1)]),
        tuned.torch_release(),
        f"float32[{stars}], 2.0",
        tuple(sizes),
        tuple(kernels),
    )
    return made._replace(**changes)


def digest(op: Any, provider: str) -> str:
    kernels, _ = torchop._rules.providers.choice_of_call(op, (torch.ones(1),), {})
    written = {name: p.written for name, p in kernels.providers.items()}
    return tuned.digest(written.get(provider, kernels.reference))


def provider(op: Any, *args: Any) -> Any:
    return torchop.explain(op, *args).provider


def users(cache: Path, *found: Measurement) -> None:
    measurements.write(cache / "tuning.json", found)
    with registration_lock:
        tuned.forget()


def test_a_call_follows_the_measurement_of_its_sizes(scale, cache):
    assert provider(scale, torch.ones(6)) == "fast"
    users(
        cache, measured(scale, "tiled=2", "fast"), measured(scale, "reference", sizes=[(9, None)])
    )
    calls = {size: provider(scale, torch.ones(size)) for size in (4, 5, 8, 9, 1000)}
    assert calls == {4: "fast", 5: "tiled", 8: "tiled", 9: "reference", 1000: "reference"}
    assert provider(scale, torch.ones(6).double()) == "fast"
    assert provider(scale, torch.ones(6), 3.0) == "fast"
    assert torch.equal(scale(torch.ones(6)), torch.full((6,), 2.0))
    explanation = torchop.explain(scale, torch.ones(6))
    assert any("tiled was measured as the fastest" in text for text in explanation.providers)


def test_the_config_that_was_the_fastest_runs(namespace, cache):
    used = []

    @torchop.custom_op(f"{namespace}::op", mutates_args=(), priority=["tuned"])
    def op(x: Tensor, factor: float = 2.0) -> Tensor:
        return x * factor

    @op.register_kernel(TYPE, provider="tiled", configs=[{"tile": 1}, {"tile": 2}])
    def _(x, factor, tile):
        used.append(tile)
        return x * factor

    users(cache, measured(op, "tiled=2", "tiled=1"), measured(op, "tiled=1", sizes=[(9, 9)]))
    for size in (6, 9, 6):
        op(torch.ones(size))
    assert used == [2, 1, 2]
    # If somebody edits the table by hand and names a config that the kernel does not define, such
    # as tiled=3, the entry is ignored.
    users(cache, measured(op, "tiled=3", "tiled=1"))
    op(torch.ones(6))
    assert used == [2, 1, 2, 1]


def test_filters_supports_and_removed_providers_are_skipped(scale, cache):
    users(cache, measured(scale, "gone", "fast", "tiled=1", sizes=[(2, 2), (2, 2)]))
    assert provider(scale, torch.ones(2, 2)) == "tiled"  # "fast" does not support two dimensions
    with torchop.priority(batch_invariant_only=True):
        assert provider(scale, torch.ones(2, 2)) == "reference"
    with torchop.priority({scale: ["fast"]}):
        assert provider(scale, torch.ones(2)) == "fast"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"device": "Abacus"}, "were made on 'Abacus', and this is '"),
        ({"torch": "1.0"}, "were made with PyTorch 1.0, and this is "),
        ({}, "the kernel of 'tiled' has changed since they were made"),
    ],
)
def test_stale_measurement_is_ignored_and_reported_once(scale, cache, changes, problem, caplog):
    stale = measured(scale, "tiled=1", **changes)
    if not changes:
        stale = stale._replace(kernels=(stale.kernels[0]._replace(digest="old"),))
    users(cache, stale)
    with pytest.warns(torchop.ProviderWarning, match=problem) as seen:
        scale(torch.ones(6))
    assert "Measure here: torchop.testing.tune" in str(seen[0].message)
    scale(torch.ones(7))  # a repeated warning would fail the test
    assert provider(scale, torch.ones(6)) == "fast"


def test_digest_changes_with_a_kernels_dependencies(tmp_path, monkeypatch):
    def digest_of(helper: str, source: str, text: str) -> str:
        (tmp_path / "kernel.cpp").write_text(source)
        names: dict[str, Any] = {"__name__": "made", "PATH": tmp_path / "kernel.cpp"}
        program = (
            f"TEXT = {text!r}\ndef helper(x): return {helper}\n"
            "def kernel(x): return helper(x), TEXT, PATH\ndef other(x): return x"
        )
        exec(program, names)
        assert tuned.digest(names["other"]) != tuned.digest(names["kernel"])
        return tuned.digest(names["kernel"])

    variants = [("x", "a", "a"), ("x + 1", "a", "a"), ("x", "b", "a"), ("x", "a", "b")]
    assert len({digest_of(*each) for each in variants}) == 4
    assert digest_of(*variants[0]) == digest_of(*variants[0])


def test_users_measurement_precedes_the_authors(scale, cache, tmp_path):
    shipped = tmp_path / "shipped.json"
    measurements.write(
        shipped, [measured(scale, "tiled=1"), measured(scale, "tiled=1", sizes=[(1, 1)])]
    )
    scale.set_tuning(shipped)
    assert provider(scale, torch.ones(6)) == "tiled"
    users(cache, measured(scale, "reference"))
    assert provider(scale, torch.ones(6)) == "reference"
    assert provider(scale, torch.ones(1)) == "tiled"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"format": 1, "meas', "is not a table of measurements"),
        ("[]", "is not a table of measurements"),
        ('{"format": 1, "measurements": [{"op": 3}]}', "is not a table"),
        ('{"format": 99, "torchop": "9.9", "measurements": 1}', r"newer torchop \(9.9\)"),
        ("[" * 100_000, "is not a table"),
    ],
)
def test_a_file_that_is_no_table_is_ignored_with_a_warning(scale, cache, text, problem):
    (cache / "tuning.json").write_text(text)
    with registration_lock:
        tuned.forget()
    with pytest.warns(torchop.ProviderWarning, match=problem + ".* ignored"):
        scale(torch.ones(6))
    assert torch.equal(scale(torch.ones(7)), torch.full((7,), 2.0))


def test_a_table_is_read_as_it_was_written(scale, tmp_path):
    path = tmp_path / "table.json"
    found = [measured(scale, "tiled=1", "fast"), measured(scale, "fast", sizes=[(9, None)])]
    measurements.write(path, found)
    assert measurements.read(path) == found
    assert [m.call for m in found] == ["float32[5..8], 2.0", "float32[9..], 2.0"]
    assert len(path.read_text().splitlines()) == 7
    later = measured(scale, "reference")
    assert measurements.merged(found, [later]) == [later, found[1]]
    assert list(tmp_path.glob("table.json.*")) == []


def test_buckets():
    x, weight = torch.ones(0, 1, 2, 3, 8, 9), torch.ones(300)
    powers = ((0, 0), (1, 1), (2, 2), (3, 4), (5, 8), (9, 16))
    assert tuned.bucketed(["x"], {}, (x,), {}) == powers
    own = {"x": {0: [1, 16], -1: [4]}, "weight": {0: [16, 256]}}
    assert tuned.bucketed(["x", "weight"], own, (x,), {"weight": weight}) == (
        (0, 1),
        *powers[1:5],
        (5, None),
        (257, None),
    )


def test_set_tuning_rejects_unusable_values(scale):
    with pytest.raises(ValueError, match=r"buckets for 'y', but the operator takes x, factor"):
        scale.set_tuning(buckets={"y": {}})
    for wrong in ([1, 16], {0: ["a"]}, {0: 3}):
        with pytest.raises(TypeError, match=r"upper bounds of buckets by dimension, such as"):
            scale.set_tuning(buckets={"x": wrong})
    with pytest.raises(torchop.ProviderError, match="'tuned' stands for the provider"):
        scale.register_kernel(TYPE, lambda x, factor: x, provider="tuned")


def test_the_order_of_a_graph_follows_the_table(namespace, cache):
    """A compiled graph uses the provider for the traced sizes, and guards on these sizes."""

    @torchop.custom_op(
        f"{namespace}::op", mutates_args=(), compile="inline", priority=["tuned", "sine"]
    )
    def op(x: Tensor, factor: float = 2.0) -> Tensor:
        return x * factor

    op.register_kernel(TYPE, lambda x, factor: torch.sin(x) * factor, provider="sine")
    users(cache, measured(op, "reference", sizes=[(5, 8)]), measured(op, "sine", sizes=[(9, 16)]))
    compiled = torch.compile(op, backend="aot_eager", dynamic=True, fullgraph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torchop.ProviderWarning)
        for size, sine in ((6, False), (12, True), (7, False), (15, True)):
            x = torch.ones(size)
            assert torch.allclose(compiled(x), (torch.sin(x) if sine else x) * 2)

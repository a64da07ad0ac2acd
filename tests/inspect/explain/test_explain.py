"""`explain` reports the path of a call, however the operator is named."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import torchop
from tests._support.common import adding, assert_clean, counting, needs_native
from tests._support.devices import AUTOGRAD, BACKEND
from tests._support.forking import run_forked
from tests.inspect.explain.checking import T

pytestmark = needs_native


def test_operator_may_be_given_in_every_way(op):
    overload = op.overload
    for way in (op, op.name, f"{op.name}.default", overload, overload.overloadpacket):
        explanation = torchop.explain(way, T)
        assert explanation.native
        assert explanation.op == op.name


def test_explain_of_a_packet_explains_the_chosen_overload(namespace):
    library = torch.library.Library(namespace, "FRAGMENT")
    library.define("op(Tensor x) -> Tensor")
    library.define("op.two(Tensor x, Tensor y) -> Tensor")
    packet = getattr(torch.ops, namespace).op
    assert torchop.explain(packet, T).op == f"{namespace}::op"
    assert torchop.explain(packet, T, y=T).op == f"{namespace}::op.two"
    with pytest.raises(RuntimeError, match="failed to match any schema"):
        torchop.explain(packet, "text")
    library._destroy()


def test_nothing_is_run(namespace):
    def kernel(x: Tensor) -> Tensor:
        raise AssertionError("it was run")

    op = torchop.custom_op(f"{namespace}::op", kernel, mutates_args=())
    with counting(op) as calls:
        assert torchop.explain(op, T).native
        assert not torchop.explain(op, T.to_sparse()).native
    assert calls == {}


def test_explanation_text(op):
    lines = str(torchop.explain(op, T)).splitlines()
    assert lines[0].startswith(f"{op.name}: native, because the dispatcher would run only")
    assert lines[1] == f"keys: {AUTOGRAD}, ADInplaceOrView, BackendSelect, {BACKEND}"
    assert lines[2] == "1. autograd: records nothing"
    lines = str(torchop.explain(op, T.to_sparse())).splitlines()
    assert lines[0].startswith(f"{op.name}: through the dispatcher, because a tensor is not plain")
    assert lines[1].rpartition(", ")[2].startswith("Sparse")


def test_operator_of_pytorch(namespace):
    explanation = torchop.explain("aten::sin", T)
    assert explanation.op == "aten::sin"
    assert not explanation.native
    assert explanation.reason == "it was defined in C++"
    assert any(line.startswith("CPU: registered at ") for line in explanation.kernels)


def test_operator_of_a_library(namespace):
    with torchop.Library(namespace, "FRAGMENT") as library:
        library.define("op(Tensor x) -> Tensor")
        library.impl("op", lambda x: x + 1, BACKEND)
        before = torchop.explain(f"{namespace}::op", T)
        packet = getattr(torch.ops, namespace).op
        packet(T)  # the first call creates the call plan
        after = torchop.explain(f"{namespace}::op", T)
        assert packet(T).tolist() == [1, 1]
        assert torchop.native.counters(packet) == {"native": 1}
    assert not before.native
    assert before.reason == "torchop has called none of its kernels yet"
    assert any(__file__ in line for line in before.kernels)
    assert after.native
    assert __file__ in after.kernels[-1]


def test_an_undefined_operator(namespace):
    with pytest.raises(torchop.OperatorNotFoundError, match=f"{namespace}::absent"):
        torchop.explain(f"{namespace}::absent", T)


def test_explanation_of_a_non_operator_is_rejected():
    with pytest.raises((TypeError, ValueError)):
        torchop.explain(3, T)


def test_a_deregistered_operator(namespace):
    old = adding(namespace)
    new = adding(namespace)
    with pytest.raises(torchop.OperatorGoneError, match=f"{namespace}::op"):
        torchop.explain(old, T)
    assert torchop.explain(new, T).native


def test_notebooks_show_a_list(namespace):
    op = adding(namespace)
    op(T)
    shown = torchop.explain(op, T)._repr_html_()
    assert shown.startswith(f"<p><b>{namespace}::op: native, because ")
    assert shown.endswith("</li></ol>")
    assert "&lt;lambda&gt;" in shown
    assert "<lambda>" not in shown


def test_without_the_extension():
    done = run_forked(
        """
        import torch, torchop

        @torchop.custom_op("without::op", mutates_args=())
        def op(x: torch.Tensor) -> torch.Tensor:
            return x + 1

        explanation = torchop.explain(op, torch.ones(1))
        assert not explanation.native and len(explanation.kernels) > 0
        print(explanation.reason)
        """,
        TORCHOP_NATIVE="0",
    )
    assert assert_clean(done) == (
        "the native call path is not loaded (TORCHOP_NATIVE=0 turns it off)\n"
    )

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor

import torchop
from tests._support.common import needs_native
from tests._support.devices import BACKEND, TYPE
from tests._support.forking import run_compiling
from tests.accelerate.support import T

pytestmark = needs_native


def is_native(op) -> bool:
    before = torchop.native.counters(op).get("native", 0)
    op(T)
    return torchop.native.counters(op).get("native", 0) == before + 1


def state(op):
    overload = op._opoverload
    packet = overload._overloadpacket
    table = torch.jit._builtins._get_builtin_table()
    return (
        overload._op,
        packet._op,
        hash(overload),
        table.get(id(packet._op)),
        # Count the entries of this packet, because the table also keeps entries of freed functions.
        list(table.values()).count(packet._qualified_op_name),
        torch.library.Library.define,
    )


def test_undo_restores_everything(op, namespace):
    op(T)
    before = state(op)
    acceleration = torchop.accelerate(f"{namespace}::*")
    assert is_native(op)
    during = state(op)
    assert during[:2] != before[:2]
    assert during[2:4] == before[2:4]
    acceleration.undo()
    acceleration.undo()
    after = state(op)
    assert all(a is b for a, b in zip(before[:2], after[:2], strict=True))
    assert before[2:] == after[2:]
    assert not acceleration.is_active
    assert not is_native(op)


def test_accelerating_again_adds_no_hook_to_the_library(op, namespace):
    hooks = op._lib._registration_handles
    torchop.accelerate(f"{namespace}::*").undo()
    before = list(hooks)
    torchop.accelerate(f"{namespace}::*").undo()
    assert hooks == before


def test_acceleration_is_a_context_manager(op, namespace):
    with torchop.accelerate(f"{namespace}::op") as acceleration:
        assert acceleration.is_active
        assert acceleration.patterns == (f"{namespace}::op",)
        assert is_native(op)
    assert not acceleration.is_active
    assert not is_native(op)


@pytest.mark.parametrize("first", [0, 1])
def test_operator_stays_accelerated_while_another_acceleration_matches(op, namespace, first):
    both = [torchop.accelerate(f"{namespace}::*"), torchop.accelerate(f"{namespace}::op")]
    function = op._opoverload._op
    both.pop(first).undo()
    assert op._opoverload._op is function
    assert is_native(op)
    both.pop().undo()
    assert not is_native(op)


def test_accelerating_twice_changes_nothing(op, namespace):
    with torchop.accelerate(f"{namespace}::*"):
        assert is_native(op)
        before = state(op)
        with torchop.accelerate(f"{namespace}::*"):
            assert state(op) == before
        assert state(op) == before
        assert is_native(op)


def test_undo_keeps_a_function_that_other_code_set(op, namespace):
    original = op._opoverload._op
    acceleration = torchop.accelerate(f"{namespace}::*")
    ours = op._opoverload._op

    def theirs(*args, **kwargs):
        return ours(*args, **kwargs)

    op._opoverload._op = theirs
    acceleration.undo()
    assert op._opoverload._op is theirs
    assert torch.equal(op(T), T + 1)
    assert ours.entry.counters[0] == 0  # the call inside of `theirs` is not native
    op._opoverload._op = original


def test_function_replaced_by_other_code_is_not_accelerated(op, namespace):
    overload = op._opoverload
    original, calls = overload._op, []

    def theirs(*args, **kwargs):
        calls.append(args)
        return original(*args, **kwargs)

    overload._op = theirs
    with torchop.accelerate(f"{namespace}::*") as acceleration:
        assert acceleration.operators[0].reason == ("other code replaced its function in torch.ops")
        assert torch.equal(op(T), T + 1)
        assert len(calls) == 1
    assert overload._op is theirs
    overload._op = original


def test_operators_registered_later_are_accelerated(namespace):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torchop.NothingToAccelerateWarning)
        acceleration = torchop.accelerate(f"{namespace}::late*")

    @torch.library.custom_op(f"{namespace}::later", mutates_args=())
    def later(x: Tensor) -> Tensor:
        return x + 1

    @torch.library.custom_op(f"{namespace}::other", mutates_args=())
    def other(x: Tensor) -> Tensor:
        return x + 1

    torch.library.define(f"{namespace}::late_low", "(Tensor x) -> Tensor")
    torch.library.impl(f"{namespace}::late_low", TYPE, lambda x: x + 2)
    low = getattr(torch.ops, namespace).late_low
    assert is_native(later)
    assert is_native(low)
    assert not is_native(other)
    acceleration.undo()

    @torch.library.custom_op(f"{namespace}::late_again", mutates_args=())
    def too_late(x: Tensor) -> Tensor:
        return x + 1

    assert not is_native(later)
    assert not is_native(too_late)


def test_a_redefinition_by_the_name_of_an_accelerated_operator(op, namespace):
    acceleration = torchop.accelerate(f"{namespace}::*")
    assert is_native(op)

    @torch.library.custom_op(f"{namespace}::op", mutates_args=())
    def second(x: Tensor) -> Tensor:
        return x + 2

    assert is_native(second)
    assert torch.equal(second(T), T + 2)
    acceleration.undo()
    assert torch.equal(second(T), T + 2)
    assert not is_native(second)


def test_packet_finds_an_overload_defined_later(namespace, accelerated, library):
    library.define("op(Tensor x) -> Tensor")
    library.impl("op", lambda x: x + 1, BACKEND)
    accelerated()
    packet = getattr(torch.ops, namespace).op
    assert torch.equal(packet(T), T + 1)
    library.define("op.two(Tensor x, Tensor y) -> Tensor")
    library.impl("op.two", lambda x, y: x - y, BACKEND)
    assert torch.equal(packet(T), T + 1)
    assert torch.equal(packet(T, T), T - T)
    assert torchop.native.counters(packet.default) == {"native": 2}
    assert torchop.native.counters(packet.two) == {"native": 1}


def test_the_table(op, namespace, library):
    library.define("empty(Tensor x) -> Tensor")
    with torchop.accelerate(f"{namespace}::*") as acceleration:
        lines = str(acceleration).splitlines()
        assert lines[0].split() == ["operator", "accelerated", "reason"]
        assert lines[1].split(maxsplit=2) == [
            f"{namespace}::empty",
            "no",
            "none of its kernels is a Python function",
        ]
        assert lines[2].split() == [f"{namespace}::op", "yes"]
    assert "the acceleration was undone" in str(acceleration)
    assert repr(acceleration) == f"<Acceleration of {namespace}::*>"


def test_operators_defined_in_cpp_are_skipped_with_the_reason():
    function = torch.ops.aten.sin.default._op
    with pytest.warns(
        torchop.NothingToAccelerateWarning,
        match=r"^accelerate\('aten::sin'\) accelerates nothing, because all 2 matching operators "
        r"were defined in C\+\+\.$",
    ):
        acceleration = torchop.accelerate("aten::sin")
    with acceleration:
        assert str(acceleration).splitlines()[1].split(maxsplit=2) == [
            "aten::sin",
            "no",
            "it was defined in C++",
        ]
        assert torch.ops.aten.sin.default._op is function


def test_a_pattern_may_name_overloads(namespace, library):
    for overload in ("op", "op.one", "op.two"):
        library.define(f"{overload}(Tensor x) -> Tensor")
        library.impl(overload, lambda x: x + 1, BACKEND)
    ops = getattr(torch.ops, namespace).op
    with torchop.accelerate(f"{namespace}::op.*") as acceleration:
        assert [row.op for row in acceleration.operators] == [
            f"{namespace}::op.one",
            f"{namespace}::op.two",
        ]
        assert is_native(ops.one)
        assert not is_native(ops.default)
    with torchop.accelerate(f"{namespace}::op") as acceleration:
        assert len(acceleration.operators) == 3  # the name of a packet matches all its overloads
    with torchop.accelerate(f"{namespace}::op.default") as acceleration:
        assert [row.op for row in acceleration.operators] == [f"{namespace}::op"]


def test_all_operators(op):
    with torchop.accelerate("*") as acceleration:
        assert is_native(op)
        names = [row.op for row in acceleration.operators]
        assert op._qualname in names
        assert not any(name.startswith("aten::") for name in names)


def test_a_pattern_without_a_match_warns_with_the_nearest_namespaces(op, namespace):
    with pytest.warns(
        torchop.NothingToAccelerateWarning,
        match=rf"no registered operator matches; the nearest namespaces are .*"
        rf"{namespace}.*Operators that are registered later will be accelerated",
    ) as caught:
        acceleration = torchop.accelerate(f"{namespace}x::*")
    assert caught[0].filename == __file__
    assert str(acceleration) == f"no operator matches {namespace}x::* yet"
    acceleration.undo()


def test_a_refusal_names_the_argument_and_its_type(namespace, library):
    library.define("op(Tensor x, *, Stream? stream=None) -> Tensor")
    library.impl("op", lambda x, stream=None: x + 1, BACKEND)
    with torchop.accelerate(f"{namespace}::op") as acceleration:
        assert acceleration.operators[0].reason == (
            "argument 'Stream? stream=None' has a type that only the dispatcher can convert"
        )


def test_explain_shows_how_to_accelerate_and_that_it_was_undone(op):
    name = op._qualname
    how = f"it is not accelerated; torchop.accelerate('{name}') does that"
    assert torchop.explain(name, T).reason == how
    with torchop.accelerate(name):
        assert torchop.explain(name, T).native
    assert torchop.explain(name, T).reason == how


def test_invalid_pattern_is_rejected():
    with pytest.raises(ValueError, match="got no pattern; name the operators"):
        torchop.accelerate()
    with pytest.raises(TypeError, match="'mylib::\\*', got int: 3"):
        torchop.accelerate(3)
    for given, meant in [
        ("mylib", r"'mylib::\*' for a whole namespace\.$"),
        ("mylib.*", r"'mylib::\*' for a whole namespace\.$"),
        ("", r"'mylib::\*' for a whole namespace\.$"),
        ("mylib:*", r"'mylib::\*' for a whole namespace\.$"),
        ("mylib:crop", r"'mylib::crop'\.$"),
        ("torch.ops.mylib.crop.out", r"'mylib::crop\.out'\.$"),
    ]:
        with pytest.raises(ValueError, match=f"have the form namespace::name. Write {meant}"):
            torchop.accelerate(given)
    with pytest.raises(TypeError, match=r"torchop\.record\(torch\) and call accelerate"):
        torchop.accelerate(torch)
    with pytest.raises(
        TypeError, match=r"To pass several names, unpack them: accelerate\(\*names\)\.$"
    ):
        torchop.accelerate(["mylib::*"])
    assert torch.library.Library.define.__module__ == "torch.library"


def test_a_process_without_acceleration_changes_nothing():
    code = """
        import torch
        from torch._library.custom_ops import CustomOpDef
        define, call = torch.library.Library.define, CustomOpDef.__call__
        import sys, torchop
        assert torch.library.Library.define is define and CustomOpDef.__call__ is call
        assert "torchop._native.table.others" not in sys.modules
        @torch.library.custom_op("n::op", mutates_args=())
        def op(x: torch.Tensor) -> torch.Tensor:
            return x + 1
        assert not type(op._opoverload._op).__module__.startswith("torchop")
        with torchop.accelerate("n::*"):
            op(torch.ones(1))
            assert torchop.native.counters(op) == {}, torchop.native.counters(op)
            print(torchop.accelerate("n::op"))
    """
    ran = run_compiling(code, TORCHOP_NATIVE="0")
    assert ran.returncode == 0, ran.stderr
    assert "the native call path is not loaded" in ran.stdout

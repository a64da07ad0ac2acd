"""Describe a finding to the author of an operator: the bug, its location, and the fix."""

from __future__ import annotations

import fnmatch
import os
import re
from typing import NamedTuple

import torchop
from torchop._compat import registries
from torchop._inspect.registrant import functions_of, place_of
from torchop.extend import Operator
from torchop.testing._check.findings import NOT_THE_LAYOUT, Finding, Result


class Advice(NamedTuple):
    """The bug that a check finds, and how to fix it.

    In `fix`, `{x}` is a placeholder for the name of an argument. `of` is the part of the operator
    that contains the bug: `"kernel"`, `"fake"` (the fake kernel) or `"formula"` (the backward
    formula).
    """

    fault: str
    fix: str
    of: str = "kernel"


_STRIDES = "Read {x} by its strides and storage offset, or call {x}.contiguous() first."
_SIZES = "Handle {x} of this size, or raise an error."
_FAKE = "Make each result in the fake kernel as the kernel does, with the same "
_FORMULA = "Correct the gradient of {x} in the formula."
# Maps patterns of check names to advice. The first matching pattern wins.
_ADVICE: dict[str, Advice] = {
    "contracts.schema: write": Advice(
        "A call writes into an argument that the schema does not declare as mutated.",
        "Write into a copy, such as {x}.clone(), or declare the argument in mutates_args (in a "
        "schema: Tensor(a!) {x}).",
    ),
    "contracts.schema": Advice(
        "A result shares memory with an argument, another result or an earlier result.",
        "Return a copy, such as result.clone().",
    ),
    "contracts.repeated: generator": Advice(
        "The operator ignores its generator argument.",
        "Pass the generator to each function that draws random numbers.",
    ),
    "contracts.repeated": Advice(
        "Equal calls give different results.",
        "Compute results from the arguments only. If the operator draws random numbers, give it "
        "the tag torch.Tag.nondeterministic_seeded.",
    ),
    "contracts.state": Advice(
        "The result of a call depends on earlier calls.",
        "Do not keep values from call to call, or compare them with all arguments before use.",
    ),
    "contracts.written": Advice(
        "An argument is declared as mutated, but no call changes it.",
        "Write into {x}, for example with copy_, or remove {x} from mutates_args.",
    ),
    "contracts.kept": Advice(
        "The operator keeps the memory of an argument after the call.",
        "Do not store {x}, or store a copy.",
    ),
    "contracts.leaks": Advice(
        "Memory grows with every call.", "Release everything that a call allocates."
    ),
    "contracts.process: random": Advice(
        "A call advances or seeds a global random number generator.",
        "Give the operator the tag torch.Tag.nondeterministic_seeded, or draw from a "
        "torch.Generator of its own.",
    ),
    "contracts.process": Advice(
        "A call changes the state of the process.", "Restore the state before the call returns."
    ),
    "contracts.environment": Advice(
        "The result depends on an environment variable.",
        "Make the setting an argument, or read the variable when the module is imported.",
    ),
    "contracts.num_threads": Advice(
        "The result depends on the number of threads.",
        "Let each thread write its own elements, and combine partial results in a fixed order.",
    ),
    "contracts.defaults": Advice(
        "The kernel and the schema have different defaults.", "Give both the same default."
    ),
    "memory.given: any layout": Advice(
        "The result for an example is wrong.", "Correct the kernel, or the reference."
    ),
    "memory.given": Advice("The result is wrong for the layout of a recorded call.", _STRIDES),
    "memory.uninitialized": Advice(
        "Some elements of a result are never written.", "Write every element, or use torch.zeros."
    ),
    "memory.contiguous": Advice(
        "The kernel reads or writes outside of a contiguous tensor.", "Check the limits of loops."
    ),
    "memory.empty*": Advice("The result is wrong for tensors without elements.", _SIZES),
    "memory.single*": Advice("The result is wrong for dimensions of size 1.", _SIZES),
    "memory.zero_dim*": Advice("The result is wrong for tensors without dimensions.", _SIZES),
    "memory.out": Advice(
        "An out= argument of another shape is not resized.",
        "Call resize_ on {x}, or raise an error.",
    ),
    "memory.blocks": Advice(
        "The result is wrong for other sizes than those of the examples.",
        "Check the limits of loops, and the elements beyond the last full block.",
    ),
    "memory.written_expanded": Advice(
        "A call writes into an expanded tensor instead of raising an error.",
        "Raise an error if elements of {x} share memory.",
    ),
    "memory.*: any layout": Advice(
        "The result is wrong, also for contiguous tensors.", "Correct the kernel, or the reference."
    ),
    "memory.*": Advice("The result is wrong for a tensor that is not contiguous.", _STRIDES),
    "dtypes.accepted": Advice(
        "The fake kernel and the kernel disagree for a dtype.", _FAKE + "dtype.", "fake"
    ),
    "dtypes.promotion": Advice(
        "The fake kernel promotes dtypes differently than the kernel.",
        "Use torch.result_type in the fake kernel.",
        "fake",
    ),
    "dtypes.indices": Advice(
        "The kernel reads int32 indices as int64, or the reverse.",
        "Convert {x} to one dtype first, or raise an error for the other.",
    ),
    "dtypes.int64": Advice(
        "The kernel computes int64 results in int32.", "Keep {x} in int64, also between steps."
    ),
    "dtypes.double": Advice(
        "The kernel computes double results in float32.", "Keep {x} in double, also between steps."
    ),
    "dtypes.half": Advice("The kernel rounds float16 to bfloat16.", "Keep {x} in float16."),
    "dtypes.*": Advice(
        "Results are less precise than the dtype.", "Accumulate in float32 or double."
    ),
    "values.int8": Advice(
        "The result is wrong for the limits of 8-bit integers.",
        "Convert {x} to a wider dtype before arithmetic.",
    ),
    "values.scalars": Advice(
        "The result is wrong for other numbers than those of the examples.",
        "Handle this number, or reject it: register_examples(..., valid=...).",
    ),
    "values.negative_dim": Advice(
        "A negative dimension does not count from the end.",
        "Add the number of dimensions to a negative dimension, or raise an error.",
    ),
    "values.*: any layout": Advice(
        "The result is wrong for special values.",
        "Handle {x} of these values, or reject them: register_examples(..., valid=...).",
    ),
    "values.*": Advice(
        "The result for special values differs between layouts.",
        "Handle {x} in all code paths alike.",
    ),
    "sharing.*": Advice(
        "The result is wrong if arguments share memory.",
        "Read all arguments before the first write, or raise an error.",
    ),
    "subsystems.fake*": Advice(
        "The fake kernel describes a result differently than the kernel makes it.",
        _FAKE + "shape, strides, dtype and device.",
        "fake",
    ),
    "subsystems.autograd_registration": Advice(
        "The gradient is recorded inside the kernel, where compilers cannot see it.",
        "Register a formula with register_autograd.",
    ),
    "subsystems.grad_strides": Advice(
        "Backward ignores the strides of an incoming gradient.",
        "Call .contiguous() on the incoming gradient.",
        "formula",
    ),
    "subsystems.gradcheck: random": Advice(
        "Equal backward calls give different gradients.",
        "Return the random numbers of the forward call as a residual, and save them.",
        "formula",
    ),
    "subsystems.gradcheck": Advice("A gradient is wrong.", _FORMULA, "formula"),
    "subsystems.gradgradcheck": Advice("A second derivative is wrong.", _FORMULA, "formula"),
    "subsystems.saved": Advice(
        "Backward writes into an incoming gradient, or uses tensors that changed since the call.",
        "Save tensors with ctx.save_for_backward, and write into copies.",
        "formula",
    ),
    "subsystems.grad_memory": Advice(
        "A gradient depends on earlier backward calls, or is overwritten by later ones.",
        "Make a fresh tensor for each gradient.",
        "formula",
    ),
    "subsystems.needs_input_grad": Advice(
        "A gradient is wrong if other arguments require no grad.", _FORMULA, "formula"
    ),
    "subsystems.func": Advice("Gradients of torch.func are wrong.", _FORMULA, "formula"),
    "subsystems.vmap*": Advice(
        "vmap disagrees with a loop over the batch.", "Correct the vmap rule."
    ),
    "subsystems.flops": Advice(
        "The FLOP formula does not return the number of operations.",
        "Return an int of 0 or more, which grows with the sizes.",
    ),
    "subsystems.threads": Advice(
        "Two threads that call the operator at once get wrong results.",
        "Protect shared buffers with a lock, or allocate them for each call.",
    ),
    "subsystems.compiled*": Advice(
        "A compiled program differs from eager mode.",
        "Describe all results in the fake kernel, and declare all writes and effects.",
        "fake",
    ),
    "subsystems.export_dynamic": Advice(
        "An exported program has fixed sizes, or differs from eager mode.",
        "Do not convert sizes to int in the fake kernel, and do not branch on them.",
        "fake",
    ),
    "subsystems.residuals": Advice(
        "The residuals of a call and its backward do not fit together.",
        "Describe each residual in the fake kernel as the kernel makes it, and pass all that "
        "backward needs to ctx in setup_context.",
        "fake",
    ),
    "subsystems.forward_mode": Advice(
        "Forward mode is wrong.", "Correct the tangent of {x} in the formula.", "formula"
    ),
    "subsystems.sharding": Advice(
        "Results on DTensors are wrong.",
        "Correct the sharding rule: list dimensions that must not be sharded in whole=..., and "
        "partial results in reduce=....",
    ),
    "subsystems.inference_mode": Advice(
        "The result is different in inference mode, or if arguments require grad.",
        "Do not let the kernel depend on the grad mode, or on requires_grad.",
    ),
    "subsystems.subclasses": Advice(
        "The result is wrong for subclasses of Tensor.",
        "Do not check the exact type of {x} in the kernel, or read its memory by address.",
    ),
    "subsystems.autocast": Advice(
        "The result under autocast is wrong.", "Cast all arguments to one dtype."
    ),
}
# For a pattern of check names and a text in the failure message, the key of the advice in
# `_ADVICE`.
_BY_MESSAGE = {
    ("contracts.schema", "UndeclaredMutationError"): "contracts.schema: write",
    ("contracts.repeated", "generator that the caller passes"): "contracts.repeated: generator",
    ("contracts.process", "nondeterministic_seeded"): "contracts.process: random",
    ("subsystems.gradcheck", "not reentrant"): "subsystems.gradcheck: random",
    ("*", "elements that the kernel does not write"): "memory.uninitialized",
}


def _advice(result: Result) -> Advice:
    if result.crashes:
        return _advice_for_crash(result)
    name = result.check.partition("[")[0]
    if NOT_THE_LAYOUT in result.message:
        name = f"{name}: any layout"
    for (check, words), key in _BY_MESSAGE.items():
        if fnmatch.fnmatchcase(name, check) and words in result.message:
            name = key
    for pattern, advice in _ADVICE.items():
        if fnmatch.fnmatchcase(name, pattern):
            return advice
    return Advice(f"No: {result.question}", "See the call below.")


def _advice_for_crash(result: Result) -> Advice:
    label, _, _ = result.message.partition(f": {result.cause}")
    case = "tensors with 0 elements" if "size 0" in result.changes else f"this case: {label}"
    fault = f"{result.cause[0].upper()}{result.cause[1:]} for {case}."
    if result.cause.startswith("the call took "):
        fix = "Check the conditions of loops, and release each lock, for such a call."
    elif "size 0" in result.changes:
        fix = "Return early if {x} has 0 elements, or check the sizes before reading memory."
    else:
        fix = (
            "Check the sizes, strides and dtype of {x} before reading or writing memory, and raise "
            "an error if the kernel does not support them."
        )
    return Advice(fault, fix)


def finding_in_words(operator: Operator, finding: Finding) -> str:
    """Return a message with the operator, the bug, its location, a fix and a failing call."""
    result, others = finding
    advice = _advice(result)
    also = f"; also fails: {', '.join(others)}" if others else ""
    lines = [
        f"{operator}: {advice.fault} ({result.check}{also})",
        f"  found: {result.message}",
        f"  where: {_place(operator, advice.of)}",
        f"  fix:   {advice.fix.replace('{x}', _argument(operator, result))}",
        "",
        *(f"    {line}".rstrip() for line in result.program.splitlines()),
    ]
    return "\n".join(lines).rstrip()


def followup_in_words(operator: Operator, result: Result, first: Result) -> str:
    """Describe a failure that probably has the same cause as `first`, an earlier failure."""
    return (
        f"{operator}: {result.check} probably fails for the same reason as {first.check}. Correct "
        f"{first.check} first.\n  found: {result.message}"
    )


def _argument(operator: Operator, result: Result) -> str:
    """Return the argument that the failure message names, or else the first tensor argument."""
    tensors = [a.name for a in operator.schema.arguments if "Tensor" in a.kind]
    if result.check.partition("[")[0] in ("memory.out", "memory.written_expanded"):
        return next(name for name in tensors if name in operator.schema.mutated)
    number = re.search(r"gradient at index (\d+)", result.message)
    if number and int(number[1]) < len(operator.schema.arguments):
        return operator.schema.arguments[int(number[1])].name
    named = re.search(r"(?:[Aa]rgument|input) '?(\w+)", result.message)
    if named and named[1] in tensors:
        return named[1]
    return tensors[0] if tensors else "the argument"


_PACKAGE = os.path.dirname(torchop.__file__) + os.sep


def _place(operator: Operator, of: str) -> str:
    name = str(operator)
    if of == "fake" and (source := registries.fake_source(name)) is not None:
        return source
    if of == "fake":
        functions = []
    elif of == "formula":
        functions = registries.formula_functions(name)
    else:
        functions = list(functions_of(operator.name))
    for function in functions:
        code = getattr(function, "__code__", None)
        if code is not None and not code.co_filename.startswith(_PACKAGE):  # a wrapper of torchop
            return f"{code.co_filename}:{code.co_firstlineno} ({code.co_name})"
    return place_of(operator) or "unknown"

"""Run mutation tests: remove conditions from the C++ sources, and check that a test fails.

    python tools/mutants.py [NAME ...]

A mutant is a copy of the C++ extension with one condition removed or changed. For each mutant, the
script compiles the extension, and runs the tests of native calls until one fails. If no test fails,
the mutant survives. The condition is then not tested, or not needed.

To save time, the script only runs the test files that execute the mutant's condition. To find these
files, it first runs each test file with the unchanged extension, compiled for measuring coverage.
Conditions for features that the installed PyTorch does not have are skipped.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from torchop._native.extension import api
from torchop._native.extension.recipe import (
    CSRC,
    compile_flags,
    find_compiler,
    include_flags,
    make_recipe,
)

ROOT = Path(__file__).parents[1]
# The tests that run first, because they are the most likely to fail: the tests for the mutant's
# source file, and REASONS, which test why calls fall back to the dispatcher.
CLOSEST = {
    "ambient_state.cpp": ["tests/rules/autograd/derived"],
    "arguments.h": [
        "tests/native/test_passed_arguments.py",
        "tests/native/test_optional_lists.py",
        "tests/native/test_overrides.py",
    ],
    "autograd.cpp": ["tests/native/gradients"],
    "autograd_fallback.cpp": ["tests/native/test_autograd_fallback.py"],
    "backward.cpp": ["tests/native/gradients", "tests/rules/residuals"],
    "bypass.cpp": ["tests/native/test_bypass.py"],
    "call.cpp": ["tests/native/test_native.py", "tests/native/gradients"],
    "choice.cpp": ["tests/rules/providers/test_choice.py", "tests/integration/test_device.py"],
    "lifetime.cpp": [
        "tests/native/test_dispatcher_calls.py",
        "tests/native/test_leaks.py",
        "tests/define/test_next_operator.py",
    ],
    "disabled.h": ["tests/native/test_switch.py", "tests/integration/test_device.py"],
    "entry.cpp": ["tests/native/test_deep_recursion.py", "tests/native/test_operator_end.py"],
    "flat.h": ["tests/native/gradients"],
    "gradients.cpp": ["tests/native/gradients", "tests/rules/autograd/test_gradients.py"],
    "kinds.h": ["tests/native/test_unusual_arguments.py", "tests/native/test_overrides.py"],
    "overloads.cpp": ["tests/native/test_overloads.py"],
    "plan.cpp": ["tests/native/test_native.py", "tests/native/test_later_registrations.py"],
    "residuals.cpp": ["tests/rules/residuals"],
    "resolution.cpp": ["tests/native/test_resolution.py", "tests/native/test_overloads.py"],
    "results.h": ["tests/native/gradients", "tests/core/test_contract_aliases.py"],
    "call_key.h": ["tests/rules/providers/test_choice.py", "tests/integration/test_device.py"],
    "thread.h": ["tests/native/test_deep_recursion.py"],
}
REASONS = ["tests/inspect/explain", "tests/native/test_devices.py"]
TESTS = [
    "tests/native/test_native.py",
    "tests/native/gradients",
    "tests/rules/residuals/test_native.py",
    "tests/rules/autograd/test_gradients.py",
    "tests/rules/residuals/test_training.py",
    "tests/native/test_autograd_fallback.py",
    "tests/native/test_optional_lists.py",
    "tests/rules/autograd/derived/test_native.py",
    "tests/rules/providers",
    "tests/core/test_contract_aliases.py",
    "tests/native/test_overloads.py",
    "tests/native/test_resolution.py",
    "tests/native/test_bypass.py",
    "tests/native/test_passed_arguments.py",
    "tests/native/test_greenlets.py",
    "tests/native/test_reset_libraries.py",
    "tests/accelerate",
    "tests/native/test_switch.py",
    "tests/native/test_overrides.py",
    "tests/native/test_later_registrations.py",
    "tests/native/test_operator_end.py",
    "tests/native/test_exceptions.py",
    "tests/native/test_changes_during_calls.py",
    "tests/native/test_processes.py",
    "tests/native/test_unusual_arguments.py",
    "tests/native/test_opaque_arguments.py",
    "tests/native/test_thread_end.py",
    "tests/native/test_deep_recursion.py",
    "tests/integration/test_device.py",
    "tests/integration/compile/test_compile.py",
    "tests/integration/compile/test_opaque_kernels.py",
    "tests/integration/compile/test_side_effects.py",
    "tests/integration/compile/test_dynamic_shapes.py",
    "tests/integration/compile/test_fake_kernels.py",
    "tests/integration/compile/test_errors.py",
    "tests/integration/differential",
]


class Mutant(NamedTuple):
    """A condition in the C++ sources, and the replacement in the mutant."""

    file: str
    condition: str
    without: str = "if (false)"
    # The first PyTorch release that has the feature that needs the condition.
    since: tuple[int, int] = (2, 11)


MUTANTS = {
    "switched off": Mutant("call.cpp", "if (C10_UNLIKELY(is_disabled()))"),
    "switched off in other threads": Mutant("disabled.h", " && open_here() > 0", ""),
    "switched off after a block inside": Mutant("disabled.h", "open_here() + by", "long(by)"),
    "switched off after a backward": Mutant(
        "disabled.h", "std::max(open_here() + by, 0L)", "open_here() + by"
    ),
    "unsupported operator": Mutant("call.cpp", "if (C10_UNLIKELY(plan.always_dispatches))"),
    "bypass: switched off": Mutant("bypass.cpp", "if (is_disabled())"),
    "bypass: another kernel": Mutant(
        "bypass.cpp", "if (!is_python_kernel(kernel) || python_function(kernel) != function)"
    ),
    "bypass: inference tensor": Mutant("bypass.cpp", "all_count &= !tensor.is_inference();", ""),
    "bypass: gradient": Mutant("bypass.cpp", "if (c10::GradMode::is_enabled()) {", "if (false) {"),
    "bypass: tangent": Mutant(
        "bypass.cpp", "if (torch::autograd::ForwardADLevel::try_get_by_idx(0) != nullptr)"
    ),
    "bypass: view": Mutant("bypass.cpp", " || (meta->is_view_ && tensor.requires_grad())", ""),
    "bypass: object": Mutant("bypass.cpp", "needed |= is_tensor_object(value);", ""),
    "too many arguments": Mutant(
        "arguments.h", "if (count > parameters_.positional)\n      return"
    ),
    "unknown keyword": Mutant(
        "arguments.h",
        "if (guess == parameters_.size())\n        return false;",
        "if (guess == parameters_.size())\n        continue;",
    ),
    "missing argument": Mutant(
        "arguments.h", "if (values[index] == nullptr)\n          return Reason::Binding;", ""
    ),
    "tensor subclass": Mutant(
        "dispatch.h",
        "return Py_TYPE(value) == tensor_type || Py_TYPE(value) == parameter_type;",
        "return THPVariable_Check(value);",
    ),
    "64-bit integers": Mutant("kinds.h", "return overflow == 0;", "return true;"),
    "negative zero": Mutant(
        "kinds.h",
        "return PyFloat_CheckExact(value) && !is_negative_zero(value);",
        "return PyFloat_CheckExact(value);",
    ),
    "exact int": Mutant(
        "kinds.h",
        "return PyLong_CheckExact(value) && fits_in_64_bits(value);",
        "return PyLong_Check(value) && fits_in_64_bits(value);",
    ),
    "exact float": Mutant(
        "kinds.h",
        "return PyFloat_CheckExact(value) && !is_negative_zero(value);",
        "return PyFloat_Check(value) && !is_negative_zero(value);",
    ),
    "exact str": Mutant(
        "kinds.h", "PyUnicode_CheckExact(value) && is_utf8", "PyUnicode_Check(value) && is_utf8"
    ),
    "subclass that overrides": Mutant(
        "kinds.h",
        "if (!PyLong_CheckExact(value) && !PyBool_Check(value) && !is_plain_object(value))",
    ),
    "float that an int computes": Mutant(
        "kinds.h", "Py_TYPE(value)->tp_as_number->nb_float == ", "true || nullptr == "
    ),
    "negative zero of a subclass": Mutant(
        "kinds.h", "return is_negative_zero(value) ?", "return false ?"
    ),
    "text of a subclass": Mutant("kinds.h", "return is_utf8(value) ?", "return true ?"),
    "object with computed attributes": Mutant(
        "kinds.h", "type->tp_getattro != PyObject_GenericGetAttr || ", ""
    ),
    "container for an object": Mutant("kinds.h", "PyType_HasFeature(type, containers) ||", ""),
    "override by a class": Mutant("kinds.h", "_PyType_Lookup(type, function) != nullptr ||", ""),
    "override by an object": Mutant("kinds.h", "if (C10_LIKELY(found == 0))", "if (true)"),
    "object of a claimed class": Mutant(
        "kinds.h",
        "_PyType_Lookup(type, declared) != _PyType_Lookup(&PyBaseObject_Type, declared)",
        "false",
    ),
    "object saved for backward": Mutant(
        "autograd.cpp",
        "item != Py_None && !is_tensor(item)",
        "item != Py_None && !THPVariable_Check(item)",
    ),
    "only None for NoneType": Mutant("kinds.h", "return value == Py_None;", "return true;"),
    "object of any type": Mutant(
        "kinds.h", "return value == Py_None || PyComplex_CheckExact(value)", "return true || false"
    ),
    "lists are copied": Mutant(
        "arguments.h",
        "PyObject* list = copy_of(value);",
        "PyObject* list = PyList_CheckExact(value) ? Py_NewRef(value) : copy_of(value);",
    ),
    "keys in an optional list": Mutant(
        "arguments.h", "if (C10_UNLIKELY(!seen.keys.has_all(optional_list_keys_)))"
    ),
    "optional list": Mutant("arguments.h", "if (C10_UNLIKELY(is_optional_list))"),
    "a number in a tensor": Mutant(
        "resolution.cpp", "&& impl_of(tensor)->numel() > 1;", "&& true;"
    ),
    "a tensor for a list": Mutant(
        "resolution.cpp",
        "return is_read_as_sequence ? Fit::Rejected : Fit::Unknown;",
        "return Fit::Rejected;",
    ),
    "a number for a list": Mutant(
        "resolution.cpp",
        "return may_be_repeated || !is_builtin(value)",
        "return !is_builtin(value)",
    ),
    "None for a tensor": Mutant(
        "resolution.cpp",
        "return is_tensor || value == Py_None ? Fit::Accepted : Fit::Rejected;",
        "return is_tensor ? Fit::Accepted : Fit::Rejected;",
    ),
    "any number for a bool": Mutant("resolution.cpp", "if (base == Base::Bool)"),
    "no device": Mutant(
        "resolution.cpp",
        "return PyUnicode_CheckExact(value) ? Fit::Unknown : Fit::Rejected;",
        "return Fit::Rejected;",
    ),
    "too large a number": Mutant(
        "resolution.cpp",
        "return is_certain && fits_in_64_bits(value) ? Fit::Accepted : Fit::Unknown;",
        "return is_certain ? Fit::Accepted : Fit::Rejected;",
    ),
    "tangent": Mutant("dispatch.cpp", "if (C10_UNLIKELY(seen.tangent))"),
    "plain keys": Mutant("dispatch.cpp", "if (C10_UNLIKELY((keys & ~plain_keys) != 0))"),
    "one backend": Mutant(
        "dispatch.cpp",
        "if (C10_UNLIKELY(found == 0 || (found & (found - 1)) != 0))",
        "if (found == 0)",
    ),
    "plain backend": Mutant("dispatch.cpp", "(found & ~plain_backends) != 0 ||", ""),
    "backend without autograd of its own": Mutant(
        "dispatch.cpp",
        "return c10::getAutogradRelatedKeySetFromBackend(backend).has_all(\n"
        "          DispatchKeySet(DispatchKey::AutogradFunctionality));",
        "return true;",
    ),
    "lazy backend": Mutant("dispatch.cpp", "    case c10::BackendComponent::LazyBit:\n", ""),
    "backend without data": Mutant(
        "dispatch.cpp", "    case c10::BackendComponent::MetaBit:", "//"
    ),
    "backend that computes later": Mutant(
        "dispatch.cpp", "    case c10::BackendComponent::XLABit:", "//"
    ),
    "backend of no device": Mutant(
        "dispatch.cpp", "    case c10::BackendComponent::PrivateUse2Bit:", "//"
    ),
    "another backend of no device": Mutant(
        "dispatch.cpp", "    case c10::BackendComponent::PrivateUse3Bit:", "//"
    ),
    "autocast of a backend": Mutant(
        "dispatch.cpp", " |\n        c10::getAutocastRelatedKeySetFromBackend(backend)", ""
    ),
    "thread keys": Mutant(
        "dispatch.h", "if (C10_UNLIKELY((local.included_.raw_repr() & ~usual.raw_repr()) != 0))"
    ),
    "no kernels for data": Mutant(
        "dispatch.h",
        "if (C10_UNLIKELY(local.excluded_.has_any(DispatchKeySet(DispatchKey::Dense))))",
    ),
    "excluded keys": Mutant(
        "call.cpp", "(seen.keys | local.included_) - local.excluded_", "seen.keys | local.included_"
    ),
    "profiler": Mutant(
        "dispatch.h",
        "if (C10_UNLIKELY(at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION).has_value()))",
    ),
    "function mode": Mutant(
        "dispatch.h", "if (C10_UNLIKELY(at::impl::torch_function_mode_enabled()))"
    ),
    "skipped torch functions": Mutant("dispatch.h", "if (C10_UNLIKELY(skips_torch_functions()))"),
    "frame of a call without an entry": Mutant(
        "overloads.cpp", "!has_entry(function.get()) || ", ""
    ),
    "trace of a call": Mutant("overloads.cpp", "is_traced() || ", ""),
    "operator of a function": Mutant("entry.cpp", "if (entry_of(self).lifetime == nullptr)"),
    "skipped torch functions of an overload": Mutant(
        "overloads.cpp", " || skips_torch_functions()", "", since=(2, 14)
    ),
    "declared dtypes of gradients": Mutant(
        "autograd.cpp", "||\n      declares_dtypes(node))", ")", since=(2, 14)
    ),
    "declared dtypes of several gradients": Mutant(
        "python_node.h",
        "THPObjectPtr dtypes(std::exchange(fields.output_grad_dtypes, nullptr));",
        "THPObjectPtr dtypes;",
        since=(2, 14),
    ),
    "hooks for new nodes": Mutant(
        "autograd.cpp", "call_creation_hooks(attached);", "", since=(2, 14)
    ),
    "attached node": Mutant("autograd.cpp", "attached = node;", "", since=(2, 14)),
    "autocast": Mutant(
        "dispatch.cpp",
        "route.reason = is_autocast ? Reason::Autocast : Reason::Native;",
        "route.reason = Reason::Native;",
    ),
    "autocast of a formula, forward": Mutant(
        "autograd.cpp", "C10_UNLIKELY(autocast_is_enabled()) &&", "false &&"
    ),
    "autocast of a formula, backward": Mutant(
        "backward.cpp", "C10_UNLIKELY(may_need_other_autocast(args[0]))", "false"
    ),
    "declared layouts": Mutant(
        "call.cpp", "!plan.layouts.empty() && !has_declared_layouts(plan, values)", "false"
    ),
    "own kernel": Mutant(
        "call.cpp",
        "decision.kernel = kernel_for(plan, decision.route.kernel);",
        "decision.kernel = &plan.kernels[0];",
    ),
    "kernel of ours": Mutant(
        "dispatch.cpp",
        " ||\n            boxed_function(kernel) != autograd_fallback_function)",
        ")",
    ),
    "gradient of the fallback": Mutant("call.cpp", "if (grad && decision.route.through_fallback)"),
    "gradient of the fallback, in a list with None": Mutant(
        "autograd_fallback.cpp", " && !kind.items_are_optional", ""
    ),
    "results for the fallback, in a list": Mutant(
        "autograd_fallback.cpp",
        "is_tensor(tensor))\n      tensors",
        "false)\n      tensors",
    ),
    "results for the fallback, in a list with None": Mutant(
        "autograd_fallback.cpp",
        " || !declared.type()->isSubtypeOf(*c10::ListType::ofTensors())",
        "",
    ),
    "too few results for the fallback": Mutant(
        "autograd_fallback.cpp", "index + 1 == count ? results : nullptr", "nullptr"
    ),
    "last results for the fallback": Mutant(
        "autograd_fallback.cpp", "PyTuple_GET_SIZE(results) - Py_ssize_t(count) + ", ""
    ),
    "shared elements": Mutant(
        "call.cpp", "overlaps |= strides[dim] == 0 && sizes[dim] > 1;", "(void)strides;"
    ),
    "inference mode": Mutant("call.cpp", "!c10::InferenceMode::is_enabled())", "true)"),
    "inference tensor": Mutant("call.cpp", "impl.is_inference() &&", "false &&"),
    "mutation with grad": Mutant("call.cpp", "!(keeps_history && impl.requires_grad())", "true"),
    "mutation by others with grad": Mutant("call.cpp", " && !plan.is_foreign;", ";"),
    "returned parameter": Mutant(
        "plan.cpp", "are_fresh == 0 || !plan.returns.parameters.empty();", "are_fresh == 0;"
    ),
    "shared memory": Mutant(
        "call.cpp",
        "may_write(tensor, route, keeps_history) &&\n"
        "          (!must_be_alone || has_no_alias(tensor, index, plan, values));",
        "may_write(tensor, route, keeps_history);",
    ),
    "anomaly": Mutant(
        "call.cpp",
        "      return stop(Reason::Anomaly);\n    decision.records_gradient",
        "      ;\n    decision.records_gradient",
    ),
    "gradient on another device": Mutant(
        "gradients.cpp", "gradient.device() == input.device() &&", ""
    ),
    "capture": Mutant("autograd.cpp", "if (C10_UNLIKELY(seen.get() == Py_NotImplemented))"),
    "capture, as explained": Mutant("entry.cpp", "needs_dispatcher(gradient, values))", "false)"),
    "capture, as counted": Mutant(
        "call.cpp", "if (C10_UNLIKELY(result == nullptr && PyErr_Occurred() == nullptr))"
    ),
    "settings of a derived formula": Mutant(
        "ambient_state.cpp",
        " || !settings_are_plain())\n    Py_RETURN_NONE",
        ")\n    Py_RETURN_NONE",
    ),
    "anomaly, without a formula": Mutant(
        "call.cpp",
        "      return stop(Reason::Anomaly);\n    decision.runs_in_fallback",
        "      ;\n    decision.runs_in_fallback",
    ),
    "gradient not wired": Mutant(
        "plan.cpp",
        "plan.gradient.setup_context = none_to_null(setup_context);",
        "plan.gradient.setup_context = nullptr;",
    ),
    "below autograd": Mutant(
        "call.cpp", "if (decision.route.through_autograd)\n      below.emplace();", ""
    ),
    "below autograd, with grad": Mutant(
        "autograd.cpp", "at::AutoDispatchBelowAutograd below;\n", ""
    ),
    "without grad": Mutant("autograd.cpp", "WithoutGrad mode;\n", ""),
    "without forward mode": Mutant("autograd.cpp", "state_.set_fw_grad_mode(false);", ""),
    "grad afterwards": Mutant("autograd.cpp", "state_.set_grad_mode(grad_);", ""),
    "forward mode afterwards": Mutant("autograd.cpp", "state_.set_fw_grad_mode(forward_);", ""),
    "version counter": Mutant("call.cpp", "impl_of(tensor)->bump_version();", "(void)tensor;"),
    "fresh results": Mutant("results.h", "fresh &= !share_memory(input, tensor);", "(void)input;"),
    "memory of NumPy": Mutant("results.h", " && !is_borrowed(storage_of(tensor))))", "))"),
    "overlapping memory": Mutant(
        "results.h", " || (first != nullptr && second != nullptr && overlap(first, second));", ";"
    ),
    "overlapping memory in a list": Mutant(
        "results.h", "if (share_memory(before, tensor))\n        return false;", ""
    ),
    "result in inference mode": Mutant(
        "results.h",
        "(C10_LIKELY(!impl_of(value)->is_inference()) || c10::InferenceMode::is_enabled())",
        "true",
    ),
    "own object": Mutant("results.h", "Py_REFCNT(tensor) == 1 && has_own", "has_own"),
    "own memory": Mutant(
        "results.h", "&& impl_of(tensor)->unsafe_storage().use_count() == 1;", ";"
    ),
    "own object in a list": Mutant(
        "results.h",
        "!has_own_storage(tensor) || Py_REFCNT(tensor) != 1",
        "!has_own_storage(tensor)",
    ),
    "own memory in a list": Mutant(
        "results.h",
        "!has_own_storage(tensor) || Py_REFCNT(tensor) != 1",
        "Py_REFCNT(tensor) != 1",
    ),
    "own list": Mutant("results.h", "PyList_CheckExact(value) && Py_REFCNT(value) == 1;", "true;"),
    "lists of results": Mutant("flat.h", "if (!gradient.as_dispatched)\n      return true;", ""),
    "layout of results": Mutant("autograd.cpp", "if (outputs.layout &&", "if (false &&"),
    "what is no tensor": Mutant(
        "autograd.cpp", "is_tensor(item))\n      raw", "item != Py_None)\n      raw"
    ),
    "lists passed by": Mutant(
        "call.cpp",
        "if (C10_UNLIKELY(plan.gradient.skips_optional_lists && !wants_gradient(values)))",
    ),
    "list with None passed by": Mutant(
        "autograd.cpp", "wanted |= needed && !holds_none;", "wanted |= needed;"
    ),
    "results of calls in C++": Mutant(
        "call.cpp",
        "if (enters_cpp || (keywords != nullptr && PyTuple_GET_SIZE(keywords) > 0))",
        since=(2, 14),
    ),
    "no input": Mutant(
        "results.h", "is_input |= detail::share_memory(value, result);", "(void)value;"
    ),
    "no input in a list": Mutant(
        "results.h", "compare(PySequence_Fast_GET_ITEM(value, item));", ";"
    ),
    "operator of torch.ops": Mutant(
        "overloads.cpp", "Py_TYPE(function.get()) == operator_type", "true"
    ),
    "another overload": Mutant(
        "entry.cpp",
        "is_skipped_overload((*plan).parameters, args, PyVectorcall_NARGS(nargsf), keywords)",
        "true",
    ),
    "inputs spread out": Mutant("flat.h", "if (gradient.inputs != nullptr)"),
    "fresh of each other": Mutant(
        "results.h",
        "if (before != Py_None && detail::share_memory(before, item))",
    ),
    "saved output": Mutant(
        "autograd.cpp", "tensor.grad_fn().get() == created.node().get())", "false)"
    ),
    "input layout": Mutant("autograd.cpp", "if (inputs.layout &&", "if (false &&"),
    "input info": Mutant("autograd.cpp", "fields.input_info = std::move(inputs.infos);", ""),
    "view requires grad": Mutant("dispatch.h", "seen.requires_grad |= impl->requires_grad();", ""),
    "view has a tangent": Mutant(
        "dispatch.h", "seen.tangent |= THPVariable_Unpack(tensor)._fw_grad(0).defined();", ""
    ),
    "Dynamo": Mutant("call.cpp", "WithoutDynamo frames; // Dynamo must", "// Dynamo must"),
    "changed source": Mutant(
        "plan.cpp",
        "if (PyDict_GetItemWithError(source.container, source.key) != source.value)\n"
        "    return false;",
        "",
    ),
    "changed dictionary": Mutant("plan.cpp", "version == source.version", "source.version != 0"),
    "disabled kernel": Mutant(
        "plan.cpp", "source.key) == 1) == (source.value == Py_True);", "source.key) == 1) || true;"
    ),
    "kernel with keys": Mutant(
        "dispatch.cpp", " && !takes_keys_or_operator(functor_of(kernel));", ";"
    ),
    "keys of this kernel": Mutant(
        "dispatch.cpp",
        "if (C10_UNLIKELY(!is_autocast && takes_keys_or_operator(functor_of(kernel))))",
    ),
    "unknown kernel": Mutant("entry.cpp", "if ((*plan).is_foreign)"),
    "edge of a view": Mutant("flat.h", "if (C10_UNLIKELY(meta->is_view_))"),
    "returned input": Mutant("flat.h", "if (keeps_variables_)"),
    "arguments of a gradient": Mutant(
        "flat.h",
        "add_as_dispatched(values.count_passed(),",
        "add_as_dispatched(values.parameters().positional,",
    ),
    "end of the stack": Mutant("entry.cpp", "if (C10_UNLIKELY(is_stack_low(here)))"),
    "stack of this thread": Mutant("thread.h", "measure_stack(here);", ";"),
    "operator is gone": Mutant(
        "entry.h",
        "entry.lifetime != nullptr && !entry.lifetime->load(std::memory_order_relaxed)",
        "false",
    ),
    "kernels of a deregistered operator": Mutant(
        "lifetime.cpp",
        'kernels.emplace_front(kernels.front().kernel, nullptr, "deregistered");',
        "(void)kernels;",
    ),
    "schema of a deregistered operator": Mutant("lifetime.cpp", "  ++definition.def_count;\n", ""),
    "functions of a deregistered operator": Mutant(
        "lifetime.cpp", "if (has_gil && frees_functions)", "if (false)"
    ),
    "kernels of another library": Mutant("lifetime.cpp", "found |= kernels.size() > 1;", ""),
    "call of an operator that ended": Mutant(
        "entry.cpp", "else if (PyErr_Occurred() == PyExc_RuntimeError)", "else if (false)"
    ),
    "end of a thread": Mutant(
        "entry.cpp", "    plan.abandon();\n    throw;", "    plan.abandon();"
    ),
    "positional defaults": Mutant(
        "arguments.h", "while (count > 0 && is_default(count - 1))", "while (false)"
    ),
    "keyword-only defaults": Mutant("arguments.h", "named += !is_default(index);", "++named;"),
    "defaults of lists": Mutant(
        "arguments.h", "if (!are_equal(PyList_GET_ITEM(list, item), PyList_GET_ITEM(other, item)))"
    ),
    "type of a default": Mutant("arguments.h", "Py_TYPE(value) != Py_TYPE(other) || ", ""),
    "default device": Mutant(
        "arguments.h",
        "parameter.default_value == nullptr || parameter.is_device_string",
        "parameter.default_value == nullptr",
    ),
    "spelled default": Mutant(
        "call.cpp", "&& values.passes_device_string_default()))", "&& false))"
    ),
    "left out defaults": Mutant("plan.cpp", "parameters.drops_defaults |= are_dropped;", ""),
    "looking before the kernel": Mutant(
        "autograd.cpp",
        "return nullptr;\n      result = checked(compute());",
        "return nullptr;\n      result = checked(compute());\n"
        "      seen = call_before_kernel(gradient, values);",
    ),
    "ambient state: other devices": Mutant(
        "ambient_state.cpp",
        "return tensor.is_cpu() || accelerators.have(tensor.device());",
        "return true;",
    ),
    "ambient state: subclasses": Mutant(
        "ambient_state.cpp", "if (is_plain_tensor(value))", "if (THPVariable_Check(value))"
    ),
    "ambient state: other values": Mutant(
        "ambient_state.cpp", "value == Py_None || PyLong_CheckExact(value)", "true"
    ),
    "ambient state: default device": Mutant(
        "ambient_state.cpp", "at::impl::PythonTorchFunctionTLS::stack_len() == 0", "true"
    ),
    "ambient state: autocast": Mutant(
        "ambient_state.cpp", "return !autocast_is_enabled() && c10::get", "return c10::get"
    ),
    "backward: gradient of no tensor": Mutant(
        "backward.cpp", "PyTuple_GET_ITEM(hold_tensors, index) == Py_True ||", "true ||"
    ),
    "backward: gradient that does not fit": Mutant(
        "backward.cpp", "return plain && fit_inputs(gradients, ctx);", "return plain;"
    ),
    "backward: tensors read twice": Mutant("backward.cpp", "if (!found->tensors) {", "if (true) {"),
    "backward: one that is recorded": Mutant(
        "backward.cpp", "c10::GradMode::is_enabled()\n", "false\n"
    ),
    "backward: below a compiled frame": Mutant("backward.cpp", "WithoutDynamo frames;", ""),
    "residuals: thread that records": Mutant(
        "call.cpp", " && !thread_records(plan.residuals.recording)", ""
    ),
    "residuals: kernel of another operator": Mutant(
        "call.cpp", "suspended.emplace(all_recordings).stop();", ";"
    ),
    "residuals: formula that does not ask": Mutant(
        "call.cpp", " && plan.residuals.setup != Py_None", ""
    ),
    "residuals: number": Mutant(
        "residuals.cpp", " ||\n      PyTuple_GET_SIZE(saved) != residuals.count", ""
    ),
    "residuals: own memory": Mutant("residuals.cpp", " && detail::has_own_storage(tensor)", ""),
    "residuals: the same twice": Mutant(
        "residuals.cpp", "are_separate &= PyTuple_GET_ITEM(saved, other) != tensor;", ";"
    ),
    "residuals: result": Mutant("residuals.cpp", "output(result, place) != tensor && ", ""),
    "residuals: list of results": Mutant(
        "residuals.cpp", " && !PyList_Check(output(result, place))", ""
    ),
    "residuals: input": Mutant("residuals.cpp", "are_separate &= input != tensor;", ""),
    "residuals: one that is not saved": Mutant(
        "residuals.cpp",
        "if (!all_are_saved || has_tensor_attributes(ctx)) {",
        "if (has_tensor_attributes(ctx)) {",
    ),
    "residuals: one that is an attribute": Mutant(
        "residuals.cpp",
        "if (!all_are_saved || has_tensor_attributes(ctx)) {",
        "if (!all_are_saved) {",
    ),
    "residuals: one that is saved twice": Mutant(
        "residuals.cpp", "all_are_saved &= found.places.size() > before;", ""
    ),
    "residuals: request that no kernel took": Mutant(
        "autograd.cpp",
        "const Recording recording(gradient.recording);\n      THPObjectPtr",
        "THPObjectPtr",
    ),
    "residuals: request of a question": Mutant(
        "autograd.cpp",
        "const Recording recording(gradient.recording);\n  return",
        "",
    ),
    "residuals: types": Mutant("residuals.cpp", "if (residuals.count == 0 || ", "if ("),
    "choice: dtype": Mutant(
        "call_key.h",
        "const auto dtype = uint64_t(c10::typeMetaToScalarType(impl.dtype()));",
        "const auto dtype = uint64_t{0};",
    ),
    "choice: device": Mutant("call_key.h", "dtype | packed(impl.device()) << 8", "dtype"),
    "choice: number of a device": Mutant(
        "call_key.h", " | uint64_t(uint8_t(device.index())) << 8;", ";"
    ),
    "choice: device that is an argument": Mutant(
        "call_key.h",
        "add_tag(Tag::Device, packed(reinterpret_cast<THPDevice*>(value)->device))",
        "add_tag(Tag::Device)",
    ),
    "choice: strides": Mutant(
        "call_key.h", "for (const int64_t stride : strides)\n      add(uint64_t(stride));", ""
    ),
    "choice: integers": Mutant("call_key.h", "add(uint64_t(number));", ""),
    "choice: keywords": Mutant(
        "call_key.h", "if (!add_value(PyTuple_GET_ITEM(keywords, index)) || ", "if ("
    ),
    "choice: open blocks": Mutant(
        "choice.cpp", "reinterpret_cast<uintptr_t>(selection.settings.get()) | ", ""
    ),
    "choice: blocks of a backward": Mutant(
        "choice.cpp",
        "if (C10_LIKELY(is_open || torch::autograd::get_current_graph_task_id() == -1))",
        "",
    ),
    "choice: blocks inside of a backward": Mutant("choice.cpp", "is_open || ", ""),
    "choice: changes meanwhile": Mutant(
        "choice.cpp", "if (find_selection(choice, settings, is_deterministic) != nullptr)"
    ),
    "choice: bounded table": Mutant(
        "choice.cpp",
        "choice.cache.kernels.size() >= max_keys || choice.cache.words + key.size() > max_words",
        "false",
    ),
    "choice: determinism": Mutant(
        "choice.cpp", " && selection.is_deterministic == is_deterministic", ""
    ),
}


# Save the environment for the tests before `precompile_headers` sets CXX, because Inductor reads
# CXX too.
USUAL = dict(os.environ)
FILE_NAME = make_recipe(CSRC).file_name  # depends on the flags in CXX
Line = tuple[str, int]


def files_of(tests: list[str]) -> list[str]:
    """Return all test files in `tests`, a list of files and folders."""
    paths = (ROOT / name for name in tests)
    files = (sorted(path.rglob("test_*.py")) if path.is_dir() else [path] for path in paths)
    return list(dict.fromkeys(str(file.relative_to(ROOT)) for some in files for file in some))


def build(source: Path, folder: Path) -> None:
    """Compile the sources, and rename the result to the file name of the unchanged extension."""
    api.build(folder, source=source).rename(folder / FILE_NAME)


def failure(folder: Path, tests: list[str], **environment: str) -> str | None:
    """Run tests with the extension in `folder`, until one fails.

    Returns:
        The name of the failing test, or the exit status if the process crashed. None if all tests
        pass.
    """
    # Some mutants hang, so set a timeout.
    options = ["-q", "-x", "-rfE", "--tb=no", "-p", "no:xdist", "-p", "no:cacheprovider"]
    options += ["-o", "faulthandler_timeout=300", "-o", "faulthandler_exit_on_timeout=true"]
    process = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *tests],
        cwd=ROOT,
        env={
            **USUAL,
            "TORCHOP_NATIVE": "require",
            "TORCHOP_NATIVE_DIR": str(folder),
            **environment,
        },
        capture_output=True,
        check=False,
        text=True,
    )
    if process.returncode == 0:
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", process.stdout, re.MULTILINE)
    return failed[1] if failed else f"a process that ended with {process.returncode}"


class Coverage:
    """Finds the lines of the unchanged C++ sources that each test file executes."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self._notes = folder / "whole.gcno"
        usual = os.environ["CXX"]
        # Disable optimization, because it makes the counts of lines inexact. These flags come last
        # and override the usual ones.
        counting = f"-O0 --coverage -fprofile-note={shlex.quote(str(self._notes))}"
        compiler = folder / "compiler"
        compiler.write_text(f'#!/bin/sh\nexec {usual} "$@" {counting}\n', encoding="utf-8")
        compiler.chmod(0o700)
        os.environ["CXX"] = str(compiler)
        build(CSRC, folder)
        os.environ["CXX"] = usual
        self._lines: dict[str, set[Line]] = {}
        self._countable: set[Line] = set()
        self._locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)

    def reaching(self, mutant: Mutant, files: list[str]) -> list[str]:
        """Return the test files that execute a mutant's condition.

        Files that execute few lines come first, because they are usually fast.
        """
        wanted = _lines_of(mutant)
        # gcov does not count lines without code, such as a `case` label. If the mutant only changes
        # such lines, run all files.
        files = [
            file
            for file in files
            if self._lines_of_tests(file) & wanted or not self._countable & wanted
        ]
        return sorted(files, key=lambda file: len(self._lines[file]))

    def _lines_of_tests(self, file: str) -> set[Line]:
        with self._locks[file]:  # another mutant may need the same file at the same time
            if file not in self._lines:
                self._lines[file] = self._ran(file)
            return self._lines[file]

    def _ran(self, test: str) -> set[Line]:
        with tempfile.TemporaryDirectory(dir=self._folder) as name:
            # Stop here if a test fails without any mutation, because no mutant would survive it.
            if failed := failure(self._folder, [test], GCOV_PREFIX=name):
                raise SystemExit(f"the sources as they are fail {failed}")
            lines: set[Line] = set()
            for counts in Path(name).rglob("*.gcda"):
                shutil.copy(counts, Path(name, "whole.gcda"))
                shutil.copy(self._notes, name)
                command = ["gcov", "--json-format", "--stdout", "whole.gcda"]
                text = subprocess.run(command, cwd=name, check=True, capture_output=True).stdout
                for file in json.loads(text)["files"]:
                    path = Path(file["file"])
                    # gcov lists a line of a template several times, once per instantiation.
                    for line in file["lines"] if path.parent == CSRC else ():
                        place = (path.name, line["line_number"])
                        self._countable.add(place)
                        if line["count"]:
                            lines.add(place)
            return lines


def _lines_of(mutant: Mutant) -> set[Line]:
    """Return the lines that a mutant affects. A test can only fail if it runs one of them."""
    before, condition, after = _text(mutant).partition(mutant.condition)
    first = before.count("\n") + 1
    last = first + condition.count("\n")
    if mutant.without != "if (false)":
        return {(mutant.file, number) for number in range(first - 1, last + 2)}
    if condition.endswith("return"):
        return {(mutant.file, last)}
    # If the condition's statement takes two lines, include both.
    statement = after.splitlines()[1]
    return {(mutant.file, last + 1), (mutant.file, last + 1 + (not statement.endswith(";")))}


def _text(mutant: Mutant) -> str:
    text = (CSRC / mutant.file).read_text(encoding="utf-8")
    if text.count(mutant.condition) != 1:
        raise SystemExit(f"{mutant.file} does not have this once: {mutant.condition}")
    return text


def killer(mutant: Mutant, folder: Path, coverage: Coverage) -> str | None:
    """Compile a mutant and run the tests. Return the result of `failure`."""
    source = folder / "csrc"
    shutil.copytree(CSRC, source)
    changed = _text(mutant).replace(mutant.condition, _keep_return(mutant))
    (source / mutant.file).write_text(changed, encoding="utf-8")
    build(source, folder)
    first = files_of([*CLOSEST.get(mutant.file, ()), *REASONS])
    rest = files_of([*itertools.chain(*CLOSEST.values()), *TESTS])
    for files in (first, [file for file in rest if file not in first]):
        reaching = coverage.reaching(mutant, files)
        if reaching and (failed := failure(folder, reaching)):
            return failed
    return None


def _keep_return(mutant: Mutant) -> str:
    # Some conditions end with the `return` that follows them, because a mutant's condition must be
    # unique in the file. Keep this `return`.
    return mutant.without + (" return" if mutant.condition.endswith("return") else "")


def precompile_headers(folder: Path) -> None:
    """Precompile PyTorch's headers, because they take half of the time to compile a mutant."""
    texts = (file.read_text(encoding="utf-8") for file in CSRC.iterdir())
    included = {line for text in texts for line in re.findall("^#include <.*", text, re.MULTILINE)}
    header = folder / "included.h"
    header.write_text("\n".join(sorted(included)), encoding="utf-8")
    compiler = find_compiler()
    flags = [*compile_flags(), *include_flags()]
    subprocess.run(
        [*compiler, *flags, "-x", "c++-header", str(header), "-o", f"{header}.gch"], check=True
    )
    os.environ["CXX"] = shlex.join([*compiler, "-include", str(header)])


def main(names: list[str]) -> int:
    release = tuple(map(int, torch.__version__.split(".")[:2]))
    chosen = {name: MUTANTS[name] for name in names or MUTANTS if MUTANTS[name].since <= release}
    survivors = []
    with tempfile.TemporaryDirectory() as root:
        precompile_headers(Path(root))
        coverage = Coverage(Path(root, "coverage"))
        folders = [Path(root, str(number)) for number in range(len(chosen))]
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            run = functools.partial(killer, coverage=coverage)
            killers = pool.map(run, chosen.values(), folders)
            for name, test in zip(chosen, killers, strict=True):
                print(f"dies      {name}: {test}" if test else f"SURVIVES  {name}", flush=True)
                survivors += [name] * (test is None)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} mutants die")
    return 1 if survivors else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

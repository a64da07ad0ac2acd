"""Tests that `on_device.py` expects to fail on devices other than the CPU, by file and reason."""

from __future__ import annotations

import traceback
from pathlib import Path

import pytest

HERE = Path(__file__).parents[1]
NUMPY = "it has kernels, or values, of NumPy"
INDUCTOR = "Inductor compiles for few types of devices"
CPU = "it has kernels, tensors or generators for the CPU"
DEFAULT = "it makes tensors on the default device, which this plug-in does not set"
WORDS = "it expects words in which the CPU is named"
CHECKPOINT = "compiled and selective checkpoints keep random numbers of few types of devices"
OPCHECK = "stock opcheck knows formulas on few types of devices"
STOCK = "operators of PyTorch fail there, too"
STANDIN = "there, operators of PyTorch run on the CPU"
LACKING = "the stand-in has no such tensors"
RANKS = "simulated ranks are on the CPU"
# Reasons that apply only to the stand-in, a simulated accelerator, and not to GPUs.
NOT_ON_GPUS = {INDUCTOR, CHECKPOINT, OPCHECK, STANDIN, LACKING}

# Files and folders that a run on another device does not collect, each with the reason.
FILES = {
    "native/extension": "it is about compiling",
    "native/test_leaks.py": "tests/integration/device has it, with fewer calls",
    "native/test_mutants.py": "it is about source files",
    "rules/user/sharding": RANKS,
    "rules/user/test_sharding.py": RANKS,
}
TESTS: dict[str, dict[str, tuple[str, ...]]] = {
    "core/test_end.py": {
        INDUCTOR: ("test_operators_of_two_libraries_compile_one_after_another",),
    },
    "define/forms/test_derive.py": {
        INDUCTOR: ("test_inplace_form_differentiates_through_the_formula[inductor]",),
    },
    "define/test_class_attributes.py": {
        CPU: ("test_other_forms_and_torch_dispatch",),
    },
    "define/test_handle_as_def.py": {
        CPU: ("test_functions_of_torch_library_register_our_rules",),
    },
    "define/test_out_op_buffers.py": {
        NUMPY: ("test_read_only_memory_is_not_detected",),
    },
    "define/test_out_op_kernels.py": {
        NUMPY: ("test_gradients_flow_through_the_functional_and_the_inplace_form",),
    },
    "inspect/explain/test_explain.py": {
        WORDS: ("test_operator_of_pytorch",),
    },
    "inspect/explain/test_reasons.py": {
        LACKING: ("test_keys[quantized]",),
    },
    "inspect/test_call_record.py": {
        LACKING: ("test_unusual_tensors_are_recorded_by_their_kind[quantized tensor]",),
    },
    "rules/autograd/derived/test_native.py": {
        CPU: ("test_backward_restores_the_forwards_autocast",),
    },
    "rules/autograd/derived/test_random_numbers.py": {
        CPU: (
            "test_a_generator_among_the_arguments_is_replayed",
            "test_backward_does_not_advance_a_reseeded_generator[False]",
        ),
        CHECKPOINT: ("test_checkpointed_operator_reuses_its_random_numbers[True]",),
    },
    "rules/autograd/derived/test_refused_bodies.py": {
        CPU: (
            "test_a_body_that_leaves_autograd_is_refused[through_detached_numpy]",
            "test_a_compiled_graph_may_return_an_output_without_gradients",
            "test_one_output_that_left_autograd_is_refused_in_vmap",
        ),
    },
    "rules/autograd/derived/test_replay.py": {
        CPU: ("test_a_body_without_the_tag_may_restore_or_read_the_state[reads]",),
        DEFAULT: (
            "test_settings_are_restored_after_an_error",
            "test_backward_uses_the_forwards_default_device",
        ),
    },
    "rules/autograd/test_mutation.py": {
        INDUCTOR: (
            "test_compiled_gradients_equal_eager[inductor]",
            "test_compiled_training_updates_the_buffer[inductor]",
        ),
        STOCK: ("test_gradients_equal_pytorchs_in_place_operators[a view]",),
    },
    "rules/fake/test_rule.py": {
        CPU: ("test_a_real_input_with_a_meta_tensor_does_not_return_uninitialized_memory",),
    },
    "rules/kernels/test_backend_select.py": {
        CPU: ("test_factory_without_a_device_behaves_like_torch_ops",),
    },
    "rules/kernels/test_missing.py": {
        LACKING: ("test_missing_kernel_for_a_tensor_that_is_not_dense_names_the_layout[sparse]",),
    },
    "rules/kernels/test_rule.py": {
        LACKING: ("test_dispatch_key_without_a_device_type_has_a_kernel_of_its_own",),
    },
    "rules/providers/test_priority.py": {
        INDUCTOR: ("test_a_warning_points_at_the_users_line[inductor]",),
    },
    "rules/user/test_flop_formula.py": {
        CPU: ("test_counter_uses_the_formula",),
    },
    "integration/compile/test_aliases.py": {
        INDUCTOR: ("test_inductor_itself_removes_the_copy",),
    },
    "integration/compile/test_combined.py": {
        CHECKPOINT: ("test_a_program_is_trained_as_in_eager_mode[_checkpoints_in_regions]",),
    },
    "integration/compile/test_derived.py": {
        CHECKPOINT: (
            "test_a_checkpoint_in_a_compiled_graph",
            "test_a_checkpoint_in_a_compiled_graph_draws_the_same_numbers",
        ),
    },
    "integration/compile/test_fake_kernels.py": {
        INDUCTOR: ("test_outputs_described_by_one_fake_tensor_stay_separate[inductor]",),
    },
    "integration/compile/test_mutation.py": {
        INDUCTOR: ("test_out_operator_reads_its_output_argument[inductor]",),
    },
    "integration/compile/test_mutation_and_gradients.py": {
        INDUCTOR: tuple(
            f"test_mutating_a_tensor_with_grad_raises_as_in_eager_mode[{which}-inductor]"
            for which in (
                "a leaf is read-plain",
                "a leaf is written without grad-plain",
                "a leaf is written without grad-with a result",
                "a leaf is written without grad-inplace",
                "a leaf is written without grad-out",
            )
        ),
    },
    "integration/subsystems/test_modes.py": {
        STANDIN: ("test_the_profiler_shows_the_name_of_the_operator",),
        CPU: ("test_device_context_affects_neither_arguments_nor_kernel",),
    },
    "integration/subsystems/test_tags.py": {
        CHECKPOINT: (
            "test_a_seeded_operator_draws_the_same_numbers_when_a_checkpoint_recomputes_it[True]",
        ),
    },
    "testing/test_checking.py": {
        LACKING: ("test_reading_a_compressed_sparse_tensor_is_not_a_write",),
    },
    "testing/test_snapshot.py": {
        LACKING: (
            "test_every_kind_of_write_is_detected[through DLPack]",
            "test_one_changed_bit_is_detected_for_every_kind_of_tensor[quantized]",
            "test_one_changed_bit_is_detected_for_every_kind_of_tensor[quantized by channel]",
            "test_unwritten_tensor_has_no_change[quantized]",
            "test_unwritten_tensor_has_no_change[quantized by channel]",
        ),
    },
    "testing/test_contents.py": {
        NUMPY: ("test_memory_shared_through_numpy_is_detected",),
    },
    "testing/test_opcheck.py": {
        CPU: ("test_gradients_registered_at_a_backend_key_are_found",),
        OPCHECK: ("test_result_equals_the_result_of_torch_library",),
    },
}


def reason(file: str, name: str, device_type: str) -> str | None:
    function, _, parameters = name.rstrip("]").partition("[")
    for reason, entries in TESTS.get(file, {}).items():
        if reason in NOT_ON_GPUS and device_type != "standin":
            continue
        # The entry "test_one" means all cases of that test. "test_one[word]" means only the cases
        # that have `word` among their parameters.
        for entry in entries:
            of_entry, _, word = entry.rstrip("]").partition("[")
            if of_entry == function and (not word or f"-{word}-" in f"-{parameters}-"):
                return reason
    return None


def reason_for_failure(raised: pytest.ExceptionInfo[BaseException], device_type: str) -> str | None:
    """Return the reason why a failed test needs the CPU, judging by its exception, or None.

    The exception must come from a line of the tests that converts a tensor to NumPy, or from
    Inductor's lookup of the device. So an exception that torchop raises never excuses a failure.
    """
    error: BaseException | None = raised.value
    while error is not None:
        frames = traceback.extract_tb(error.__traceback__)
        if isinstance(error, TypeError) and "tensor to numpy" in str(error):
            return NUMPY if Path(frames[-1].filename).is_relative_to(HERE) else None
        if "Inductor" in type(error).__name__ and (
            f"KeyError: {device_type!r}" in str(error) or frames[-1].name == "get_backend_features"
        ):
            return INDUCTOR
        error = error.__cause__
    return None

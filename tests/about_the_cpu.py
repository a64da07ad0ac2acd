"""The tests that are about the CPU, or what there is on it alone, by file: see `on_device.py`."""

from __future__ import annotations

NUMPY = "it has kernels, or values, of NumPy"
INDUCTOR = "Inductor compiles for few types of devices"
KINDS = "only the CPU has such tensors"
CPU = "it has kernels, or tensors, for the CPU"
THREAD = "on a device, backward runs in another thread"

# No test of these files can be collected: they make arrays of NumPy when they are imported.
FILES = ("core/test_contract.py",)
TESTS: dict[str, dict[str, tuple[str, ...]]] = {
    "accelerate/test_arguments.py": {
        CPU: ("test_forty_arguments_of_which_eight_are_written",),
    },
    "accelerate/test_gradients.py": {
        CPU: (
            "test_a_formula_registered_later_is_used",
            "test_a_kernel_that_returns_its_inputs_leaves_them_alone",
            "test_a_library_with_a_formula",
            "test_gradients_without_setup_context_and_of_higher_order",
        ),
    },
    "accelerate/test_kernels.py": {
        CPU: ("test_kernels_of_a_library",),
    },
    "accelerate/test_operator.py": {
        CPU: ("test_versions_are_counted",),
    },
    "accelerate/test_overloads.py": {
        CPU: (
            "test_a_packet_calls_the_overload_that_pytorch_would",
            "test_a_scripted_function_calls_a_packet_of_several_overloads",
        ),
    },
    "core/test_checking.py": {
        NUMPY: ("test_mutation_through_numpy_is_found",),
        CPU: ("test_kernels_of_every_device_and_of_others_operators_are_looked_at",),
        THREAD: ("test_calls_from_backward_are_looked_at",),
    },
    "core/test_definition.py": {
        CPU: ("test_registrations_from_several_threads_all_count",),
    },
    "core/test_end.py": {
        INDUCTOR: ("test_operators_of_two_libraries_compile_one_after_another",),
    },
    "core/test_plan.py": {
        CPU: ("test_call_in_progress_keeps_the_plan_that_it_began_with",),
    },
    "core/test_redefinition.py": {
        CPU: ("test_operator_is_not_replaced_from_inside_a_call_of_it",),
    },
    "core/test_registry.py": {
        CPU: (
            "test_every_rule_is_registered_in_every_way",
            "test_in_place_operator_in_a_library_has_a_formula",
            "test_registration_through_another_library_ends_with_it",
        ),
    },
    "core/test_snapshot.py": {
        KINDS: (
            "test_one_bit_is_found_in_every_kind",
            "test_one_bit_is_found_in_every_part_of_a_sparse_tensor",
            "test_what_nobody_wrote_is_unchanged",
        ),
        NUMPY: (
            "test_every_way_of_writing_is_found",
            "test_memory_far_away_is_not_copied",
            "test_no_room_for_a_copy_leaves_the_contents_out",
        ),
    },
    "define/forms/test_derive.py": {
        CPU: ("test_kernels_of_later_are_honoured",),
        INDUCTOR: (
            "test_compiled_equals_eager",
            "test_inplace_form_differentiates_through_the_formula",
        ),
    },
    "define/test_class_attributes.py": {
        CPU: ("test_other_forms_and_torch_dispatch",),
        NUMPY: ("test_an_opaque_backward",),
    },
    "define/test_class_form.py": {
        NUMPY: (
            "test_compile_and_export",
            "test_every_member_is_registered",
            "test_opcheck_uses_the_examples",
        ),
        CPU: (
            "test_a_kernel_of_a_device_beside_the_default_one",
            "test_kernels_of_devices_with_a_signature",
        ),
    },
    "define/test_handle_as_def.py": {
        CPU: ("test_functions_of_torch_library_reach_our_rules",),
    },
    "define/test_library_impl.py": {
        CPU: (
            "test_handle_stands_for_its_operator",
            "test_kernel_calls_what_was_there_when_it_was_found",
            "test_kernel_with_a_keyset_can_redispatch",
            "test_operator_of_pytorch_has_another_kernel_inside_the_block_only",
            "test_result_of_a_kernel_for_pytorch_is_checked",
        ),
    },
    "define/test_library_lifetime.py": {
        CPU: ("test_operator_of_a_library_outlives_its_handle",),
    },
    "define/test_maybe_out.py": {
        NUMPY: (
            "test_compiled_and_exported",
            "test_it_calls_one_operator_or_the_other",
            "test_operators_may_be_given_in_any_way",
        ),
    },
    "define/test_out_op.py": {
        NUMPY: (
            "test_all_forms_compute_the_same",
            "test_native_calls_are_guarded_too",
            "test_opcheck_passes_on_all_forms",
            "test_opcheck_passes_with_gradients",
            "test_packet_finds_the_form",
        ),
        CPU: ("test_factory_without_tensors",),
    },
    "define/test_out_op_buffers.py": {
        NUMPY: (
            "test_buffer_that_does_not_fit_is_refused_untouched",
            "test_buffers_in_inference_mode",
            "test_outputs_may_be_interleaved_with_inputs",
            "test_read_only_memory_cannot_be_known",
        ),
    },
    "define/test_out_op_compiled.py": {
        NUMPY: (
            "test_compiled_forms_equal_eager",
            "test_exported_program_writes_into_the_buffer",
        ),
        INDUCTOR: ("test_inductor_calls_the_functional_operator",),
    },
    "define/test_out_op_definitions.py": {
        NUMPY: (
            "test_defining_again_replaces_all_forms",
            "test_forms_live_as_long_as_their_library",
            "test_name_that_somebody_else_has_is_refused_before_anything_is_defined",
        ),
    },
    "define/test_out_op_kernels.py": {
        CPU: ("test_kernel_without_the_defaults_is_told_them",),
        NUMPY: (
            "test_form_may_have_a_kernel_of_its_own_which_is_guarded_too",
            "test_formula_is_that_of_the_functional_operator",
            "test_gradcheck_of_the_inplace_form",
            "test_gradients_flow_through_the_functional_and_the_inplace_form",
            "test_inplace_form_treats_a_leaf_as_pytorch_does",
            "test_kernel_with_other_parameters_is_refused_for_all_forms",
            "test_transforms_go_through_the_inplace_form",
        ),
    },
    "define/test_triton_op.py": {
        CPU: (
            "test_all_registrations",
            "test_compiled_calls_run_the_kernel_that_a_device_has",
        ),
    },
}


def reason(file: str, name: str) -> str | None:
    """Why a test, in a file of this folder, is about the CPU; None if it is not."""
    of_file = TESTS.get(file, {})
    return next((reason for reason, names in of_file.items() if name in names), None)

"""Native calls (calls without the dispatcher) to operators that `custom_op` did not create."""

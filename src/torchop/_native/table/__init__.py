"""Native calls of operators that `custom_op` did not define, from the dispatcher's table."""

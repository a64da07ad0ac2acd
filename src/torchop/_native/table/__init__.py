"""Native calls to operators that `custom_op` did not create, based on the dispatcher's table."""

"""Native calls to operators that `torchop.custom_op` did not create."""

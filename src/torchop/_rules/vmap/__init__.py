"""vmap rules: how operators handle batches."""

"""vmap rules, which apply an operator to a batch."""

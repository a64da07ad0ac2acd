"""vmap rules, which define how `torch.vmap` applies an operator to a batch."""

"""Rules for vmap: how an operator handles a batch."""

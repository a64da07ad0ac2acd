"""What autograd is told of arguments that are mutated."""

"""What an operator does with fake tensors."""

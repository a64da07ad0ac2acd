"""What a compiler's trace shows of an operator that mutates."""

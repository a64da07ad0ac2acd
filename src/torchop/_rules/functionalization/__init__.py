"""How a compiler's trace records an operator that mutates."""

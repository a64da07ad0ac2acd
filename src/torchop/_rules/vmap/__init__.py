"""What an operator does under vmap."""

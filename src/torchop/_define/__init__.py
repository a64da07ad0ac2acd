"""What a user writes to define an operator, and the handle that comes of it."""

"""The functional, out= and in-place forms of an operator."""

"""What an operator is: its definition, its rules, its lifetime."""

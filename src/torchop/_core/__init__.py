"""The definition of an operator: its schema, rules, call plan and lifetime."""

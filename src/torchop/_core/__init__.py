"""An operator's definition: its schema, rules, call plan (the compiled rules) and lifetime."""

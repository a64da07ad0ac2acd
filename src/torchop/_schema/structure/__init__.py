"""Arguments and results with fields, such as dataclasses. The schema has one argument per field."""

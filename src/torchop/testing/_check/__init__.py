"""The implementation of `torchop.testing.check`.

`table.CHECKS` lists all checks. Each check generates calls of an operator, and runs a *probe* on
every call. A probe is a function that raises an exception if it finds a bug in the operator.

- Most calls come from *variants* (`variants.VARIANTS`). A variant takes an example call written by
  the author of the operator and changes one property, such as the memory layout or the values.
  Some checks define their own function that generates calls.
- A `calls.Call` makes one call and records its results, its writes and its exception.
- A probe (in `checks`) inspects this record, and may make further calls. If the probe raises,
  `shrink` searches for a smaller example that also fails, and `program` writes a script that
  reproduces the failure.

The pytest plugin and `api.check` both call `run.plan_checks` to list the checks, and then
`run.run_check` to run them.
"""

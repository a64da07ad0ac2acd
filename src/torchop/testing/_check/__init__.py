"""The implementation of `torchop.testing.check`.

`table.CHECKS` lists all checks. A check generates calls of an operator, and runs a *probe* on each
call. A probe is a function that raises if it finds a fault in the operator.

- The calls come from *variants* (`variants.VARIANTS`). A variant takes an example call that the
  author of the operator wrote, and changes one property of it, such as the memory layout or the
  values. Some checks generate calls with a function of their own instead.
- A `calls.Call` makes one call, and records its results, its writes and its exception.
- A probe (in `checks`) reads this record, and may make further calls. If the probe raises, `shrink`
  searches for a smaller example that also fails, and `program` writes a program that calls the
  probe with the smaller example.

The pytest plugin and `api.check` list the checks with `run.plan_checks`, and run each of them with
`run.run_check`.
"""

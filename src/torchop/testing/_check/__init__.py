"""The implementation of `torchop.testing.check`.

`table.CHECKS` lists all checks. A check generates calls of an operator and runs a *probe* on each:

- a *variant* (`variants.VARIANTS`) generates calls from an example of the operator's author, with
  for example another memory layout or other values. Some checks have their own generator instead;
- a `calls.Call` makes one call, and records the results, the writes and the exception;
- a probe (in `checks`) reads this record, may make further calls, and raises if the operator is
  wrong. `shrink` then searches for a smaller example that fails too, and `program` prints a program
  that calls the probe with this example.

`run.plan_checks(op, examples)` returns the checks of an operator, and `run.run_check(check)` runs
one of them. The pytest plugin and `api.check` use these functions. `report.CheckReport` groups
failures with the same cause (`findings`).
"""

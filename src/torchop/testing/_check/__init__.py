"""The implementation of `torchop.testing.check`.

`table.CHECKS` lists all checks. A check runs a *probe* on the calls of *variants*, or on calls from
a function:

- a variant (`variants.VARIANTS`) changes an example of the author, such as the layout or values;
- a `calls.Call` runs once, and records the results, the writes and the exception of a call;
- a probe (`checks`) reads this record, possibly makes further calls, and raises if the operator is
  wrong. `shrink` then searches a smaller example, and `program` prints the call of the probe.

`run.plan_checks(op, examples)` returns the checks of an operator, and `run.run_check(check)` runs
one. The pytest plugin and `api.check` use these functions. `report.CheckReport` groups failures
with the same cause (`findings`).
"""

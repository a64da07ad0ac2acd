"""The checks of `torchop.testing.check`, each an item that can be run for itself.

`table.CHECKS` lists all checks. A check is a *probe* with some *variants*, or a function of its own
that yields calls:

- a variant (`variants.VARIANTS`) changes an example of the author, such as its layout or values;
- a `calls.Call` is made once, and keeps a record of what it returned, wrote and raised;
- a probe is a function `probe(call, **options)` that reads the record and raises if the operator is
  wrong. Its source is printed by failures (`program`), after `shrink` has found a small example.
  The probes and the checks with calls of their own are in `checks`.

What runs checks in another way, such as one test for each operator, needs these functions:

- `run.plan_checks(op, examples, ...)` takes the arguments of `check` and returns a list of `Check`,
  each with a `name`, such as `"memory.transposed"`. In another process, plan again with the same
  arguments, and take the check of that name: `only=name`.
- `run.run_check(check, end=None)` runs one, raises nothing, and returns a `findings.Result`.
  `run.Budget(seconds).run(check)` does so as long as there is time left.
- `api.report_of(checks, results, seconds)` makes a `CheckReport` of the results, which groups the
  failures by their cause (`findings`). Text, JSON and HTML are made of the report.
"""

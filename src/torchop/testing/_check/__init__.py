"""The checks of `torchop.testing.check`, each an item that can be run for itself.

What runs them in another way, such as one test for each operator and check, or a process for each
operator, needs these functions:

- `run.plan_checks(op, examples, ...)` takes the arguments of `check` and returns a list of `Check`.
  A check has a `name`, such as `"memory.transposed"`, and runs nothing by itself. In another
  process, plan again with the same arguments, and take the check of that name: `only=name`.
- `run.run_check(check, end=None)` runs one, raises nothing, and returns a `Result`: the `outcome`,
  the message and the program of a failure, what it cost. `end` is a time of `time.perf_counter`.
- `run.Budget(seconds).run(check)` does that as long as there is time left.
- `api.report_of(checks, results, seconds)` makes a `CheckReport` of the results. It goes to
  other processes by `to_dict` and `from_dict`; `report.write_html(reports, path)` writes one page
  for several operators.

The files: `subject` is what is checked, its examples, and a `Case`, which is one call of a probe.
`memory`, `dtypes`, `values`, `sharing`, `contracts` and `subsystems` are the families; each has a
table `CHECKS` of `kinds.CheckKind`. A check is a generator of cases with the name of the check, and
its question as the docstring. `variants` changes examples, `shrink` makes them smaller, `program`
writes a failure as a program, and `report` fills in `page.html`.

A probe is a function `probe(op, args, kwargs, **options)` that raises if the operator is wrong: its
source is what a failure prints, with imports of what it uses. `probes.py` beside this folder has
the helpers. Public functions, such as `opcheck`, are probes too, and only imported.
"""

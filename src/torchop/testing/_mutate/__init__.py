"""`torchop.testing.mutate`: small changes of an operator's functions, and which no check notices.

`edits` finds the changes in the text of a function, `installing` runs a function with one of them,
`judging` does that in processes which may end or hang, and `report` is what users get.

mutmut and cosmic-ray generate such changes, too. They rewrite the files of a project, start its
test command for each change, and know no tensors. Here a change is judged by checks in a process
that has imported PyTorch and the operator already, which takes milliseconds, so the code of one
live function is replaced; and the changes that matter are those of kernels: a gradient that is
None, a `sum_to_size` or a `dtype=` that is left out. What remains of such a library is a table of
operators, which is what `edits` has.
"""

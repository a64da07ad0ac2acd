"""Wrap all PyTorch internals that torchop uses, with one module for each part of PyTorch.

The rest of torchop uses private names of PyTorch only through these modules, so supporting a new
release of PyTorch means changing this package alone. The package is checked on torch 2.11, 2.13 and
2.15.

Each workaround cites the PyTorch issue, or the file and function in PyTorch, that makes it
necessary. Code that only some releases need says which ones, for example "before 2.13" or "since
2.14", so it can be deleted when torchop no longer supports these releases.

Callers import a module and write `dispatch.has_kernel(...)`, so a file's imports list the internals
that the file depends on. Only classes are imported by name, because annotations use them often.
"""

"""All uses of PyTorch internals, with one module for each part of PyTorch.

The rest of torchop uses private names of PyTorch only through these modules, so supporting a new
release of PyTorch means changing this package alone. The package is checked on torch 2.11, 2.13 and
2.15. The package does not depend on the rest of torchop, i.e. on rules (fake kernels, backward
formulas and so on) and native calls.

Each workaround cites the PyTorch issue, or the file and function in PyTorch, that makes it
necessary. Code that only some releases need says which ones, for example "before 2.13" or "since
2.14", so it can be deleted when torchop no longer supports these releases.

The package exports nothing. Import a module and call functions through the module:

    from torchop._compat import dispatch, functorch
    from torchop._compat.classes import DispatchKeySet

    if dispatch.has_kernel(name, functorch.ENTRY): ...

This way, a file's imports list the internals that it depends on, and each call names the part of
PyTorch. Classes are imported by name, because annotations use them often.
"""

"""All uses of PyTorch internals, with one module for each part of PyTorch.

Checked on torch 2.11, 2.13 and 2.15. The rest of torchop uses private names of PyTorch only through
these modules, so supporting a new release means changing this package alone. The modules do not
depend on torchop's rules and call plans.

Workarounds cite the PyTorch issue, or the file and function, that forces them. Code for a single
release says so, such as "before 2.13" or "since 2.14", so it can be deleted with that release.

The package exports nothing. Import a module and call its functions through it:

    from torchop._compat import dispatch, functorch
    from torchop._compat.classes import DispatchKeySet

    if dispatch.has_kernel(name, functorch.ENTRY): ...

The imports then list the internals that a file depends on, and each call names the part of PyTorch.
Classes are imported by name because annotations use them often.
"""

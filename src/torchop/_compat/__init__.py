"""All uses of PyTorch internals, with one module for each part of PyTorch.

Checked on torch 2.11, 2.13 and 2.15. The rest of torchop reaches private names of PyTorch only
through these modules, so supporting a new release means changing this package alone. The modules
know nothing about torchop's rules and plans.

The package exports nothing. Import a module and call its functions through it:

    from torchop._compat import dispatch, functorch
    from torchop._compat.classes import DispatchKeySet

    if dispatch.has_kernel(name, functorch.ENTRY): ...

The imports then list the internals that a file depends on, and each call names the part of PyTorch.
Classes are imported by name because annotations use them often.
"""

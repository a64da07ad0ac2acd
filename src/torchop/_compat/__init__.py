"""Every private name of PyTorch that torchop uses, and nothing else.

Checked on torch 2.11, 2.13 and 2.15. The rest of torchop uses PyTorch's internals only through
these files, so a new release needs changes in this folder only. Each file is about one part of
PyTorch, as its first line says. None of them knows our rules and plans.

This package exports nothing. A file imports the parts that it needs, and calls functions through
them:

    from torchop._compat import dispatch, functorch
    from torchop._compat.classes import DispatchKeySet

    if dispatch.has_kernel(name, functorch.ENTRY): ...

So the first lines of a file say which internals it uses, and each call names the part. One flat
namespace would hide both, and would be a list of 180 names to maintain. Classes are imported by
name, because annotations use them often.
"""

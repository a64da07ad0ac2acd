"""Every private name of PyTorch that torchop uses, and nothing else.

Checked on torch 2.11, 2.13 and 2.15. The rest of torchop speaks to PyTorch's internals through
these files, so supporting a new release is a matter of this folder. Each file is about one part of
PyTorch, as its first line says; none knows of our rules and plans.

Nothing is exported again from here. A file imports the parts that it needs, and calls functions
through them:

    from torchop._compat import dispatch, functorch
    from torchop._compat.classes import DispatchKeySet

    if dispatch.has_kernel(name, functorch.ENTRY): ...

So its first lines say on which internals it rests, and each call says of which part it is. One flat
namespace would hide both, and be a list of 180 names to keep. Classes are imported by name, because
annotations are full of them.
"""

"""How to install what the extras of torchop ask for."""

# Whether a package index has torchop. A release sets this: what messages and the pages of the
# documentation say of installing it follows.
ON_INDEX = False


def installing(extra: str) -> str:
    """How to install what an extra of torchop asks for."""
    if ON_INDEX:
        return f"pip install 'torchop[{extra}]'"
    return f"pip install '.[{extra}]' in a checkout of torchop"

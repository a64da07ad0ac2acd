"""The command that installs the optional dependencies of torchop."""

# Whether a package index has torchop. The first release sets this to True. Messages and the
# documentation then contain the command to install from the index.
ON_INDEX = False


def installing(extra: str) -> str:
    """Return the command that installs an extra of torchop."""
    if ON_INDEX:
        return f"pip install 'torchop[{extra}]'"
    return f"pip install '.[{extra}]' in a checkout of torchop"

"""The command that installs the optional dependencies of torchop."""

# Whether a package index has torchop. A release sets this to True, which changes messages and the
# documentation.
ON_INDEX = False


def installing(extra: str) -> str:
    """Return the command that installs an extra of torchop."""
    if ON_INDEX:
        return f"pip install 'torchop[{extra}]'"
    return f"pip install '.[{extra}]' in a checkout of torchop"

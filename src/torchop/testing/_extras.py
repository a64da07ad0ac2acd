"""The command that installs optional dependencies of torchop."""

# Whether torchop is available from a package index. The first release sets this to True. Messages
# and the documentation then show the command that installs torchop from the index.
ON_INDEX = False


def installing(extra: str) -> str:
    """Return the command that installs torchop with an extra, i.e. with optional dependencies."""
    if ON_INDEX:
        return f"pip install 'torchop[{extra}]'"
    return f"pip install '.[{extra}]' in a checkout of torchop"

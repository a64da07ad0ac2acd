"""The command that installs optional dependencies of torchop."""

# Set this to True with the first release. Messages and the documentation then show how to install
# torchop from a package index instead of from a checkout.
ON_INDEX = False


def installing(extra: str) -> str:
    if ON_INDEX:
        return f"pip install 'torchop[{extra}]'"
    return f"pip install '.[{extra}]' in a checkout of torchop"

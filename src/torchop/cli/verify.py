"""`python -m torchop certificate verify`: checks again what a certificate says was checked."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from torchop.cli.certificate import differences, read_certificate
from torchop.cli.check import Request, certified, check_operators, seconds
from torchop.cli.child_process import import_all
from torchop.testing._check.report import environment


@click.group()
def certificate() -> None:
    """Certificates, which `check --certificate` writes."""


@certificate.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
def verify(file: Path) -> None:
    """Runs the checks of a certificate again, and shows where their outcome differs.

    It imports the modules that the file names, with their examples. If the environment changed,
    such as the version of PyTorch, it shows that too, but does not count it as a difference. Nor
    does it count a check that could not be done before, or was not run, and passes now.

    The exit code is 0 if the operators, their examples and all outcomes are the same, and 1 if not.
    """
    before = read_certificate(file)
    request = Request(**{name: before["request"][name] for name in Request._fields})
    modules, only = (tuple(map(str, names)) for names in (request.modules, request.only))
    request = request._replace(modules=modules, only=only)
    for limit in (request.timeout, request.budget):
        seconds(None, None, limit)
    import_all(request.modules)
    operators = [operator["op"] for operator in before["operators"]]
    reports, unchecked = check_operators(operators, request)
    after = certified(reports, unchecked, request)
    for name, value in environment().items():
        if (was := before["environment"].get(name)) != value:
            _say(f"{name}: {was} before, {value} now")
    found = differences(before, after)
    for difference in found:
        _say(difference)
    signed = f", signed off by {before['signed_off_by']}" if "signed_off_by" in before else ""
    outcome = f"{len(found)} difference{'s' * (len(found) > 1)}" if found else "the same"
    click.echo()
    _say(f"{file.name}, of {before['date']}{signed}: {outcome}")
    sys.exit(1 if found else 0)


def _say(text: str) -> None:
    """Prints a line in which a file can hide none of its own, nor move the cursor."""
    escaped = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    click.echo("".join(escaped))

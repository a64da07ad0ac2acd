"""Certificates: what was checked on what, as JSON that shows if it was edited; and badges.

The digest makes an edit evident, as a checksum does. It is no signature: whoever edits a file can
compute it anew. What settles a doubt is `python -m torchop certificate verify`, which checks again.
"""

from __future__ import annotations

import datetime
import hashlib
import html
import inspect
import json
import re
import tokenize
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import EllipsisType
from typing import Any

import click
import torch

from torchop._inspect.authored import authored_functions
from torchop._inspect.registrant import in_dispatcher
from torchop.extend import Operator, short_text
from torchop.testing import CheckReport, _contents, probes
from torchop.testing._check.report import write_json
from torchop.testing._check.subject import Subject
from torchop.testing.process_state import restored, seed_torch

FORMAT = 1
_SIGNATURE = re.compile(r"[^<>\s][^<>\n]* <[^<>@\s]+@[^<>@\s]+>")
# What a certificate has, and what each operator in it has.
_FIELDS = {
    "format": int,
    "date": str,
    "environment": dict,
    "request": dict,
    "operators": list,
    "not_checked": list,
    "totals": dict,
    "digest": str,
    "signed_off_by": str | EllipsisType,
}
_OF_OPERATOR = {
    "op": str,
    "schema": str,
    "sources": str,
    "kernels": list,
    "examples": str,
    "checks": list,
}
_OF_CHECK = {"check": str, "outcome": str, "reason": str}
_OF_REQUEST = {
    "modules": list,
    "examples": str | None,
    "reference": str | None,
    "expected": str | None,
    "only": list,
    "seed": int,
    "timeout": int | float,
    "budget": int | float | None,
}


def refuse_signature(signed_off_by: str | None, certificate: Path | None) -> None:
    """Raises click.BadParameter for what is no name with a mail address, or has no certificate."""
    if signed_off_by is None:
        return
    if _SIGNATURE.fullmatch(signed_off_by) is None:
        raise click.BadParameter(
            "--signed-off-by expects a name and an address, as git writes them, such as "
            f"'Ada Lovelace <ada@example.org>'; got {signed_off_by!r}"
        )
    if certificate is None:
        raise click.BadParameter(
            "--signed-off-by is a line of the file that --certificate writes; give that option too"
        )


def refuse_badge(path: Path | None) -> None:
    """Raises click.BadParameter for a badge of another kind than there are."""
    if path is not None and path.suffix not in (".svg", ".json"):
        raise click.BadParameter(f"--badge writes .svg, or .json for shields.io; got {path.name}")


def identity_of(op: str, make_examples: Callable[[], Sequence[Any]]) -> dict[str, Any]:
    """What an operator and its examples are, in digests: of what its functions and inputs are."""
    with restored():
        seed_torch(0)  # examples by chance are then the same ones
        subject = Subject(op, make_examples())
    inputs = [(tuple(each), [_tensor(t) for t in each.tensors]) for each in subject.originals]
    named = [(probes.mapped(each, lambda tensor: None), tensors) for each, tensors in inputs]
    return {
        "sources": _sources(subject.operator),
        # Of other operators, also those in C++, whose source is not here.
        "kernels": sorted(subject.operator.kernels or in_dispatcher(subject.operator)[0]),
        "examples": _digest_of(json.dumps(named, default=_in_words)),
    }


def _in_words(value: Any) -> str:
    """A value that JSON has no word for; the text of a generator is its address."""
    is_generator = isinstance(value, torch.Generator)
    return f"{value.device} {value.initial_seed()}" if is_generator else str(value)


def _sources(operator: Operator) -> str:
    """A digest of the functions of an operator; of their code, where there is no source."""
    texts = []
    for function, role in authored_functions(operator).items():
        try:
            text = inspect.getsource(function)
        except (OSError, SyntaxError, tokenize.TokenError):
            text = function.__code__.co_code.hex()
        texts.append(f"{role} {function.__qualname__}\n{text}")
    return _digest_of("\0".join(sorted(texts)))


def _tensor(tensor: torch.Tensor) -> str:
    """A tensor in words, and a digest of its numbers."""
    # The type of its device, because another machine may number its devices otherwise.
    what = f"{tensor.dtype} {tensor.device.type} {list(tensor.shape)} {tensor.layout}"
    return f"{what} {_contents.digest(tensor)}"


def content_of(
    reports: Sequence[CheckReport],
    identities: Sequence[Mapping[str, Any]],
    not_checked: Iterable[str],
    request: Mapping[str, Any],
    signed_off_by: str | None,
) -> dict[str, Any]:
    """A certificate, with its digest."""
    operators = [
        {"op": report.op, "schema": report.schema, **identity, **_checks_of(report)}
        for report, identity in zip(reports, identities, strict=True)
    ]
    content = {
        "format": FORMAT,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "environment": dict(reports[0].environment) if reports else {},
        "request": dict(request),
        "tolerances": "those of torch.testing.assert_close",
        "operators": operators,
        "not_checked": list(not_checked),
        "totals": dict(Counter(r.outcome for report in reports for r in report.results)),
    }
    if signed_off_by is not None:
        content["signed_off_by"] = signed_off_by
    return {**content, "digest": digest(content)}


def _checks_of(report: CheckReport) -> dict[str, Any]:
    checks = [
        {
            "check": r.check,
            "outcome": r.outcome,
            "reason": r.message,
            "seed": report.seed,
            "cases": r.cases,
            "refused": r.refused,
        }
        for r in report.results
    ]
    providers = {
        name: dict(Counter(r.outcome for r in each.results))
        for name, each in report.by_provider().items()
        if name
    }
    return {
        "checks": checks,
        "providers": providers,
        "totals": dict(Counter(r.outcome for r in report.results)),
    }


def digest(content: Mapping[str, Any]) -> str:
    """The digest of all that a certificate holds besides, in whatever order it is written."""
    values = {name: value for name, value in content.items() if name != "digest"}
    text = json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return _digest_of(text)


def _digest_of(text: str) -> str:
    return f"sha256:{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()}"


def write_certificate(content: Mapping[str, Any], path: Path) -> None:
    """Writes a certificate."""
    text = json.dumps(content, indent=1, ensure_ascii=False, sort_keys=True)
    path.write_text(text + "\n", encoding="utf-8", errors="surrogatepass")


def read_certificate(path: Path) -> dict[str, Any]:
    """Reads a certificate.

    Raises:
        click.ClickException: it is none, it is cut or from a later version, or it was edited.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise click.ClickException(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise click.ClickException(
            f"{path} is not JSON, or was cut ({short_text(str(error))}); get the file again"
        ) from None
    if not isinstance(content, dict) or "format" not in content or "digest" not in content:
        raise click.ClickException(f"{path} is not a certificate of `torchop check --certificate`")
    if content["format"] != FORMAT:
        raise click.ClickException(
            f"{path} has format {content['format']!r}, but this version of torchop reads {FORMAT}"
        )
    if (found := digest(content)) != content["digest"]:
        raise click.ClickException(
            f"{path} was edited after it was written, because its digest is {content['digest']}, "
            f"but its content has {found}. Write it again with `torchop check --certificate`"
        )
    _refuse_fields(path, content, _FIELDS)
    _refuse_fields(path, content["request"], _OF_REQUEST)
    for operator in content["operators"]:
        _refuse_fields(path, operator, _OF_OPERATOR)
        for check in operator["checks"]:
            _refuse_fields(path, check, _OF_CHECK)
    refuse_signature(content.get("signed_off_by"), path)
    outcomes = Counter(c["outcome"] for each in content["operators"] for c in each["checks"])
    if not outcomes or outcomes != content["totals"]:
        raise click.ClickException(
            f"{path} is not a certificate that torchop wrote: its totals are {content['totals']}, "
            f"but its checks come to {dict(outcomes)}"
        )
    return content


def _refuse_fields(path: Path, values: Any, fields: Mapping[str, Any]) -> None:
    for name, kind in fields.items():
        if not isinstance(values, dict) or not isinstance(values.get(name, ...), kind):
            raise click.ClickException(
                f"{path} is not a certificate that torchop wrote: {name!r} is missing, or not of "
                f"type {getattr(kind, '__name__', kind)}"
            )


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Where another run of the same checks differs, apart from the environment.

    A check that could not be done, or was not run, may pass: another machine has an accelerator,
    or is faster. One that passed has to pass again.
    """
    found = []
    earlier, later = ({o["op"]: o for o in each["operators"]} for each in (before, after))
    for op in sorted(earlier.keys() | later.keys()):
        if op not in later:
            why = "; ".join(text for text in after["not_checked"] if op in text) or "there is none"
            found.append(f"{op} was not checked: {why}")
            continue
        if op not in earlier:
            found.append(f"{op} is not in the certificate")
            continue
        for name in ("schema", "kernels"):
            was, now = earlier[op][name], later[op][name]
            if was != now:
                found.append(f"{op}: its {name} changed: {was} before, {now} now")
        if earlier[op]["sources"] != later[op]["sources"]:
            found.append(f"{op}: the source of its functions changed")
        if earlier[op]["examples"] != later[op]["examples"]:
            found.append(f"{op}: its examples changed")
        outcomes = [{c["check"]: c for c in each[op]["checks"]} for each in (earlier, later)]
        for check in dict.fromkeys((*outcomes[0], *outcomes[1])):
            was, now = (each.get(check, {"outcome": "absent", "reason": ""}) for each in outcomes)
            # What passes here says no less than before, when another machine could not do it.
            same = ("passed", "cannot be done", "not run") if now["outcome"] == "passed" else ()
            if was["outcome"] not in (now["outcome"], *same):
                why = short_text(now["reason"] or was["reason"])
                found.append(
                    f"{op}: {check} was {was['outcome']!r}, but is {now['outcome']!r} now: {why}"
                )
    return found


def write_badge(reports: Sequence[CheckReport], not_checked: Sequence[str], path: Path) -> None:
    """Writes a badge: an endpoint of shields.io, or an image."""
    passed = sum(report.count("passed") for report in reports)
    failed = sum(report.count("failed") for report in reports)
    left = sum(report.count("not run") for report in reports) + len(not_checked)
    counts = [f"{passed} passed", *([f"{failed} failed"] if failed else [])]
    counts += [f"{left} not run"] if left else []
    message = ", ".join(counts)
    color = "#c0392b" if failed or not reports else "#b7791f" if left else "#2e7d32"
    if path.suffix == ".json":
        values = {"schemaVersion": 1, "label": "torchop check", "message": message, "color": color}
        write_json(values, path)
        return
    label = "torchop check"
    left_width, right_width = (7 * len(text) + 12 for text in (label, message))
    width, middle = left_width + right_width, left_width + right_width / 2
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="20" role="img"'
        f' aria-label="{label}: {html.escape(message)}">\n'
        f'<rect width="{left_width}" height="20" fill="#444"/>\n'
        f'<rect x="{left_width}" width="{right_width}" height="20" fill="{color}"/>\n'
        '<g fill="#fff" font-family="Verdana,sans-serif" font-size="11" text-anchor="middle">\n'
        f'<text x="{left_width / 2}" y="14">{label}</text>\n'
        f'<text x="{middle}" y="14">{html.escape(message)}</text>\n</g>\n</svg>\n',
        encoding="utf-8",
    )

"""Run checks and format their outcomes.

Owns: which checks run, in which order; the lines, tables and JSON that show the outcomes.
May not know: the requests of any check.
Invariants: a check is skipped if a check that it needs did not pass before it.
"""

from __future__ import annotations

import json
import secrets
import ssl
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from urllib.parse import urlsplit

from ..client.http import Client, Connections, NoAnswer, Send
from ..content.images import Seed
from ..messages import is_name
from . import discovery, management, pull, push_blobs, push_manifests
from .checks import CHECKS, WORKFLOWS, Check, Failed, Outcome, Row, Run, Skipped

__all__ = [
    "Unusable",
    "as_json",
    "as_line",
    "as_summary",
    "as_tables",
    "begin_run",
    "check_registry",
    "choose_checks",
    "count_outcomes",
    "run_checks",
]

# Each module adds its checks to CHECKS when it is imported.
_MODULES = (pull, push_blobs, push_manifests, discovery, management)


class Unusable(Exception):
    """The registry cannot be checked: it cannot be reached, or it refuses the login."""


def run_checks(
    run: Run, checks: Iterable[Check], progress: Callable[[Row], None] | None = None
) -> list[Row]:
    """Run checks in order. `progress` is called with each outcome."""
    rows: dict[Callable[[Run], None], Row] = {}
    for entry in checks:
        needed = [rows[act] for act in entry.needs if act in rows]
        lacking = [row for row in needed if row.outcome != "pass"]
        if lacking:
            row = Row(entry, "skip", f"rests on {lacking[0].check.name!r} ({lacking[0].outcome})")
        else:
            row = _carry_out(run, entry)
        rows[entry.act] = row
        if progress is not None:
            progress(row)

    return list(rows.values())


def _carry_out(run: Run, entry: Check) -> Row:
    try:
        entry.act(run)
    except Skipped as reason:
        return Row(entry, "skip", str(reason))
    except Failed as reason:
        return Row(entry, "fail", str(reason))
    except NoAnswer as reason:
        return Row(entry, "fail", f"no answer: {reason}")
    return Row(entry, "pass", "")


def begin_run(
    url: str,
    send: Send,
    *,
    credentials: tuple[str, str] | None = None,
    mounting: str | None = None,
    seed: int | None = None,
) -> Run:
    """Return a run for http(s)://HOST[:PORT]/REPOSITORY.

    Raises Unusable if the URL is malformed, or if nothing can be pushed there.
    """
    try:
        parts = urlsplit(url)
    except ValueError as problem:
        raise Unusable(f"{url!r}: {problem}") from None

    repository = parts.path.strip("/")
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise Unusable(f"{url!r} is not http(s)://HOST[:PORT]/REPOSITORY")
    if not is_name(repository) or parts.query or parts.fragment:
        raise Unusable(f"{repository!r} is not the name of a repository")

    origin = f"{parts.scheme}://{parts.netloc}"
    client = Client(origin, send, credentials)
    hint = "are these the credentials?" if credentials else "it wants credentials (--user)"
    try:
        ping = client.ask("GET", "/v2/")
        if ping.status in (401, 403):
            raise Unusable(f"{ping}: {hint}")
        pushed = client.ask("POST", f"/v2/{repository}/blobs/uploads/", None, b"")
    except NoAnswer as problem:
        raise Unusable(f"no answer: {problem}") from None

    if pushed.status in (401, 403):
        raise Unusable(f"{pushed}, so nothing can be pushed there: {hint}")
    if pushed.status in (404, 405):
        raise Unusable(f"{pushed}, so nothing can be pushed there")

    number = secrets.randbits(48) if seed is None else seed
    identity = f"check-{number:012x}"
    return Run(client, repository, mounting or f"{repository}-mount", Seed(number), identity)


def choose_checks(workflows: Sequence[str] = ()) -> list[Check]:
    """Return the checks of `workflows` in order, or those of all workflows if it is empty."""
    ordered = [entry for workflow in WORKFLOWS for entry in CHECKS if entry.workflow == workflow]
    return [entry for entry in ordered if not workflows or entry.workflow in workflows]


def check_registry(
    url: str,
    *,
    credentials: tuple[str, str] | None = None,
    workflows: Sequence[str] = (),
    context: ssl.SSLContext | None = None,
    mounting: str | None = None,
    keep: bool = False,
    progress: Callable[[Row], None] | None = None,
) -> list[Row]:
    """Run the checks of some workflows against a registry. Raises Unusable as `begin_run` does.

    With `keep`, the pushed content is not deleted at the end.
    """
    with closing(Connections(context)) as connections:
        run = begin_run(url, connections, credentials=credentials, mounting=mounting)
        try:
            return run_checks(run, choose_checks(workflows), progress)
        finally:
            if not keep:
                run.delete_pushed()


# Formatting.


def as_line(row: Row) -> str:
    """Format one row: outcome, workflow, name, then the reason, if any, with the cited sentence."""
    text = f"{row.outcome:4}  {row.check.workflow:10}  {row.check.name}"
    return f"{text} -- {row.reason} -- spec: {row.check.cites}" if row.reason else text


def count_outcomes(rows: Sequence[Row]) -> dict[Outcome, int]:
    """Count the rows by outcome."""
    outcomes: tuple[Outcome, ...] = ("pass", "fail", "skip")
    return {outcome: sum(1 for row in rows if row.outcome == outcome) for outcome in outcomes}


def as_summary(rows: Sequence[Row]) -> str:
    """Format the number of checks by outcome."""
    numbers = count_outcomes(rows)
    return f"{len(rows)} checks: {numbers['pass']} passed, {numbers['fail']} failed, {numbers['skip']} skipped"


def as_tables(rows: Sequence[Row]) -> str:
    """Format a table for each workflow, with a row for each API and a column for each kind of data.

    A cell has the worst outcome of its checks. For "fail" and "skip", it also has the number of the
    checks with this outcome and the number of all.
    """
    tables = [
        _table(workflow, [row for row in rows if row.check.workflow == workflow])
        for workflow in WORKFLOWS
    ]
    return "\n\n".join(filter(None, tables))


def _table(workflow: str, rows: Sequence[Row]) -> str:
    if not rows:
        return ""

    kinds = list(dict.fromkeys(row.check.data for row in rows))
    table = [[workflow, *(kind or "any" for kind in kinds)]]
    for api in dict.fromkeys(row.check.api for row in rows):
        cells = [api]
        for kind in kinds:
            counts = Counter[str](
                row.outcome for row in rows if (row.check.api, row.check.data) == (api, kind)
            )
            worst = next((outcome for outcome in ("fail", "skip", "pass") if counts[outcome]), "-")
            if worst in ("pass", "-"):
                cells.append(worst)
            else:
                cells.append(f"{worst} {counts[worst]}/{counts.total()}")
        table.append(cells)

    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join("  ".join(map(str.ljust, cells, widths)).rstrip() for cells in table)


def as_json(url: str, rows: Sequence[Row]) -> str:
    """Format the rows as JSON."""
    checks = [
        {
            "name": row.check.name,
            "workflow": row.check.workflow,
            "api": row.check.api,
            "data": row.check.data or "any",
            "cites": row.check.cites,
            "outcome": row.outcome,
            "reason": row.reason,
        }
        for row in rows
    ]
    return json.dumps({"url": url, "count": count_outcomes(rows), "checks": checks}, indent=2)

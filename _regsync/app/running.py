"""A run, and a listing of tags: from a configuration to results, report and exit status.

Owns: how the run, the signals and the console come together.
May not know: arguments, configuration files, how anything is copied.
Invariants: connections are closed however a command ends.
Follows: docs/specification.md section 1.6, docs/design.md sections 2, 5 and 10.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import anyio

from _regsync.app.console import Console
from _regsync.app.environment import carry_out, connect, utc_now
from _regsync.config.model import Config, MappingRule, Registry
from _regsync.errors import Side
from _regsync.state.knowledge import Knowledge
from _regsync.state.seen import first_seen_for
from _regsync.sync.discovery import Discovery
from _regsync.sync.report import Report, analysis_lines
from _regsync.sync.run import Run
from _regsync.tags import Reason, TagRule, check_glob

if TYPE_CHECKING:
    from _regsync.sync.lockfile import Lock
    from _regsync.sync.retry import Retry


class SingleImage(NamedTuple):
    mapping: MappingRule
    reference: str  # tag or digest at the source
    target_reference: str  # tag or digest at the target


async def run(
    config: Config,
    console: Console,
    *,
    kind: Literal["sync", "plan", "analysis"] = "sync",
    image: SingleImage | None = None,
    recheck: bool = False,
    lock: Lock | None = None,
    retry: Retry | None = None,
) -> int:
    """Run all mappings of a configuration, or copy `image` alone; return the exit status.

    A plan and an analysis change nothing. With `recheck`, and for one image, artifacts are looked
    at whatever the state says of them. With a lock, names and digests of sources are the lock's.
    With `retry`, only the images of an earlier report are tried.
    """
    began = anyio.current_time()
    started_at = utc_now()
    run_id = os.urandom(8).hex()
    writes = kind == "sync"
    is_sync_of_mappings = writes and image is None
    if writes and config.cache_dir is None:
        message = "nothing is kept for the next run: there is no configuration file"
        console.log("info", "no_state", f"{message}, and no absolute cache_dir")

    report = Report()
    with closing(connect(console)) as transport:
        first_seen = None
        # An analysis is also about images that are too young to be copied.
        if kind != "analysis":
            wall = transport.machine.wall
            known = lock.first_seen_times() if lock is not None else None
            first_seen = first_seen_for(config, wall, console.log, keep=writes, known=known)
        work = Run(
            transport,
            config,
            console.show_outcome,
            report,
            kind if image is None else "copy",
            recheck=recheck or image is not None,
            first_seen=first_seen,
            lock=lock,
            retry=retry,
        )
        if is_sync_of_mappings:
            console.omit_shared_hosts(_hosts_of(config))
        stop = anyio.Event()
        act = partial(work.sync, stop) if image is None else partial(work.copy, *image, stop)
        signals = await carry_out(act, console, work.scheduler, stop)
    elapsed = anyio.current_time() - began

    if report.interrupted:
        console.log("warning", "interrupted", report.undone_text())
    if is_sync_of_mappings:
        console.print_summary(report, elapsed)
    if kind == "analysis":
        assert work.dry_run is not None  # the run has made one for this kind
        _show_analysis(work.dry_run.analysis(), console)
    elif console.writes_json:
        console.print_document(
            report.as_json(run_id, started_at, elapsed, transport.requests, transport.throttled)
        )
    elif kind == "plan":
        console.print_lines(report.plan())

    if report.interrupted:
        return 128 + signals[0]
    return report.exit_status()


def _show_analysis(analysis: dict[str, Any], console: Console) -> None:
    if console.writes_json:
        console.print_document(analysis)
    else:
        console.print_lines(analysis_lines(analysis))


def _hosts_of(config: Config) -> set[tuple[str, str]]:
    """Return from which source hosts to which target hosts the mappings copy."""
    return {
        (mapping.source.authority, target.authority)
        for mapping in config.mappings
        for target in mapping.targets
    }


async def list_tags(
    registry: Registry, repository: str, rules: Sequence[TagRule], console: Console
) -> int:
    """Show the tags of a repository that any of the rules selects, and for each other tag the reason
    why the first rule drops it; return the exit status.
    """
    with closing(connect(console)) as transport:
        transport.prepare(registry)
        discovery = Discovery(transport, Knowledge())
        source = discovery.repository(registry, repository, Side.SOURCE)
        # The repository is listed once, however many rules there are.
        selections = [await discovery.select(rule, source) for rule in rules]

    kept = dict.fromkeys(tag for selection in selections for tag in selection.kept)
    dropped = {tag: why for tag, why in selections[0].dropped.items() if tag not in kept}
    missing = _missing_tags(rules, {*kept, *dropped})

    _log_selection(str(source), len(kept), dropped, missing, console)
    for selection in selections:
        shortfall = selection.shortfall(str(source))
        if shortfall is not None:
            console.log("warning", "min_tags", shortfall)

    if console.writes_json:
        console.print_document(
            {
                "schema": 1,
                "repository": str(source),
                "tags": list(kept),
                "dropped": dropped,
                "missing": missing,
            }
        )
    else:
        console.print_lines(kept)
    return 0


def _missing_tags(rules: Sequence[TagRule], present: Collection[str]) -> list[str]:
    """Return the tags that rules name without wildcards, and that the repository does not have."""
    patterns = [pattern for rule in rules for pattern in rule.glob]
    named = dict.fromkeys(check_glob(pattern) for pattern in patterns)
    return [tag for tag in named if tag is not None and tag not in present]


def _log_selection(
    repository: str,
    kept: int,
    dropped: Mapping[str, Reason],
    missing: Sequence[str],
    console: Console,
) -> None:
    """Log what is not selected and why, then how many tags are."""
    for tag, reason in dropped.items():
        console.log("info", "tag_dropped", f"dropped, {reason:<12}  {tag}", tag=tag, reason=reason)
    for tag in missing:
        console.log("warning", "tag_missing", f"{repository}: tag {tag!r} does not exist", tag=tag)
    message = f"{repository}: {_count_text(kept, dropped)}"
    if kept:
        console.log("info", "selected", message)
    else:
        console.log("warning", "nothing_selected", message)


def _count_text(kept: int, dropped: Mapping[str, Reason]) -> str:
    """Return `12 of 20 tags are selected (dropped: 5 glob, 3 exclude)`."""
    text = f"{kept} of {kept + len(dropped)} tags are selected"
    if not dropped:
        return text
    counts = Counter(dropped.values()).most_common()
    return f"{text} (dropped: {', '.join(f'{count} {reason}' for reason, count in counts)})"

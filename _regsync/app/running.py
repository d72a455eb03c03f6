"""Run the mappings of a configuration, copy one image, or list the tags of a repository.

Invariants: connections are closed however a command ends.
Follows: docs/specification.md section 1.6, docs/design.md sections 2, 5 and 10.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple

import anyio

from _regsync.app.console import Console
from _regsync.app.environment import carry_out, connected, print_report, report_document, utc_now
from _regsync.config import Config, MappingRule, Registry
from _regsync.errors import RegsyncError, Side
from _regsync.state import Knowledge, StateFile
from _regsync.sync.discovery import Discovery
from _regsync.sync.report import Report
from _regsync.sync.run import Run
from _regsync.tags import TagRule
from _regsync.text import json_text, printable, reason_of

if TYPE_CHECKING:
    from _regsync.pins import Lock
    from _regsync.sync.retry import Retry

# sync: all mappings; copy: one image; plan: what a sync would do.
RunKind = Literal["sync", "copy", "plan"]


class SingleImage(NamedTuple):
    """The image of a run of the kind `copy`."""

    mapping: MappingRule
    reference: str  # tag or digest at the source
    target_reference: str  # tag or digest at the target


async def run(
    config: Config,
    console: Console,
    *,
    kind: RunKind,
    image: SingleImage | None = None,
    recheck: bool = False,
    verify: bool = False,
    lock: Lock | None = None,
    retry: Retry | None = None,
    summary_path: str | None = None,
) -> int:
    """Carry out one run and show its results. Returns the exit status.

    `image` is the image of a copy, and None for the other kinds, which run all mappings. With
    `recheck`, artifacts are looked up whatever the saved state says about them. With `verify`,
    targets are asked for every part of every image, too. With a lock, its tags and digests stand in
    for those of the sources. With `retry`, only its images are copied. Markdown is written to
    `summary_path`.

    If a signal has interrupted the run, the exit status is 128 and the signal's number.
    """
    start = anyio.current_time()
    started_at = utc_now()
    if kind != "plan" and config.cache_dir is None:
        message = "nothing is kept for the next run: there is no configuration file"
        console.log("info", "no_state", f"{message}, and no absolute cache_dir")

    report = Report()
    stop = anyio.Event()  # set by the first signal
    async with connected(console) as transport:
        state = StateFile(config.cache_dir, transport.machine.log)
        if config.has_ages:
            state.require(may_write=kind != "plan")
        work = Run(
            transport,
            config,
            console.show_outcome,
            report,
            kind,
            state=state,
            recheck=recheck,
            verify=verify,
            lock=lock,
            retry=retry,
        )
        if image is None:
            act = partial(work.sync, stop)
        else:
            act = partial(work.copy, image.mapping, image.reference, image.target_reference, stop)
        signals = await carry_out(act, console, work.scheduler, stop)
    elapsed = anyio.current_time() - start

    if report.interrupted:
        console.log("warning", "interrupted", report.undone_text())
    if kind == "sync":
        console.print_summary(report, elapsed)
    if console.writes_json:
        print_report(report, started_at, elapsed, transport, console)
    elif kind == "plan":
        console.print_lines(report.plan())
    if summary_path is not None:
        write_summary(report_document(report, started_at, elapsed, transport), summary_path)

    if report.interrupted:
        return 128 + signals[0]
    return report.exit_status()


def write_summary(document: dict[str, object], path: str) -> None:
    """Write the report of a run in Markdown. Raises RegsyncError if it cannot be written."""
    from _regsync.app.pages import as_markdown, read_report

    # The report as a reader of its JSON has it, with all secrets masked.
    text = as_markdown(read_report(json_text(document).encode(), "the report"))
    try:
        with open(path, "w", encoding="utf-8") as stream:
            stream.write(text)
    except OSError as error:
        raise RegsyncError(f"{printable(path)} cannot be written: {reason_of(error)}") from error


async def list_tags(
    registry: Registry, repository: str, rules: Sequence[TagRule], console: Console
) -> int:
    """Print the tags of a repository that at least one rule selects. Returns the exit status.

    Every other tag is logged with the reason why the first rule drops it.
    """
    async with connected(console) as transport:
        transport.dialer.prepare(registry)
        discovery = Discovery(transport, Knowledge())
        source = discovery.repository(registry, repository, Side.SOURCE)
        # The listing is requested only once: `discovery` keeps it for the next rule.
        selections = [await discovery.select(rule, source) for rule in rules]

    # The tags that any rule keeps, each once.
    kept = dict.fromkeys(tag for selection in selections for tag in selection.kept)
    # The tags that no rule keeps, with the reasons of the first rule.
    dropped = {tag: why for tag, why in selections[0].dropped.items() if tag not in kept}

    for tag, reason in dropped.items():
        console.log("info", "tag_dropped", f"dropped, {reason:<12}  {tag}", tag=tag, reason=reason)
    for selection in selections:
        for event, warning in selection.warnings(str(source)):
            console.log("warning", event, warning)
    if console.writes_json:
        tags = {"tags": list(kept), "dropped": dropped}
        console.print_document({"schema": 1, "repository": str(source), **tags})
    else:
        console.print_lines(kept)
    return 0

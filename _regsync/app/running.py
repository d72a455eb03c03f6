"""Carry out the commands that ask registries: copy, sync, audit, lock, and list tags.

Owns: how the work, the signals, the console and the files that a command writes go together.
May not know: which requests are sent, what their answers mean.
Invariants: connections are closed however a command ends. A lock file and a receipt are replaced
atomically: of two commands that write one, the last one wins. A receipt is replaced only if the audit
was not interrupted and everything could be checked.
Follows: docs/specification.md section 1.6, docs/design.md sections 2, 5, 10 and 12.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Literal

import anyio

from _regsync import edge
from _regsync.app.console import Console
from _regsync.app.environment import carry_out, connected, report_document, utc_now
from _regsync.config import Config, MappingRule, Registry
from _regsync.errors import ConfigError, RegsyncError, Side
from _regsync.files import replacing
from _regsync.registry.runs import Transport
from _regsync.state import Knowledge, StateFile
from _regsync.sync.artifacts import Referrers
from _regsync.sync.discovery import Discovery
from _regsync.sync.report import Outcome, Report, error_json, exit_status_for
from _regsync.sync.run import Run
from _regsync.tags import TagRule
from _regsync.text import json_text, printable, reason_of

if TYPE_CHECKING:
    from _regsync.locking import Locking
    from _regsync.pins import Change, Lock
    from _regsync.sync.inspection import Finding
    from _regsync.sync.mappings import Retry

# Copying.

# sync: all mappings; copy: one image; plan: what a sync would do.
RunKind = Literal["sync", "copy", "plan"]


async def run(
    config: Config,
    console: Console,
    *,
    kind: RunKind,
    references: tuple[str, str] | None = None,
    recheck: bool = False,
    verify: bool = False,
    lock: Lock | None = None,
    retry: Retry | None = None,
    summary_path: str | None = None,
) -> int:
    """Carry out one run and show its results. Returns the exit status.

    `references` are those of a copy, a tag or digest at the source and at the target, and its
    mapping is the only one. The other kinds run all mappings. With `recheck`, artifacts are looked
    up whatever the saved state says about them. With `verify`, targets are asked for every part of
    every image, too. With a lock, its tags and digests stand in for those of the sources. With
    `retry`, only its images are copied. Markdown is written to `summary_path`.

    If a signal has interrupted the run, the exit status is 128 and the signal's number.
    """
    start = anyio.current_time()
    started_at = utc_now()
    report = Report()
    stop = anyio.Event()  # set by the first signal
    async with connected(console, config.registries_in_use) as transport:
        state = StateFile(config.cache_dir, transport.machine.log)
        state.load(may_write=kind != "plan", is_needed=config.has_ages)
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
        if references is None:
            act = partial(work.sync, stop)
        else:
            act = partial(work.copy, config.mappings[0], *references, stop)
        signals = await carry_out(act, console, work.scheduler, stop)
    elapsed = anyio.current_time() - start

    if report.interrupted:
        console.log("warning", "interrupted", report.undone_text())
    if kind == "sync":
        console.print_summary(report, elapsed)
    if console.writes_json:
        console.print_document(report_document(report, started_at, elapsed, transport))
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


# Listing tags.


async def list_tags(
    registry: Registry, repository: str, rules: Sequence[TagRule], console: Console
) -> int:
    """Print the tags of a repository that at least one rule selects. Returns the exit status.

    Every other tag is logged with the reason why the first rule drops it.
    """
    async with connected(console, [registry]) as transport:
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


# Auditing.


async def audit(
    config: Config,
    console: Console,
    *,
    reads_blobs: bool,
    receipt_path: str | None,
    lock: Lock | None,
) -> int:
    """Check that targets hold the images that a configuration selects. Returns the exit status.

    With `reads_blobs`, the bytes of all blobs at the targets are downloaded and checked. A receipt
    lists every manifest and blob that was found. It is written to `receipt_path`, unless that is
    None or something could not be checked. With a lock, no source is contacted: the lock has the
    expected digests and artifacts. After a signal, the exit status is 128 and the signal's number.
    """
    from _regsync.audit import Audit

    start = anyio.current_time()
    started_at = utc_now()

    def show(result: Finding | Outcome) -> None:
        if isinstance(result, Outcome):  # an image that could not be checked
            console.show_outcome(result)
        elif not console.writes_json:
            console.print_line(result.line())

    async with connected(console, config.registries_in_use) as transport:
        with reading_state(config, transport, is_needed=config.has_ages) as knowledge:
            work = Audit(transport, config, knowledge, show, reads_blobs=reads_blobs, lock=lock)
            signals = await carry_out(work.run, console, work)
    elapsed = anyio.current_time() - start
    if work.interrupted:
        console.log("warning", "interrupted", work.undone_text())
    elif receipt_path is not None and work.failures:
        # A new receipt would lack what these images have, so that the next disk for a closed network
        # would contain it again, although the registry in that network has it.
        text = f"{printable(receipt_path)} is left as it was: not everything could be checked"
        remedy = "run it again when every source can be read and its disk is mounted"
        console.log("error", "receipt_kept", text, hint=remedy)
    console.print_summary(work, elapsed)
    if console.writes_json:
        console.print_document(report_document(work, started_at, elapsed, transport))
    if work.interrupted:
        return 128 + signals[0]
    if receipt_path is not None and not work.failures:
        replace_lines(receipt_path, work.receipt())
    return work.exit_status()


# Locking.


def open_lock(path: str) -> Lock | None:
    """Read a lock file. Returns None if it does not exist, and raises ConfigError if it is invalid."""
    from _regsync.pins import read_lock

    try:
        with open(path, "rb") as stream:
            return read_lock(stream, path)
    except FileNotFoundError:
        return None
    except OSError as error:
        reason = reason_of(error)
        raise ConfigError(f"{printable(path)} cannot be read: {reason}") from error


def select_mappings(names: Sequence[str], config: Config) -> Sequence[MappingRule]:
    """Return the mappings whose `from` is named, or all mappings if `names` is empty.

    Raises ConfigError for a name that no mapping has.
    """
    from _regsync.pins import source_key

    froms = {mapping.source_repository for mapping in config.mappings}
    for name in names:
        if name not in froms:
            raise ConfigError(
                f"--only {printable(name)}: no mapping has this repository as `from`",
                hint="write the repository as the mapping's `from` has it",
            )
    # A repository may have another name in another mapping, and all its lines are made together.
    repositories = {
        source_key(mapping).repository
        for mapping in config.mappings
        if not names or mapping.source_repository in names
    }
    return [each for each in config.mappings if source_key(each).repository in repositories]


async def update_lock(
    path: str,
    config: Config,
    console: Console,
    *,
    only: Sequence[str],
    recheck: bool,
    is_check: bool,
) -> int:
    """Resolve a new lock, write it, and show how it differs from the old one.

    With `only` the mappings are resolved whose `from` it names, and the lines of other repositories
    are kept. With `recheck` artifacts are looked up of images whose digest has not changed, too.
    With `is_check` the file is not written.

    Returns the exit status. That of a check is 0 if the lock is what the sources have, 1 if it
    differs, and 2 if something could not be looked up. After a signal it is 128 and the signal's
    number.
    """
    from _regsync.locking import Locking
    from _regsync.pins import Lock, compare, lines_of

    mappings = select_mappings(only, config)
    old_lock = open_lock(path) or Lock()
    async with connected(console, [rule.source for rule in mappings]) as transport:
        # The state has facts about the sources, from their logins to their referrers, which save
        # requests.
        with reading_state(config, transport) as knowledge:
            discovery = Discovery(transport, knowledge, reads_only=True)
            new = Locking(
                transport,
                discovery,
                Referrers(discovery, knowledge),
                old_lock,
                mappings,
                keeps_others=bool(only),
                recheck=recheck,
            )
            signals = await carry_out(new.resolve, console, new)
    if signals:
        return 128 + signals[0]

    # Logged before the file is replaced, which may fail.
    for name, error in new.failures.items():
        text = f"failed {name}: {error.code}: {error}"
        console.log("error", "lock_failed", text, code=error.code, hint=error.hint)
    should_write = new.lock != old_lock and not is_check
    if should_write:
        replace_lines(path, lines_of(new.lock))
    changes = compare(old_lock, new.lock)
    if console.writes_json:
        console.print_document(_document(path, new, changes, is_written=should_write))
    else:
        console.print_lines(map(_change_line, changes))
        if new.have_rules_changed:
            console.print_line("changed the mappings, or their rules")

    if not is_check:
        codes = [error.code for error in new.failures.values()]
        return exit_status_for(codes, has_all_failed=not new.lines)
    if new.failures:
        return 2
    return 1 if changes or new.have_rules_changed else 0


def _document(
    path: str, new: Locking, changes: Iterable[Change], *, is_written: bool
) -> dict[str, object]:
    """Return the JSON document."""
    return {
        "schema": 1,
        "lock": path,
        "written": is_written,
        "locked": len(new.lock),
        "changes": [
            {
                "kind": change.kind,
                "source": change.image.name,
                "platforms": list(change.image.source.platforms) or None,
                "before": change.before,
                "after": change.after,
            }
            for change in changes
        ],
        "rules_changed": new.have_rules_changed,
        "failed": [
            {"source": name, "error": error_json(error)} for name, error in new.failures.items()
        ],
        "requests": {host: dict(actions) for host, actions in new.transport.requests.items()},
    }


def _change_line(change: Change) -> str:
    """Format a change: its kind, the image, and one digest, or both if it has moved."""
    digests = dict.fromkeys(filter(None, (change.before, change.after)))
    return f"{change.kind} {change.image} {' -> '.join(digests)}"


# Files.


@contextmanager
def reading_state(
    config: Config, transport: Transport, *, is_needed: bool = False
) -> Iterator[Knowledge]:
    """Yield what earlier runs have learnt. Nothing is saved.

    Raises ConfigError if the state `is_needed` and cannot be read.
    """
    with closing(StateFile(config.cache_dir, transport.machine.log)) as state:
        state.load(may_write=False, is_needed=is_needed)
        yield Knowledge(state, now=edge.current().wall, ttl=config.cache_ttl)


def replace_lines(path: str, lines: Iterable[str]) -> None:
    """Replace a text file, with the permissions that it has. Raises RegsyncError if that fails.

    Everybody may read a new file. What is no file, such as a pipe or `/dev/null`, stays and is
    written to.
    """
    written = (f"{line}\n".encode(errors="surrogateescape") for line in lines)
    real_path = os.path.realpath(path)  # replace the target of a symbolic link, not the link
    mode = 0o644
    try:
        if os.path.exists(path) and not os.path.isfile(path):
            with open(path, "wb") as stream:
                stream.writelines(written)
            return
        with suppress(FileNotFoundError):
            mode = os.stat(real_path).st_mode & 0o777
        with replacing(real_path, mode) as descriptor, open(descriptor, "wb") as stream:
            stream.writelines(written)
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        reason = reason_of(error)
        raise RegsyncError(
            f"{printable(path)} was not written and is unchanged: {reason}"
        ) from error

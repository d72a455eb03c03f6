"""`regsync lock`: a new lock is resolved, compared with the old one, written and shown.

Owns: the lock's file, what is shown of a new lock, the exit status.
May not know: arguments, how a digest is found.
Invariants: the file is the old one or the new one, whatever happens. A file that somebody else has
changed meanwhile is not replaced.
Follows: docs/design.md section 12 ("Lock").
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import NamedTuple

import anyio

from _regsync.app.console import Console
from _regsync.app.environment import connect
from _regsync.app.progress import show_progress
from _regsync.config.model import Config, MappingRule
from _regsync.errors import ConfigError, RegsyncError
from _regsync.files import Stamp, replacing, stamp_of
from _regsync.registry.transport import Transport
from _regsync.state.database import StateFile
from _regsync.state.knowledge import Knowledge
from _regsync.state.seen import first_seen_for
from _regsync.sync.discovery import Discovery
from _regsync.sync.lockfile import (
    Change,
    Lock,
    LockedImage,
    compare,
    lines_of,
    read_lock,
    source_key,
)
from _regsync.sync.locking import Locking, NewLock
from _regsync.sync.referrers import Referrers
from _regsync.sync.report import error_json, status_of
from _regsync.text import printable, reason_of

# A table for a pull request has so many rows: GitHub takes 65,536 characters.
MOST_ROWS = 250

SHORT_DIGEST = len("sha256:") + 12

# The permissions of a new lock: it goes into a repository.
MODE = 0o644

Requests = Mapping[str, Counter[str]]  # by host and action


class LockOptions(NamedTuple):
    """What a command asks for."""

    # Those that are resolved.
    mappings: Sequence[MappingRule]
    # Whether lines of other repositories stay.
    keeps_others: bool
    # Whether artifacts of images that have not moved are looked for.
    recheck: bool
    writes: bool
    # Whether changes are shown in Markdown.
    as_table: bool


class LockFile(NamedTuple):
    """The file of a lock as it was read."""

    path: str
    # None where there is no file.
    stamp: Stamp | None
    lock: Lock


# The file.


def open_lock(path: str) -> LockFile:
    """Read the file of a lock, which need not be there; ConfigError for one that is no lock."""
    try:
        with open(path, "rb") as stream:
            stamp = stamp_of(stream.fileno())
            return LockFile(path, stamp, read_lock(stream, path))
    except FileNotFoundError:
        return LockFile(path, None, Lock())
    except OSError as error:
        reason = reason_of(error)
        raise ConfigError(f"{printable(path)} cannot be read: {reason}") from error


def replace_lock(file: LockFile, lock: Lock) -> None:
    """Replace the file. RegsyncError where it cannot be written, or is not the one that was read."""
    shown = printable(file.path)
    # A link stays one: what it leads to is replaced.
    path = os.path.realpath(file.path)
    try:
        stamp: Stamp | None = None
        mode = MODE
        if os.path.exists(path):
            stamp = stamp_of(path)
            mode = os.stat(path).st_mode & 0o777
        if stamp != file.stamp:
            text = f"{shown} was not written: something else changed it in the meantime"
            raise RegsyncError(text, hint="run `regsync lock` again")

        with replacing(path, mode) as descriptor, open(descriptor, "wb") as stream:
            stream.writelines(f"{line}\n".encode() for line in lines_of(lock))
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        reason = reason_of(error)
        raise RegsyncError(f"{shown} was not written and is unchanged: {reason}") from error


# The answers.


async def update_lock(
    file: LockFile, config: Config, options: LockOptions, console: Console
) -> int:
    """Resolve a new lock, write it and show how it differs; return the exit status."""
    with closing(connect(console)) as transport:
        new = await resolve_lock(transport, file.lock, config, options, console)

    is_written = options.writes and new.is_writable and new.lock != file.lock
    log_failures(file, new, console)
    if is_written:
        replace_lock(file, new.lock)
    if console.writes_json:
        console.print_document(lock_document(file, new, transport.requests, is_written=is_written))
    else:
        print_changes(file, new, console, as_table=options.as_table)
    return exit_status(new)


async def resolve_lock(
    transport: Transport, old: Lock, config: Config, options: LockOptions, console: Console
) -> NewLock:
    """Ask sources for a new lock."""
    # An unusable file of a registry stops all before any request.
    for registry in dict.fromkeys(rule.source for rule in options.mappings):
        transport.prepare(registry)

    # What earlier runs learnt of the sources' logins and referrers saves questions.
    state = StateFile(config.cache_dir, transport.machine.log)
    state.load(may_write=False)
    try:
        wall = transport.machine.wall
        knowledge = Knowledge(state, now=wall, ttl=config.cache_ttl)
        discovery = Discovery(transport, knowledge, reads_only=True)
        referrers = Referrers(discovery, knowledge, wall, has_state=False)
        locking = Locking(
            transport,
            discovery,
            referrers,
            old,
            options.mappings,
            int(wall()),
            keeps_others=options.keeps_others,
            recheck=options.recheck,
            first_seen=first_seen_for(
                config, wall, transport.machine.log, may_write=False, known={}
            ),
        )
        async with anyio.create_task_group() as tasks:
            if console.has_display or console.has_heartbeat:
                tasks.start_soon(show_progress, console, locking)
            new = await locking.resolve()
            tasks.cancel_scope.cancel()
    finally:
        state.close()
    return new


def mappings_from(names: Sequence[str], config: Config) -> Sequence[MappingRule]:
    """Return the mappings from repositories with these names, as `from` has them or as a lock does;
    all without a name. ConfigError for a name that no mapping has.
    """
    if not names:
        return config.mappings
    mappings_of = defaultdict[str, list[MappingRule]](list)
    for rule in config.mappings:
        for name in {rule.source_repository, source_key(rule).repository}:
            mappings_of[name].append(rule)

    chosen = dict[int, MappingRule]()
    for name in names:
        if name not in mappings_of:
            raise ConfigError(
                f"--only {printable(name)}: no mapping has this repository as `from`",
                hint="write the repository as the mapping's `from` has it",
            )
        chosen.update((rule.index, rule) for rule in mappings_of[name])
    return [chosen[index] for index in sorted(chosen)]


# What is shown.


def log_failures(file: LockFile, new: NewLock, console: Console) -> None:
    """Log what failed, and what that means for the file."""
    for failure in new.failures:
        error = failure.error
        text = f"failed {failure.name}: {error.code}: {error}"
        console.log("error", "lock_failed", text, code=error.code, hint=error.hint)
    for failure in new.failed_mappings:
        if failure.keeps_lines:
            text = f"{failure.name}: keeps its old lines in the lock"
        else:
            text = f"{printable(file.path)} was not written: it would lack {failure.name}"
        console.log("warning", "lock_incomplete", text)


def print_changes(file: LockFile, new: NewLock, console: Console, *, as_table: bool) -> None:
    """Show how a new lock differs; nothing where it does not."""
    changes = compare(file.lock, new.lock)
    if as_table:
        console.print_lines(markdown_table(changes))
        return
    console.print_lines(map(change_line, changes))
    if file.lock.mappings != new.lock.mappings:
        console.print_line("changed the mappings, or their rules")


def lock_document(
    file: LockFile, new: NewLock, requests: Requests, *, is_written: bool
) -> dict[str, object]:
    """Return what `--json` writes."""
    return {
        "schema": 1,
        "lock": file.path,
        "written": is_written,
        "locked": len(new.lock),
        "changes": [change_json(change) for change in compare(file.lock, new.lock)],
        "rules_changed": file.lock.mappings != new.lock.mappings,
        "failed": [
            {
                "source": failure.name,
                "keeps_lines": failure.keeps_lines,
                "error": error_json(failure.error),
            }
            for failure in new.failures
        ],
        "requests": {host: dict(actions) for host, actions in requests.items()},
    }


def exit_status(new: NewLock) -> int:
    codes = [failure.error.code for failure in new.failures]
    return status_of(codes, all_failed=not new.resolved)


def change_line(change: Change) -> str:
    """Return what a user reads of a change."""
    what = f"{change.kind} {change.image}"
    if change.before is None or change.after is None:
        return f"{what} {change.image.digest}"
    if change.kind == "moved":
        return f"{what} {change.before.digest} -> {change.after.digest}"
    return f"{what} {change.after.digest} ({', '.join(differences(change.before, change.after))})"


def differences(before: LockedImage, after: LockedImage) -> Iterator[str]:
    """Say what differs between two lines with one digest."""
    if before.pushed != after.pushed:
        yield f"at targets {before.digest_at_target} -> {after.digest_at_target}"
    came = len({*after.artifacts} - {*before.artifacts})
    gone = len({*before.artifacts} - {*after.artifacts})
    if came or gone:
        yield f"artifacts: {came} came, {gone} gone"


def markdown_table(changes: Sequence[Change]) -> Iterator[str]:
    """Give the lines of a table in Markdown; none without a change."""
    if not changes:
        return
    counts = Counter(change.kind for change in changes)
    yield ", ".join(f"{counts[kind]} {kind}" for kind in counts)
    yield ""
    yield "| | image | was | is | artifacts |"
    yield "|---|---|---|---|---|"
    for change in changes[:MOST_ROWS]:
        before = change.before
        after = change.after
        count = "" if after is None else str(len(after.artifacts))
        cells = (change.kind, f"`{change.image}`", digest_cell(before), digest_cell(after), count)
        yield f"| {' | '.join(cells)} |"
    if len(changes) > MOST_ROWS:
        yield ""
        yield f"and {len(changes) - MOST_ROWS} more"


def digest_cell(image: LockedImage | None) -> str:
    return "" if image is None else f"`{image.digest[:SHORT_DIGEST]}`"


def change_json(change: Change) -> dict[str, object]:
    """Return a change's entry in `changes`."""
    platforms = change.image.source.platforms
    return {
        "kind": change.kind,
        "source": change.image.name,
        "platforms": None if platforms is None else list(platforms),
        "before": line_json(change.before),
        "after": line_json(change.after),
    }


def line_json(image: LockedImage | None) -> dict[str, object] | None:
    if image is None:
        return None
    return {
        "digest": image.digest,
        "pushed": image.pushed,
        "artifacts": [artifact.digest for artifact in image.artifacts],
    }

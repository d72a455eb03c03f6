"""Run `regsync lock`: resolve a new lock, write its file, and show how it differs from the old one.

Invariants: the file is replaced atomically. A file that has changed since it was read is not replaced.
Follows: docs/design.md section 12 ("Lock").
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import anyio

from _regsync.app.console import Console
from _regsync.app.environment import connected
from _regsync.app.progress import show_progress
from _regsync.config import Config, MappingRule
from _regsync.errors import ConfigError, RegsyncError
from _regsync.files import replacing
from _regsync.locking import Locking, NewLock
from _regsync.pins import Change, Lock, LockedImage, lines_of, read_lock, source_key
from _regsync.registry.runs import Transport
from _regsync.state import Knowledge, StateFile, first_seen_for
from _regsync.sync.artifacts import Referrers
from _regsync.sync.discovery import Discovery
from _regsync.sync.report import error_json, exit_status_for
from _regsync.text import printable, reason_of

# The permissions of a new lock file. The file is meant to be committed, so everybody may read it.
_MODE = 0o644


class LockOptions(NamedTuple):
    """The options of `regsync lock`."""

    mappings: Sequence[MappingRule]  # the mappings to resolve
    keeps_others: bool  # whether lines of repositories outside `mappings` are kept
    recheck: bool  # whether to look up artifacts of images whose digest has not changed
    is_check: bool  # whether the lock is only compared, and its file is not written


class LockFile(NamedTuple):
    """A lock file as it was read."""

    path: str
    content: bytes | None  # None if the file does not exist
    lock: Lock  # empty if the file does not exist


# The file.


def open_lock(path: str) -> LockFile:
    """Read a lock file, which need not exist. Raises ConfigError if it is not a valid lock."""
    try:
        content = _read_file(path)
    except OSError as error:
        reason = reason_of(error)
        raise ConfigError(f"{printable(path)} cannot be read: {reason}") from error
    lock = Lock() if content is None else read_lock(content.splitlines(), path)
    return LockFile(path, content, lock)


def _read_file(path: str) -> bytes | None:
    try:
        with open(path, "rb") as stream:
            return stream.read()
    except FileNotFoundError:
        return None


def replace_lock(file: LockFile, lock: Lock) -> None:
    """Write a new lock to the file.

    Raises RegsyncError if the file cannot be written or has changed since it was read.
    """
    shown_path = printable(file.path)
    path = os.path.realpath(file.path)  # replace the target of a symbolic link, not the link
    try:
        content = _read_file(path)
        if content != file.content:
            text = f"{shown_path} was not written: something else changed it in the meantime"
            raise RegsyncError(text, hint="run `regsync lock` again")

        # Keep the permissions of a file that exists.
        mode = _MODE if content is None else os.stat(path).st_mode & 0o777
        with replacing(path, mode) as descriptor, open(descriptor, "wb") as stream:
            stream.writelines(f"{line}\n".encode() for line in lines_of(lock))
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        reason = reason_of(error)
        raise RegsyncError(f"{shown_path} was not written and is unchanged: {reason}") from error


# The command.


def select_mappings(names: Sequence[str], config: Config) -> Sequence[MappingRule]:
    """Return the mappings whose source repository is named, or all mappings if `names` is empty.

    A name is written as in the mapping's `from` or as in a lock. Raises ConfigError for a name that
    no mapping has.
    """

    def is_named(mapping: MappingRule, name: str) -> bool:
        return name in (mapping.source_repository, source_key(mapping).repository)

    for name in names:
        if not any(is_named(mapping, name) for mapping in config.mappings):
            raise ConfigError(
                f"--only {printable(name)}: no mapping has this repository as `from`",
                hint="write the repository as the mapping's `from` has it",
            )
    if not names:
        return config.mappings
    return [each for each in config.mappings if any(is_named(each, name) for name in names)]


async def update_lock(
    file: LockFile, config: Config, options: LockOptions, console: Console
) -> int:
    """Resolve a new lock, write it, and show how it differs from the old one.

    Returns the exit status. That of a check is 0 if the lock is what the sources have, 1 if it
    differs, and 2 if something could not be looked up.
    """
    async with connected(console) as transport:
        new = await _resolve(transport, file.lock, config, options, console)

    # Logged before the file is replaced, which may fail.
    _log_failures(file, new, console, is_check=options.is_check)
    has_changed = new.lock != file.lock
    should_write = new.is_writable and has_changed and not options.is_check
    if should_write:
        replace_lock(file, new.lock)
    changes = new.changes_from(file.lock)
    have_rules_changed = file.lock.mappings != new.lock.mappings
    if console.writes_json:
        document = {
            "schema": 1,
            "lock": file.path,
            "written": should_write,
            "locked": len(new.lock),
            "changes": [_change_json(change) for change in changes],
            "rules_changed": have_rules_changed,
            "failed": [
                {
                    "source": failure.name,
                    "keeps_lines": failure.keeps_lines,
                    "error": error_json(failure.error),
                }
                for failure in new.failures
            ],
            "requests": {host: dict(actions) for host, actions in transport.requests.items()},
        }
        console.print_document(document)
    else:
        console.print_lines(map(_change_line, changes))
        if have_rules_changed:
            console.print_line("changed the mappings, or their rules")

    if not options.is_check:
        codes = [failure.error.code for failure in new.failures]
        return exit_status_for(codes, has_all_failed=not new.resolved_count)
    if new.failures:
        return 2
    return 1 if changes or have_rules_changed else 0


async def _resolve(
    transport: Transport, old: Lock, config: Config, options: LockOptions, console: Console
) -> NewLock:
    """Query the sources of the mappings for a new lock, and show the progress. Writes no file."""
    # Read the certificate files of all registries first, so that an unusable file ends the command
    # before the first request.
    for registry in dict.fromkeys(rule.source for rule in options.mappings):
        transport.dialer.prepare(registry)

    # The state has facts about the sources, from their logins to their referrers, which save
    # requests.
    state = StateFile(config.cache_dir, transport.machine.log)
    state.load(may_write=False)
    try:
        wall = transport.machine.wall
        knowledge = Knowledge(state, now=wall, ttl=config.cache_ttl)
        discovery = Discovery(transport, knowledge, reads_only=True)
        locking = Locking(
            transport,
            discovery,
            Referrers(discovery, knowledge, wall, has_state=False),
            old,
            options.mappings,
            int(wall()),
            keeps_others=options.keeps_others,
            recheck=options.recheck,
            # The lock itself keeps the times. With `locked_times` they need no directory.
            first_seen=first_seen_for(config, state, wall, may_write=False, locked_times={}),
        )
        async with anyio.create_task_group() as tasks:
            if console.shows_progress:
                tasks.start_soon(show_progress, console, locking)
            new = await locking.resolve()
            tasks.cancel_scope.cancel()  # ends `show_progress`
    finally:
        state.close()
    return new


# Output.


def _log_failures(file: LockFile, new: NewLock, console: Console, *, is_check: bool) -> None:
    """Log each failure and, unless the lock is only checked, what a failed mapping does to it."""
    for failure in new.failures:
        error = failure.error
        text = f"failed {failure.name}: {error.code}: {error}"
        console.log("error", "lock_failed", text, code=error.code, hint=error.hint)
    for failure in new.failures:
        if is_check or failure.repository is None:
            continue
        text = f"{failure.name}: keeps its old lines in the lock"
        if not failure.keeps_lines:
            text = f"{printable(file.path)} was not written: it would lack {failure.name}"
        console.log("warning", "lock_incomplete", text)


def _change_line(change: Change) -> str:
    """Format a change: its kind, the image, and the digests or the differences."""
    before = change.before
    after = change.after
    subject = f"{change.kind} {change.image}"
    if before is None or after is None:
        return f"{subject} {change.image.digest}"
    if change.kind == "moved":
        return f"{subject} {before.digest} -> {after.digest}"
    return f"{subject} {after.digest} ({', '.join(_differences(before, after))})"


def _differences(before: LockedImage, after: LockedImage) -> Iterator[str]:
    """Describe the differences between two lines whose digest at the source is the same."""
    if before.pushed != after.pushed:
        yield f"at targets {before.digest_at_target} -> {after.digest_at_target}"
    added = len({*after.artifacts} - {*before.artifacts})
    removed = len({*before.artifacts} - {*after.artifacts})
    if added or removed:
        yield f"artifacts: {added} came, {removed} gone"


def _change_json(change: Change) -> dict[str, object]:
    """Return the entry of a change in `changes` of the JSON document."""
    platforms = change.image.source.platforms
    return {
        "kind": change.kind,
        "source": change.image.name,
        "platforms": None if platforms is None else list(platforms),
        "before": _line_json(change.before),
        "after": _line_json(change.after),
    }


def _line_json(image: LockedImage | None) -> dict[str, object] | None:
    if image is None:
        return None
    return {
        "digest": image.digest,
        "pushed": image.pushed,
        "artifacts": [artifact.digest for artifact in image.artifacts],
    }

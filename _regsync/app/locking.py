"""Run `regsync lock`: resolve a new lock, write its file, and show how it differs from the old one.

Invariants: the file is replaced atomically. A file that has changed since it was read is not replaced.
Follows: docs/design.md section 12 ("Lock").
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import anyio

from _regsync import edge
from _regsync.app.console import Console
from _regsync.app.environment import connected
from _regsync.app.progress import show_progress
from _regsync.config import Config, MappingRule
from _regsync.errors import ConfigError, RegsyncError
from _regsync.files import replacing
from _regsync.locking import Locking
from _regsync.pins import Change, Lock, LockedImage, lines_of, read_lock, source_key
from _regsync.state import FirstSeen, Knowledge, StateFile
from _regsync.sync.artifacts import Referrers
from _regsync.sync.discovery import Discovery
from _regsync.sync.report import error_json, exit_status_for
from _regsync.text import printable, reason_of

# The permissions of a new lock file. The file is meant to be committed, so everybody may read it.
_MODE = 0o644


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

    def names_of(mapping: MappingRule) -> set[str]:
        return {mapping.source_repository, source_key(mapping).repository}

    for name in names:
        if not any(name in names_of(each) for each in config.mappings):
            raise ConfigError(
                f"--only {printable(name)}: no mapping has this repository as `from`",
                hint="write the repository as the mapping's `from` has it",
            )
    if not names:
        return config.mappings
    return [each for each in config.mappings if not names_of(each).isdisjoint(names)]


async def update_lock(
    file: LockFile,
    config: Config,
    mappings: Sequence[MappingRule],
    console: Console,
    *,
    keeps_others: bool,
    recheck: bool,
    is_check: bool,
) -> int:
    """Resolve a new lock of `mappings`, write it, and show how it differs from the old one.

    With `keeps_others` lines of repositories outside `mappings` are kept. With `recheck` artifacts
    are looked up of images whose digest has not changed, too. With `is_check` the file is not
    written.

    Returns the exit status. That of a check is 0 if the lock is what the sources have, 1 if it
    differs, and 2 if something could not be looked up.
    """
    async with connected(console) as transport:
        # Read the certificate files of all registries first, so that an unusable file ends the
        # command before the first request.
        for registry in dict.fromkeys(rule.source for rule in mappings):
            transport.dialer.prepare(registry)
        # The state has facts about the sources, from their logins to their referrers, which save
        # requests.
        state = StateFile(config.cache_dir, transport.machine.log)
        state.load(may_write=False)
        try:
            wall = edge.current().wall
            knowledge = Knowledge(state, now=wall, ttl=config.cache_ttl)
            discovery = Discovery(transport, knowledge, reads_only=True)
            new = Locking(
                transport,
                discovery,
                Referrers(discovery, knowledge, wall, has_state=False),
                file.lock,
                mappings,
                FirstSeen(state, wall, file.lock.first_seen_times()),
                keeps_others=keeps_others,
                recheck=recheck,
            )
            async with anyio.create_task_group() as tasks:
                if console.shows_progress:
                    tasks.start_soon(show_progress, console, new)
                await new.resolve()
                tasks.cancel_scope.cancel()  # ends `show_progress`
        finally:
            state.close()

    # Logged before the file is replaced, which may fail.
    _log_failures(file, new, console, is_check=is_check)
    should_write = new.is_writable and new.lock != file.lock and not is_check
    if should_write:
        replace_lock(file, new.lock)
    changes = new.changes()
    if console.writes_json:
        console.print_document(_document(file, new, changes, is_written=should_write))
    else:
        console.print_lines(map(_change_line, changes))
        if new.have_rules_changed:
            console.print_line("changed the mappings, or their rules")

    if not is_check:
        codes = [failure.error.code for failure in new.failures.values()]
        return exit_status_for(codes, has_all_failed=not new.images_resolved)
    if new.failures:
        return 2
    return 1 if changes or new.have_rules_changed else 0


# Output.


def _log_failures(file: LockFile, new: Locking, console: Console, *, is_check: bool) -> None:
    """Log each failure and, unless the lock is only checked, what a failed mapping does to it."""
    for failure in new.failures.values():
        error = failure.error
        text = f"failed {failure.name}: {error.code}: {error}"
        console.log("error", "lock_failed", text, code=error.code, hint=error.hint)
        if is_check or not failure.repository:
            continue
        text = f"{failure.name}: keeps its old lines in the lock"
        if not failure.keeps_lines:
            text = f"{printable(file.path)} was not written: it would lack {failure.name}"
        console.log("warning", "lock_incomplete", text)


def _document(
    file: LockFile, new: Locking, changes: Iterable[Change], *, is_written: bool
) -> dict[str, object]:
    """Return the JSON document."""
    return {
        "schema": 1,
        "lock": file.path,
        "written": is_written,
        "locked": len(new.lock),
        "changes": [
            {
                "kind": change.kind,
                "source": change.image.name,
                "platforms": list(change.image.source.platforms) or None,
                "before": _line_json(change.before),
                "after": _line_json(change.after),
            }
            for change in changes
        ],
        "rules_changed": new.have_rules_changed,
        "failed": [
            {
                "source": failure.name,
                "keeps_lines": failure.keeps_lines,
                "error": error_json(failure.error),
            }
            for failure in new.failures.values()
        ],
        "requests": {host: dict(actions) for host, actions in new.transport.requests.items()},
    }


def _change_line(change: Change) -> str:
    """Format a change: its kind, the image, and the digests or the differences."""
    kind, image, before, after = change
    subject = f"{kind} {image}"
    if before is None or after is None:
        return f"{subject} {image.digest}"
    if kind == "moved":
        return f"{subject} {before.digest} -> {after.digest}"
    differences = list[str]()
    if before.pushed != after.pushed:
        differences.append(f"at targets {before.digest_at_target} -> {after.digest_at_target}")
    added = len({*after.artifacts} - {*before.artifacts})
    removed = len({*before.artifacts} - {*after.artifacts})
    if added or removed:
        differences.append(f"artifacts: {added} came, {removed} gone")
    return f"{subject} {after.digest} ({', '.join(differences)})"


def _line_json(image: LockedImage | None) -> dict[str, object] | None:
    if image is None:
        return None
    return {
        "digest": image.digest,
        "pushed": image.pushed or None,
        "artifacts": [artifact.digest for artifact in image.artifacts],
    }

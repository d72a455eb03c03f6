"""Run `regsync lock`: resolve a new lock, write its file, and show how it differs from the old one.

Invariants: the file is replaced atomically: of two commands that write it, the last one wins.
Follows: docs/design.md section 12 ("Lock").
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence

import anyio

from _regsync import edge
from _regsync.app.console import Console
from _regsync.app.environment import connected
from _regsync.app.progress import show_progress
from _regsync.config import Config, MappingRule
from _regsync.errors import ConfigError, RegsyncError
from _regsync.files import replacing
from _regsync.locking import Locking
from _regsync.pins import Change, Lock, compare, lines_of, read_lock, source_key
from _regsync.state import Knowledge, StateFile
from _regsync.sync.artifacts import Referrers
from _regsync.sync.discovery import Discovery
from _regsync.sync.report import error_json, exit_status_for
from _regsync.text import printable, reason_of

# The permissions of a new lock file. The file is meant to be committed, so everybody may read it.
_MODE = 0o644


# The file.


def open_lock(path: str) -> Lock | None:
    """Read a lock file. Returns None if it does not exist, and raises ConfigError if it is invalid."""
    try:
        with open(path, "rb") as stream:
            return read_lock(stream, path)
    except FileNotFoundError:
        return None
    except OSError as error:
        reason = reason_of(error)
        raise ConfigError(f"{printable(path)} cannot be read: {reason}") from error


def replace_lock(path: str, lock: Lock) -> None:
    """Write a lock to a file. Raises RegsyncError if the file cannot be written."""
    real_path = os.path.realpath(path)  # replace the target of a symbolic link, not the link
    mode = _MODE
    try:
        with contextlib.suppress(FileNotFoundError):
            mode = os.stat(real_path).st_mode & 0o777  # keep the permissions of a file that exists
        with replacing(real_path, mode) as descriptor, open(descriptor, "wb") as stream:
            stream.writelines(f"{line}\n".encode() for line in lines_of(lock))
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        reason = reason_of(error)
        raise RegsyncError(
            f"{printable(path)} was not written and is unchanged: {reason}"
        ) from error


# The command.


def select_mappings(names: Sequence[str], config: Config) -> Sequence[MappingRule]:
    """Return the mappings whose `from` is named, or all mappings if `names` is empty.

    Raises ConfigError for a name that no mapping has.
    """
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
    old_lock = open_lock(path) or Lock()
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
                old_lock,
                mappings,
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
    for name, error in new.failures.items():
        text = f"failed {name}: {error.code}: {error}"
        console.log("error", "lock_failed", text, code=error.code, hint=error.hint)
    should_write = new.lock != old_lock and not is_check
    if should_write:
        replace_lock(path, new.lock)
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


# Output.


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

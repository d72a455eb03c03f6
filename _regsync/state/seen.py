"""The times at which digests were first seen at their sources: one file.

Owns: `seen.jsonl`; which time counts if clocks disagree; which entries are removed.
May not know: registries, how `min_age` holds a digest back.
Invariants: a lost or doubtful time makes a digest younger, never older. The file is replaced as a
whole, after the new file has been synced to disk.
Follows: docs/design.md section 12 ("Age").

The age of a digest, which `min_age` requires, is counted from these times. They are not a cache,
because registries do not report them.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import anyio

from _regsync.config import Config
from _regsync.errors import ConfigError
from _regsync.files import WRITE_FLAGS, Stamp, lock, open_safely, replacing, stamp_of, sync_folder
from _regsync.state.archive import RepositoryKey
from _regsync.text import json_object, parse_time, printable, reason_of, time_text

_VERSION = 1  # of the file's format
_DAY = 86400  # seconds

# An entry is removed if its digest was last seen longer ago than this. `last_seen` is updated once
# a day, so the last day is added to the 90 days that are promised.
_KEPT_SECONDS = 91 * _DAY

# Minimum seconds between two saves within a run. A killed run loses the entries of this time.
_SAVE_SECONDS = 60.0
# The maximum share of the time that saves take. If a save is slow, the next one is later.
_SAVE_SHARE = 0.05

# How often a save tries to lock the file, and the seconds between two attempts.
_LOCK_ATTEMPTS = 40
_LOCK_PAUSE = 0.05

# Maximum size of the file in bytes: a million entries.
_LARGEST_FILE = 256 * 1024 * 1024


class SeenKey(NamedTuple):
    """A digest in a repository of a source."""

    where: RepositoryKey
    digest: str


@dataclass(slots=True)
class Sighting:
    """When a digest was first and last seen at its source, in seconds since 1970."""

    first_seen: int
    last_seen: int
    # When the age begins again from zero: the first time by a clock that was ahead of the clock of
    # `first_seen`. It is unknown which clock was right, and a doubtful time must make the digest
    # younger.
    restarts_at: int | None = None

    def effective_first_seen(self, now: int) -> int | None:
        """Return the time from which the age is counted: the later one that is not in the future.

        Returns None if both times are in the future.
        """
        times = (self.first_seen, self.restarts_at)
        past = [time for time in times if time is not None and time <= now]
        return max(past, default=None)

    def has_expired(self, now: int) -> bool:
        """Report whether the digest was not seen for so long that its entry is removed."""
        return now - self.last_seen > _KEPT_SECONDS

    def merge(self, other: Sighting) -> Sighting:
        """Return the combination of two processes' sightings of one digest."""
        restarts = [time for time in (self.restarts_at, other.restarts_at) if time is not None]
        return Sighting(
            first_seen=min(self.first_seen, other.first_seen),
            last_seen=max(self.last_seen, other.last_seen),
            restarts_at=max(restarts, default=None),
        )


def first_seen_for(
    config: Config,
    now: Callable[[], float],
    log: Callable[[str, str, str], object],
    *,
    may_write: bool = True,
    locked_times: Mapping[SeenKey, int] | None = None,
) -> FirstSeen | None:
    """Load the first-seen times for a configuration. Returns None if no mapping has `min_age`.

    Raises ConfigError if the directory cannot be used. Raises ConfigError too if there is no
    directory and `locked_times` is None, because each run would then hold back every digest.
    """
    aged = next((mapping for mapping in config.mappings if mapping.min_age), None)
    if aged is None:
        return None

    if config.seen_dir is None and locked_times is None:
        raise ConfigError(
            f"mappings[{aged.index}] has `min_age`, but this run keeps nothing for the next one",
            hint="set `cache_dir` in `global` to a directory that stays from run to run (an absolute "
            "one if the configuration comes from standard input), or run from a lock (`--locked`)",
        )
    first_seen = FirstSeen(
        config.seen_dir, now, log, may_write=may_write, locked_times=locked_times
    )
    first_seen.load()
    return first_seen


class FirstSeen:
    """The first-seen times of digests, from earlier runs and from this one.

    `now` returns the time in seconds since 1970. Disk errors after `load` are not raised, but
    logged by `log(level, event, message)`.
    """

    def __init__(
        self,
        directory: str | None,
        now: Callable[[], float],
        log: Callable[[str, str, str], object],
        *,
        may_write: bool = True,
        locked_times: Mapping[SeenKey, int] | None = None,
    ) -> None:
        """Keep the times in `directory`, or only in memory if it is None.

        Without `may_write`, the file is read and never written. `locked_times` are the first-seen
        times of a lock, in seconds since 1970. If a digest has two times, the earlier one counts.
        """
        self._directory = directory
        self._now = now
        self._log = log
        self._may_write = may_write and directory is not None
        self._locked_times: Mapping[SeenKey, int] = locked_times or {}
        self._path = os.path.join(directory or "", "seen.jsonl")

        # Sightings from the file and from this process.
        self._sightings = dict[SeenKey, Sighting]()
        # The stamp of the file when this process last read or wrote it. None before.
        self._stamp: Stamp | None = None
        # The latest time in the file.
        self._latest = 0
        # Whether `_sightings` has entries or times that are not in the file.
        self._has_changed = False

    def record_sighting(self, where: RepositoryKey, digest: str, min_age: float) -> int | None:
        """Record that a digest is seen now. Return until when it is held back because of `min_age`.

        `min_age` is in seconds. The result is in seconds since 1970. Returns None if the digest is
        old enough.
        """
        now = int(self._now())
        key = SeenKey(where, digest)
        first_seen = min(self._record(key, now), self._locked_times.get(key, now))
        held_until = first_seen + int(min_age)
        return held_until if held_until > now else None

    def first_seen_at(self, key: SeenKey) -> int | None:
        """Return when a digest was first seen, in seconds since 1970.

        Returns None if it is unknown.
        """
        sighting = self._sightings.get(key)
        return None if sighting is None else sighting.effective_first_seen(int(self._now()))

    def _record(self, key: SeenKey, now: int) -> int:
        """Record that a digest is seen now. Return when it was first seen, at the latest `now`."""
        sighting = self._sightings.get(key)
        if sighting is None or sighting.has_expired(now):
            # If the file has a later time than now, some clock is wrong, and the digest may be as
            # new as that time.
            sighting = Sighting(first_seen=max(now, self._latest), last_seen=now)
            self._sightings[key] = sighting
            self._has_changed = True
        elif now - sighting.last_seen >= _DAY:
            sighting.last_seen = now
            self._has_changed = True

        first_seen = sighting.effective_first_seen(now)
        if first_seen is None:  # all times are in the future
            sighting.restarts_at = max(sighting.first_seen, sighting.restarts_at or 0)
            sighting.first_seen = now
            first_seen = now
            self._has_changed = True
        return first_seen

    # The file.

    def load(self) -> None:
        """Read the entries that other runs and processes have saved.

        Raises ConfigError if the directory or the file cannot be used.
        """
        if self._directory is None:
            return
        try:
            if self._may_write:
                os.makedirs(self._directory, mode=0o700, exist_ok=True)
                if not os.access(self._directory, os.W_OK | os.X_OK):
                    raise PermissionError(0, "it cannot be written")
            wrong_lines = self._merge_file()
        except OSError as error:
            raise self._unusable(reason_of(error)) from error

        if wrong_lines:
            self._has_changed = True  # so that the next save removes these lines
            text = f"{len(wrong_lines)} lines are not entries, the first is line {wrong_lines[0]}"
            what = "the ages of what they named begin again"
            self._warn(f"{printable(self._path)}: {text}; {what}")

    def refresh(self) -> None:
        """Read the file again. If that fails, log a warning and keep the known times."""
        try:
            self.load()
        except ConfigError as error:
            self._warn(str(error))

    async def save_regularly(self) -> None:
        """Save new times at intervals, until cancelled. Returns at once without `may_write`."""
        pause = _SAVE_SECONDS
        while self._may_write:
            with anyio.move_on_after(pause):
                await anyio.sleep_forever()
            began = anyio.current_time()
            await self.save()
            took = anyio.current_time() - began
            pause = max(_SAVE_SECONDS, took / _SAVE_SHARE)

    async def save(self) -> None:
        """Write all times to the file, together with times that other processes have added to it.

        Does nothing if there are no new times. Disk errors are logged.
        """
        if not self._may_write or not self._has_changed:
            return
        try:
            async with self._locked():
                # First the times of other processes, because the file is replaced as a whole.
                self._merge_file()
                self._write()
        except (OSError, ConfigError) as error:
            text = f"first-seen times are not saved: {reason_of(error)}"
            self._warn(f"{printable(self._path)}: {text}; images are held back for longer")
        else:
            self._has_changed = False

    def _merge_file(self) -> list[int]:
        """Add the entries of the file to `_sightings`. Return the numbers of malformed lines.

        Does nothing if the file is unchanged since this process last read or wrote it. Raises
        ConfigError if the file is too large or has a newer format.
        """
        try:
            with open(self._path, "rb", opener=open_safely) as stream:
                stamp = stamp_of(stream.fileno())
                if stamp == self._stamp:
                    return []
                text = stream.read(_LARGEST_FILE + 1)
        except FileNotFoundError:
            return []
        if len(text) > _LARGEST_FILE:
            raise self._unusable(f"seen.jsonl is larger than {_LARGEST_FILE} bytes")

        wrong_lines = list[int]()
        for number, line in enumerate(text.splitlines(), start=1):
            fields = json_object(line) or {}
            is_header = number == 1 and isinstance(fields.get("seen"), int)
            if is_header:
                if fields["seen"] > _VERSION:
                    raise self._unusable("seen.jsonl was written by a newer version of regsync")
                continue
            try:
                key, sighting = _parse_entry(fields)
            except (KeyError, TypeError, ValueError):
                wrong_lines.append(number)
            else:
                self._add(key, sighting)
        self._stamp = stamp
        return wrong_lines

    def _add(self, key: SeenKey, sighting: Sighting) -> None:
        """Add an entry that was read from the file."""
        if sighting.has_expired(int(self._now())):
            return
        known = self._sightings.get(key)
        self._sightings[key] = sighting.merge(known) if known else sighting
        self._latest = max(self._latest, sighting.first_seen, sighting.last_seen)

    def _write(self) -> None:
        """Replace the file by all sightings that have not expired."""
        now = int(self._now())
        lines = [json.dumps({"seen": _VERSION})]
        for key in sorted(self._sightings):
            sighting = self._sightings[key]
            if not sighting.has_expired(now):
                lines.append(json.dumps(_format_entry(key, sighting)))

        with replacing(self._path) as descriptor, open(descriptor, "wb") as stream:
            stream.write("".join(f"{line}\n" for line in lines).encode())
            stream.flush()
            os.fsync(descriptor)
            stamp = stamp_of(descriptor)
        self._stamp = stamp
        sync_folder(os.path.dirname(self._path))

    @contextlib.asynccontextmanager
    async def _locked(self) -> AsyncIterator[None]:
        """Prevent other processes from saving until the block ends.

        The block also runs without a lock, if another process holds it for too long or if the file
        system does not support locks. Times that another process saves meanwhile may then be lost,
        so that its digests get the time of its next run.
        """
        assert self._directory is not None
        path = os.path.join(self._directory, "seen.lock")
        descriptor = os.open(path, WRITE_FLAGS, 0o600)
        try:
            for _ in range(_LOCK_ATTEMPTS):
                if _try_lock(descriptor):
                    break
                await anyio.sleep(_LOCK_PAUSE)
            yield
        finally:
            os.close(descriptor)

    def _unusable(self, reason: str) -> ConfigError:
        shown = printable(self._directory or "")
        return ConfigError(
            f"`min_age` needs first-seen times, which {shown} cannot keep: {reason}",
            hint="set `cache_dir` in `global` to a directory that this user may write",
        )

    def _warn(self, message: str) -> None:
        self._log("warning", "first_seen", message)


def _parse_entry(fields: Mapping[str, object]) -> tuple[SeenKey, Sighting]:
    """Parse the fields of a line of the file.

    Raises KeyError, TypeError or ValueError if the line is malformed.
    """
    texts = {name: text for name, text in fields.items() if isinstance(text, str)}
    host, slash, repository = texts["source"].partition("/")
    if not slash:
        raise ValueError("a source is host and repository")
    sighting = Sighting(parse_time(texts["first_seen"]), parse_time(texts["answered"]))
    if "ahead" in texts:
        sighting.restarts_at = parse_time(texts["ahead"])
    return SeenKey(RepositoryKey(host, repository), texts["digest"]), sighting


def _format_entry(key: SeenKey, sighting: Sighting) -> dict[str, str]:
    """Return the fields of a digest's line in the file, in the form that `_parse_entry` accepts."""
    fields = {
        "source": "/".join(key.where),
        "digest": key.digest,
        "first_seen": time_text(sighting.first_seen),
        "answered": time_text(sighting.last_seen),
    }
    if sighting.restarts_at is not None:
        fields["ahead"] = time_text(sighting.restarts_at)
    return fields


def _try_lock(descriptor: int) -> bool:
    """Lock a file. Returns False if another process holds the lock."""
    try:
        lock(descriptor)
    except BlockingIOError:
        return False
    except OSError:
        return True  # the file system does not support locks
    return True

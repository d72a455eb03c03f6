"""When each digest was first seen at its source, which `min_age` counts from: one file.

Owns: `seen.jsonl`; which time counts where clocks disagree; which entries leave.
May not know: registries, what a digest is held back from.
Invariants: a time that is lost or doubtful makes a digest younger, never older. The file is replaced
whole, and is on the disk before it is replaced.
Follows: docs/design.md section 12 ("Age").

These times are no cache: no registry can tell them again.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import anyio

from _regsync.config.model import Config
from _regsync.errors import ConfigError
from _regsync.files import WRITE_FLAGS, Stamp, lock, open_safely, replacing, stamp_of
from _regsync.state.archive import RepositoryKey
from _regsync.text import json_object, parse_time, printable, reason_of, time_text

_VERSION = 1
_DAY = 86400

# An entry leaves so long after its digest last answered. That moment is written once a day, so the
# entry may stay for one day more.
_KEPT_SECONDS = 91 * _DAY

# Seconds between two savings within a run: a killed run loses no more. They are rarer where they
# would take more than this share of the time.
_SAVE_SECONDS = 60.0
_SAVE_SHARE = 0.05

# How often a saving looks whether another process's is over, and seconds between two looks.
_LOCK_LOOKS = 40
_LOCK_TICK = 0.05

# Bytes: a million entries.
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
    # The first time by a clock that was ahead of the one that gave `first_seen`. Nobody knows which
    # of them was right, so it counts from when our clock has come so far.
    first_by_fast_clock: int | None = None

    def counted(self, now: int) -> int | None:
        """Return the first time that counts; None where all are later than now."""
        known = (self.first_seen, self.first_by_fast_clock)
        past = [time for time in known if time is not None and time <= now]
        return max(past, default=None)

    def has_expired(self, now: int) -> bool:
        """Say whether the digest was not seen for so long that its time begins again."""
        return now - self.last_seen > _KEPT_SECONDS

    def joined(self, other: Sighting) -> Sighting:
        """Return what two processes know of one digest."""
        by_fast_clocks = [
            time
            for time in (self.first_by_fast_clock, other.first_by_fast_clock)
            if time is not None
        ]
        return Sighting(
            min(self.first_seen, other.first_seen),
            max(self.last_seen, other.last_seen),
            max(by_fast_clocks, default=None),
        )


def first_seen_for(
    config: Config,
    now: Callable[[], float],
    log: Callable[[str, str, str], object],
    *,
    keep: bool = True,
    known: Mapping[SeenKey, int] | None = None,
) -> FirstSeen | None:
    """Return the first-seen times that a configuration needs; None where no mapping has `min_age`.

    ConfigError where nothing would be left for the next run, and `known` (see `FirstSeen`) is not
    there either: then a digest would be held back for ever.
    """
    aged = next((mapping for mapping in config.mappings if mapping.min_age), None)
    if aged is None:
        return None

    if config.seen_dir is None and known is None:
        raise ConfigError(
            f"mappings[{aged.index}] has `min_age`, but this run keeps nothing for the next one",
            hint="set `cache_dir` in `global` to a directory that stays from run to run (an absolute "
            "one if the configuration comes from standard input), or run from a lock (`--locked`)",
        )
    first_seen = FirstSeen(config.seen_dir, now, log, keep=keep, known=known)
    first_seen.load()
    return first_seen


class FirstSeen:
    """The first-seen times of digests: what earlier runs left, and what this one sees.

    `now` is the wall clock; failures of the disk in the middle of a run are logged by
    `log(level, event, message)`.
    """

    def __init__(
        self,
        directory: str | None,
        now: Callable[[], float],
        log: Callable[[str, str, str], object],
        *,
        keep: bool = True,
        known: Mapping[SeenKey, int] | None = None,
    ) -> None:
        """Keep the times in `directory`; without `keep` only read them there; None: keep none.

        `known` has times from elsewhere, in seconds since 1970: of two times the earlier counts.
        """
        self._directory = directory
        self._now = now
        self._log = log
        self._keeps = keep and directory is not None
        self._known: Mapping[SeenKey, int] = known or {}
        self._path = os.path.join(directory or "", "seen.jsonl")

        # By digest: what is in the file, and what this process has seen.
        self._sightings = dict[SeenKey, Sighting]()
        # The file as this process has read or written it.
        self._stamp: Stamp | None = None
        # The latest moment that the file names: if it is later than now, some clock is wrong.
        self._latest = 0
        self._has_changed = False

    def held_until(self, where: RepositoryKey, digest: str, min_age: float) -> int | None:
        """Note that a digest is seen now. Return the moment at which it will be `min_age` seconds old, in
        seconds since 1970; None where it is that old.
        """
        now = int(self._now())
        key = SeenKey(where, digest)
        first_seen = min(self._record(key, now), self._known.get(key, now))
        until = first_seen + int(min_age)
        return until if until > now else None

    def time_of(self, key: SeenKey) -> int | None:
        """Return when a digest was first seen, in seconds since 1970; None where no run has seen it."""
        sighting = self._sightings.get(key)
        return None if sighting is None else sighting.counted(int(self._now()))

    def _record(self, key: SeenKey, now: int) -> int:
        """Note that a digest is seen now; return when it was first seen."""
        sighting = self._sightings.get(key)
        if sighting is None or sighting.has_expired(now):
            # If our clock is behind that of an earlier run, the digest may be as new as the latest time
            # in the file.
            is_clock_behind = self._latest > now
            later = self._latest if is_clock_behind else None
            self._sightings[key] = Sighting(now, now, later)
            self._has_changed = True
            return now

        if now - sighting.last_seen >= _DAY:
            sighting.last_seen = now
            self._has_changed = True
        first_seen = sighting.counted(now)
        if first_seen is None:
            # The clock that gave these times was ahead of ours. The digest's age begins now, and
            # again when our clock has come so far.
            first_seen = now
            sighting.first_by_fast_clock = max(
                sighting.first_seen, sighting.first_by_fast_clock or 0
            )
            sighting.first_seen = now
            self._has_changed = True
        return first_seen

    # The file.

    def load(self) -> None:
        """Read what earlier runs left, and other processes meanwhile. ConfigError where the directory
        cannot be used.
        """
        if self._directory is None:
            return
        try:
            if self._keeps:
                os.makedirs(self._directory, mode=0o700, exist_ok=True)
                if not os.access(self._directory, os.W_OK | os.X_OK):
                    raise PermissionError(0, "it cannot be written")
            wrong_lines = self._update()
        except OSError as error:
            raise self._unusable(reason_of(error)) from error

        if wrong_lines:
            self._has_changed = True
            text = f"{len(wrong_lines)} lines are not entries, the first is line {wrong_lines[0]}"
            what = "the ages of what they named begin again"
            self._warn(f"{printable(self._path)}: {text}; {what}")

    def refresh(self) -> None:
        """Read the file as `load` does. If that fails, go on with what is known."""
        try:
            self.load()
        except ConfigError as error:
            self._warn(str(error))

    async def save_regularly(self) -> None:
        """Save what is new now and then, until cancelled."""
        pause = _SAVE_SECONDS
        while self._keeps:
            with anyio.move_on_after(pause):
                await anyio.sleep_forever()
            began = anyio.current_time()
            await self.save()
            took = anyio.current_time() - began
            pause = max(_SAVE_SECONDS, took / _SAVE_SHARE)

    async def save(self) -> None:
        """Replace the file, with what other processes have put there meanwhile."""
        if not self._keeps or not self._has_changed:
            return
        try:
            async with self._locked():
                self._update()
                self._write()
        except (OSError, ConfigError) as error:
            text = f"first-seen times are not saved: {reason_of(error)}"
            self._warn(f"{printable(self._path)}: {text}; images are held back for longer")
        else:
            self._has_changed = False

    def _update(self) -> list[int]:
        """Add the entries of the file, unless it is as this process has read or written it last. Return
        the numbers of the lines that are no entries.
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
            if number == 1 and isinstance(fields.get("seen"), int):
                if fields["seen"] > _VERSION:
                    raise self._unusable("seen.jsonl was written by a newer version of regsync")
                continue
            try:
                self._add(*_entry_of(fields))
            except (KeyError, TypeError, ValueError):
                wrong_lines.append(number)
        self._stamp = stamp
        return wrong_lines

    def _add(self, key: SeenKey, sighting: Sighting) -> None:
        """Add an entry of the file."""
        if sighting.has_expired(int(self._now())):
            return
        known = self._sightings.get(key)
        self._sightings[key] = sighting.joined(known) if known else sighting
        self._latest = max(self._latest, sighting.first_seen, sighting.last_seen)

    def _write(self) -> None:
        now = int(self._now())
        lines = [json.dumps({"seen": _VERSION})]
        for key in sorted(self._sightings):
            sighting = self._sightings[key]
            if not sighting.has_expired(now):
                lines.append(json.dumps(_fields_of(key, sighting)))

        with replacing(self._path) as descriptor, open(descriptor, "wb") as stream:
            stream.write("".join(f"{line}\n" for line in lines).encode())
            stream.flush()
            os.fsync(descriptor)
            stamp = stamp_of(descriptor)
        self._stamp = stamp
        _sync_directory(os.path.dirname(self._path))

    @contextlib.asynccontextmanager
    async def _locked(self) -> AsyncIterator[None]:
        """Keep other processes from saving meanwhile.

        If one of them takes too long, or the file system knows no locks, go on without: what one of
        them adds may be lost then, and is first seen by its next run.
        """
        assert self._directory is not None
        path = os.path.join(self._directory, "seen.lock")
        descriptor = os.open(path, WRITE_FLAGS, 0o600)
        try:
            for _ in range(_LOCK_LOOKS):
                if _has_locked(descriptor):
                    break
                await anyio.sleep(_LOCK_TICK)
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


def _entry_of(fields: Mapping[str, object]) -> tuple[SeenKey, Sighting]:
    """Return what a line of the file says; KeyError, TypeError or ValueError where it is no entry."""
    texts = {name: text for name, text in fields.items() if isinstance(text, str)}
    host, slash, repository = texts["source"].partition("/")
    if not slash:
        raise ValueError("a source is host and repository")
    sighting = Sighting(parse_time(texts["first_seen"]), parse_time(texts["answered"]))
    if "ahead" in texts:
        sighting.first_by_fast_clock = parse_time(texts["ahead"])
    return SeenKey(RepositoryKey(host, repository), texts["digest"]), sighting


def _fields_of(key: SeenKey, sighting: Sighting) -> dict[str, str]:
    """Return the fields of a digest's line in the file, which `_entry_of` reads."""
    fields = {
        "source": "/".join(key.where),
        "digest": key.digest,
        "first_seen": time_text(sighting.first_seen),
        "answered": time_text(sighting.last_seen),
    }
    if sighting.first_by_fast_clock is not None:
        fields["ahead"] = time_text(sighting.first_by_fast_clock)
    return fields


def _has_locked(descriptor: int) -> bool:
    """Lock a file; False when another process has locked it."""
    try:
        lock(descriptor)
    except BlockingIOError:
        return False
    except OSError:
        return True  # no locks here
    return True


def _sync_directory(path: str) -> None:
    """See that a new name in a directory survives a power cut, where the system lets us."""
    if hasattr(os, "O_DIRECTORY"):
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

"""What registries have answered, in this run and in earlier ones, and what of it is believed.

Owns: the file `state.db` and its lock; the one rule of belief (`Knowledge.is_held`); the times from
which `min_age` counts.
May not know: how requests are made, what is copied, and when.
Invariants: every entry was made from a registry's answer. A wrong entry costs requests, and never
leads to a wrong image (I5). Only the holder of the lock writes the file. A failing disk never stops
a run.
Follows: docs/specification.md section 1.1 (three-step look-up), docs/design.md sections 6 (rules
10, 11), 7 and 8.

The file has one relation and one table of notes. `held` says that a repository holds a digest, and
why: because of an answer about the digest itself, or because of a manifest that names it. `note` has
everything else, by key.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import stat
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple
from urllib.parse import quote

import anyio

from _regsync.config import Config
from _regsync.crypto import hash_hex
from _regsync.errors import ConfigError
from _regsync.files import SAFE_FLAGS, WRITE_FLAGS, lock, remove_if_possible
from _regsync.oci import LAYOUT_SCHEME, is_digest, is_repository, split_digest
from _regsync.text import printable, reason_of

try:
    import sqlite3
except ImportError:  # some builds of Python lack it
    HAS_SQLITE = False
else:
    HAS_SQLITE = True

_DAY = 86400  # seconds

# Maximum age of a fact about a host, and of an entry where a registry would accept a manifest that
# names an absent blob, in seconds.
_FACT_SECONDS = _DAY
_RECENT_SECONDS = 30 * 60
# An entry whose time is further in the future than this is not believed: a clock was wrong.
_CLOCK_AHEAD_SECONDS = _DAY
# Entries are removed once in this time.
_SWEEP_SECONDS = _DAY
# Artifact checks and first-seen times are removed this long after they were last in use: the image
# is no longer mirrored. First-seen times are renewed once a day, so that they stay for 90 days.
_CHECK_SECONDS = 400 * _DAY
_SEEN_SECONDS = 91 * _DAY

# Seconds between two commits. A killed run loses the entries of this time.
COMMIT_SECONDS = 0.5
# Seconds that a query waits for the lock of another process on the file. The writer's commits block
# the event loop; one that fails is made up for by the next.
_READER_PATIENCE = 2.0
_WRITER_PATIENCE = 0.05

# Maximum number of repositories from which the mount of one blob is tried.
MOST_HOLDERS = 32
# Refused mounts, each of a blob that only an earlier run has seen in its repository, after which a
# host is recorded as one that does not mount.
_MOST_DOUBTFUL_REFUSALS = 3

# Maximum number of keys in one query. SQLite accepts at least 999 values
# (https://www.sqlite.org/limits.html).
_MOST_KEYS = 500


# Names and keys.


class RepositoryKey(NamedTuple):
    """One repository of one registry."""

    host: str  # `host` or `host:port`, as in reports; `oci-layout:PATH` for an image layout
    name: str

    @property
    def first_segment(self) -> str:
        """The first path segment of the name.

        Some registries have settings for each, as a project.
        """
        return self.name.partition("/")[0]

    @property
    def area(self) -> str:
        """Host and first segment. Some facts hold for all repositories of an area."""
        return f"{self.host} {self.first_segment}"


# The first byte of a key, by the algorithm of its digest.
_ALGORITHMS = {"sha256": b"\1", "sha512": b"\2"}
# In `held`, that of a manifest: its bytes may be a blob too, and a repository may have only one.
_ALGORITHMS_OF_MANIFESTS = {b"\1": b"\3", b"\2": b"\4"}
_KEY_BYTES = 33


# The cache helps because the keys of an image's digests are needed some twenty times while the
# image is copied.
@lru_cache(4096)
def key_of(digest: str) -> bytes:
    """Return the key of a digest: a byte for the algorithm and the first 32 bytes of the hash.

    The first 32 bytes of a sha512 resist collisions as well as a sha256.
    """
    algorithm, encoded = split_digest(digest)
    return _ALGORITHMS[algorithm] + bytes.fromhex(encoded[:64])  # two hexadecimal digits a byte


@lru_cache(4096)
def _manifest_key(digest: str) -> bytes:
    """Return the key of a manifest in `held`."""
    key = key_of(digest)
    return _ALGORITHMS_OF_MANIFESTS[key[:1]] + key[1:]


def digest_like(key: bytes) -> str:
    """Return the digest of a key, or the first half of the digest if it is a sha512.

    Names of referrers tags have the same half. The algorithm is empty if the key is malformed.
    """
    for algorithm, mark in _ALGORITHMS.items():
        if key[:1] == mark:
            return f"{algorithm}:{key[1:].hex()}"
    return f":{key[1:].hex()}"  # another program has written this key


def hashed_key(*words: str) -> bytes:
    """Return the name of a snapshot or artifact check: a hash of the words, 32 bytes."""
    return bytes.fromhex(hash_hex("sha256", "\0".join(words).encode()))


# What notes say. All times are whole seconds since 1970.


class Snapshot(NamedTuple):
    """The digests of a tag at its source and its target when the target was last up to date."""

    source: bytes  # key of the digest at the source
    pushed: bytes  # key of the digest at the target; another one if the index is trimmed


class SnapshotEntry(NamedTuple):
    confirmed_at: int  # when the tag was last found up to date
    snapshot: Snapshot


# Flags of an artifact check. The flags 1, 2, 4 and 8 record which tags with artifacts the source's
# listing had (`Referrers.listed_tag_bits`).

# All artifacts are at the target.
COMPLETE = 32
# A run has copied the image: the image was not at the target already.
COPIED = 64


class ArtifactCheck(NamedTuple):
    """The result of the last check of an image's artifacts at one target."""

    last: int  # time of the last check; 0 if there was none
    first: int  # time of the first check; 0 if there was none
    flags: int  # COMPLETE, COPIED, and 1, 2, 4 and 8 as above
    listing_hash: bytes  # hash of the digests that the source listed, 8 bytes

    @property
    def listed_tag_bits(self) -> int:
        """Which tags with artifacts the source's listing had: the flags 1, 2, 4 and 8."""
        return self.flags & ~(COMPLETE | COPIED)

    @property
    def is_complete(self) -> bool:
        return bool(self.flags & COMPLETE)

    @property
    def was_copied(self) -> bool:
        return bool(self.flags & COPIED)


NO_CHECK = ArtifactCheck(last=0, first=0, flags=0, listing_hash=bytes(8))


# Facts of hosts, and of areas of a host's repositories.

MOUNTS = "mounts"  # whether the host has mounted a blob
# Whether a probing POST, which asks for a blob and begins an upload if it is absent, is answered so
# (docs/design.md section 6, rule 11).
ABSENT_IS_202 = "absent_is_202"
PRESENT_IS_201 = "present_is_201"


# The file.

# `application_id` in the header of our files: "rgsy"; `user_version`: the version of the tables.
_APPLICATION_ID = 0x72677379
_VERSION = 4

# In `held`, `because` is empty for an answer about the digest itself, at the time `at`; and `part` is
# one of what a manifest names. Else `because` is the key of a manifest that names the digest.
_SCHEMA = (
    "CREATE TABLE held (digest BLOB, place INTEGER, because BLOB, at INTEGER, part BLOB,"
    " PRIMARY KEY (digest, place, because)) WITHOUT ROWID",
    "CREATE TABLE note (key BLOB PRIMARY KEY, value BLOB, at INTEGER) WITHOUT ROWID",
    "CREATE TABLE place (id INTEGER PRIMARY KEY, host TEXT, name TEXT)",
)

# The direct answer comes first. Of a layer that very many manifests name, some of them are enough.
_REASONS = """
SELECT because, CAST(at AS INTEGER) FROM held WHERE digest = ? AND place = ?
ORDER BY because LIMIT 64
"""

# A blob that can be reached from a manifest.
_BELOW = """
WITH RECURSIVE below (digest) AS (
    VALUES (?1) UNION SELECT part FROM below JOIN held USING (digest)
    WHERE place = ?2 AND because = x'' AND part IS NOT NULL)
SELECT digest FROM below WHERE substr(digest, 1, 1) = x'01'
"""

# The repositories of a host that hold a digest, without a look at all the manifests that name it.
_HOLDERS = """
WITH RECURSIVE next (place) AS (
    SELECT min(place) FROM held WHERE digest = ?1 UNION
    SELECT (SELECT min(place) FROM held WHERE digest = ?1 AND place > next.place) FROM next
    WHERE next.place IS NOT NULL)
SELECT name FROM next JOIN place ON id = next.place WHERE host = ?2
"""

# What was held because of a manifest that is not held any more.
_ORPHANS = """
DELETE FROM held WHERE because != x'' AND NOT EXISTS (
    SELECT 1 FROM held AS above WHERE above.digest = held.because AND above.place = held.place)
"""

# The kinds of notes, with which their keys begin.
_TAG = b"tag "  # value: the two keys of a snapshot
_LOOK = b"look "  # value: an artifact check, whose time is that of the note
_FACT = b"fact "  # value: what was learnt about a host
_SEEN = b"seen "  # value: times that may be the first at which a digest was seen
_SWEPT = b"swept"  # its time: when old entries were last removed

# What SQLite puts beside a file has these endings.
_SUFFIXES = ("", "-journal", "-wal", "-shm")
_EARLIER = "it is of an earlier version"


class StateUnusable(Exception):
    """The state cannot be kept or read, and why."""


class StateFile:
    """The state file between `load` and `close`.

    Disk errors are not raised. They are logged by `log(level, event, message)`. The file is in one
    of these states:

    - writer: open, and this process holds the lock;
    - reader: open without the lock;
    - closed: nothing is known of earlier runs. Notes are kept in memory, until they can be written.
    """

    def __init__(self, directory: str | None, log: Callable[[str, str, str], object]) -> None:
        """Keep the state in a directory, or only in memory if it is None."""
        self._directory = directory
        self._shown_directory = printable(directory or "")  # for messages
        self._path = os.path.join(directory or "", "state.db")
        self._log = log
        self._connection: sqlite3.Connection | None = None
        self._lock: int | None = None  # descriptor of `state.lock`, which this process has locked
        self._is_loaded = False
        # Notes that are not in the file yet: value and time, by key.
        self._notes = dict[bytes, tuple[bytes, int]]()
        # Rows of `held` that are not in the file yet: at and part, by digest, place and because.
        self._rows = dict[tuple[bytes, int, bytes], tuple[int, bytes | None]]()
        # The table `place`; its last id, and the last one when the file was opened.
        self._places = dict[RepositoryKey, int]()
        self._last_place = 0
        self._last_old_place = 0

    @property
    def is_writer(self) -> bool:
        """Whether this process holds the lock and so may write the file."""
        return self._lock is not None

    @property
    def is_used(self) -> bool:
        """Whether this run can use the notes of earlier runs."""
        return self._is_loaded or bool(self._notes)

    # Opening and closing.

    def load(self, *, may_write: bool = True) -> None:
        """Open the file as `open` does. If it cannot be used, log why."""
        try:
            self.open(may_write=may_write)
        except StateUnusable as error:
            level = "warning" if HAS_SQLITE else "info"
            self._log(level, "state", f"no state is kept: {self._shown_directory}: {error}")

    def open(self, *, may_write: bool = True) -> None:
        """Open the file for writing if `may_write` and if no other process holds the lock, else for
        reading. Does nothing if it is open. Raises StateUnusable.
        """
        if self._directory is None or self._connection is not None:
            return
        self._is_loaded = False
        if not HAS_SQLITE:
            raise StateUnusable("this Python has no module sqlite3")
        try:
            if may_write:
                self._take_lock(self._directory)
            self._connect()
        except (OSError, sqlite3.Error, UnicodeDecodeError, StateUnusable) as error:
            self._close_file()
            raise StateUnusable(reason_of(error)) from error
        self._is_loaded = True

    def _take_lock(self, directory: str) -> None:
        """Lock the state, or log that another process has locked it."""
        os.makedirs(directory, mode=0o700, exist_ok=True)
        self._lock = os.open(os.path.join(directory, "state.lock"), WRITE_FLAGS, 0o600)
        try:
            lock(self._lock)
        except BlockingIOError:
            self._close_file()
            text = f"another run uses {self._shown_directory}: this one reads the state and saves nothing"
            self._log("warning", "state_locked", text)

    def _connect(self) -> None:
        """Open the database. A writer creates it, and replaces a file that is damaged or old.

        Raises StateUnusable if the file is another program's, OSError and sqlite3.Error.
        """
        try:
            self._open_database()
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            if not self.is_writer or not _is_damage(error):
                raise
            text = f"the state in {self._shown_directory} begins anew: {reason_of(error)}"
            self._log("info" if str(error) == _EARLIER else "warning", "state", text)
            self._remove_file()
            self._open_database()

    def _open_database(self) -> None:
        """Open the file without checking all of it, which would read all of it. A writer creates it.

        SQLite follows links and waits for pipes. So this raises sqlite3.DatabaseError if something
        else than a regular file with one name is where SQLite has its files, or if the file is
        damaged or old; StateUnusable if it must not be replaced. Other damage is found when a
        damaged page is read.
        """
        for suffix in _SUFFIXES:
            with contextlib.suppress(FileNotFoundError):
                status = os.lstat(self._path + suffix)
                if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
                    raise sqlite3.DatabaseError(f"state.db{suffix} is not a file of its own")
        flags = os.O_RDWR | os.O_CREAT if self.is_writer else os.O_RDONLY
        try:
            os.close(os.open(self._path, flags | SAFE_FLAGS, 0o600))
        except FileNotFoundError:
            return  # there is no state yet

        path = os.path.join(os.getcwd(), self._path).replace(os.sep, "/").lstrip("/")
        uri = f"file:///{quote(os.fsencode(path))}?mode={'rw' if self.is_writer else 'ro'}"
        patience = _WRITER_PATIENCE if self.is_writer else _READER_PATIENCE
        self._connection = sqlite3.connect(uri, uri=True, timeout=patience, isolation_level=None)
        self._connection.text_factory = _decode
        # Another user may have made the file: no code in its schema is trusted, and each page is
        # checked when it is read.
        for pragma in ("trusted_schema = OFF", "cell_size_check = ON"):
            self._connection.execute(f"PRAGMA {pragma}").fetchall()
        self._begin(self._connection)

    def _begin(self, database: sqlite3.Connection) -> None:
        """Check that a database is ours, and begin to use it. A writer fills one that is empty.

        Raises sqlite3.DatabaseError if it is damaged or old, StateUnusable if it must not be
        replaced.
        """
        names = ("application_id", "user_version", "journal_mode")
        program, version, mode = (
            database.execute(f"PRAGMA {name}").fetchone()[0] for name in names
        )
        query = "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY name"
        tables = tuple(sql for (sql,) in database.execute(query).fetchall())
        is_new = not (program or version or tables)
        if not is_new:
            if program != _APPLICATION_ID:
                raise StateUnusable("state.db is another program's")
            if version > _VERSION:
                raise StateUnusable("it was written by a newer version of regsync")
            if version < _VERSION:
                raise sqlite3.DatabaseError(_EARLIER)
            # A write-ahead log does not work on network disks.
            if tables != _SCHEMA or mode == "wal":
                raise sqlite3.DatabaseError("its tables are not those of this version")
            places = database.execute("SELECT host, name, id FROM place").fetchall()
            self._places = {RepositoryKey(host, name): place for host, name, place in places}
            self._last_place = self._last_old_place = max(self._places.values(), default=0)

        if is_new and not self.is_writer:
            self._close_file()  # there is no state yet
            return
        if self.is_writer:
            # A commit does not wait for the disk. If a power cut damages the file, that costs
            # requests only (I5).
            database.execute("PRAGMA synchronous = OFF")
            # All statements until the next commit share one transaction. Without one, each query
            # would lock and unlock the file.
            database.execute("BEGIN")
        if is_new:
            for statement in _SCHEMA:
                database.execute(statement)
            database.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
            database.execute(f"PRAGMA user_version = {_VERSION}")
            database.execute("COMMIT")
            database.execute("BEGIN")

    def close(self) -> None:
        """Commit what is new, close the file and release the lock."""
        self.commit()
        self._close_file()

    def _close_file(self) -> None:
        """Close the file and release the lock, without a commit."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._places = {}
        self._last_place = self._last_old_place = 0
        self._rows.clear()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _remove_file(self) -> None:
        """Remove the file, and what SQLite has put beside it."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        for suffix in _SUFFIXES:
            remove_if_possible(self._path + suffix)

    # Reading and writing.

    async def commit_regularly(self) -> None:
        """Commit new entries every COMMIT_SECONDS, until cancelled or until the lock is lost."""
        while self.is_writer:
            await anyio.sleep(COMMIT_SECONDS)
            self.commit()

    def commit(self) -> None:
        """Write what is new to the file. If the file is locked, the next commit does it."""
        if self._connection is None or not self.is_writer:
            return
        notes = [(key, *note) for key, note in self._notes.items()]
        rows = [(*key, *row) for key, row in sorted(self._rows.items())]
        try:
            self._connection.executemany("INSERT OR REPLACE INTO note VALUES (?, ?, ?)", notes)
            self._connection.executemany("INSERT OR REPLACE INTO held VALUES (?, ?, ?, ?, ?)", rows)
            self._connection.execute("COMMIT")
            self._notes.clear()
            self._rows.clear()
            self._connection.execute("BEGIN")
        except sqlite3.Error as error:
            self._on_error(error)

    def _execute(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        """Execute a statement, and return its rows. Returns no rows after an error.

        Rows may have values of any type, because the file may be damaged.
        """
        if self._connection is None:
            return []
        try:
            # A query keeps the file locked until its last row has been read.
            return self._connection.execute(statement, values).fetchall()
        except (sqlite3.Error, UnicodeDecodeError) as error:
            self._on_error(error)
            return []

    def _write_rows(self, statement: str, rows: Iterable[Sequence[object]]) -> None:
        """Execute a statement for each row, if this process may write the file."""
        if self._connection is None or not self.is_writer:
            return
        try:
            self._connection.executemany(statement, rows)
        except sqlite3.Error as error:
            self._on_error(error)

    def _on_error(self, error: Exception) -> None:
        """Stop using the file, unless another process has locked it for a moment.

        A damaged file is removed, so that the next run begins anew.
        """
        if self.is_writer and "is locked" in str(error):
            return
        text = f"the state in {self._shown_directory} is not used any more: {reason_of(error)}"
        self._log("warning", "state", text)
        if self.is_writer and _is_damage(error):
            self._remove_file()
        self._close_file()

    # What repositories hold.

    def reasons(self, where: RepositoryKey, key: bytes) -> list[tuple[bytes, int | None]]:
        """Return why earlier runs have believed that a repository holds a digest: (because, at).

        Of a repository that is new in this run, this run knows all.
        """
        place = self._places.get(where)
        if place is None or place > self._last_old_place:
            return []
        return self._execute(_REASONS, key, place)

    def holders(self, host: str, key: bytes) -> list[str]:
        """Return the repositories of a host of which earlier runs have believed that they hold a
        digest.
        """
        if not self._last_old_place:
            return []
        # The file has no checksum, and the name becomes part of a URL.
        names = [name for (name,) in self._execute(_HOLDERS, key, host)]
        return [name for name in names if isinstance(name, str) and is_repository(name)]

    def blob_below(self, where: RepositoryKey, manifest: bytes) -> bytes | None:
        """Return the sha256 of a blob that earlier runs have found below a manifest, as a key."""
        rows = self._execute(_BELOW, manifest, self._places.get(where))
        return rows[0][0] if rows else None

    def put(
        self, where: RepositoryKey, rows: Iterable[tuple[bytes, bytes, int, bytes | None]]
    ) -> None:
        """Add rows (digest, because, at, part) of one repository."""
        if not self.is_writer:
            return
        place = self._places.get(where)
        if place is None:
            self._last_place += 1
            place = self._places[where] = self._last_place
            self._write_rows("INSERT OR REPLACE INTO place VALUES (?, ?, ?)", [(place, *where)])
        for digest, because, at, part in rows:
            self._rows[digest, place, because] = at, part

    def drop_answers(self, where: RepositoryKey, keys: Iterable[bytes]) -> None:
        """Remove answers about digests that a manifest names from now on."""
        place = self._places.get(where, 0)
        written = [(key, place) for key in keys if self._rows.pop((key, place, b""), None) is None]
        statement = "DELETE FROM held WHERE digest = ? AND place = ? AND because = x''"
        self._write_rows(statement, written)

    def forget(self, where: RepositoryKey, keys: Collection[bytes]) -> None:
        """Remove all that was known of digests."""
        place = self._places.get(where)
        for row in [row for row in self._rows if row[0] in keys and row[1] == place]:
            del self._rows[row]
        statement = "DELETE FROM held WHERE digest = ? AND place = ?"
        self._write_rows(statement, [(key, place) for key in keys])

    def renew(
        self, where: RepositoryKey, keys: Iterable[bytes], young_since: int, now: int
    ) -> None:
        """Set the times of answers about these digests to now, if they are older than
        `young_since`, or too far in the future.
        """
        place = self._places.get(where)
        latest = now + _CLOCK_AHEAD_SECONDS
        self._write_rows(
            "UPDATE held SET at = ? WHERE digest = ? AND place = ? AND because = x''"
            " AND at NOT BETWEEN ? AND ?",
            [(now, key, place, young_since, latest) for key in keys],
        )

    # Notes.

    def note(self, key: bytes) -> tuple[bytes, int] | None:
        """Return the value of a note, and its time. Returns None if there is no note."""
        return self.notes([key]).get(key)

    def notes(self, keys: Iterable[bytes]) -> dict[bytes, tuple[bytes, int]]:
        """Return the values of the notes that exist, and their times, by key."""
        keys = list(keys)
        found = dict[bytes, tuple[bytes, int]]()
        for start in range(0, len(keys), _MOST_KEYS):
            batch = keys[start : start + _MOST_KEYS]
            marks = ", ".join("?" * len(batch))
            for row in self._execute(f"SELECT * FROM note WHERE key IN ({marks})", *batch):
                match row:
                    case (bytes(key), bytes(value), int(at)):
                        found[key] = value, at
        found.update((key, self._notes[key]) for key in keys if key in self._notes)
        return found

    def put_note(self, key: bytes, value: bytes, at: int) -> None:
        self._notes[key] = value, at

    def latest(self, kind: bytes) -> int:
        """Return the latest time of the notes of a kind, which is the beginning of their keys."""
        query = "SELECT CAST(max(at) AS INTEGER) FROM note WHERE key BETWEEN ? AND ?"
        times = [time for (time,) in self._execute(query, kind, _end(kind)) if time]
        times += [at for key, (_, at) in self._notes.items() if key.startswith(kind)]
        return max(times, default=0)

    def sweep(self, held_before: float, notes_before: Mapping[bytes, float]) -> None:
        """Remove what was confirmed before a time: what repositories hold, and notes by kind."""
        self.commit()
        if held_before > 0:
            self._execute("DELETE FROM held WHERE because = x'' AND at < ?", held_before)
            changes = -1
            while self._connection is not None and changes != self._connection.total_changes:
                changes = self._connection.total_changes
                self._write_rows(_ORPHANS, [()])
        for kind, before in notes_before.items():
            query = "DELETE FROM note WHERE key BETWEEN ? AND ? AND at < ?"
            self._write_rows(query, [(kind, _end(kind), before)])


def _end(kind: bytes) -> bytes:
    """Return what is behind all keys of a kind, which ends with a space."""
    return kind[:-1] + b"!"


def _fact_note(place: str, name: str) -> bytes:
    return _FACT + f"{place} {name}".encode()


def _seen_note(key: SeenKey) -> bytes:
    return _SEEN + f"{'/'.join(key.where)} {key.digest}".encode()


def _decode(text: bytes) -> str:
    return text.decode("utf-8", "replace")


def _is_damage(error: Exception) -> bool:
    """Report whether an error is one of the file, and not of the disk or of another process.

    SQLite reports these as errors of other classes.
    """
    return isinstance(error, UnicodeDecodeError) or type(error) is sqlite3.DatabaseError


# Belief.


@dataclass(slots=True)
class _Repository:
    """What answers of this run say about one repository, by key of the digest."""

    file: StateFile
    confirmed: set[bytes] = field(default_factory=set)
    # What answers show that were not about the digest itself: manifests that tags name, and those
    # below them; and blobs that a probing POST has found.
    roots: set[bytes] = field(default_factory=set)
    # By blob, the last manifest that this run has put here, or read, which names it.
    named_by: dict[bytes, bytes] = field(default_factory=dict)
    gone: set[bytes] = field(default_factory=set)  # may be absent
    probed: set[bytes] = field(default_factory=set)  # blobs that a probing POST has found
    # Whether an answer of this run contradicts what earlier runs have left.
    is_contradicted: bool = False
    # Whether the repository held manifests when this run asked. None if this run has not asked.
    is_populated: bool | None = None
    # Names of repositories from which a mount into this repository was refused.
    refused_sources: set[str] = field(default_factory=set)

    def has(self, key: bytes) -> bool:
        """Report whether an answer of this run shows a digest, or a manifest above it."""
        return key in self.confirmed or key in self.roots


class Knowledge:
    """What registries have answered in this run, and what earlier runs left in the file.

    `now` returns the time in seconds since 1970. `ttl` is the maximum age of an entry that is
    believed, in seconds; 0 means no maximum.
    """

    def __init__(
        self,
        file: StateFile | None = None,
        *,
        now: Callable[[], float] = lambda: 0.0,
        ttl: float = 0.0,
    ) -> None:
        memory = StateFile(None, lambda *_: None)
        self._file = file or memory
        # Nothing is kept of image layouts, because another disk may be mounted in the next run
        # (docs/design.md section 13).
        self._layouts = memory
        self._now = now
        self._max_age = ttl or math.inf  # seconds
        # Entries in use are written again when they are older than this, in seconds. So most runs
        # without changes write nothing.
        self._renewal_age = self._max_age / 4
        self._repositories = dict[RepositoryKey, _Repository]()
        # By host and key of a blob, the repositories where this run knows a manifest that names it.
        # A run has an entry for each blob that it copies, so the size of an entry counts.
        self._holders = defaultdict[str, dict[bytes, tuple[str, ...]]](dict)
        # By key of a manifest, the repositories where this run has found it below a tag.
        self._tagged_in = dict[bytes, tuple[RepositoryKey, ...]]()
        self._facts = dict[tuple[str, str], object]()  # by place and name
        # By host, refused mounts of blobs that only earlier runs have seen.
        self._doubtful_refusals = Counter[str]()
        # What earlier runs have left does not change within a run, but by `forget`.
        self._reasons = lru_cache(4096)(self._read_reasons)
        self._old_holders = lru_cache(4096)(self._read_holders)

    def _of(self, where: RepositoryKey) -> _Repository:
        repository = self._repositories.get(where)
        if repository is None:
            repository = self._repositories[where] = _Repository(self._file_of(where.host))
        return repository

    def _file_of(self, host: str) -> StateFile:
        return self._layouts if host.startswith(f"{LAYOUT_SCHEME}:") else self._file

    def _read_reasons(self, where: RepositoryKey, key: bytes) -> list[tuple[bytes, int | None]]:
        return self._of(where).file.reasons(where, key)

    def _read_holders(self, host: str, key: bytes) -> list[str]:
        return self._file_of(host).holders(host, key)

    def _is_young(self, time: int, max_age: float) -> bool:
        """Report whether `time` is at most `max_age` seconds ago, or at most a day in the future."""
        return -_CLOCK_AHEAD_SECONDS <= self._now() - time <= max_age

    # The rule of belief.

    def _is_held(
        self,
        where: RepositoryKey,
        key: bytes,
        *,
        must_be_recent: bool = False,
        must_be_named: bool = False,
    ) -> bool:
        """Report whether a repository is believed to hold a blob or manifest.

        It is believed if an answer was about it, or about a manifest from which it can be reached:
        an answer of this run, or of an earlier one that is young enough. So a tag that answers in
        this run vouches for all that is below it. With `must_be_named` only manifests above the
        digest count.
        """
        repository = self._of(where)
        max_age = min(self._max_age, _RECENT_SECONDS) if must_be_recent else self._max_age
        if repository.is_contradicted:
            max_age = -math.inf
        if not must_be_named and repository.has(key):
            return True
        unread = [key]
        for each in unread:  # the list grows
            if each in repository.gone:
                continue  # what may be absent vouches for nothing
            reasons = self._reasons(where, each)
            above = [because for because, _ in reasons if because]
            if each in repository.named_by:
                above.append(repository.named_by[each])
            if any(map(repository.has, above)):
                return True
            if each != key or not must_be_named:
                times = [at for because, at in reasons if not because and at is not None]
                if any(self._is_young(at, max_age) for at in times):
                    return True
            unread += [manifest for manifest in above if manifest not in unread]
        return False

    def is_blob_believed(
        self, where: RepositoryKey, digest: str, *, must_be_recent: bool = False
    ) -> bool:
        """Report whether a repository is believed to hold a blob.

        Pass `must_be_recent` if the registry would accept a manifest although the blob is absent.
        The age of an older entry is then no evidence.
        """
        return self._is_held(where, key_of(digest), must_be_recent=must_be_recent)

    def is_manifest_believed(self, where: RepositoryKey, digest: str) -> bool:
        """Report whether a repository is believed to hold a manifest with all its parts."""
        return self._is_held(where, _manifest_key(digest))

    def is_confirmed(self, where: RepositoryKey, digest: str) -> bool:
        """Report whether an answer of this run was about this blob or manifest."""
        if not is_digest(digest):
            return False
        keys = {key_of(digest), _manifest_key(digest)}
        return not keys.isdisjoint(self._of(where).confirmed)

    def is_manifest_confirmed(self, where: RepositoryKey, digest: str) -> bool:
        """Report whether an answer of this run was about this manifest."""
        return is_digest(digest) and _manifest_key(digest) in self._of(where).confirmed

    # Answers about blobs and manifests.

    def confirm_blob(self, where: RepositoryKey, digest: str, *, by_probe: bool = False) -> None:
        """Record that a registry has confirmed a blob in a repository.

        With `by_probe` it has answered 201 to a probing POST (rule 11): no answer was about the
        blob alone.
        """
        repository, key = self._of(where), key_of(digest)
        if by_probe:
            repository.roots.add(key)
            repository.probed.add(key)
        elif key in repository.confirmed:
            return
        else:
            repository.gone.discard(key)
            repository.confirmed.add(key)
        repository.file.put(where, [(key, b"", int(self._now()), None)])

    def confirm_manifest(
        self, where: RepositoryKey, digest: str, blobs: Iterable[str], children: Iterable[str] = ()
    ) -> None:
        """Record that a repository holds a manifest and the blobs that the manifest names.

        `blobs` and `children` are the digests that the manifest names. The blobs may be mounted
        from the repository from now on.
        """
        repository = self._of(where)
        manifest = _manifest_key(digest)
        blob_keys = [key_of(blob) for blob in blobs]
        repository.confirmed.update(blob_keys, [manifest])
        repository.gone.difference_update(blob_keys, [manifest])
        self._record_content(where, manifest, blob_keys, map(_manifest_key, children))

    def _record_content(
        self,
        where: RepositoryKey,
        manifest: bytes,
        blobs: Sequence[bytes],
        children: Iterable[bytes],
    ) -> None:
        """Record what a manifest names: the blobs can be mounted.

        If the file knows the manifest, nothing is written: so most runs write nothing.
        """
        repository, holders = self._of(where), self._holders[where.host]
        for blob in blobs:
            repository.named_by[blob] = manifest
            names = holders.get(blob, ())
            if where.name not in names and len(names) < MOST_HOLDERS:
                holders[blob] = (*names, where.name)
        times = [at for because, at in self._reasons(where, manifest) if not because and at]
        if not any(self._is_young(at, self._renewal_age) for at in times):
            parts = (*blobs, *children)
            top = (manifest, b"", int(self._now()), parts[0] if parts else None)
            repository.file.drop_answers(where, blobs)
            repository.file.put(where, [top, *((part, manifest, 0, None) for part in parts)])

    def forget(self, where: RepositoryKey, digest: str) -> None:
        """Drop all evidence of a blob or manifest, because an answer shows that it may be absent.

        What a manifest names is no longer believed because of it.
        """
        repository = self._of(where)
        keys = {key_of(digest), _manifest_key(digest)}
        repository.confirmed -= keys
        repository.roots -= keys
        repository.gone |= keys
        repository.file.forget(where, keys)
        self._reasons.cache_clear()

    def record_absent_blob(self, where: RepositoryKey, digest: str) -> None:
        """Record that a repository lacks a blob, whatever names it."""
        self._of(where).gone.add(key_of(digest))

    # What tags name (docs/design.md section 7, "Vouching").

    def confirm_tagged_manifest(self, where: RepositoryKey, digest: str) -> None:
        """Record that a tag of a repository names a manifest."""
        repository, manifest = self._of(where), _manifest_key(digest)
        repository.confirmed.add(manifest)
        repository.gone.discard(manifest)
        self._add_root(where, manifest)

    def _add_root(self, where: RepositoryKey, manifest: bytes) -> None:
        self._of(where).roots.add(manifest)
        repositories = self._tagged_in.get(manifest, ())
        if where not in repositories:
            self._tagged_in[manifest] = (*repositories, where)

    def record_tagged_content(
        self, host: str, digest: str, blobs: Iterable[str], children: Iterable[str]
    ) -> None:
        """Record what a manifest names, as evidence for all repositories where it is tagged.

        Does nothing if no tag of the host names the manifest, directly or through an index. `blobs`
        and `children` are the digests that the manifest names. An answer of this run that one of
        them may be absent is better evidence.
        """
        manifest = _manifest_key(digest)
        blob_keys, child_keys = [*map(key_of, blobs)], [*map(_manifest_key, children)]
        for where in self._tagged_in.get(manifest, ()):
            repository = self._of(where)
            if where.host != host or manifest not in repository.roots:
                continue
            present = [blob for blob in blob_keys if blob not in repository.gone]
            for child in child_keys:
                if child not in repository.gone:
                    self._add_root(where, child)
            self._record_content(where, manifest, present, child_keys)

    def record_contradiction(self, where: RepositoryKey) -> None:
        """Record that an answer of this run contradicts the entries of a repository.

        What is left is what answers of this run were about, and manifests that are found tagged
        after this call.
        """
        repository = self._of(where)
        repository.is_contradicted = True
        repository.confirmed -= repository.roots
        repository.roots.clear()

    def record_populated(self, where: RepositoryKey, is_populated: bool = True) -> None:
        """Record whether a repository holds manifests.

        A repository without manifests contradicts what earlier runs have left.
        """
        self._of(where).is_populated = is_populated
        if not is_populated:
            self.record_contradiction(where)

    def is_empty(self, where: RepositoryKey) -> bool:
        """Report whether a repository held no manifests when this run listed its tags."""
        return self._of(where).is_populated is False

    # Mounts and probes (docs/design.md section 6, rules 10 and 11).

    def mount_source(self, where: RepositoryKey, digest: str) -> str | None:
        """Return the name of a repository of the same host from which to mount a blob.

        Returns None if no such repository is known.
        """
        for holder in self.holders(where.host, digest):
            if holder != where.name and self.may_mount(where, holder):
                return holder
        return None

    def holders(self, host: str, digest: str) -> Iterator[str]:
        """Yield the names of repositories from which a blob can be mounted, best evidence first.

        A manifest of the repository has to name the blob. A repository may be yielded twice.
        """
        key = key_of(digest)
        for name in chain(self._holders[host].get(key, ()), self._old_holders(host, key)):
            if self._is_held(RepositoryKey(host, name), key, must_be_named=True):
                yield name

    def supports_mounts(self, host: str) -> bool | None:
        """Report whether a host mounts blobs. Returns None if no mount was answered."""
        return self.fact(host, MOUNTS)

    def may_mount(self, where: RepositoryKey, source: str) -> bool:
        """Report whether a mount from the repository `source` may succeed."""
        is_refused = source in self._of(where).refused_sources
        return not is_refused and self.supports_mounts(where.host) is not False

    def record_refused_mount(
        self, where: RepositoryKey, source: str, *, is_source_confirmed: bool
    ) -> None:
        """Record that a mount from `source` was refused. The same mount is not tried again.

        If the host has mounted nothing yet, it is recorded as one that does not mount. But if only
        an earlier run believed that `source` holds the blob, it may just have lost it: then the host
        is recorded when that has happened several times (docs/design.md section 6, rule 10).
        """
        self._of(where).refused_sources.add(source)
        self._doubtful_refusals[where.host] += not is_source_confirmed
        is_conclusive = is_source_confirmed or (
            self._doubtful_refusals[where.host] >= _MOST_DOUBTFUL_REFUSALS
        )
        if is_conclusive and self.supports_mounts(where.host) is None:
            self.learn(where.host, MOUNTS, False)

    def needs_head(self, where: RepositoryKey, digest: str) -> bool:
        """Report whether a HEAD must check for a blob before a probing POST starts its upload.

        A HEAD is needed if the answer to the POST would not show whether the blob is present. It is
        not needed in a repository without known manifests: most blobs are absent there, and the
        upload needs the POST anyway.
        """
        repository = self._of(where)
        if self.fact(where.area, ABSENT_IS_202) is False:
            return True  # a 201 would not show that the blob is present
        if key_of(digest) in repository.probed and key_of(digest) in repository.gone:
            return True  # a 201 was wrong
        return repository.is_populated is True and not self.fact(where.area, PRESENT_IS_201)

    def choose_present_blob(self, where: RepositoryKey) -> str | None:
        """Return the digest of a blob that an answer of this run has shown to be in a repository.

        Returns None if there is no such blob. The age of an entry alone is not enough.
        """
        repository = self._of(where)
        named = [
            blob for blob, manifest in repository.named_by.items() if manifest in repository.roots
        ]
        # A digest can be made of the key of a sha256 only.
        is_whole = _ALGORITHMS["sha256"]
        present = [key for key in (*repository.confirmed, *named) if key.startswith(is_whole)]
        if present:
            return digest_like(min(present))
        for root in repository.roots:
            key = repository.file.blob_below(where, root)
            if key is not None and key not in repository.gone:
                return digest_like(key)
        return None

    # Facts of hosts.

    def fact(self, place: str, name: str) -> bool | None:
        """Return a yes or no that runs of the last day have learnt about a place, or None.

        `place` is a host, or the area of a repository.
        """
        value = self.host_note(place, name)
        return value if isinstance(value, bool) else None

    def host_note(self, place: str, name: str) -> object:
        """Return what runs of the last day have learnt about a place, or None.

        The file may be damaged, so the value may have any form.
        """
        fact = (place, name)
        if fact not in self._facts:
            self._facts[fact] = None
            value, at = self._file_of(place).note(_fact_note(*fact)) or (b"", 0)
            if value and self._is_young(at, _FACT_SECONDS):
                with contextlib.suppress(ValueError, RecursionError):
                    self._facts[fact] = json.loads(value)
        return self._facts[fact]

    def learn(self, place: str, name: str, value: object) -> None:
        """Record what was learnt about a host, or about the area of a repository."""
        if self.host_note(place, name) != value:
            self._facts[place, name] = value
            text = json.dumps(value).encode()
            self._file_of(place).put_note(_fact_note(place, name), text, int(self._now()))

    def has_referrers_api(self, where: RepositoryKey) -> bool | None:
        """Report whether a repository's registry has the referrers API. Returns None if unknown."""
        return self.fact(where.area, "has_referrers_api")

    def record_referrers_api(self, where: RepositoryKey, has_api: bool) -> None:
        """Record whether a repository's registry has the referrers API."""
        self.learn(where.area, "has_referrers_api", has_api)

    # Tags, and artifacts of images.

    def snapshots(self, names: Iterable[bytes]) -> dict[bytes, SnapshotEntry]:
        """Return the snapshots with these names that are known and not too old, by name.

        An empty name never has a snapshot.
        """
        notes = self._file.notes(_TAG + name for name in names if name)
        return {
            key[len(_TAG) :]: SnapshotEntry(at, Snapshot(value[:_KEY_BYTES], value[_KEY_BYTES:]))
            for key, (value, at) in notes.items()
            if self._is_young(at, self._max_age)
        }

    def record_snapshot(
        self, name: bytes, snapshot: Snapshot, old: SnapshotEntry | None = None
    ) -> None:
        """Record what a tag names at its source and at its target. Does nothing if `name` is empty.

        `old` is the entry that `snapshots` has returned for the name.
        """
        is_up_to_date = (
            old is not None
            and old.snapshot == snapshot
            and self._is_young(old.confirmed_at, self._renewal_age)
        )
        if name and not is_up_to_date:
            self._file.put_note(_TAG + name, snapshot.source + snapshot.pushed, int(self._now()))

    def artifact_check(self, name: bytes) -> ArtifactCheck:
        """Return the last artifact check of an image. Returns NO_CHECK if there is none."""
        value, last = self._file.note(_LOOK + name) or (b"", 0)
        # A check has no maximum age, but its time must not be in the future.
        if name and self._is_young(last, math.inf):
            with contextlib.suppress(ValueError, RecursionError):
                match json.loads(value):
                    case [int(first), int(flags), str(listing_hash)]:
                        return ArtifactCheck(last, first, flags, bytes.fromhex(listing_hash))
        return NO_CHECK

    def record_artifact_check(
        self, name: bytes, flags: int, listing_hash: bytes, *, first: int = 0
    ) -> None:
        """Record the result of an artifact check. Does nothing if `name` is empty.

        `first` is the time of the first check of the image, or 0 if this check is the first. A
        check stays valid for longer than `ttl`.
        """
        now = int(self._now())
        if name:
            value = json.dumps([first or now, flags, listing_hash.hex()]).encode()
            self._file.put_note(_LOOK + name, value, now)

    # The end of a run.

    def finish(self) -> None:
        """Renew the old entries of images that are still tagged. Remove old entries once a day.

        Only the manifest of a tag is renewed: what is below it is as young as the manifest.
        """
        now = int(self._now())
        oldest = now - self._max_age
        if self._max_age < math.inf:  # else no entry needs a new time
            for where, repository in self._repositories.items():
                young_since = now - int(self._renewal_age)
                repository.file.renew(where, repository.roots, young_since, now)
        _, swept_at = self._file.note(_SWEPT) or (b"", 0)
        if not self._is_young(swept_at, _SWEEP_SECONDS):
            self._file.put_note(_SWEPT, b"", now)
            self._file.sweep(
                oldest,
                {
                    _TAG: oldest,
                    _LOOK: now - _CHECK_SECONDS,
                    _FACT: now - _FACT_SECONDS,
                    _SEEN: now - _SEEN_SECONDS,
                },
            )


# The age of digests (docs/design.md section 12, "Age").


class SeenKey(NamedTuple):
    """A digest in a repository of a source."""

    where: RepositoryKey
    digest: str


class FirstSeen:
    """The times at which digests were first seen at their sources, from which `min_age` counts.

    `now` returns the time in seconds since 1970. `locked_times` are the times of a lock. If a
    digest has two times, the earlier one counts. A lost or doubtful time makes a digest younger,
    never older.
    """

    def __init__(
        self,
        file: StateFile,
        now: Callable[[], float],
        locked_times: Mapping[SeenKey, int] | None = None,
    ) -> None:
        self._file = file
        self._now = now
        self._locked_times: Mapping[SeenKey, int] = locked_times or {}

    def record_sighting(self, where: RepositoryKey, digest: str, min_age: float) -> int | None:
        """Record that a digest is seen now. Return until when it is held back because of `min_age`.

        `min_age` is in seconds. The result is in seconds since 1970. Returns None if the digest is
        old enough.
        """
        now = int(self._now())
        key = SeenKey(where, digest)
        times, last_seen = self._times(key)
        is_news = not times or now - last_seen >= _DAY
        # If another digest was seen later than now, this one may be as new as that time.
        times = times or [max(now, self._file.latest(_SEEN))]
        past = [time for time in times if time <= now]
        # A clock may be wrong, and nobody knows which. So a time later than now is kept, and counts
        # when the clock has come so far.
        if is_news or not past:
            value = json.dumps(times if past else [*times, now]).encode()
            self._file.put_note(_seen_note(key), value, max(now, last_seen))
        first_seen = min(max(past, default=now), self._locked_times.get(key, now))
        held_until = first_seen + int(min_age)
        return held_until if held_until > now else None

    def first_seen_at(self, key: SeenKey) -> int | None:
        """Return when a digest was first seen, in seconds since 1970, or None if it is unknown."""
        now = int(self._now())
        times, _ = self._times(key)
        return max((time for time in times if time <= now), default=None)

    def _times(self, key: SeenKey) -> tuple[list[int], int]:
        """Return the times that may be the first, and when the digest was last seen.

        Returns no times if they are unknown or were not in use for too long.
        """
        value, last_seen = self._file.note(_seen_note(key)) or (b"[]", 0)
        times: object = None
        with contextlib.suppress(ValueError, RecursionError):
            times = json.loads(value)
        is_expired = self._now() - last_seen > _SEEN_SECONDS
        if is_expired or not isinstance(times, list):
            return [], 0
        return [time for time in times if isinstance(time, int)], last_seen


def first_seen_for(
    config: Config,
    file: StateFile,
    now: Callable[[], float],
    *,
    may_write: bool = True,
    locked_times: Mapping[SeenKey, int] | None = None,
) -> FirstSeen | None:
    """Return the first-seen times for a configuration, or None if no mapping has `min_age`.

    Opens the file. Raises ConfigError if nothing can be kept in it, because each run would then
    hold back every digest. With `locked_times` nothing has to be kept.
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
    if may_write:
        try:
            file.open()
        except StateUnusable as error:
            shown = printable(config.cache_dir or "")
            raise ConfigError(
                f"`min_age` needs first-seen times, which {shown} cannot keep: {error}",
                hint="set `cache_dir` in `global` to a directory that this user may write",
            ) from error
    return FirstSeen(file, now, locked_times)

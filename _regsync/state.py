"""What registries have answered, in this run and in earlier ones, and what of it is believed.

Owns: the file `state.db` and its lock; the one rule of belief (`Knowledge._is_held`); the times from
which `min_age` counts.
May not know: how requests are made, what is copied, and when.
Invariants: every entry was made from a registry's answer. A wrong entry costs requests, and never
leads to a wrong image (I5). Only the holder of the lock writes the file. A failing disk never stops
a run.
Follows: docs/specification.md section 1.1 (three-step look-up), docs/design.md sections 6 (rules
10, 11), 7 and 8.

The file has one relation and one table of notes, and the numbers of repositories. `held` says that a
repository holds a digest, and why: because of an answer about the digest itself, or because of a
manifest that names it. `note` has everything else, by key. `Knowledge` has the same relation for
this run, in front of the file: an answer of this run is one whose time is later than all times in
the file.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import stat
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

import anyio

from _regsync.crypto import hash_hex
from _regsync.errors import ConfigError, ContentError
from _regsync.files import WRITE_FLAGS, lock, private_files, remove_if_possible
from _regsync.oci import LAYOUT_SCHEME, check_digest, is_digest, is_repository, split_digest
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
# Artifact checks, and first-seen times with snapshots, are removed this long after they were last in
# use: the image is no longer mirrored. First-seen times are renewed once a day, so that they stay for
# 90 days.
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


# Names and keys.


class RepositoryKey(NamedTuple):
    """One repository of one registry."""

    host: str  # `host` or `host:port`, as in reports; `oci-layout:PATH` for an image layout
    name: str

    @property
    def area(self) -> str:
        """Host and first path segment: some registries have settings for each, as a project. Some facts
        hold for all repositories of an area.
        """
        return f"{self.host} {self.name.partition('/')[0]}"


# The first byte of a key, by the algorithm of its digest.
_SHA256 = b"\1"
_ALGORITHMS = {"sha256": _SHA256, "sha512": b"\2"}
# What is added to it if the digest is that of a manifest: its bytes may be a blob too, and a repository
# may have only one of them.
_IS_MANIFEST = 2


# The cache helps because the keys of an image's digests are needed some twenty times while the
# image is copied.
@lru_cache(4096)
def _blob_key(digest: str) -> bytes:
    """Return the key of a digest: a byte for the algorithm and the first 32 bytes of the hash.

    The first 32 bytes of a sha512 resist collisions as well as a sha256.
    """
    algorithm, encoded = split_digest(digest)
    return _ALGORITHMS[algorithm] + bytes.fromhex(encoded[:64])  # two hexadecimal digits a byte


@lru_cache(4096)
def _manifest_key(digest: str) -> bytes:
    """Return the key of a manifest in `held`."""
    key = _blob_key(digest)
    return bytes([key[0] + _IS_MANIFEST]) + key[1:]


def hashed_key(*words: str) -> bytes:
    """Return the name of a snapshot or artifact check: a hash of the words, 32 bytes."""
    return bytes.fromhex(hash_hex("sha256", "\0".join(words).encode(errors="surrogateescape")))


# What notes say. All times are whole seconds since 1970.


class Snapshot(NamedTuple):
    """The digests of a tag at its source and its target when the target was last up to date."""

    source: str
    pushed: str  # at the target; another one if the index is trimmed


class ArtifactCheck(NamedTuple):
    """The result of the last check of an image's artifacts at one target."""

    last: int = 0  # time of the last check; 0 if there was none
    first: int = 0  # time of the first check; 0 if there was none
    is_complete: bool = False  # whether all artifacts are at the target
    # Which tags with artifacts the source's listing had (`Referrers.listed_tag_bits`).
    listed_tag_bits: int = 0
    listing_hash: str = "unknown"  # hash of the digests that the source listed


NO_CHECK = ArtifactCheck()


# Facts of hosts, and of areas of a host's repositories.

MOUNTS = "mounts"  # whether the host has mounted a blob
# Whether a probing POST, which asks for a blob and begins an upload if it is absent, is answered so
# (docs/design.md section 6, rule 11).
ABSENT_IS_202 = "absent_is_202"
PRESENT_IS_201 = "present_is_201"


# The file.

# `application_id` in the header of our files: "rgsy"; `user_version`: the version of the tables.
_APPLICATION_ID = 0x72677379
_VERSION = 5

# In `held`, `because` is empty for an answer about the digest itself, at the time `at`; and `part` is
# one of what a manifest names. Else `because` is the key of a manifest that names the digest.
_SCHEMA = (
    "CREATE TABLE held (digest BLOB, place INTEGER, because BLOB, at INTEGER, part BLOB,"
    " PRIMARY KEY (digest, place, because)) WITHOUT ROWID",
    "CREATE TABLE note (key BLOB PRIMARY KEY, value BLOB, at INTEGER) WITHOUT ROWID",
    "CREATE TABLE place (id INTEGER PRIMARY KEY, host TEXT, name TEXT)",
)

# The direct answer comes first. Of a layer that very many manifests name, some of them are enough.
_REASONS = "SELECT because, at FROM held WHERE digest = ? AND place = ? ORDER BY because LIMIT 64"

# A blob that can be reached from a manifest.
_BELOW = """
WITH RECURSIVE below (digest) AS (
    VALUES (?1) UNION SELECT part FROM below JOIN held USING (digest)
    WHERE place = ?2 AND because = x'' AND part IS NOT NULL)
SELECT digest FROM below WHERE substr(digest, 1, 1) = x'01'
"""

_HOLDERS = "SELECT DISTINCT name FROM held JOIN place ON id = place WHERE digest = ? AND host = ?"

_PUT = "INSERT OR REPLACE INTO held VALUES (?, ?, ?, ?, ?)"
_FORGET = "DELETE FROM held WHERE digest = ? AND place = ?"
# A time that is too old, or too far in the future, is set to now.
_RENEW = """
UPDATE held SET at = ?3
WHERE digest = ?1 AND place = ?2 AND because = x'' AND at NOT BETWEEN ?4 AND ?5
"""

_SWEEP = "DELETE FROM held WHERE because = x'' AND at < ?"
_SWEEP_NOTES = "DELETE FROM note WHERE key BETWEEN ? AND ? AND at < ?"
# What was held because of a manifest that is not held any more. What is below that in turn is
# removed by the next sweep.
_SWEEP_ORPHANS = """
DELETE FROM held WHERE because != x'' AND NOT EXISTS (
    SELECT 1 FROM held AS above WHERE above.digest = held.because AND above.place = held.place)
"""

# The kinds of notes, with which their keys begin. Values are JSON.
_TAG = b"tag "  # a snapshot
_LOOK = b"look "  # an artifact check, whose time is that of the note
_FACT = b"fact "  # what was learnt about a host
_SEEN = b"seen "  # when a digest was first seen; its time: when it was last seen, to a day
_SWEPT = b"swept"  # its time: when old entries were last removed

# The endings of the files that SQLite has. A write-ahead log would not work on network disks.
_SUFFIXES = ("", "-journal")


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

    def __init__(self, directory: str | None, log: Callable[..., object]) -> None:
        """Keep the state in a directory, or only in memory if it is None."""
        self._directory = directory
        self._shown_directory = printable(directory or "")  # for messages
        self._path = os.path.join(directory or "", "state.db")
        self._log = log
        self._connection: sqlite3.Connection | None = None
        self._lock: int | None = None  # descriptor of `state.lock`, which this process has locked
        self._is_loaded = False
        # Notes that are not in the file yet: value and time, by key.
        self._notes = dict[bytes, tuple[Any, int]]()
        # Statements that are not executed yet, each with its rows of values. No query sees them: the
        # run knows what it has written.
        self._changes = list[tuple[str, list[tuple[Any, ...]]]]()
        # The table `place`: what earlier runs have written, and what this run adds.
        self.old_places = dict[RepositoryKey, int]()
        self._new_places = dict[RepositoryKey, int]()
        self._last_place = 0

    @property
    def is_writer(self) -> bool:
        """Whether this process holds the lock and so may write the file."""
        return self._lock is not None

    @property
    def is_used(self) -> bool:
        """Whether this run can use the notes of earlier runs."""
        return self._is_loaded or bool(self._notes)

    # Opening and closing.

    def load(self, *, may_write: bool = True, is_needed: bool = False) -> None:
        """Open the file for writing if `may_write` and if no other process holds the lock, else for
        reading. Does nothing if it is open.

        If it cannot be used, that is logged. But if it `is_needed`, raises ConfigError: without the
        times of earlier runs `min_age` would hold back every digest.
        """
        is_wanted = is_needed or self._directory is not None
        if self._connection is not None or not is_wanted:
            return
        self._is_loaded = False
        try:
            self._open(may_write=may_write)
        except StateUnusable as error:
            self._close_file()
            hint = (
                "set `cache_dir` in `global` to a directory that this user may write and that stays"
                " from run to run (an absolute one if the configuration comes from standard input)"
            )
            if is_needed:
                text = f"`min_age` counts from a state, and none is kept: {error}"
                raise ConfigError(text, hint=hint) from error
            level, hints = ("warning", {"hint": hint}) if HAS_SQLITE else ("info", {})
            self._log(level, "state", f"no state is kept: {error}", **hints)
        else:
            self._is_loaded = True

    def _open(self, *, may_write: bool) -> None:
        """Lock and open the file. Raises StateUnusable."""
        if self._directory is None:
            raise StateUnusable("no directory is set")
        if not HAS_SQLITE:
            raise StateUnusable("this Python has no module sqlite3")
        try:
            with private_files():
                if may_write:
                    self._take_lock(self._directory)
                self._connect()
        except (OSError, sqlite3.Error, UnicodeDecodeError, StateUnusable) as error:
            raise StateUnusable(f"{self._shown_directory}: {reason_of(error)}") from error

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
            self._log("warning", "state", text)
            self._remove_file()
            self._open_database()

    def _open_database(self) -> None:
        """Open the file without checking all of it, which would read all of it. A writer creates it.

        SQLite follows links and waits for pipes. So this raises sqlite3.DatabaseError if something
        else than a regular file with one name is where SQLite has its two files, or if the state is
        damaged or old; StateUnusable if it must not be replaced. Other damage is found when a
        damaged page is read.
        """
        for suffix in _SUFFIXES:
            with contextlib.suppress(FileNotFoundError):
                status = os.lstat(self._path + suffix)
                if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
                    raise sqlite3.DatabaseError(f"state.db{suffix} is not a file of its own")
        if not self.is_writer and not os.path.exists(self._path):
            return  # there is no state yet
        patience = _WRITER_PATIENCE if self.is_writer else _READER_PATIENCE
        database = sqlite3.connect(self._path, timeout=patience, isolation_level=None)
        self._connection = database
        database.text_factory = lambda text: text.decode("utf-8", "replace")
        is_new = self._is_empty(database)
        if not is_new:
            places = database.execute("SELECT host, name, id FROM place").fetchall()
            self.old_places = {RepositoryKey(host, name): place for host, name, place in places}
            self._last_place = max(self.old_places.values(), default=0)
        if self.is_writer:
            # A commit does not wait for the disk. If a power cut damages the file, that costs
            # requests only (I5).
            database.execute("PRAGMA synchronous = OFF")
            # All statements until the next commit share one transaction. Without one, each query
            # would lock and unlock the file.
            database.execute("BEGIN")
        elif is_new:
            self._close_file()  # there is no state yet
            return
        if is_new:
            for statement in _SCHEMA:
                database.execute(statement)
            database.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
            database.execute(f"PRAGMA user_version = {_VERSION}")
            database.execute("COMMIT")
            database.execute("BEGIN")

    def _is_empty(self, database: sqlite3.Connection) -> bool:
        """Report whether a database is new. Checks that one that is not is ours.

        Raises sqlite3.DatabaseError if it is damaged or old, StateUnusable if it must not be
        replaced.
        """
        (program,) = database.execute("PRAGMA application_id").fetchone()
        (version,) = database.execute("PRAGMA user_version").fetchone()
        query = "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY name"
        tables = tuple(sql for (sql,) in database.execute(query).fetchall())
        if not (program or version or tables):
            return True
        if program != _APPLICATION_ID:
            raise StateUnusable("state.db is another program's")
        if version > _VERSION:
            raise StateUnusable("it was written by a newer version of regsync")
        if version < _VERSION:
            raise sqlite3.DatabaseError("it is of an earlier version")
        if tables != _SCHEMA:
            raise sqlite3.DatabaseError("its tables are not those of this version")
        return False

    def close(self) -> None:
        """Commit what is new, close the file and release the lock."""
        self.commit(is_last=True)
        self._close_file()

    def _close_file(self) -> None:
        """Close the file and release the lock, without a commit."""
        self._disconnect()
        self.old_places = {}
        self._new_places.clear()
        self._last_place = 0
        self._changes.clear()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _remove_file(self) -> None:
        """Remove the file, and what SQLite has put beside it."""
        self._disconnect()
        for suffix in _SUFFIXES:
            remove_if_possible(self._path + suffix)

    # Reading and writing.

    async def commit_regularly(self) -> None:
        """Commit new entries every COMMIT_SECONDS, until cancelled or until the lock is lost."""
        while self.is_writer:
            await anyio.sleep(COMMIT_SECONDS)
            self.commit()

    def commit(self, *, is_last: bool = False) -> None:
        """Write what is new to the file. If the file is locked, the next commit does it; the last one
        waits for readers.
        """
        if self._connection is None or not self.is_writer:
            return
        notes = [(key, json.dumps(value).encode(), at) for key, (value, at) in self._notes.items()]
        try:
            if is_last:
                milliseconds = int(_READER_PATIENCE * 1000)
                self._connection.execute(f"PRAGMA busy_timeout = {milliseconds}")
            for statement, rows in self._changes:
                self._connection.executemany(statement, rows)
            self._connection.executemany("INSERT OR REPLACE INTO note VALUES (?, ?, ?)", notes)
            self._connection.execute("COMMIT")
            self._notes.clear()
            self._changes.clear()
            self._connection.execute("BEGIN")
        except sqlite3.Error as error:
            self._on_error(error, is_last=is_last)

    def write(self, statement: str, rows: Iterable[tuple[Any, ...]]) -> None:
        """Execute a statement for each row with the next commit, if this process may write."""
        if self.is_writer:
            self._changes.append((statement, list(rows)))

    def read(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        """Return the rows of a query. Returns no rows after an error.

        Rows may have values of any type, because the file may be damaged.
        """
        if self._connection is None:
            return []
        try:
            # A query keeps the file locked until its last row has been read.
            return self._connection.execute(query, values).fetchall()
        except sqlite3.Error as error:
            self._on_error(error)
            return []

    def _on_error(self, error: Exception, *, is_last: bool = False) -> None:
        """Stop using the file, unless another process has locked it for a moment, and what is new
        can be written later.

        A damaged file is removed, so that the next run begins anew.
        """
        if self.is_writer and not is_last and "is locked" in str(error):
            return
        text = f"the state in {self._shown_directory} is not used any more: {reason_of(error)}"
        self._log("warning", "state", text)
        if self.is_writer and _is_damage(error):
            self._remove_file()
        self._close_file()

    # Repositories and notes.

    def place_of(self, where: RepositoryKey) -> int:
        """Return the number of a repository in the file. It gets one if it has none."""
        place = self.old_places.get(where) or self._new_places.get(where)
        if place is None:
            place = self._last_place = self._last_place + 1
            self._new_places[where] = place
            self.write("INSERT OR REPLACE INTO place VALUES (?, ?, ?)", [(place, *where)])
        return place

    def note(self, key: bytes) -> tuple[Any, int]:
        """Return the value of a note, and its time. Returns None and 0 if there is no note.

        The file may be damaged, so the value may have any form.
        """
        if key in self._notes:
            return self._notes[key]
        for value, at in self.read("SELECT value, at FROM note WHERE key = ?", key):
            with contextlib.suppress(TypeError, ValueError, RecursionError):
                if isinstance(at, int):
                    return json.loads(value), at
        return None, 0

    def put_note(self, key: bytes, value: object, at: int) -> None:
        """Note a value, which must be one of JSON."""
        self._notes[key] = value, at

    def latest(self, kind: bytes) -> int:
        """Return the latest time of the notes of a kind, which is the beginning of their keys."""
        query = "SELECT CAST(max(at) AS INTEGER) FROM note WHERE key BETWEEN ? AND ?"
        times = [time for (time,) in self.read(query, kind, _end(kind)) if time]
        times += [at for key, (_, at) in self._notes.items() if key.startswith(kind)]
        return max(times, default=0)


def _end(kind: bytes) -> bytes:
    """Return what is behind all keys of a kind, which ends with a space."""
    return kind[:-1] + b"!"


def _is_damage(error: Exception) -> bool:
    """Report whether an error is one of the file, and not of the disk or of another process.

    SQLite reports these as errors of other classes.
    """
    return isinstance(error, UnicodeDecodeError) or type(error) is sqlite3.DatabaseError


# Belief.

# The time of an answer of this run: it is later than any time that an earlier run has written.
_THIS_RUN = math.inf
# The time of an answer that there was not: it is neither before nor after any other.
_NEVER = math.nan


def _is_layout(place: str) -> bool:
    """Report whether a host, or an area of one, is an image layout."""
    return place.startswith(f"{LAYOUT_SCHEME}:")


@dataclass(slots=True)
class _Held:
    """Why a repository is believed to hold a digest. What an answer has shown to be absent has no
    reason.
    """

    at: float = _NEVER  # when an answer was last about the digest itself
    above: tuple[bytes, ...] = ()  # the manifests of the repository that name it
    is_gone: bool = False  # whether the last answer about it has shown that it is absent


@dataclass(slots=True)
class _Repository:
    """What this run knows about one repository."""

    # What this run has learnt, by key of the digest. It stands in place of what the file says.
    held: dict[bytes, _Held] = field(default_factory=dict)
    tagged: set[bytes] = field(default_factory=set)  # manifests that tags name
    # Whether an answer of this run contradicts what earlier runs have left.
    is_contradicted: bool = False
    # Whether the repository held manifests when this run asked. None if this run has not asked.
    is_populated: bool | None = None
    # Names of repositories from which a mount into this repository was refused.
    refused_sources: set[str] = field(default_factory=set)

    def learn(self, key: bytes) -> _Held:
        """Return what this run knows of a digest, to be changed."""
        return self.held.setdefault(key, _Held())

    def confirm(self, key: bytes) -> None:
        """Record that an answer of this run was about a digest."""
        held = self.learn(key)
        held.at = _THIS_RUN
        held.is_gone = False


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
        self._file = file or StateFile(None, lambda *_: None)
        self._now = now
        self._max_age = ttl or math.inf  # seconds
        # A snapshot is no evidence of what a target holds: it says what to ask, and what to compare.
        self._tag_age = max(self._max_age, _SEEN_SECONDS)
        # Entries in use are written again when they are older than this, in seconds. So most runs
        # without changes write nothing.
        self._renewal_age = self._max_age / 4
        self._repositories = defaultdict[RepositoryKey, _Repository](_Repository)
        # By host and key, the names of repositories where this run knows a manifest or a tag that
        # names the digest. A run has an entry for each blob that it copies, so its size counts.
        self._holders = defaultdict[str, dict[bytes, tuple[str, ...]]](dict)
        self._facts = dict[tuple[str, str], object]()  # by place and name
        # By host, refused mounts of blobs that only earlier runs have seen.
        self._doubtful_refusals = Counter[str]()
        self._read = lru_cache(4096)(self._read_reasons)
        self._old_holders = lru_cache(4096)(self._read_holders)

    # The file.

    def _read_reasons(self, where: RepositoryKey, key: bytes) -> _Held:
        """Return why earlier runs believed that a repository holds a digest."""
        place = self._file.old_places.get(where)
        rows = self._file.read(_REASONS, key, place) if place else []
        times = [at for because, at in rows if not because and isinstance(at, int)]
        return _Held(max(times, default=_NEVER), tuple(because for because, _ in rows if because))

    def _read_holders(self, host: str, key: bytes) -> list[str]:
        """Return the repositories of which earlier runs believed that they hold a digest."""
        rows = self._file.read(_HOLDERS, key, host) if self._file.old_places else []
        # The file has no checksum, and the name becomes part of a URL.
        return [name for (name,) in rows if isinstance(name, str) and is_repository(name)]

    def _write(
        self, where: RepositoryKey, statement: str, rows: Iterable[Sequence[object]]
    ) -> None:
        """Change rows of one repository in the file. A row begins with a digest, whose place follows.

        Nothing is kept of image layouts, because another disk may be mounted in the next run
        (docs/design.md section 13).
        """
        if self._file.is_writer and not _is_layout(where.host):
            place = self._file.place_of(where)
            self._file.write(statement, [(row[0], place, *row[1:]) for row in rows])

    def _is_young(self, time: float, max_age: float) -> bool:
        """Report whether `time` is at most `max_age` seconds ago, or at most a day in the future."""
        return -_CLOCK_AHEAD_SECONDS <= self._now() - time <= max_age

    # The rule of belief.

    def _is_held(
        self,
        where: RepositoryKey,
        key: bytes,
        max_age: float = math.inf,
        *,
        must_be_named: bool = False,
    ) -> bool:
        """Report whether a repository is believed to hold a blob or manifest.

        It is believed if an answer was about it, or about a manifest from which it can be reached:
        an answer of this run, or of an earlier one that is young enough. So a tag that answers in
        this run vouches for all that is below it. With `must_be_named` only manifests above the
        digest count.
        """
        repository = self._repositories[where]
        max_age = -math.inf if repository.is_contradicted else min(max_age, self._max_age)
        unread = [key]
        for each in unread:  # the list grows
            held = repository.held.get(each) or self._read(where, each)
            counts = each != key or not must_be_named
            if counts and (held.at == _THIS_RUN or self._is_young(held.at, max_age)):
                return True
            unread += [manifest for manifest in held.above if manifest not in unread]
        return False

    def is_blob_believed(
        self, where: RepositoryKey, digest: str, *, must_be_recent: bool = False
    ) -> bool:
        """Report whether a repository is believed to hold a blob.

        Pass `must_be_recent` if the registry would accept a manifest although the blob is absent.
        The age of an older entry is then no evidence.
        """
        max_age = _RECENT_SECONDS if must_be_recent else math.inf
        return self._is_held(where, _blob_key(digest), max_age)

    def is_manifest_believed(
        self, where: RepositoryKey, digest: str, *, must_be_recent: bool = False
    ) -> bool:
        """Report whether a repository is believed to hold a manifest with all its parts, as
        `is_blob_believed` does.
        """
        max_age = _RECENT_SECONDS if must_be_recent else math.inf
        return self._is_held(where, _manifest_key(digest), max_age)

    def is_confirmed(self, where: RepositoryKey, digest: str) -> bool:
        """Report whether an answer of this run was about this blob or manifest."""
        return self.is_manifest_confirmed(where, digest) or (
            is_digest(digest) and self._is_answered(where, _blob_key(digest))
        )

    def is_manifest_confirmed(self, where: RepositoryKey, digest: str) -> bool:
        """Report whether an answer of this run was about this manifest."""
        return is_digest(digest) and self._is_answered(where, _manifest_key(digest))

    def _is_answered(self, where: RepositoryKey, key: bytes) -> bool:
        held = self._repositories[where].held.get(key)
        return held is not None and held.at == _THIS_RUN

    # Answers about blobs and manifests.

    def confirm_blob(self, where: RepositoryKey, digest: str, *, by_probe: bool = False) -> None:
        """Record that a registry has confirmed a blob in a repository.

        With `by_probe` it has answered 201 to a probing POST (rule 11): no answer was about the
        blob alone. So it is believed as by an earlier run.
        """
        repository, key = self._repositories[where], _blob_key(digest)
        now = int(self._now())
        if key not in repository.held:
            # Not a copy, for memory's sake: from now on nobody reads this key of the cache.
            repository.held[key] = self._read(where, key)
        held = repository.held[key]
        if held.at == _THIS_RUN:
            return
        if by_probe:
            held.at = now
        else:
            repository.confirm(key)
        self._write(where, _PUT, [(key, b"", now, None)])

    def confirm_manifest(
        self, where: RepositoryKey, digest: str, blobs: Iterable[str], children: Iterable[str] = ()
    ) -> None:
        """Record that a repository holds a manifest and the blobs that the manifest names.

        `blobs` and `children` are the digests that the manifest names. The blobs may be mounted
        from the repository from now on.
        """
        repository, manifest = self._repositories[where], _manifest_key(digest)
        blob_keys = [_blob_key(blob) for blob in blobs]
        for key in (manifest, *blob_keys):
            repository.confirm(key)
        self._record_content(where, manifest, [*blob_keys, *map(_manifest_key, children)])

    def _record_content(
        self, where: RepositoryKey, manifest: bytes, parts: Sequence[bytes]
    ) -> None:
        """Record what a manifest names: the blobs can be mounted.

        If the file knows the manifest, nothing is written: so most runs write nothing.
        """
        repository = self._repositories[where]
        above = (manifest,)
        for part in parts:
            repository.learn(part).above = above
            self._add_holder(where, part)
        if not self._is_young(self._read(where, manifest).at, self._renewal_age):
            top = (manifest, b"", int(self._now()), parts[0] if parts else None)
            self._write(where, _PUT, [top, *((part, manifest, 0, None) for part in parts)])

    def _add_holder(self, where: RepositoryKey, key: bytes) -> None:
        names = self._holders[where.host].get(key, ())
        if where.name not in names and len(names) < MOST_HOLDERS:
            self._holders[where.host][key] = (*names, where.name)

    def forget(self, where: RepositoryKey, digest: str, *, is_absent: bool = True) -> None:
        """Drop all evidence of a blob or manifest, because an answer shows that it is absent, or else
        may be. What a manifest names is no longer believed because of it.
        """
        repository = self._repositories[where]
        keys = (_blob_key(digest), _manifest_key(digest))
        is_found_by_probe = math.isfinite(repository.learn(keys[0]).at)
        if is_absent and is_found_by_probe:
            self.learn(where.area, ABSENT_IS_202, False)
        repository.held.update((key, _Held(is_gone=True)) for key in keys)
        repository.tagged.difference_update(keys)
        self._write(where, _FORGET, [(key,) for key in keys])

    # What tags name (docs/design.md section 7, "Vouching").

    def confirm_tagged_manifest(self, where: RepositoryKey, digest: str) -> None:
        """Record that a tag of a repository names a manifest."""
        repository, manifest = self._repositories[where], _manifest_key(digest)
        repository.confirm(manifest)
        repository.tagged.add(manifest)
        self._add_holder(where, manifest)

    def record_tagged_content(
        self, host: str, digest: str, blobs: Iterable[str], children: Iterable[str]
    ) -> None:
        """Record what a manifest names, as evidence for all repositories where it is tagged.

        Does nothing if no tag of the host names the manifest, directly or through an index. `blobs`
        and `children` are the digests that the manifest names. An answer of this run that one of
        them may be absent is better evidence.
        """
        manifest = _manifest_key(digest)
        parts = [*map(_blob_key, blobs), *map(_manifest_key, children)]
        for name in self._holders[host].get(manifest, ()):
            where = RepositoryKey(host, name)
            if self._is_held(where, manifest, -math.inf):
                learn = self._repositories[where].learn
                there = [each for each in parts if not learn(each).is_gone]
                self._record_content(where, manifest, there)

    def record_contradiction(self, where: RepositoryKey) -> None:
        """Record that an answer of this run contradicts the entries of a repository.

        What is left is what answers of this run were about, and manifests that are found tagged
        after this call.
        """
        repository = self._repositories[where]
        repository.is_contradicted = True
        for manifest in repository.tagged:
            repository.held.pop(manifest, None)
        repository.tagged.clear()

    def record_populated(self, where: RepositoryKey, is_populated: bool = True) -> None:
        """Record whether a repository holds manifests.

        A repository without manifests contradicts what earlier runs have left.
        """
        self._repositories[where].is_populated = is_populated
        if not is_populated:
            self.record_contradiction(where)

    def is_empty(self, where: RepositoryKey) -> bool:
        """Report whether a repository held no manifests when this run listed its tags."""
        return self._repositories[where].is_populated is False

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
        key = _blob_key(digest)
        for name in chain(self._holders[host].get(key, ()), self._old_holders(host, key)):
            if self._is_held(RepositoryKey(host, name), key, must_be_named=True):
                yield name

    def supports_mounts(self, host: str) -> bool | None:
        """Report whether a host mounts blobs. Returns None if no mount was answered."""
        return self.fact(host, MOUNTS)

    def may_mount(self, where: RepositoryKey, source: str) -> bool:
        """Report whether a mount from the repository `source` may succeed."""
        is_refused = source in self._repositories[where].refused_sources
        return not is_refused and self.supports_mounts(where.host) is not False

    def record_refused_mount(
        self, where: RepositoryKey, source: str, *, is_source_confirmed: bool
    ) -> None:
        """Record that a mount from `source` was refused. The same mount is not tried again.

        If the host has mounted nothing yet, it is recorded as one that does not mount. But if only
        an earlier run believed that `source` holds the blob, it may just have lost it: then the host
        is recorded when that has happened several times (docs/design.md section 6, rule 10).
        """
        self._repositories[where].refused_sources.add(source)
        self._doubtful_refusals[where.host] += not is_source_confirmed
        is_conclusive = is_source_confirmed or (
            self._doubtful_refusals[where.host] >= _MOST_DOUBTFUL_REFUSALS
        )
        if is_conclusive and self.supports_mounts(where.host) is None:
            self.learn(where.host, MOUNTS, False)

    def needs_head(self, where: RepositoryKey) -> bool:
        """Report whether a HEAD must check for a blob before a probing POST starts its upload.

        A HEAD is needed if the answer to the POST would not show whether the blob is present. It is
        not needed in a repository without known manifests: most blobs are absent there, and the
        upload needs the POST anyway.
        """
        repository = self._repositories[where]
        if self.fact(where.area, ABSENT_IS_202) is False:
            return True  # a 201 would not show that the blob is present
        return repository.is_populated is True and not self.fact(where.area, PRESENT_IS_201)

    def choose_present_blob(self, where: RepositoryKey) -> str | None:
        """Return the digest of a blob that an answer of this run has shown to be in a repository.

        Returns None if there is no such blob. The age of an entry alone is not enough.
        """
        repository = self._repositories[where]
        # A digest can be made of the key of a sha256 only.
        blobs = [key for key in repository.held if key.startswith(_SHA256)]
        present = [key for key in blobs if self._is_held(where, key, -math.inf)]
        for manifest in repository.tagged:
            if not present:
                rows = self._file.read(_BELOW, manifest, self._file.old_places.get(where))
                present = [key for (key,) in rows if key not in repository.held]
        return f"sha256:{min(present)[1:].hex()}" if present else None

    # Facts of hosts.

    def fact(self, place: str, name: str) -> bool | None:
        """Return a yes or no that runs of the last day have learnt about a place, or None.

        `place` is a host, or the area of a repository.
        """
        value = self.host_note(place, name)
        return value if isinstance(value, bool) else None

    def host_note(self, place: str, name: str) -> object:
        """Return what runs of the last day have learnt about a place, or None."""
        fact = (place, name)
        if fact not in self._facts:
            value, at = self._file.note(_fact_note(*fact))
            self._facts[fact] = value if self._is_young(at, _FACT_SECONDS) else None
        return self._facts[fact]

    def learn(self, place: str, name: str, value: object) -> None:
        """Record what was learnt about a host, or about the area of a repository."""
        if self.host_note(place, name) != value:
            self._facts[place, name] = value
            if not _is_layout(place):
                self._file.put_note(_fact_note(place, name), value, int(self._now()))

    # Tags, and artifacts of images. The state keeps nothing under an empty name.

    def snapshot(self, name: bytes) -> Snapshot | None:
        """Return the snapshot with this name. Returns None if there is none, or if it is too old."""
        match self._file.note(_TAG + name):
            case [str(source), str(pushed)], at if self._is_young(at, self._tag_age):
                with contextlib.suppress(ContentError):
                    return Snapshot(check_digest(source), check_digest(pushed))
        return None

    def record_snapshot(self, name: bytes, snapshot: Snapshot) -> None:
        """Record what a tag names at its source and at its target, unless that was done lately."""
        value, at = self._file.note(_TAG + name)
        is_up_to_date = value == [*snapshot] and self._is_young(at, self._tag_age / 4)
        if name and not is_up_to_date:
            self._file.put_note(_TAG + name, [*snapshot], int(self._now()))

    def artifact_check(self, name: bytes) -> ArtifactCheck:
        """Return the last artifact check of an image. Returns NO_CHECK if there is none."""
        match self._file.note(_LOOK + name):
            # A check has no maximum age, but its time must not be in the future.
            case [int(), bool(), int(), str()] as value, last if self._is_young(last, math.inf):
                return ArtifactCheck(last, *value)
        return NO_CHECK

    def record_artifact_check(self, name: bytes, check: ArtifactCheck) -> None:
        """Record the result of an artifact check that was made now.

        A check stays valid for longer than `ttl`.
        """
        now = int(self._now())
        if name:
            _, *results = check._replace(first=check.first or now)
            self._file.put_note(_LOOK + name, results, now)

    # The age of digests (docs/design.md section 12, "Age").

    def record_sighting(self, where: RepositoryKey, digest: str, min_age: float) -> int | None:
        """Record that a digest is seen now at its source. Return until when `min_age` holds it back.

        `min_age` is in seconds. The result is in seconds since 1970. Returns None if the digest is
        old enough. A lost or doubtful time makes a digest younger, never older.
        """
        now = int(self._now())
        key = _SEEN + f"{'/'.join(where)} {digest}".encode()
        first, last_seen = self._file.note(key)
        if not isinstance(first, int):
            # If another digest was seen later than now, a clock was wrong, and this digest may be
            # as new as that time, which is noted once a day.
            latest, last_seen = self._file.latest(_SEEN), 0
            first = now if now >= latest else latest + _DAY
        if now - last_seen >= _DAY:
            self._file.put_note(key, first, now)
        held_until = first + int(min_age)
        return held_until if held_until > now else None

    # The end of a run.

    def finish(self) -> None:
        """Renew the old entries of images that are still tagged. Remove old entries once a day.

        Only the manifest of a tag is renewed: what is below it is as young as the manifest.
        """
        now = int(self._now())
        times = (now, now - self._renewal_age, now + _CLOCK_AHEAD_SECONDS)
        for where, repository in self._repositories.items():
            if repository.tagged:
                self._write(where, _RENEW, [(key, *times) for key in repository.tagged])
        _, swept_at = self._file.note(_SWEPT)
        if not self._is_young(swept_at, _SWEEP_SECONDS):
            self._file.put_note(_SWEPT, None, now)
            self._file.write(_SWEEP, [(now - self._max_age,)])
            self._file.write(_SWEEP_ORPHANS, [()])
            ages = {
                _TAG: self._tag_age,
                _LOOK: _CHECK_SECONDS,
                _FACT: _FACT_SECONDS,
                _SEEN: _SEEN_SECONDS,
            }
            rows = [(kind, _end(kind), now - age) for kind, age in ages.items()]
            self._file.write(_SWEEP_NOTES, rows)


def _fact_note(place: str, name: str) -> bytes:
    return _FACT + f"{place} {name}".encode(errors="surrogateescape")

"""The state that runs keep on disk: one SQLite file.

Owns: `state.db` and its lock `state.lock`; the entries that are not in the file yet; when they are
written.
May not know: what an entry means and whether it is believed (state/knowledge.py), clocks,
registries.
Invariants: only the holder of the lock writes the file, or removes it if it is damaged. A failing
disk never stops a run.
Follows: docs/design.md section 8.

All access is on the event loop's thread. With 600,000 entries a look-up takes 10 microseconds, and
a commit of 1,000 entries takes 10 ms. Entries are read one by one, so that the memory of a run does
not depend on the size of the file.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence

import anyio

from _regsync.files import WRITE_FLAGS, lock
from _regsync.state import sqlite
from _regsync.state.archive import (
    DIGEST_BYTES,
    MOST_HOLDERS,
    ArtifactCheck,
    BlobEntry,
    Fact,
    ManifestEntry,
    MemoryArchive,
    RepositoryKey,
    Snapshot,
    SnapshotEntry,
)
from _regsync.state.sqlite import BelongsToOthers, Damaged
from _regsync.text import printable, reason_of

if sqlite.HAS_SQLITE:
    import sqlite3

# Maximum seconds between two commits. A killed run loses the entries of this time.
COMMIT_SECONDS = 0.5
# As many new entries are committed at once.
_COMMIT_ENTRIES = 1000
# The maximum share of the time that commits take. On a fast disk they are more frequent than
# COMMIT_SECONDS requires.
_COMMIT_SHARE = 0.05

# How long a query of a reader, and the last commit of a run, wait for another process's lock, in
# seconds.
_BUSY_SECONDS = 2.0
# The same for all other commits. They block the event loop, so they wait only briefly. If the file
# is still locked, their entries stay in memory until the next commit.
_WRITER_BUSY_SECONDS = 0.05

# Maximum number of keys in one query. SQLite accepts at least 999 values
# (https://www.sqlite.org/limits.html).
_MOST_KEYS = 500

# Names of files of earlier versions. Values: the bytes with which those versions began the file.
_OLD_FILES = {"state.bin": b"regsync\n", "state.journal": b"regsyncj"}

_Row = tuple[object, ...]


class StateFile:
    """The state file between `load` and `close`. Implements `Archive` (state/archive.py).

    Disk errors are not raised. They are logged by `log(level, event, message)`. The file is in one
    of these states:

    - writer: open, and this process holds the lock. New entries are kept in memory until they are
      committed;
    - reader: open without the lock. Of new entries, only artifact checks and forgotten keys are
      kept, for look-ups of this run. A writer becomes a reader if it cannot write any more;
    - closed: look-ups find only what this run has kept in memory.
    """

    def __init__(
        self,
        cache_dir: str | None,
        log: Callable[[str, str, str], object],
        *,
        keeps_unsaved: bool = False,
    ) -> None:
        """Keep the state in the directory `cache_dir`, or keep no state if it is None.

        With `keeps_unsaved`, entries that could not be written stay in memory until the next
        `load` of this object.
        """
        self._directory = cache_dir
        self._log = log
        # The directory, for messages.
        self._shown_directory = printable(cache_dir or "")
        self._path = os.path.join(cache_dir or "", "state.db")
        self._keeps_unsaved = keeps_unsaved and cache_dir is not None

        self._connection: sqlite3.Connection | None = None
        # The file descriptor of `state.lock`. None unless this process holds the lock.
        self._lock_descriptor: int | None = None
        # Whether this run has opened the file, or found that there is none yet.
        self._is_used = False

        # Entries that are not in the file yet. They are newer than the file's. The value None marks
        # a blob or manifest as forgotten.
        self._unsaved = MemoryArchive()
        self._puts_since_commit = 0
        # Set by each new entry. None until `commit_regularly` waits for an entry.
        self._put_event: anyio.Event | None = None

    @property
    def is_writer(self) -> bool:
        """Whether this process holds the lock and so may write the file."""
        return self._lock_descriptor is not None

    @property
    def is_used(self) -> bool:
        """Whether this run can use the entries of earlier runs."""
        return self._is_used or (self._keeps_unsaved and bool(self._unsaved))

    # Opening and closing.

    def load(self, *, may_write: bool = True) -> None:
        """Open the file.

        It is opened for writing if `may_write` and if no other process holds the lock, else for
        reading. If it cannot be used, this logs a warning, and the state stays closed.
        """
        self._is_used = False
        if self._directory is None:
            return
        if not sqlite.HAS_SQLITE:
            self._warn("no state is kept: this Python has no module sqlite3")
            return
        try:
            if may_write and self._try_lock():
                self._open_for_writing()
                self.commit()  # entries that could not be written before
            else:
                self._open_for_reading()
        except BelongsToOthers as error:
            self._warn(
                f"the state in {self._shown_directory} is not used, and none is kept: {error}"
            )
            self._close_file()
        except (OSError, sqlite3.Error) as error:
            self._warn(f"no state is kept: {self._shown_directory}: {reason_of(error)}")
            self._close_file()

    def close(self) -> None:
        """Commit the new entries, close the file and release the lock."""
        if self._connection is not None and self.is_writer:
            # The last commit may wait for longer, because no other task is running.
            with contextlib.suppress(sqlite3.Error):
                self._connection.execute(f"PRAGMA busy_timeout = {_BUSY_SECONDS * 1000:.0f}")
            self.commit()
            if self._unsaved and self.is_writer:
                # Another process has locked the file for too long.
                self._warn(f"the state in {self._shown_directory} is not saved: it is locked")
        self._close_file()
        if not self._keeps_unsaved:
            self._unsaved.clear()

    def _close_file(self) -> None:
        """Close the file and release the lock, without a commit."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._unlock()

    def _unlock(self) -> None:
        if self._lock_descriptor is not None:
            os.close(self._lock_descriptor)
            self._lock_descriptor = None

    def _try_lock(self) -> bool:
        """Take the lock. Returns False and logs a warning if another process holds it."""
        assert self._directory is not None
        os.makedirs(self._directory, mode=0o700, exist_ok=True)
        descriptor = os.open(os.path.join(self._directory, "state.lock"), WRITE_FLAGS, 0o600)
        try:
            lock(descriptor)
        except BlockingIOError:
            os.close(descriptor)
            text = f"another run uses {self._shown_directory}: this one reads the state and saves nothing"
            self._log("warning", "state_locked", text)
            return False
        except OSError:
            os.close(descriptor)
            raise
        self._lock_descriptor = descriptor
        return True

    def _open_for_writing(self) -> None:
        """Open the file, or replace it if it is damaged. Files of earlier versions are removed."""
        assert self._directory is not None
        for name, beginning in _OLD_FILES.items():
            sqlite.remove_if_ours(os.path.join(self._directory, name), beginning)
        try:
            self._connection = sqlite.open_for_writing(self._path, _WRITER_BUSY_SECONDS)
        except Damaged as error:
            self._begin_empty_file(str(error))
        self._is_used = True

    def _open_for_reading(self) -> None:
        try:
            # None if there is no file yet.
            self._connection = sqlite.open_for_reading(self._path, _BUSY_SECONDS)
        except (Damaged, BelongsToOthers, OSError, sqlite3.Error) as error:
            self._stop_reading(error)
        else:
            self._is_used = True

    def _stop_reading(self, error: Exception) -> None:
        """Close the file after an error in a process that only reads, and log the reason."""
        self._close_file()
        self._is_used = False
        if isinstance(error, (Damaged, BelongsToOthers)):
            self._warn(f"the state in {self._shown_directory} is not used: {error}")
        elif sqlite.is_busy(error) or sqlite.is_half_written(error):
            text = f"the state in {self._shown_directory} is not used: another run has not finished writing it"
            self._log("info", "state", text)
        else:
            self._warn(f"{self._shown_directory} cannot be read: {reason_of(error)}")

    def _begin_empty_file(self, problem: str) -> None:
        """Replace a damaged file by an empty file. Log the problem as a warning."""
        self._warn(f"the state in {self._shown_directory} is not used: {problem}")
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        sqlite.remove_database(self._path)
        try:
            self._connection = sqlite.open_for_writing(self._path, _WRITER_BUSY_SECONDS)
        except Damaged as error:
            raise OSError(str(error)) from error

    def _warn(self, message: str) -> None:
        self._log("warning", "state", message)

    # Writing.

    async def commit_regularly(self) -> None:
        """Commit new entries within COMMIT_SECONDS, until cancelled or until the lock is lost."""
        while self.is_writer:
            self._put_event = anyio.Event()
            if not self._unsaved:
                await self._put_event.wait()
            start = anyio.current_time()
            self.commit()
            took = anyio.current_time() - start
            pause = min(COMMIT_SECONDS, took / _COMMIT_SHARE)
            with anyio.move_on_after(pause):
                await anyio.sleep_forever()

    def commit(self) -> None:
        """Write the new entries to the file. If the file is locked, they stay in memory."""
        self._puts_since_commit = 0
        if self._connection is None or not self.is_writer or not self._unsaved:
            return
        try:
            _write_entries(self._connection, self._unsaved)
        except sqlite3.Error as error:
            self._on_write_error(error)
        else:
            self._unsaved.clear()

    def _on_write_error(self, error: sqlite3.Error) -> None:
        """Replace a damaged file. Stop writing after any other error, unless the file is locked.

        If another process has locked the file, the next commit tries again.
        """
        if sqlite.is_damage(error):
            self._replace_damaged(error)
        elif not sqlite.is_busy(error):
            self._stop_writing(error)

    def _stop_writing(self, error: Exception) -> None:
        """Stop writing after an error, such as a full disk. The file stays open for reading."""
        self._warn(f"the state in {self._shown_directory} is not saved: {reason_of(error)}")
        if self._connection is not None and self._connection.in_transaction:
            # Another process may take the lock from now on, and must not wait for this transaction.
            self._connection.execute("ROLLBACK")
        self._unlock()

    def _replace_damaged(self, error: Exception) -> None:
        """Replace a damaged file by a new file with the unsaved entries.

        If that fails too, continue without a file.
        """
        try:
            self._begin_empty_file(reason_of(error))
            assert self._connection is not None
            _write_entries(self._connection, self._unsaved)
        except (BelongsToOthers, OSError, sqlite3.Error) as second_error:
            self._stop_writing(second_error)
            self._close_file()
        else:
            self._unsaved.clear()

    def sweep(
        self, now: int, *, entries_before: int, checks_before: int, facts_before: int
    ) -> None:
        """Commit new entries, then remove old entries from the file (see `Archive.sweep`)."""
        self.commit()  # after an error this process may no longer be the writer
        if self._connection is None or not self.is_writer:
            return
        connection = self._connection
        try:
            with _committing(connection):
                for table in ("blob", "manifest", "snapshot"):
                    connection.execute(
                        f"DELETE FROM {table} WHERE confirmed < ?", (entries_before,)
                    )
                # The table of artifact checks.
                connection.execute("DELETE FROM look WHERE last < ?", (checks_before,))
                connection.execute("DELETE FROM fact WHERE learnt < ?", (facts_before,))
                connection.execute("INSERT OR REPLACE INTO swept VALUES (1, ?)", (now,))
        except sqlite3.Error as error:
            self._on_write_error(error)

    # Look-ups of `Archive`. Rows with values of unexpected types are ignored: the file may be
    # damaged.

    def _select(self, query: str, *values: object) -> list[_Row]:
        """Return all rows of a query. Returns no rows if the file cannot be read.

        After an error, a damaged file is replaced by a writer, and the file is closed otherwise. A
        writer keeps a locked file open.
        """
        if self._connection is None:
            return []
        try:
            # A query keeps the file locked until its last row has been read.
            return self._connection.execute(query, values).fetchall()
        except sqlite3.Error as error:
            if not self.is_writer:
                self._stop_reading(error)
            elif sqlite.is_damage(error):
                self._replace_damaged(error)
            elif not sqlite.is_busy(error):  # a busy file may answer the next query
                self._stop_writing(error)
                self._close_file()
            return []

    def _select_each(
        self, query: str, values: Sequence[object], keys: Sequence[bytes]
    ) -> Iterator[_Row]:
        """Yield the rows of a query for any number of keys.

        `KEYS` in the query stands for their placeholders, which follow those of `values`.
        """
        for start in range(0, len(keys), _MOST_KEYS):
            batch = keys[start : start + _MOST_KEYS]
            marks = ", ".join("?" * len(batch))
            yield from self._select(query.replace("KEYS", marks), *values, *batch)

    @property
    def swept_at(self) -> int:
        match self._select("SELECT moment FROM swept"):
            case [(int(swept_at),)]:
                return swept_at
        return 0

    def blob(self, where: RepositoryKey, key: bytes) -> BlobEntry | None:
        if where.name in self._unsaved.blobs.get((where.host, key), ()):
            return self._unsaved.blob(where, key)
        query = (
            "SELECT confirmed, is_mountable FROM blob"
            " WHERE host = ? AND digest = ? AND repository = ?"
        )
        match self._select(query, where.host, key, where.name):
            case [(int(confirmed_at), is_mountable)]:
                return BlobEntry(confirmed_at, bool(is_mountable))
        return None

    def manifest(self, where: RepositoryKey, key: bytes) -> ManifestEntry | None:
        if (where, key) in self._unsaved.manifests:
            return self._unsaved.manifest(where, key)
        query = (
            "SELECT confirmed, blobs, children FROM manifest"
            " WHERE host = ? AND repository = ? AND digest = ?"
        )
        match self._select(query, where.host, where.name, key):
            case [(int(confirmed_at), bytes(blobs), bytes(children))]:
                return ManifestEntry(confirmed_at, _split_keys(blobs), _split_keys(children))
        return None

    def manifest_times(self, where: RepositoryKey, keys: Iterable[bytes]) -> dict[bytes, int]:
        keys = list(keys)
        query = (
            "SELECT digest, confirmed FROM manifest"
            " WHERE host = ? AND repository = ? AND digest IN (KEYS)"
        )
        times: dict[bytes, int] = {}
        for row in self._select_each(query, where, keys):
            match row:
                case (bytes(key), int(confirmed_at)) if (where, key) not in self._unsaved.manifests:
                    times[key] = confirmed_at
        return times | self._unsaved.manifest_times(where, keys)

    def holders_of(self, host: str, key: bytes) -> dict[str, int]:
        query = (
            "SELECT repository, confirmed FROM blob WHERE host = ? AND digest = ? AND is_mountable"
            f" ORDER BY confirmed DESC LIMIT {MOST_HOLDERS}"
        )
        unsaved_repositories = self._unsaved.blobs.get((host, key), {})
        holders = self._unsaved.holders_of(host, key)
        for row in self._select(query, host, key):
            match row:
                case (str(repository), int(confirmed_at)) if repository not in unsaved_repositories:
                    holders[repository] = confirmed_at
        return holders

    def snapshots(self, names: Iterable[bytes]) -> dict[bytes, SnapshotEntry]:
        names = list(names)
        query = "SELECT name, confirmed, source, pushed FROM snapshot WHERE name IN (KEYS)"
        snapshots: dict[bytes, SnapshotEntry] = {}
        for row in self._select_each(query, (), names):
            match row:
                case (bytes(name), int(confirmed_at), bytes(source), bytes(pushed)):
                    snapshots[name] = SnapshotEntry(confirmed_at, Snapshot(source, pushed))
        return snapshots | self._unsaved.snapshots(names)  # these replace older rows

    def artifact_check(self, name: bytes) -> ArtifactCheck | None:
        if name in self._unsaved.artifact_checks:
            return self._unsaved.artifact_check(name)
        match self._select("SELECT last, first, bits, listed FROM look WHERE name = ?", name):
            case [(int(last), int(first), int(bits), bytes(listed))]:
                return ArtifactCheck(last, first, bits, listed)
        return None

    def facts_of(self, host: str) -> list[Fact]:
        facts = dict[tuple[str, str], Fact]()
        for row in self._select(
            "SELECT name, segment, value, learnt FROM fact WHERE host = ?", host
        ):
            match row:
                case (str(name), str(segment), str(text), int(learnt_at)):
                    # A value that is not JSON is ignored like a value of another type.
                    with contextlib.suppress(ValueError, RecursionError):
                        facts[name, segment] = Fact(name, segment, json.loads(text), learnt_at)
        facts.update(self._unsaved.facts.get(host, {}))
        return list(facts.values())

    # New entries of `Archive`.

    @property
    def _can_save(self) -> bool:
        """Whether a new entry can be written to the file, now or after the next `load`."""
        return self.is_writer or self._keeps_unsaved

    def _on_put(self) -> None:
        """Wake `commit_regularly`, and commit at once if there are many new entries."""
        if not self.is_writer:
            return  # the entry stays in memory
        if self._put_event is not None:
            self._put_event.set()
        self._puts_since_commit += 1
        if self._puts_since_commit >= _COMMIT_ENTRIES:
            self.commit()

    def put_blob(self, where: RepositoryKey, key: bytes, entry: BlobEntry) -> None:
        if self._can_save:
            self._unsaved.put_blob(where, key, entry)
            self._on_put()

    def put_manifest(self, where: RepositoryKey, key: bytes, entry: ManifestEntry) -> None:
        if self._can_save:
            self._unsaved.put_manifest(where, key, entry)
            self._on_put()

    def forget(self, where: RepositoryKey, keys: Iterable[bytes]) -> None:
        # Kept even if the file is open for reading only: this run must not find the entry again.
        if self._can_save or self._connection is not None:
            self._unsaved.forget(where, keys)
            self._on_put()

    def put_snapshot(self, name: bytes, entry: SnapshotEntry) -> None:
        if self._can_save:
            self._unsaved.put_snapshot(name, entry)
            self._on_put()

    def put_artifact_check(self, name: bytes, check: ArtifactCheck) -> None:
        # Kept even without a file, because this run may look up its own check.
        self._unsaved.put_artifact_check(name, check)
        self._on_put()

    def put_fact(self, host: str, fact: Fact) -> None:
        if self._can_save:
            self._unsaved.put_fact(host, fact)
            self._on_put()


@contextlib.contextmanager
def _committing(connection: sqlite3.Connection) -> Iterator[None]:
    """Commit the writes of the block, or roll them back if it fails. Then begin a transaction."""
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    finally:
        with contextlib.suppress(sqlite3.Error):
            connection.execute("BEGIN")


def _write_entries(connection: sqlite3.Connection, unsaved: MemoryArchive) -> None:
    with _committing(connection):
        for statement, rows in _statements(unsaved):
            connection.executemany(statement, rows)


def _statements(unsaved: MemoryArchive) -> Iterator[tuple[str, list[_Row]]]:
    """Yield the SQL statements that write entries to the file, each with its rows of parameters."""
    blobs = list[_Row]()
    deleted_blobs = list[_Row]()
    for (host, key), by_repository in unsaved.blobs.items():
        for repository, blob in by_repository.items():
            if blob is None:
                deleted_blobs.append((host, key, repository))
            else:
                blobs.append((host, key, repository, blob.confirmed_at, int(blob.is_mountable)))
    yield "DELETE FROM blob WHERE host = ? AND digest = ? AND repository = ?", deleted_blobs
    yield "INSERT OR REPLACE INTO blob VALUES (?, ?, ?, ?, ?)", blobs

    manifests = list[_Row]()
    deleted_manifests = list[_Row]()
    for ((host, repository), key), manifest in unsaved.manifests.items():
        if manifest is None:
            deleted_manifests.append((host, repository, key))
        else:
            blob_keys = b"".join(manifest.blobs)
            child_keys = b"".join(manifest.children)
            manifests.append((host, repository, key, manifest.confirmed_at, blob_keys, child_keys))
    yield "DELETE FROM manifest WHERE host = ? AND repository = ? AND digest = ?", deleted_manifests
    yield "INSERT OR REPLACE INTO manifest VALUES (?, ?, ?, ?, ?, ?)", manifests

    snapshots = [
        (name, entry.confirmed_at, entry.snapshot.source, entry.snapshot.pushed)
        for name, entry in unsaved.snapshots_by_name.items()
    ]
    yield "INSERT OR REPLACE INTO snapshot VALUES (?, ?, ?, ?)", list[_Row](snapshots)

    checks = [
        (name, check.last, check.first, check.flags, check.listing_hash)
        for name, check in unsaved.artifact_checks.items()
    ]
    yield "INSERT OR REPLACE INTO look VALUES (?, ?, ?, ?, ?)", list[_Row](checks)

    facts = [
        (host, fact.name, fact.segment, json.dumps(fact.value), fact.learnt_at)
        for host, by_name in unsaved.facts.items()
        for fact in by_name.values()
    ]
    yield "INSERT OR REPLACE INTO fact VALUES (?, ?, ?, ?, ?)", list[_Row](facts)


def _split_keys(keys: bytes) -> tuple[bytes, ...]:
    return tuple(keys[at : at + DIGEST_BYTES] for at in range(0, len(keys), DIGEST_BYTES))

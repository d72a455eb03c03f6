"""What earlier runs left on disk: one SQLite file.

Owns: `state.db` and its lock `state.lock`; the entries that are not written yet, and when they are written.
May not know: what an entry means and whether it is believed (state/knowledge.py), clocks, registries.
Invariants: only the holder of the lock writes the file, or removes it when it is damaged. No disk stops a run.
Follows: docs/design.md section 8.

All access is on the event loop's thread: with 600,000 entries a look-up takes 10 microseconds, a commit of 1,000 takes
10 ms. Entries are read one by one, so that a run takes no more memory than it asks for.
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
    Holder,
    ManifestEntry,
    Notes,
    RepositoryKey,
    Snapshot,
    SnapshotEntry,
)
from _regsync.state.sqlite import BelongsToOthers, Damaged
from _regsync.text import printable, reason_of

if sqlite.HAS_SQLITE:
    import sqlite3

# Entries are written after so many seconds: a killed run loses no more.
COMMIT_SECONDS = 0.5
# They are written at once when there are so many.
_COMMIT_ENTRIES = 1000
# On a quick disk they are written sooner, while commits take no more than this share of the time.
_COMMIT_SHARE = 0.05

# Seconds for which a reader, and the last commit of a run, wait for another process's lock.
_BUSY_SECONDS = 2.0
# The same for other commits, which must not hold up the event loop: their entries stay in memory
# until the next commit.
_WRITER_BUSY_SECONDS = 0.05

# Keys in one query; SQLite takes 999 values at least (https://www.sqlite.org/limits.html).
_MOST_KEYS = 500

# Files of earlier versions, and what they begin with.
_OLD_FILES = {"state.bin": b"regsync\n", "state.journal": b"regsyncj"}

_Row = tuple[object, ...]


class StateFile:
    """The state on disk between `load` and `close`: an `Archive` (state/archive.py).

    Failures of the disk are logged by `log(level, event, message)`, not raised.
    """

    def __init__(
        self,
        cache_dir: str | None,
        log: Callable[[str, str, str], object],
        *,
        remembers: bool = False,
    ) -> None:
        """Keep the state in `cache_dir`; None: keep none.

        With `remembers`, entries that could not be written stay in memory until the next `load` of
        this object.
        """
        self._directory = cache_dir
        self._log = log
        # The directory as messages name it.
        self._shown = printable(cache_dir or "")
        self._path = os.path.join(cache_dir or "", "state.db")
        self._remembers = remembers and cache_dir is not None

        self._connection: sqlite3.Connection | None = None
        # The file descriptor of `state.lock`, while this process has the lock.
        self._lock: int | None = None
        # Whether this run uses the entries of the file.
        self._is_used = False

        # Entries that are not in the file yet. A look-up searches them first, as they are newer.
        self._notes = Notes()
        self._noted_since_commit = 0
        # `commit_regularly` waits here for the next entry.
        self._note_event: anyio.Event | None = None

    @property
    def is_writer(self) -> bool:
        """Whether this process writes the file: it has the lock. Others read it alone."""
        return self._lock is not None

    @property
    def is_used(self) -> bool:
        """Whether this run knows what earlier ones left, if they left anything."""
        return self._is_used or (self._remembers and bool(self._notes))

    # Opening and closing.

    def load(self, *, keep: bool = True) -> None:
        """Open the file: for writing, if `keep` and no other process has the lock; else for reading."""
        self._is_used = False
        if self._directory is None:
            return
        if not sqlite.HAS_SQLITE:
            self._warn("no state is kept: this Python has no module sqlite3")
            return
        try:
            if keep and self._take_lock():
                self._open_for_writing()
                self.commit()  # what `remembers` has kept in memory
            else:
                self._open_for_reading()
        except BelongsToOthers as error:
            self._warn(f"the state in {self._shown} is not used, and none is kept: {error}")
            self._close()
        except (OSError, sqlite3.Error) as error:
            self._warn(f"no state is kept: {self._shown}: {reason_of(error)}")
            self._close()

    def close(self) -> None:
        """Write the entries that are not in the file, and let go of it."""
        if self._connection is not None and self.is_writer:
            # The last commit may wait for longer: it holds nobody up.
            with contextlib.suppress(sqlite3.Error):
                self._connection.execute(f"PRAGMA busy_timeout = {_BUSY_SECONDS * 1000:.0f}")
            self.commit()
            if self._notes and self.is_writer:
                self._warn(f"the state in {self._shown} is not saved: it is locked")
        self._close()
        self._is_used = False
        if not self._remembers:
            self._notes.clear()

    def _close(self) -> None:
        """Close the file, and give the lock back."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _take_lock(self) -> bool:
        """Take the lock; False when another process has it."""
        assert self._directory is not None
        os.makedirs(self._directory, mode=0o700, exist_ok=True)
        descriptor = os.open(os.path.join(self._directory, "state.lock"), WRITE_FLAGS, 0o600)
        try:
            lock(descriptor)
        except BlockingIOError:
            os.close(descriptor)
            text = f"another run uses {self._shown}: this one reads the state and saves nothing"
            self._log("warning", "state_locked", text)
            return False
        except OSError:
            os.close(descriptor)
            raise
        self._lock = descriptor
        return True

    def _open_for_writing(self) -> None:
        assert self._directory is not None
        for name, beginning in _OLD_FILES.items():
            sqlite.remove_if_ours(os.path.join(self._directory, name), beginning)
        try:
            self._connection = sqlite.open_for_writing(self._path, _WRITER_BUSY_SECONDS)
        except Damaged as error:
            self._start_anew(str(error))
        self._is_used = True

    def _open_for_reading(self) -> None:
        self._is_used = True
        try:
            self._connection = sqlite.open_for_reading(self._path, _BUSY_SECONDS)
        except (Damaged, BelongsToOthers, OSError, sqlite3.Error) as error:
            self._stop_reading(error)

    def _stop_reading(self, error: Exception) -> None:
        """Go on without the file, in a process that may only read it; say why."""
        self._close()
        self._is_used = False
        if isinstance(error, (Damaged, BelongsToOthers)):
            self._warn(f"the state in {self._shown} is not used: {error}")
        elif sqlite.is_busy(error) or sqlite.is_half_written(error):
            text = (
                f"the state in {self._shown} is not used: another run has not finished writing it"
            )
            self._log("info", "state", text)
        else:
            self._warn(f"{self._shown} cannot be read: {reason_of(error)}")

    def _start_anew(self, problem: str) -> None:
        """Remove a damaged file, and begin an empty one."""
        self._warn(f"the state in {self._shown} is not used: {problem}")
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
        """Write new entries within half a second, until cancelled or the lock is gone."""
        while self.is_writer:
            self._note_event = anyio.Event()
            if not self._notes:
                await self._note_event.wait()
            began = anyio.current_time()
            self.commit()
            took = anyio.current_time() - began
            with anyio.move_on_after(min(COMMIT_SECONDS, took / _COMMIT_SHARE)):
                await anyio.sleep_forever()

    def commit(self) -> None:
        """Write the entries that are not in the file; while it is locked they stay in memory."""
        self._noted_since_commit = 0
        if self._connection is None or not self.is_writer or not self._notes:
            return
        try:
            _write_notes(self._connection, self._notes)
        except sqlite3.Error as error:
            self._on_write_error(error)
        else:
            self._notes.clear()

    def _on_write_error(self, error: sqlite3.Error) -> None:
        if sqlite.is_damage(error):
            self._replace_damaged(error)
        elif not sqlite.is_busy(error):
            self._stop_writing(error)

    def _stop_writing(self, error: Exception) -> None:
        """Go on without writing, for example on a full disk; the file stays open to be read."""
        self._warn(f"the state in {self._shown} is not saved: {reason_of(error)}")
        if self._connection is not None and self._connection.in_transaction:
            # Another process may have the lock from now on.
            self._connection.execute("ROLLBACK")
        self._unlock()

    def _replace_damaged(self, error: Exception) -> None:
        """Replace a file that was found to be damaged during the run by one with the entries that are
        noted. If that fails too, go on without a file.
        """
        try:
            self._start_anew(reason_of(error))
            assert self._connection is not None
            _write_notes(self._connection, self._notes)
        except (BelongsToOthers, OSError, sqlite3.Error) as second_error:
            self._stop_writing(second_error)
            self._close()
        else:
            self._notes.clear()

    def sweep(
        self, now: int, *, entries_before: int, checks_before: int, facts_before: int
    ) -> None:
        """Remove what is older than the three moments behind `now` (see `Archive.sweep`). The noted
        entries are written first.
        """
        self.commit()  # if that fails, this process may be the writer no more
        if self._connection is None or not self.is_writer:
            return
        connection = self._connection
        try:
            with _committing(connection):
                for table in ("blob", "manifest", "snapshot"):
                    connection.execute(
                        f"DELETE FROM {table} WHERE confirmed < ?", (entries_before,)
                    )
                connection.execute("DELETE FROM look WHERE last < ?", (checks_before,))
                connection.execute("DELETE FROM fact WHERE learnt < ?", (facts_before,))
                connection.execute("INSERT OR REPLACE INTO swept VALUES (1, ?)", (now,))
        except sqlite3.Error as error:
            self._on_write_error(error)

    # Look-ups of an `Archive`.

    def _select(self, query: str, *values: object) -> list[_Row]:
        """Return all rows of a query, none where the file cannot be read. They are read at once: a query
        keeps the file locked until its last row is read.
        """
        if self._connection is None:
            return []
        try:
            return self._connection.execute(query, values).fetchall()
        except sqlite3.Error as error:
            if not self.is_writer:
                self._stop_reading(error)
            elif sqlite.is_damage(error):
                self._replace_damaged(error)
            elif not sqlite.is_busy(error):  # a busy file may answer the next query
                self._stop_writing(error)
                self._close()
            return []

    def _select_each(
        self, query: str, values: Sequence[object], keys: Sequence[bytes]
    ) -> Iterator[_Row]:
        """Yield the rows of a query, to which `IN (keys)` is added, for any number of keys."""
        for start in range(0, len(keys), _MOST_KEYS):
            batch = keys[start : start + _MOST_KEYS]
            marks = ", ".join("?" * len(batch))
            yield from self._select(f"{query} IN ({marks})", *values, *batch)

    @property
    def swept_at(self) -> int:
        match self._select("SELECT moment FROM swept"):
            case [(int(moment),)]:
                return moment
        return 0

    def blob(self, where: RepositoryKey, key: bytes) -> BlobEntry | None:
        if where.name in self._notes.blobs.get((where.host, key), ()):
            return self._notes.blob(where, key)
        query = (
            "SELECT confirmed, is_mountable FROM blob"
            " WHERE host = ? AND digest = ? AND repository = ?"
        )
        match self._select(query, where.host, key, where.name):
            case [(int(confirmed), is_mountable)]:
                return BlobEntry(confirmed, bool(is_mountable))
        return None

    def manifest(self, where: RepositoryKey, key: bytes) -> ManifestEntry | None:
        if (where, key) in self._notes.manifests:
            return self._notes.manifest(where, key)
        query = (
            "SELECT confirmed, blobs, children FROM manifest"
            " WHERE host = ? AND repository = ? AND digest = ?"
        )
        match self._select(query, *where, key):
            case [(int(confirmed), bytes(blobs), bytes(children))]:
                return ManifestEntry(confirmed, _split_keys(blobs), _split_keys(children))
        return None

    def manifest_times(self, where: RepositoryKey, keys: Iterable[bytes]) -> dict[bytes, int]:
        keys = list(keys)
        query = (
            "SELECT digest, confirmed FROM manifest WHERE host = ? AND repository = ? AND digest"
        )
        moments: dict[bytes, int] = {}
        for row in self._select_each(query, where, keys):
            match row:
                case (bytes(key), int(confirmed)):
                    # A note is newer than the file, also one that the manifest was forgotten.
                    if (where, key) not in self._notes.manifests:
                        moments[key] = confirmed
        return moments | self._notes.manifest_times(where, keys)

    def holders_of(self, host: str, key: bytes) -> list[Holder]:
        query = (
            "SELECT repository, confirmed FROM blob WHERE host = ? AND digest = ? AND is_mountable"
            f" ORDER BY confirmed DESC LIMIT {MOST_HOLDERS}"
        )
        # What is noted of a repository is newer than the file.
        noted = self._notes.blobs.get((host, key), {})
        holders = self._notes.holders_of(host, key)
        for row in self._select(query, host, key):
            match row:
                case (str(repository), int(confirmed)) if repository not in noted:
                    holders.append(Holder(repository, confirmed))
        return holders

    def snapshots(self, names: Iterable[bytes]) -> dict[bytes, SnapshotEntry]:
        names = list(names)
        query = "SELECT name, confirmed, source, pushed FROM snapshot WHERE name"
        snapshots: dict[bytes, SnapshotEntry] = {}
        for row in self._select_each(query, (), names):
            match row:
                case (bytes(name), int(confirmed), bytes(source), bytes(pushed)):
                    snapshots[name] = SnapshotEntry(confirmed, Snapshot(source, pushed))
        return snapshots | self._notes.snapshots(names)

    def artifact_check(self, name: bytes) -> ArtifactCheck | None:
        if name in self._notes.artifact_checks:
            return self._notes.artifact_check(name)
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
                case (str(name), str(segment), str(text), int(learnt)):
                    with contextlib.suppress(ValueError, RecursionError):
                        facts[name, segment] = Fact(name, segment, json.loads(text), learnt)
        facts.update(self._notes.facts.get(host, {}))
        return list(facts.values())

    # Entries for an `Archive`.

    @property
    def _takes_notes(self) -> bool:
        return self.is_writer or self._remembers

    def _on_note(self) -> None:
        if not self.is_writer:
            return
        if self._note_event is not None:
            self._note_event.set()
        self._noted_since_commit += 1
        if self._noted_since_commit >= _COMMIT_ENTRIES:
            self.commit()

    def put_blob(self, where: RepositoryKey, key: bytes, entry: BlobEntry) -> None:
        if self._takes_notes:
            self._notes.put_blob(where, key, entry)
            self._on_note()

    def put_manifest(self, where: RepositoryKey, key: bytes, entry: ManifestEntry) -> None:
        if self._takes_notes:
            self._notes.put_manifest(where, key, entry)
            self._on_note()

    def forget(self, where: RepositoryKey, keys: Iterable[bytes]) -> None:
        # Noted even if the file is only read: this run must not find the entry there again.
        if self._takes_notes or self._connection is not None:
            self._notes.forget(where, keys)
            self._on_note()

    def put_snapshot(self, name: bytes, entry: SnapshotEntry) -> None:
        if self._takes_notes:
            self._notes.put_snapshot(name, entry)
            self._on_note()

    def put_artifact_check(self, name: bytes, check: ArtifactCheck) -> None:
        # Kept without a file too, because this run may ask for its own check again.
        self._notes.put_artifact_check(name, check)
        self._on_note()

    def put_fact(self, host: str, fact: Fact) -> None:
        if self._takes_notes:
            self._notes.put_fact(host, fact)
            self._on_note()


@contextlib.contextmanager
def _committing(connection: sqlite3.Connection) -> Iterator[None]:
    """Commit what the block writes, or roll it back; then begin the next transaction."""
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


def _write_notes(connection: sqlite3.Connection, notes: Notes) -> None:
    with _committing(connection):
        for statement, rows in _statements(notes):
            connection.executemany(statement, rows)


def _statements(notes: Notes) -> Iterator[tuple[str, list[_Row]]]:
    """Yield the SQL statements that write `notes` to the file, each with its rows."""
    blobs = list[_Row]()
    deleted_blobs = list[_Row]()
    for (host, key), by_repository in notes.blobs.items():
        for repository, blob in by_repository.items():
            if blob is None:
                deleted_blobs.append((host, key, repository))
            else:
                blobs.append((host, key, repository, blob.confirmed_at, int(blob.is_mountable)))
    yield "DELETE FROM blob WHERE host = ? AND digest = ? AND repository = ?", deleted_blobs
    yield "INSERT OR REPLACE INTO blob VALUES (?, ?, ?, ?, ?)", blobs

    manifests = list[_Row]()
    deleted_manifests = list[_Row]()
    for ((host, repository), key), manifest in notes.manifests.items():
        if manifest is None:
            deleted_manifests.append((host, repository, key))
        else:
            blob_keys = b"".join(manifest.blobs)
            child_keys = b"".join(manifest.children)
            manifests.append((host, repository, key, manifest.confirmed_at, blob_keys, child_keys))
    yield "DELETE FROM manifest WHERE host = ? AND repository = ? AND digest = ?", deleted_manifests
    yield "INSERT OR REPLACE INTO manifest VALUES (?, ?, ?, ?, ?, ?)", manifests

    snapshots = [
        (name, entry.confirmed_at, *entry.snapshot)
        for name, entry in notes.snapshots_by_name.items()
    ]
    yield "INSERT OR REPLACE INTO snapshot VALUES (?, ?, ?, ?)", list[_Row](snapshots)

    checks = [(name, *check) for name, check in notes.artifact_checks.items()]
    yield "INSERT OR REPLACE INTO look VALUES (?, ?, ?, ?, ?)", list[_Row](checks)

    facts = [
        (host, fact.name, fact.segment, json.dumps(fact.value), fact.learnt_at)
        for host, by_name in notes.facts.items()
        for fact in by_name.values()
    ]
    yield "INSERT OR REPLACE INTO fact VALUES (?, ?, ?, ?, ?)", list[_Row](facts)


def _split_keys(keys: bytes) -> tuple[bytes, ...]:
    return tuple(keys[at : at + DIGEST_BYTES] for at in range(0, len(keys), DIGEST_BYTES))

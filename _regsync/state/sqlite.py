"""A SQLite file in a directory where others may write: it is opened when it is ours and whole.

Owns: the tables and the version of the state file, what SQLite may open, what its errors mean.
May not know: what the tables mean, when they are read and written.
Invariants: no link, pipe or file with another name is opened. A newer file, or another program's, stays as it is.
Follows: docs/design.md section 8.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from collections.abc import Iterator, Sequence
from urllib.parse import quote

from _regsync.files import _SAFE, open_safely, remove_if_possible
from _regsync.text import reason_of

try:
    import sqlite3
except ImportError:  # some builds of Python lack it
    HAS_SQLITE = False
else:
    HAS_SQLITE = True

# "rgsy" in the header of our files.
_APPLICATION_ID = 0x72677379
# Of the tables below; it is in the header too.
_VERSION = 3

# `manifest` has row ids, because SQLite gives a long row (over a quarter page) of a table without them its own page.
_SCHEMA = (
    "CREATE TABLE blob (host TEXT, digest BLOB, repository TEXT, confirmed INTEGER, is_mountable INTEGER,"
    " PRIMARY KEY (host, digest, repository)) WITHOUT ROWID",
    "CREATE TABLE fact (host TEXT, name TEXT, segment TEXT, value TEXT, learnt INTEGER,"
    " PRIMARY KEY (host, name, segment)) WITHOUT ROWID",
    "CREATE TABLE look (name BLOB PRIMARY KEY, last INTEGER, first INTEGER, bits INTEGER, listed BLOB)"
    " WITHOUT ROWID",
    "CREATE TABLE manifest (host TEXT, repository TEXT, digest BLOB, confirmed INTEGER, blobs BLOB, children BLOB,"
    " PRIMARY KEY (host, repository, digest))",
    "CREATE TABLE snapshot (name BLOB PRIMARY KEY, confirmed INTEGER, source BLOB, pushed BLOB) WITHOUT ROWID",
    "CREATE TABLE swept (id INTEGER PRIMARY KEY, moment INTEGER)",
)

# Bytes: more than a manifest of 4 MiB can name. A longer value was written by somebody else, and is not read.
_LONGEST_VALUE = 4 * 1024 * 1024

# The header of a SQLite file (https://www.sqlite.org/fileformat2.html#the_database_header).
_HEADER_BYTES = 100
_MAGIC = b"SQLite format 3\0"
_WRITE_AND_READ_VERSION = slice(18, 20)
_ROLLBACK_JOURNAL = b"\1\1"
_USER_VERSION = slice(60, 64)
_APPLICATION = slice(68, 72)

# What SQLite says of a disk or of another process (https://www.sqlite.org/rescode.html): PERM, BUSY and LOCKED,
# READONLY, INTERRUPT, IOERR, FULL, CANTOPEN, PROTOCOL.
_DISK_TROUBLES = (
    "access permission denied",
    "is locked",
    "readonly database",
    "interrupted",
    "disk I/O error",
    "database or disk is full",
    "unable to open database file",
    "locking protocol",
)

_JOURNAL_END = "-journal"
_WAL_ENDS = ("-wal", "-shm")


class Damaged(Exception):
    """Nobody can use the file any more: it is not whole, or an older version's. A run that may write
    replaces it by a new one, which costs requests only.
    """


class BelongsToOthers(Exception):
    """Somebody else can use the file: another program, or a newer version. It is not replaced."""


def open_for_writing(path: str, busy_seconds: float) -> sqlite3.Connection:
    """Open the file, or make it, and begin a transaction.

    Only for the holder of the lock. Raises Damaged, BelongsToOthers, OSError and sqlite3.Error.
    """
    header = _read_header(path, os.O_RDWR | os.O_CREAT)  # a new file is made, and is empty
    _check_header(header)
    if _is_journal_foreign(path):
        os.unlink(path + _JOURNAL_END)

    with _raising_damage():
        connection = _connect(path, "rw", busy_seconds)
        with _closing_on_failure(connection):
            # No commit waits for the disk. What a power cut damages costs requests only (I5: state that
            # is wrong or lost never makes a wrong image).
            _execute_each(connection, ("PRAGMA synchronous = OFF", "PRAGMA journal_mode = DELETE"))
            if not _has_tables(connection):
                _make_tables(connection)
            # All queries until the next commit share one transaction. Outside of one, each query
            # would lock and unlock the file.
            connection.execute("BEGIN")
    return connection


def open_for_reading(path: str, busy_seconds: float) -> sqlite3.Connection | None:
    """Open a file that another process may be writing; None where there is nothing to read.

    Nothing is repaired or removed. Raises Damaged, BelongsToOthers, OSError and sqlite3.Error.
    """
    try:
        header = _read_header(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    if not header:
        return None
    _check_header(header)
    if _is_journal_foreign(path):
        raise Damaged("its journal is another file")

    with _raising_damage():
        connection = _connect(path, "ro", busy_seconds)
        with _closing_on_failure(connection):
            has_tables = _has_tables(connection)
    if not has_tables:
        connection.close()
        return None
    return connection


def remove_database(path: str) -> None:
    """Remove a file that is damaged, with what SQLite puts beside it."""
    for end in ("", _JOURNAL_END, *_WAL_ENDS):
        remove_if_possible(path + end)


def remove_if_ours(path: str, beginning: bytes) -> None:
    """Remove a file of an earlier version, when it begins as that version wrote it."""
    with contextlib.suppress(OSError):
        with open(path, "rb", opener=open_safely) as stream:
            is_ours = stream.read(len(beginning)) == beginning
        if is_ours:
            os.unlink(path)


# What SQLite's errors mean. Python 3.10 gives no error codes.


def is_damage(error: Exception) -> bool:
    """Say whether an error shows that the file is no database, or not whole.

    Our statements are right, so an error is the file's unless it is the disk's.
    """
    if isinstance(error, (sqlite3.ProgrammingError, sqlite3.InterfaceError)):
        return False  # a defect of ours
    return not any(words in str(error) for words in _DISK_TROUBLES)


def is_busy(error: Exception) -> bool:
    """Say whether another process kept the file locked for as long as was waited."""
    return "is locked" in str(error)


def is_half_written(error: Exception) -> bool:
    """Say whether a killed writer has left a journal to roll back, which a reader may not do."""
    return "readonly database" in str(error)


# Before SQLite sees the file.


def _read_header(path: str, flags: int) -> bytes:
    """Return how a file begins, b"" for a new one; Damaged when it is not a file of its own.

    SQLite follows links, so it is asked for nothing but a regular file that has this one name.
    """
    if os.path.islink(path):
        raise Damaged("it is a link")
    descriptor = os.open(path, flags | _SAFE, 0o600)
    try:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError("it is a directory")
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
            raise Damaged("it is another file")
        return os.read(descriptor, _HEADER_BYTES)
    finally:
        os.close(descriptor)


def _is_journal_foreign(path: str) -> bool:
    """Say whether something else than a journal has the journal's name, as a link or a pipe, for which
    SQLite would wait. Where nothing has that name, there is no journal.
    """
    try:
        status = os.lstat(path + _JOURNAL_END)
    except FileNotFoundError:
        return False
    is_file_of_its_own = stat.S_ISREG(status.st_mode) and status.st_nlink == 1
    return not is_file_of_its_own


def _check_header(header: bytes) -> None:
    """Raise Damaged for a file that may be replaced, and BelongsToOthers for one that may not. A file of
    this version is neither.
    """
    if not header:
        return  # a new file
    if len(header) < _HEADER_BYTES or not header.startswith(_MAGIC):
        raise Damaged("it is not a database")
    if int.from_bytes(header[_APPLICATION], "big") != _APPLICATION_ID:
        raise BelongsToOthers("state.db is another program's")

    version = int.from_bytes(header[_USER_VERSION], "big")
    if version > _VERSION:
        raise BelongsToOthers("it was written by a newer version of regsync")
    if version < _VERSION:
        raise Damaged("it was written by an earlier version of regsync")
    # These bytes are different when a write-ahead log was switched on for the file. This program never
    # does that: such a log needs shared memory, which network disks lack.
    if header[_WRITE_AND_READ_VERSION] != _ROLLBACK_JOURNAL:
        raise Damaged("it was changed by another program")


# SQLite.


def _connect(path: str, mode: str, busy_seconds: float) -> sqlite3.Connection:
    """Open a file that is there. It is read a page at a time: nothing checks all of it first.

    `PRAGMA quick_check` would read the whole file in each run. What is damaged is found when it is
    read, and an entry that is wrong costs requests only (I5).
    """
    place = os.path.join(os.getcwd(), path).replace(os.sep, "/").lstrip("/")
    uri = f"file:///{quote(os.fsencode(place))}?mode={mode}"
    connection = sqlite3.connect(uri, uri=True, timeout=busy_seconds, isolation_level=None)
    connection.text_factory = _decoded
    if sys.version_info >= (3, 11):
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST_VALUE)
    # Somebody else may have made the file: nothing in it is run, and each page is checked when it is read.
    _execute_each(connection, ("PRAGMA trusted_schema = OFF", "PRAGMA cell_size_check = ON"))
    return connection


def _decoded(text: bytes) -> str:
    return text.decode("utf-8", "replace")


def _execute_each(connection: sqlite3.Connection, statements: Sequence[str]) -> None:
    for statement in statements:
        connection.execute(statement).fetchall()


def _make_tables(connection: sqlite3.Connection) -> None:
    identity = (f"PRAGMA application_id = {_APPLICATION_ID}", f"PRAGMA user_version = {_VERSION}")
    _execute_each(connection, ("BEGIN", *identity, *_SCHEMA, "COMMIT"))


def _has_tables(connection: sqlite3.Connection) -> bool:
    """Say whether the file has its tables yet; Damaged when it has any other table."""
    query = "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY name"
    tables = tuple(sql for (sql,) in connection.execute(query).fetchall())
    if tables not in ((), _SCHEMA):
        raise Damaged("its tables are not those of this version")
    return bool(tables)


@contextlib.contextmanager
def _closing_on_failure(connection: sqlite3.Connection) -> Iterator[None]:
    try:
        yield
    except BaseException:
        connection.close()
        raise


@contextlib.contextmanager
def _raising_damage() -> Iterator[None]:
    """Raise Damaged in place of SQLite's error, where that is about the file and not about the disk."""
    try:
        yield
    except sqlite3.Error as error:
        if is_damage(error):
            raise Damaged(reason_of(error)) from error
        raise

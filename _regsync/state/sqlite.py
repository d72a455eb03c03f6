"""Open the SQLite file of the state, in a directory where other users may have put files.

Owns: the tables and the version of the state file; which files SQLite may open; what its errors
mean.
May not know: what the tables mean, when they are read and written.
Invariants: SQLite never opens a link, a pipe or a file with a second name. A file of a newer
version or of another program is never changed.
Follows: docs/design.md section 8.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from collections.abc import Iterator, Sequence
from urllib.parse import quote

from _regsync.files import SAFE_FLAGS, open_safely, remove_if_possible
from _regsync.text import reason_of

try:
    import sqlite3
except ImportError:  # some builds of Python lack it
    HAS_SQLITE = False
else:
    HAS_SQLITE = True

# `application_id` in the header of our files: "rgsy".
_APPLICATION_ID = 0x72677379
# `user_version` in the header: the version of the tables below.
_VERSION = 3

# `manifest` has row ids. In a table without them, SQLite would store each row that is longer than a
# quarter of a page in a page of its own.
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

# Maximum length of a value in bytes. The keys of all digests in a manifest of 4 MiB fit. A longer
# value was written by another program, and reading it fails.
_LONGEST_VALUE = 4 * 1024 * 1024

# Places in the header of a SQLite file
# (https://www.sqlite.org/fileformat2.html#the_database_header).
_HEADER_BYTES = 100
_MAGIC = b"SQLite format 3\0"
_WRITE_AND_READ_VERSION = slice(18, 20)
_ROLLBACK_JOURNAL = b"\1\1"
_USER_VERSION = slice(60, 64)
_APPLICATION = slice(68, 72)

# Parts of SQLite's messages for errors of the disk or of another process, not of the file
# (https://www.sqlite.org/rescode.html): PERM, BUSY and LOCKED, READONLY, INTERRUPT, IOERR, FULL,
# CANTOPEN, PROTOCOL.
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

# Suffixes of the files that SQLite creates beside its database.
_JOURNAL_SUFFIX = "-journal"
_WAL_SUFFIXES = ("-wal", "-shm")


class Damaged(Exception):
    """The file is damaged, or was written by an older version.

    A run that may write replaces it, which costs requests only.
    """


class BelongsToOthers(Exception):
    """The file was written by another program or by a newer version. It must not be replaced."""


def open_for_writing(path: str, busy_seconds: float) -> sqlite3.Connection:
    """Open the file, or create it, and begin a transaction.

    The caller must hold the lock. A query waits up to `busy_seconds` for another process's lock on
    the file. Raises Damaged, BelongsToOthers, OSError and sqlite3.Error.
    """
    header = _read_header(path, os.O_RDWR | os.O_CREAT)  # empty if the file is new
    _check_header(header)
    if _is_journal_foreign(path):
        os.unlink(path + _JOURNAL_SUFFIX)

    with _raising_damage():
        connection = _connect(path, "rw", busy_seconds)
        with _closing_on_failure(connection):
            # A commit does not wait for the disk. If a power cut damages the file, that costs
            # requests only (I5).
            _execute_each(connection, ("PRAGMA synchronous = OFF", "PRAGMA journal_mode = DELETE"))
            if not _has_tables(connection):
                _make_tables(connection)
            # All queries until the next commit share one transaction. Without a transaction, each
            # query would lock and unlock the file.
            connection.execute("BEGIN")
    return connection


def open_for_reading(path: str, busy_seconds: float) -> sqlite3.Connection | None:
    """Open the file for reading, while another process may write it.

    Returns None if there is no file or if it has no tables yet. The file is not repaired or
    removed. Raises Damaged, BelongsToOthers, OSError and sqlite3.Error.
    """
    try:
        header = _read_header(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    if not header:
        return None  # the writer has not created the tables yet
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
    """Remove the file and the files that SQLite has created beside it."""
    for suffix in ("", _JOURNAL_SUFFIX, *_WAL_SUFFIXES):
        remove_if_possible(path + suffix)


def remove_if_ours(path: str, beginning: bytes) -> None:
    """Remove a file of an earlier version if it starts with the bytes `beginning`."""
    with contextlib.suppress(OSError):
        with open(path, "rb", opener=open_safely) as stream:
            is_ours = stream.read(len(beginning)) == beginning
        if is_ours:
            os.unlink(path)


# What SQLite's errors mean. They are recognised by their messages, because Python 3.10 has no
# codes.


def is_damage(error: Exception) -> bool:
    """Report whether an error shows that the file is damaged or is not a database.

    Our statements are correct. So each error that does not come from the disk comes from the file.
    """
    if isinstance(error, (sqlite3.ProgrammingError, sqlite3.InterfaceError)):
        return False  # a bug in this program
    return not any(words in str(error) for words in _DISK_TROUBLES)


def is_busy(error: Exception) -> bool:
    """Report whether a query has failed because another process has locked the file."""
    return "is locked" in str(error)


def is_half_written(error: Exception) -> bool:
    """Report whether a killed writer has left a journal. Only a writer can roll it back."""
    return "readonly database" in str(error)


# Checks before SQLite opens the file.


def _read_header(path: str, flags: int) -> bytes:
    """Return the header of a file, or b"" if the file is empty.

    SQLite follows links. So this raises Damaged if `path` is not a regular file, or if the file has
    another name too.
    """
    if os.path.islink(path):
        raise Damaged("it is a link")
    descriptor = os.open(path, flags | SAFE_FLAGS, 0o600)
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
    """Report whether the journal's path is something else than a regular file with one name.

    SQLite would follow a link and wait for a pipe. Returns False if there is no journal.
    """
    try:
        status = os.lstat(path + _JOURNAL_SUFFIX)
    except FileNotFoundError:
        return False
    is_file_of_its_own = stat.S_ISREG(status.st_mode) and status.st_nlink == 1
    return not is_file_of_its_own


def _check_header(header: bytes) -> None:
    """Check that a file is empty or was written by this version.

    Raises Damaged if the file may be replaced, and BelongsToOthers if it must not be replaced.
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
    # These bytes are different if the file uses a write-ahead log. This program never uses such a
    # log, because it needs shared memory, which network disks lack.
    if header[_WRITE_AND_READ_VERSION] != _ROLLBACK_JOURNAL:
        raise Damaged("it was changed by another program")


# SQLite.


def _connect(path: str, mode: str, busy_seconds: float) -> sqlite3.Connection:
    """Open an existing file without checking all of it.

    `PRAGMA quick_check` would read the whole file in each run. Damage is detected when a damaged
    page is read, and a wrong entry costs requests only (I5).
    """
    url_path = os.path.join(os.getcwd(), path).replace(os.sep, "/").lstrip("/")
    uri = f"file:///{quote(os.fsencode(url_path))}?mode={mode}"
    connection = sqlite3.connect(uri, uri=True, timeout=busy_seconds, isolation_level=None)
    connection.text_factory = _decode
    if sys.version_info >= (3, 11):
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST_VALUE)
    # Another user may have created the file. So no code in its schema is trusted, and each page is
    # checked when it is read.
    _execute_each(connection, ("PRAGMA trusted_schema = OFF", "PRAGMA cell_size_check = ON"))
    return connection


def _decode(text: bytes) -> str:
    return text.decode("utf-8", "replace")


def _execute_each(connection: sqlite3.Connection, statements: Sequence[str]) -> None:
    for statement in statements:
        connection.execute(statement).fetchall()


def _make_tables(connection: sqlite3.Connection) -> None:
    identity = (f"PRAGMA application_id = {_APPLICATION_ID}", f"PRAGMA user_version = {_VERSION}")
    _execute_each(connection, ("BEGIN", *identity, *_SCHEMA, "COMMIT"))


def _has_tables(connection: sqlite3.Connection) -> bool:
    """Report whether the file has its tables. Raises Damaged if it has any other table."""
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
    """Convert an error of the block that shows damage into Damaged."""
    try:
        yield
    # UnicodeDecodeError: the module cannot decode a message that quotes a damaged name.
    except (sqlite3.Error, UnicodeDecodeError) as error:
        if is_damage(error):
            raise Damaged(reason_of(error)) from error
        raise

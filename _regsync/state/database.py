"""What is known about blobs, manifests and tags at registries: by this run, and by earlier ones, as
they left it. Owns: the hot tier and the judgement of the warm one (docs/specification.md 1.1,
three-step look-up), what was learnt of hosts; the warm tier as bytes, looked up in place:
`state.bin` and its journal (docs/design.md section 8). May not know: clocks, sockets, tasks, files.
Invariant I5: an entry exists only because a registry answered; what an earlier run left is believed
as far as docs/design.md section 7, "Vouching", allows, wrong state costs requests only, and bytes
that are not whole, not ours or of another version are `Damaged`, never half read."""

from __future__ import annotations

import contextlib
import json
import os
import struct
import zlib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from heapq import merge
from itertools import accumulate, groupby, pairwise
from operator import itemgetter
from typing import Any

from _regsync.crypto import hash_hex
from _regsync.files import _WRITE, _remove, _replacing, _safely
from _regsync.oci import reference
from _regsync.text import clean

_MAGIC = b"regsync\n"


_VERSION = 2


_HEAD = struct.Struct(">8sHI7I")


_CRC = struct.Struct(">I")


_FRAME = struct.Struct(">cH")


_LONGEST_LOOK = 400 * 86400  # what nobody has looked at for longer is of images that are gone


_ALGORITHMS = {"sha256": b"\1", "sha512": b"\2"}


# A table is rows of one width in ascending order: 600,000 load as the file is read, in a tenth of
# what objects take, and are found in 20 steps each. A row begins with its identity: a digest's key
# (a byte for the algorithm, then 32; of sha512 the first 256 bits, as hard to meet) and a
# repository's number. Table: width of a row, of its identity, where its time of confirmation stands
# (0: none). B blobs, M manifests (`entry`): identity, time, flag (a blob: mountable). E: a
# manifest's identity, the key of a thing it names. S: a snapshot (`named`), time, keys of the
# source's and pushed. A: an image's artifacts (`named`), time of the last look, of the first, bits,
# 8 bytes of a hash of what was listed.
_LAYOUTS = {
    "B": (42, 37, 37),
    "M": (42, 37, 37),
    "E": (70, 70, 0),
    "S": (102, 32, 32),
    "A": (49, 32, 32),
}


class Damaged(ValueError):
    """These bytes are not a state file that this version can read."""


def key_of(digest: str) -> bytes:
    """Return the 33 bytes that stand for a digest."""
    algorithm, encoded = reference.split_digest(digest)
    return _ALGORITHMS[algorithm] + bytes.fromhex(encoded[:64])


def digest_like(key: bytes) -> str:
    """Return the digest of a key; of sha512 its first half, which is what a referrers tag has."""
    return f"{next((name for name, mark in _ALGORITHMS.items() if mark == key[:1]), '')}:{key[1:].hex()}"


def named(*words: str) -> bytes:
    """Return the 32 bytes that identify a snapshot: of which tag, where from and to, under which
    rules.
    """
    return bytes.fromhex(hash_hex("sha256", "\0".join(words).encode()))


def entry(key: bytes, number: int, moment: int, flag: bool) -> bytes:
    return key + _CRC.pack(number) + _CRC.pack(moment) + bytes([flag])


class Archive:
    """What earlier runs left, read only."""

    def __init__(self, image: bytes | None = None) -> None:
        """Read a whole state file; Damaged where it is none."""
        self.repositories: list[tuple[str, str]] = []
        self.facts: dict[str, tuple[Any, int]] = {}  # by name: what was learnt of a host, and when
        self.renewed = 0
        self._tables = dict.fromkeys(_LAYOUTS, memoryview(b""))
        if image is None:
            return
        rest = memoryview(image)[: -_CRC.size]
        try:
            magic, version, self.renewed, *sizes = _HEAD.unpack_from(image)
        except struct.error as error:
            raise Damaged("it is cut short") from error
        if (magic, version) != (_MAGIC, _VERSION):
            raise Damaged("it is no state file of this version")
        if len(rest) != _HEAD.size + sum(sizes) or image[len(rest) :] != _CRC.pack(
            zlib.crc32(rest)
        ):
            raise Damaged("its checksum is wrong")
        parts = pairwise(accumulate(sizes, initial=_HEAD.size))
        first, second, *tables = (rest[start:end] for start, end in parts)
        try:
            self.repositories = [(str(host), str(name)) for host, name in json.loads(bytes(first))]
            if len({*self.repositories}) < len(self.repositories):
                raise ValueError("one of two numbers")
            facts = json.loads(bytes(second)).items()
            self.facts = {name: (value, int(moment)) for name, (value, moment) in facts}
        except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise Damaged("its lists cannot be read") from error
        self._tables = dict(zip(_LAYOUTS, tables, strict=True))

    def rows(self, table: str, identity: bytes = b"") -> Iterator[bytes]:
        """Give the rows of a table that begin with `identity`, in order."""
        rows = self._tables[table]
        width = _LAYOUTS[table][0]
        size = len(identity)
        count = len(rows) // width
        first = bisect_left(
            range(count),
            identity,
            key=lambda index: bytes(rows[index * width : index * width + size]),
        )
        for start in range(first * width, count * width, width):
            row = bytes(rows[start : start + width])
            if not row.startswith(identity):
                return
            yield row

    def row(self, table: str, identity: bytes) -> bytes | None:
        return next(self.rows(table, identity), None)


EMPTY = Archive()


def moment_of(table: str, row: bytes) -> int:
    """Return when a row was confirmed, in seconds of the wall clock."""
    return int(_CRC.unpack_from(row, _LAYOUTS[table][2])[0])


def encode(
    old: Archive,
    rows: Mapping[str, list[bytes]],
    repositories: Sequence[tuple[str, str]],
    facts: Mapping[str, Any],
    *,
    oldest: int = 0,
    newest: int = 1 << 32,
    forgotten: Set[bytes] = frozenset(),
    renewed: Set[bytes] = frozenset(),
    moment: int = 0,
) -> bytes:
    """Merge an archive with what a run found out into a state file; of an identity the newest row
    stays, but for those after `newest`, of a clock that was ahead. `repositories` come behind the
    archive's own. Dropped are rows confirmed before `oldest`, and the `forgotten` of tables B and
    M; the `renewed` there were confirmed for free, at `moment`."""
    dropped: set[bytes] = set()

    def kept(table: str, identity: bytes, found: Sequence[bytes]) -> bytes:
        # The last is the newest: the time stands behind the identity, big-endian.
        row = found[-1]
        at = _LAYOUTS[table][2]
        if len(found) > 1:
            row = max(found, key=lambda each: (moment_of(table, each) <= newest, each))
        if table == "E":
            return b"" if row[:37] in dropped else row
        if table == "B":
            row = row[:-1] + max(
                each[-1:] for each in found
            )  # what could be mounted from there once still can
        if identity in renewed:
            row = row[:at] + _CRC.pack(moment) + row[at + 4 :]
        is_young = moment_of(table, row) >= (oldest if table != "A" else moment - _LONGEST_LOOK)
        if is_young and identity not in forgotten:
            return row
        if table == "M":
            dropped.add(identity)
        return b""

    parts = [json.dumps(each).encode() for each in ([*old.repositories, *repositories], facts)]
    for table, (_, size, _) in _LAYOUTS.items():
        groups = groupby(
            merge(old.rows(table), sorted(rows.get(table, []))), itemgetter(slice(size))
        )
        parts.append(b"".join(kept(table, identity, [*group]) for identity, group in groups))
    whole = b"".join([_HEAD.pack(_MAGIC, _VERSION, moment, *map(len, parts)), *parts])
    return whole + _CRC.pack(zlib.crc32(whole))


def frame(kind: str, payload: bytes) -> bytes:
    """Return one record of the journal, with a checksum of its own."""
    record = _FRAME.pack(kind.encode(), len(payload)) + payload
    return record + _CRC.pack(zlib.crc32(record))


def unframe(journal: bytes) -> tuple[list[tuple[str, bytes]], int]:
    """Return the whole records of a journal up to the first that is torn, and where that begins."""
    records = list[tuple[str, bytes]]()
    at = 0
    while at + _FRAME.size <= len(journal):
        kind, size = _FRAME.unpack_from(journal, at)
        end = at + _FRAME.size + size
        if journal[end : end + 4] != _CRC.pack(zlib.crc32(journal[at:end])):
            break
        records.append((kind.decode("latin-1"), journal[end - size : end]))
        at = end + 4
    return records, at


def folded(base: Archive, records: Iterable[tuple[str, bytes]]) -> Archive:
    """Return an archive with a journal's records in it; Damaged where they are none."""
    rows: dict[str, list[bytes]] = {table: [] for table in _LAYOUTS}
    repositories: list[tuple[str, str]] = []
    for kind, payload in records:
        host, nul, name = payload.decode("utf-8", "replace").partition("\0")
        if kind == "R" and nul:
            repositories.append((host, name))
        elif kind in rows and len(payload) == _LAYOUTS[kind][0]:
            rows[kind].append(payload)
        else:
            raise Damaged("its journal holds what is no record")
    if not (repositories or any(rows.values())):
        return base
    return Archive(encode(base, rows, repositories, base.facts, moment=base.renewed))


_JOURNAL = b"regsyncj"


_LARGEST = 1 << 30


class StateFile:
    """The state on disk between `load` and `close`, nothing noted after `save`; `warn(event,
    message)` tells of it.
    """

    def __init__(
        self, cache_dir: str | None, warn: Callable[[str, str], None], *, remembers: bool = False
    ) -> None:
        """Keep it in a directory; where that cannot be and it `remembers`, for the next `load` of
        this process.
        """
        self._directory = cache_dir
        self._warn = warn
        self._shown = clean(cache_dir or "")
        self.remembers = remembers
        self._image = b""
        self._path, self._journal_path = (
            os.path.join(cache_dir or "", f"state.{end}") for end in ("bin", "journal")
        )
        self._lock: int | None = None
        self._journal: int | None = None
        # what our journal begins with, where an earlier one's whole records end
        self._header = b""
        self._end = 0

    @property
    def is_kept(self) -> bool:
        return self._lock is not None  # whether this run's findings are: the lock is ours

    def load(self, *, keep: bool = True) -> Archive:
        """Take the lock, where findings are to be kept, and read; empty where nothing can be used."""
        if self._directory is None:
            return EMPTY
        self._end = 0
        try:
            if keep:
                os.makedirs(self._directory, mode=0o700, exist_ok=True)
                self._lock = os.open(os.path.join(self._directory, "state.lock"), _WRITE, 0o600)
                _lock(self._lock)
        except BlockingIOError:
            self.close()
            self._warn(
                "state_locked", f"another run uses {self._shown}: this one leaves no state behind"
            )
        except OSError as error:
            self._say(f"no state is kept: {self._shown}", error)
            self.close()
            return Archive(self._image) if self._image else EMPTY
        if not self.is_kept and self._image:
            return Archive(self._image)
        try:
            return self._read()
        except Damaged as error:
            # what this run notes counts repositories anew: it belongs to no file that is there
            self._header = b""
            self._warn("state", f"the state in {self._shown} is not used: {error}")
        except OSError as error:
            self._say(f"{self._shown} cannot be read", error)
        return EMPTY

    def _say(self, problem: str, error: OSError) -> None:
        self._warn("state", f"{problem}: {clean(error.strerror or str(error))}")

    def _read(self) -> Archive:
        whole = _content(self._path)
        before = self._header
        self._header = _JOURNAL + zlib.crc32(whole or b"").to_bytes(4, "big")
        if (
            self._image and self._header == before
        ):  # nobody has saved since: the disk may have room for it again
            self.save(self._image)
            if self._image:
                self.close()
            return Archive(self._image) if self._image else self._read()
        self._image = b""
        base = Archive(whole)
        journal = _content(self._journal_path) or b""
        if journal.startswith(self._header):
            records, end = unframe(journal[len(self._header) :])
            base = folded(base, records)
            self._end = len(self._header) + end
        return base

    def note(self, record: bytes) -> None:
        """Append one record to the journal: after a `kill -9` it is all that is left."""
        if self._lock is None:
            return
        try:
            if self._journal is None:
                if not self._end:
                    _remove(self._journal_path)  # it may be another file's name too
                self._journal = os.open(
                    self._journal_path, _WRITE | (os.O_APPEND if self._end else os.O_EXCL), 0o600
                )
                os.ftruncate(self._journal, self._end)
                record = record if self._end else self._header + record
            os.write(self._journal, record)
        except OSError as error:
            self._say(f"no state is kept: {self._shown}", error)
            self.close()

    def save(self, image: bytes | None) -> None:
        """Replace the state file, and let go of the journal that is folded into it."""
        self._image = image or self._image  # until it is saved
        if self._lock is None or image is None:
            return
        try:
            with _replacing(self._path) as partial, open(partial, "wb") as stream:
                stream.write(image)
                stream.flush()
                os.fsync(stream.fileno())
            if self._journal is not None:
                os.close(self._journal)
                self._journal = None
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._journal_path)
            self._image = b""
        except OSError as error:
            self._say(f"the state in {self._shown} is not saved", error)

    def close(self) -> None:
        for descriptor in (self._journal, self._lock):
            if descriptor is not None:
                os.close(descriptor)
        self._journal = self._lock = None


def _lock(descriptor: int) -> None:
    """Lock a file for this process alone; BlockingIOError when another one has it."""
    try:
        from fcntl import LOCK_EX, LOCK_NB, flock
    except ImportError:
        import msvcrt  # Windows

        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
        except OSError as error:
            raise BlockingIOError(str(error)) from error
    else:
        flock(descriptor, LOCK_EX | LOCK_NB)


def _content(path: str) -> bytes | None:
    with contextlib.suppress(FileNotFoundError), open(path, "rb", opener=_safely) as stream:
        size = os.fstat(stream.fileno()).st_size  # `read` makes room for as much as it is asked for
        if size > _LARGEST:
            raise Damaged(f"it is larger than {_LARGEST} bytes")
        return stream.read(size)
    return None

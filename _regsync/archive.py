"""The warm tier as bytes: the format of `state.bin` and of the journal beside it (design.md section 8).

Owns: the tables of what earlier runs confirmed, looked up in place by bisection, their merge with what this run
confirmed, the framing of the journal. May not know: files, clocks, what a row means (`state.Knowledge` judges).
Invariant I5: bytes that are not whole, not ours or of another version are `Damaged`, never half read."""
from __future__ import annotations
import json
import struct
import zlib
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from heapq import merge
from itertools import accumulate, groupby, pairwise
from operator import itemgetter
from typing import Any
from _regsync import fips
from _regsync.oci import split_digest
__all__ = ["EMPTY", "Archive", "Damaged", "digest_like", "encode", "entry", "folded", "frame", "key_of", "moment_of",
    "named", "unframe"]

_MAGIC, _VERSION = b"regsync\n", 2
_HEAD, _CRC, _FRAME = struct.Struct(">8sHI7I"), struct.Struct(">I"), struct.Struct(">cH")
_LONGEST_LOOK = 400 * 86400  # what nobody has looked at for longer is of images that are gone
_ALGORITHMS = {"sha256": b"\1", "sha512": b"\2"}

# A table is rows of one width in ascending order: 600,000 load as the file is read, in a tenth of what objects take,
# and are found in 20 steps each. A row begins with its identity: a digest's key (a byte for the algorithm, then 32; of
# sha512 the first 256 bits, as hard to meet) and a repository's number. Table: width of a row, of its identity, where
# its time of confirmation stands (0: none). B blobs, M manifests: identity, time, flag (a blob: mountable).
# E: a manifest's identity, the key of a thing it names. S: a snapshot (`named`), time, keys of the source's and pushed.
# A: an image's artifacts (`named`), time of the last look, of the first, bits, 8 bytes of a hash of what was listed.
_LAYOUTS = {"B": (42, 37, 37), "M": (42, 37, 37), "E": (70, 70, 0), "S": (102, 32, 32), "A": (49, 32, 32)}

class Damaged(ValueError):
    """These bytes are not a state file that this version can read."""

def key_of(digest: str) -> bytes:
    """Return the 33 bytes that stand for a digest."""
    algorithm, encoded = split_digest(digest)
    return _ALGORITHMS[algorithm] + bytes.fromhex(encoded[:64])

def digest_like(key: bytes) -> str:
    """Return the digest of a key; of sha512 its first half, which is what a referrers tag has."""
    return f"{next((name for name, mark in _ALGORITHMS.items() if mark == key[:1]), '')}:{key[1:].hex()}"

def named(*words: str) -> bytes:
    """Return the 32 bytes that identify a snapshot: of which tag, where from and to, under which rules."""
    return bytes.fromhex(fips.hash_hex("sha256", "\0".join(words).encode()))

def entry(key: bytes, number: int, moment: int, flag: bool) -> bytes:
    """Return a row of table B or M."""
    return key + _CRC.pack(number) + _CRC.pack(moment) + bytes([flag])

class Archive:
    """What earlier runs left, read only."""
    def __init__(self, image: bytes | None = None) -> None:
        """Read a whole state file; Damaged where it is none."""
        self.repositories: list[tuple[str, str]] = []
        self.facts: dict[str, tuple[Any, int]] = {}  # by name: what was learnt of a host, and when
        self.renewed, self._tables = 0, dict.fromkeys(_LAYOUTS, memoryview(b""))
        if image is None: return
        rest = memoryview(image)[: -_CRC.size]
        try: magic, version, self.renewed, *sizes = _HEAD.unpack_from(image)
        except struct.error as error: raise Damaged("it is cut short") from error
        if (magic, version) != (_MAGIC, _VERSION): raise Damaged("it is no state file of this version")
        if len(rest) != _HEAD.size + sum(sizes) or image[len(rest) :] != _CRC.pack(zlib.crc32(rest)):
            raise Damaged("its checksum is wrong")
        parts = pairwise(accumulate(sizes, initial=_HEAD.size))
        first, second, *tables = (rest[start:end] for start, end in parts)
        try:
            self.repositories = [(str(host), str(name)) for host, name in json.loads(bytes(first))]
            if len({*self.repositories}) < len(self.repositories): raise ValueError("one of two numbers")
            facts = json.loads(bytes(second)).items()
            self.facts = {name: (value, int(moment)) for name, (value, moment) in facts}
        except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise Damaged("its lists cannot be read") from error
        self._tables = dict(zip(_LAYOUTS, tables, strict=True))
    def rows(self, table: str, identity: bytes = b"") -> Iterator[bytes]:
        """Give the rows of a table that begin with `identity`, in order."""
        rows, width, size = self._tables[table], _LAYOUTS[table][0], len(identity)
        count = len(rows) // width
        first = bisect_left(range(count), identity, key=lambda index: bytes(rows[index * width : index * width + size]))
        for start in range(first * width, count * width, width):
            row = bytes(rows[start : start + width])
            if not row.startswith(identity): return
            yield row
    def row(self, table: str, identity: bytes) -> bytes | None:
        """Return the row of that identity."""
        return next(self.rows(table, identity), None)

EMPTY = Archive()

def moment_of(table: str, row: bytes) -> int:
    """Return when a row was confirmed, in seconds of the wall clock."""
    at = _LAYOUTS[table][2]
    return int.from_bytes(row[at : at + 4], "big")

def encode(old: Archive, rows: Mapping[str, list[bytes]], repositories: Sequence[tuple[str, str]],
        facts: Mapping[str, Any], *, oldest: int = 0, forgotten: Set[bytes] = frozenset(),
        renewed: Set[bytes] = frozenset(), moment: int = 0) -> bytes:
    """Merge an archive with what a run found out into a state file; of an identity the newest row stays. `repositories`
    come behind the archive's own. Dropped are rows confirmed before `oldest`, and the `forgotten` of tables B and M;
    the `renewed` there were confirmed for free, at `moment`."""
    dropped: set[bytes] = set()
    def kept(table: str, identity: bytes, found: Sequence[bytes]) -> bytes:
        # The last is the newest: the time stands behind the identity, big-endian.
        row, at = found[-1], _LAYOUTS[table][2]
        if table == "E": return b"" if row[:37] in dropped else row
        if table == "B":
            row = row[:-1] + max(each[-1:] for each in found)  # what could be mounted from there once still can
        if identity in renewed: row = row[:at] + _CRC.pack(moment) + row[at + 4 :]
        is_young = moment_of(table, row) >= (oldest if table != "A" else moment - _LONGEST_LOOK)
        if is_young and identity not in forgotten: return row
        if table == "M": dropped.add(identity)
        return b""
    parts = [json.dumps(each).encode() for each in ([*old.repositories, *repositories], facts)]
    for table, (_, size, _) in _LAYOUTS.items():
        groups = groupby(merge(old.rows(table), sorted(rows.get(table, []))), itemgetter(slice(size)))
        parts.append(b"".join(kept(table, identity, [*group]) for identity, group in groups))
    whole = b"".join([_HEAD.pack(_MAGIC, _VERSION, moment, *map(len, parts)), *parts])
    return whole + _CRC.pack(zlib.crc32(whole))

def frame(kind: str, payload: bytes) -> bytes:
    """Return one record of the journal, with a checksum of its own."""
    record = _FRAME.pack(kind.encode(), len(payload)) + payload
    return record + _CRC.pack(zlib.crc32(record))

def unframe(journal: bytes) -> tuple[list[tuple[str, bytes]], int]:
    """Return the whole records of a journal up to the first that is torn, and where that begins."""
    records, at = list[tuple[str, bytes]](), 0
    while at + _FRAME.size <= len(journal):
        kind, size = _FRAME.unpack_from(journal, at)
        end = at + _FRAME.size + size
        if journal[end : end + 4] != _CRC.pack(zlib.crc32(journal[at:end])): break
        records.append((kind.decode("latin-1"), journal[end - size : end]))
        at = end + 4
    return records, at

def folded(base: Archive, records: Iterable[tuple[str, bytes]]) -> Archive:
    """Return an archive with a journal's records in it; Damaged where they are none."""
    rows: dict[str, list[bytes]] = {table: [] for table in _LAYOUTS}
    repositories: list[tuple[str, str]] = []
    for kind, payload in records:
        host, nul, name = payload.decode("utf-8", "replace").partition("\0")
        if kind == "R" and nul: repositories.append((host, name))
        elif kind in rows and len(payload) == _LAYOUTS[kind][0]: rows[kind].append(payload)
        else: raise Damaged("its journal holds what is no record")
    if not (repositories or any(rows.values())): return base
    return Archive(encode(base, rows, repositories, base.facts, moment=base.renewed))

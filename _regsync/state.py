"""What is known about blobs, manifests and tags at registries: by this run, and by earlier ones, as
they left it. Owns: the hot tier and the judgement of the warm one (specification 1.1, three-step
look-up), what was learnt of hosts; the warm tier as bytes, looked up in place: `state.bin` and its
journal (design.md section 8). May not know: clocks, sockets, tasks, files. Invariant I5: an entry
exists only because a registry answered; what an earlier run left is believed as far as design.md
section 7, "Vouching", allows, wrong state costs requests only, and bytes that are not whole, not
ours or of another version are `Damaged`, never half read."""

from __future__ import annotations

import json
import math
import struct
import zlib
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from heapq import merge
from itertools import accumulate, groupby, pairwise
from operator import itemgetter
from typing import Any

from _regsync import fips, oci

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
    algorithm, encoded = oci.split_digest(digest)
    return _ALGORITHMS[algorithm] + bytes.fromhex(encoded[:64])


def digest_like(key: bytes) -> str:
    """Return the digest of a key; of sha512 its first half, which is what a referrers tag has."""
    return f"{next((name for name, mark in _ALGORITHMS.items() if mark == key[:1]), '')}:{key[1:].hex()}"


def named(*words: str) -> bytes:
    """Return the 32 bytes that identify a snapshot: of which tag, where from and to, under which
    rules.
    """
    return bytes.fromhex(fips.hash_hex("sha256", "\0".join(words).encode()))


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


RepositoryKey = tuple[str, str]  # host key (host:port as shown in reports) and repository name
# What a tag named when its target last held it: keys (`key_of`) of the source's digest and the
# pushed one.
Snapshot = tuple[bytes, bytes]
_FRESH_SECONDS = (
    30 * 60
)  # a weak entry is believed for so long whatever else is known (design.md section 7)
_FACTS_SECONDS = 24 * 3600  # what was learnt of a host (design.md section 8)


class Knowledge:
    """The hot tier over the warm one; `now` is the wall clock, `ttl` seconds (0: for ever), `note`
    the journal.
    """

    def __init__(
        self,
        archive: Archive = EMPTY,
        *,
        now: Callable[[], float] = float,
        ttl: float = 0.0,
        note: Callable[[bytes], None] | None = None,
    ) -> None:
        self._blobs: defaultdict[RepositoryKey, set[str]] = defaultdict(set)
        self._manifests: defaultdict[RepositoryKey, set[str]] = defaultdict(set)
        # Per host and blob, the repositories with a committed manifest that names it, oldest first.
        self._holders: defaultdict[tuple[str, str], dict[str, None]] = defaultdict(dict)
        # Whether a repository holds manifests of others, where that was asked.
        self._populated: dict[RepositoryKey, bool] = {}
        self._refused: set[tuple[RepositoryKey, str]] = set()
        self._archive = archive
        self._now = now
        self._ttl = ttl
        self._note = note
        self._numbers = {where: number for number, where in enumerate(archive.repositories)}
        self._rows: dict[str, list[bytes]] = {table: [] for table in "BMESA"}
        self._forgotten: set[bytes] = set()
        # Manifests that a target's tag answered with in this run, not yet and already looked into.
        self._vouched: defaultdict[RepositoryKey, list[bytes]] = defaultdict(list)
        self._strong: defaultdict[RepositoryKey, set[bytes]] = defaultdict(set)
        self._contradicted: set[RepositoryKey] = set()
        self._written: set[bytes] = set()  # manifests whose names are in the rows already
        self._changed = False
        self._looks = dict[bytes, bytes]()
        self._facts = {
            name: fact
            for name, fact in archive.facts.items()
            if self._is_young(fact[1], _FACTS_SECONDS)
        }

    def has_blob(self, where: RepositoryKey, digest: str, *, careful: bool = False) -> bool:
        """Say whether a blob is known to be in a repository; `careful` where the registry would not
        miss it.
        """
        return digest in self._blobs[where] or self._believed("B", where, digest, careful)

    def is_confirmed(self, where: RepositoryKey, digest: str) -> bool:
        """Say whether a registry answered in this run that it holds a blob or manifest there."""
        return digest in self._blobs[where] or digest in self._manifests[where]

    def add_blob(self, where: RepositoryKey, digest: str) -> None:
        if digest not in self._blobs[where]:
            self._blobs[where].add(digest)
            self._record("B", where, digest)

    def is_committed(self, where: RepositoryKey, digest: str) -> bool:
        return digest in self._manifests[where] or self._believed("M", where, digest, False)

    def commit(
        self, where: RepositoryKey, digest: str, blobs: Iterable[str], children: Iterable[str] = ()
    ) -> None:
        """Note a manifest that a registry holds; the blobs that it names may be mounted from there."""
        self._manifests[where].add(digest)
        manifest = self._identity(where, digest)
        if manifest in self._written:
            return
        self._written.add(manifest)
        self._record("M", where, digest)
        for blob in blobs:
            self._blobs[where].add(blob)
            self._holders[where[0], blob][where[1]] = None
            self._record("B", where, blob, flag=True)
        for name in (*blobs, *children):
            self._append("E", manifest + key_of(name))

    def forget(self, where: RepositoryKey, digest: str) -> None:
        """Drop what was believed of a digest and of what it names: a registry answered otherwise,
        or refused it.
        """
        identity = self._identity(where, digest)
        self._blobs[where].discard(digest)
        self._manifests[where].discard(digest)
        self._holders[where[0], digest].pop(where[1], None)
        self._forgotten.add(identity)
        self._forgotten.update(
            row[37:] + identity[33:] for row in self._archive.rows("E", identity)
        )
        self._changed = True
        self._written.discard(identity)

    def miss(self, where: RepositoryKey, digest: str) -> None:
        if self._identity(where, digest) in self._strengths(where):
            # A manifest that stands there names it, and yet it is gone: this host does not look.
            self.learn(f"lenient {where[0]}", True)

    def vouch(self, where: RepositoryKey, digest: str) -> None:
        """Note that a target's tag HEAD or listing answers with this manifest: what it names is
        strong.
        """
        self._manifests[where].add(digest)
        self._vouched[where].append(self._identity(where, digest))

    def contradict(self, where: RepositoryKey) -> None:
        """Note that an answer of this run speaks against the state of a repository: its entries are
        weak.
        """
        self._contradicted.add(where)
        self._vouched.pop(where, None)
        self._strong.pop(where, None)

    def set_populated(self, where: RepositoryKey, holds: bool = True) -> None:
        """Note that a repository `holds` manifests of others, whose blobs are worth asking for, or
        none at all.
        """
        self._populated[where] = holds
        if not holds:
            self.contradict(where)

    def is_empty(self, where: RepositoryKey) -> bool:
        """Say whether a repository held no manifests when this run listed it."""
        return self._populated.get(where) is False

    def was_used(self, where: RepositoryKey) -> bool:
        """Say whether an earlier run brought something to a repository."""
        return self._numbers.get(where, math.inf) < len(self._archive.repositories)

    def _identity(self, where: RepositoryKey, digest: str) -> bytes:
        return key_of(digest) + self._number(where).to_bytes(4, "big")

    def _number(self, where: RepositoryKey) -> int:
        if where not in self._numbers:
            self._numbers[where] = len(self._numbers)
            if self._note is not None:
                self._note(frame("R", "\0".join(where).encode()))
        return self._numbers[where]

    def _record(self, table: str, where: RepositoryKey, digest: str, *, flag: bool = False) -> None:
        row = entry(key_of(digest), self._number(where), int(self._now()), flag)
        self._forgotten.discard(row[:37])
        self._append(table, row)

    def _append(self, table: str, row: bytes) -> None:
        if self._note is not None:
            self._rows[table].append(row)
            self._note(frame(table, row))

    def _is_young(self, moment: int, seconds: float) -> bool:
        return (
            -_FACTS_SECONDS <= self._now() - moment <= seconds
        )  # not by a clock a day ahead, nor by a liar

    def _believed(self, table: str, where: RepositoryKey, digest: str, careful: bool) -> bool:
        """Judge an entry of an earlier run (design.md section 7, "Vouching")."""
        if where not in self._numbers:
            return False
        identity = self._identity(where, digest)
        row = self._archive.row(table, identity)
        if row is None or identity in self._forgotten:
            return False
        if not self._is_young(moment := moment_of(table, row), self._ttl or math.inf):
            return False
        if where in self._contradicted:
            return identity in self._strengths(where)
        careful = careful or self.fact(f"lenient {where[0]}") is True
        return (
            not careful
            or self._is_young(moment, _FRESH_SECONDS)
            or identity in self._strengths(where)
        )

    def _strengths(self, where: RepositoryKey) -> set[bytes]:
        """Return the identities that vouched manifests of a repository name, whatever their depth."""
        strong = self._strong[where]
        pending = self._vouched.pop(where, [])
        while pending:
            manifest = pending.pop()
            if manifest not in strong:
                strong.add(manifest)
                named = [row[37:] + manifest[33:] for row in self._archive.rows("E", manifest)]
                pending += [each for each in named if self._archive.row("M", each)]
                strong.update(each for each in named if not self._archive.row("M", each))
        return strong

    def mount_source(self, where: RepositoryKey, digest: str) -> str | None:
        holders = (each for each in self.holders(where[0], digest) if each != where[1])
        return next((each for each in holders if self.may_mount(where, each)), None)

    def holders(self, host: str, digest: str) -> Iterator[str]:
        """Give the repositories of a host that hold a blob under a committed manifest."""
        yield from self._holders.get((host, digest), ())
        for row in self._archive.rows("B", key_of(digest)):
            number = int.from_bytes(row[33:37], "big")
            where = (
                self._archive.repositories[number]
                if number < len(self._archive.repositories)
                else ("", "")
            )
            if where[0] == host and row[41] and self._believed("B", where, digest, False):
                yield where[1]

    def mounts(self, host: str) -> bool | None:
        """Say whether a host mounts, None where no mount has been answered yet."""
        return None if (told := self.fact(f"mounts {host}")) is None else bool(told)

    def may_mount(self, where: RepositoryKey, source: str) -> bool:
        """Say whether a mount from `source` is worth asking for, or waiting for."""
        return self.mounts(where[0]) is not False and (where, source) not in self._refused

    def refuse_mount(self, where: RepositoryKey, source: str) -> None:
        """Note a refused mount: that pair is not tried again, nor a host that never mounted (rule
        10).
        """
        self._refused.add((where, source))
        if self.mounts(where[0]) is None:
            self.learn(f"mounts {where[0]}", False)

    def accept_mount(self, host: str) -> None:
        """Note that this host mounts: every refusal, also an earlier one, then says something of
        its pair.
        """
        self.learn(f"mounts {host}", True)

    def may_probe(self, where: RepositoryKey, allowed: bool) -> bool:
        """Say whether the POST that starts an upload asks for an unknown blob too, not a HEAD (rule
        11).
        """
        return allowed and (not self._populated.get(where) or self.probed(where) == (True, True))

    def learn_probe(
        self, where: RepositoryKey, *, absent: bool = False, present: bool = False
    ) -> None:
        """Note what a probing POST answered, where a HEAD said the same."""
        old = self.probed(where)
        self.learn(f"probes {area(where)}", [old[0] or absent, old[1] or present])

    def probed(self, where: RepositoryKey) -> tuple[bool, bool]:
        """Say what a HEAD confirmed of such POSTs' answers: (202 for an absent blob, 201 for a
        present one).
        """
        told = self.fact(f"probes {area(where)}")
        return (
            (told[0] is True, told[1] is True)
            if isinstance(told, list) and len(told) == 2
            else (False, False)
        )

    def snapshot(self, name: bytes) -> Snapshot | None:
        """Return what a tag (`named`) was when its target last held it."""
        row = self._archive.row("S", name)
        if row is None or not self._is_young(moment_of("S", row), self._ttl or math.inf):
            return None
        return row[36:69], row[69:]

    def take_snapshot(self, name: bytes, source: bytes, pushed: bytes) -> None:
        """Note what a tag names at its source, and what its target therefore holds, as keys
        (`Snapshot`).
        """
        row = self._archive.row("S", name)
        keys = source + pushed
        moment = int(self._now())
        # An unchanged tag is written anew from time to time only: a run without changes writes
        # nothing.
        if (
            row is None
            or row[36:] != keys
            or not self._is_young(moment_of("S", row), self._ttl / 4 or math.inf)
        ):
            self._append("S", name + moment.to_bytes(4, "big") + keys)

    def look(self, name: bytes) -> tuple[int, int, int, bytes]:
        """Return when an image's artifacts were last looked at, when first, the bits noted then (0:
        they are not known to be there), what was listed."""
        row = self._looks.get(name) or self._archive.row("A", name)
        if row is None or not self._is_young(moment := moment_of("A", row), math.inf):
            return 0, 0, 0, b""
        return moment, int.from_bytes(row[36:40], "big"), row[40], row[41:]

    def looked(self, name: bytes, bits: int, listed: bytes) -> None:
        """Note what a look at an image's artifacts found, `listed` in 8 bytes; this does not age
        with `ttl`.
        """
        now = int(self._now())
        row = self._looks[name] = (
            name + _CRC.pack(now) + _CRC.pack(self.look(name)[1] or now) + bytes([bits]) + listed
        )
        self._append("A", row)

    def fact(self, name: str) -> Any:
        """Return what was learnt under a name (JSON's types), None where nothing was."""
        return self._facts.get(name, (None, 0))[0]

    def learn(self, name: str, value: Any) -> None:
        """Keep something about a host for a day; `name` says what, and of which host."""
        if self.fact(name) != value:
            self._facts[name] = (value, int(self._now()))
            self._changed = True

    def encoded(self) -> bytes | None:
        """Return the state to save, None where it would say nothing new."""
        moment = int(self._now())
        old = self._archive
        due = bool(self._ttl) and not self._is_young(old.renewed, self._ttl / 4)
        if not (self._changed or any(self._rows.values()) or (due and self._vouched)):
            return None
        for where in tuple(self._vouched) if due else ():
            self._strengths(where)
        return encode(
            old,
            self._rows,
            list(self._numbers)[len(old.repositories) :],
            self._facts,
            oldest=moment - int(self._ttl) if self._ttl else 0,
            newest=moment + _FACTS_SECONDS,
            forgotten=self._forgotten,
            renewed=set().union(*self._strong.values()) if due else set(),
            moment=moment if due or not old.renewed else old.renewed,
        )


def area(where: RepositoryKey) -> str:
    """Return what of a host is learnt together: the host and the first path segment."""
    return f"{where[0]} {where[1].partition('/')[0]}"

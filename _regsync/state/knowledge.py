"""."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from _regsync.state.database import _CRC, EMPTY, Archive, encode, entry, frame, key_of, moment_of

RepositoryKey = tuple[str, str]  # host key (host:port as shown in reports) and repository name


# What a tag named when its target last held it: keys (`key_of`) of the source's digest and the
# pushed one.
Snapshot = tuple[bytes, bytes]


_FRESH_SECONDS = (
    30 * 60
)  # a weak entry is believed for so long whatever else is known (docs/design.md section 7)


_FACTS_SECONDS = 24 * 3600  # what was learnt of a host (docs/design.md section 8)


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
        """Judge an entry of an earlier run (docs/design.md section 7, "Vouching")."""
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

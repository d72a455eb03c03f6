"""What this run believes of registries, repositories, blobs, manifests and tags.

Owns: the forms of entries and their keys; what an `Archive` of entries can do (the state file is an archive, and so are
`Notes` in memory); which entries of earlier runs are believed ("Vouching"); what was learnt of hosts; when an entry is
renewed.
May not know: clocks (`now` is an argument), sockets, tasks, files, SQL.
Invariants: an entry exists only because a registry answered. Wrong entries cost requests, never a wrong image (I5).
Follows: docs/specification.md section 1.1 (three-step look-up), docs/design.md sections 6 (rules 10, 11), 7 and 8.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple, Protocol

from _regsync.crypto import hash_hex
from _regsync.oci.reference import LAYOUT_SCHEME, is_repository, split_digest

# A host (`host:port`, as reports show it) and the name of a repository.
RepositoryKey = tuple[str, str]

# The first byte of a digest's key says the algorithm.
_ALGORITHMS = {"sha256": b"\1", "sha512": b"\2"}

# Bytes of a digest's key.
DIGEST_BYTES = 33

# An entry this young is believed without a vouching manifest (docs/design.md section 7).
_FRESH_SECONDS = 30 * 60

# What was learnt of a host is forgotten after a day (docs/design.md section 8).
_FACTS_SECONDS = 24 * 3600

# An entry from a clock that is further ahead than this is not believed.
_CLOCK_AHEAD_SECONDS = 24 * 3600

# Seconds between two removals of old entries: a removal reads the whole file.
_SWEEP_SECONDS = 24 * 3600

# An artifact check is removed so long after its last look, because the image is no longer mirrored.
_LONGEST_LOOK_SECONDS = 400 * 86400

# Repositories from which the mount of one blob is tried at most.
MOST_HOLDERS = 32

# The flags of an artifact check. Its bits 1 to 8 say which tags with artifacts the source's listing
# showed (`Referrers.listed_tags`).

# All artifacts are at the target.
COMPLETE = 32
# The image was copied, not found there.
COPIED = 64


# An image's digests are asked for some twenty times while it is copied, and soon after each other.
@lru_cache(4096)
def key_of(digest: str) -> bytes:
    """Return the 33 bytes that stand for a digest.

    Of sha512 they hold the first 256 bits, which are as hard to meet as a sha256.
    """
    algorithm, encoded = split_digest(digest)
    return _ALGORITHMS[algorithm] + bytes.fromhex(encoded[:64])


def digest_like(key: bytes) -> str:
    """Return the digest of a key; of a sha512 only the first half, as a referrers tag has it."""
    for algorithm, mark in _ALGORITHMS.items():
        if key[:1] == mark:
            return f"{algorithm}:{key[1:].hex()}"
    return f":{key[1:].hex()}"


def hashed_key(*words: str) -> bytes:
    """Return a hash of these words, 32 bytes, as the key of a snapshot or artifact check."""
    return bytes.fromhex(hash_hex("sha256", "\0".join(words).encode()))


class BlobEntry(NamedTuple):
    """A blob that a repository holds. Moments are seconds of the wall clock."""

    confirmed: int
    is_mountable: bool  # a committed manifest of the repository names the blob


class ManifestEntry(NamedTuple):
    """A manifest that a repository holds, and the keys of what it names."""

    confirmed: int
    blobs: tuple[bytes, ...]
    children: tuple[bytes, ...]


class Holder(NamedTuple):
    """A repository that holds a blob under a committed manifest."""

    repository: str
    confirmed: int


class Snapshot(NamedTuple):
    """What a tag named when its target last held it: keys of the source's digest and the pushed one."""

    source: bytes
    pushed: bytes


class SnapshotEntry(NamedTuple):
    confirmed: int
    snapshot: Snapshot


class ArtifactCheck(NamedTuple):
    """What is remembered of the looks at the artifacts of an image at one target.

    Moments are seconds since 1970, 0 where nobody has looked.
    """

    last: int
    first: int
    flags: int
    listing_hash: bytes  # 8 bytes; of the digests that the source listed

    @property
    def is_complete(self) -> bool:
        return bool(self.flags & COMPLETE)

    @property
    def was_copied(self) -> bool:
        return bool(self.flags & COPIED)


NO_CHECK = ArtifactCheck(0, 0, 0, bytes(8))


class Fact(NamedTuple):
    """One learnt field of `HostFacts`, as it is kept; `segment` is "" for the whole host."""

    name: str
    segment: str
    value: object  # of JSON's types
    learnt: int


class Archive(Protocol):
    """What earlier runs left, and where the findings of this one go.

    Each entry that was put is found again by the same run.
    """

    @property
    def swept(self) -> int:
        """When old entries were removed last; 0 where that is not known."""

    def blob(self, where: RepositoryKey, key: bytes) -> BlobEntry | None: ...

    def manifest(self, where: RepositoryKey, key: bytes) -> ManifestEntry | None: ...

    def manifest_moments(self, where: RepositoryKey, keys: Iterable[bytes]) -> dict[bytes, int]:
        """Return when each of these manifests was confirmed, as far as there are entries."""

    def holders_of(self, host: str, key: bytes) -> list[Holder]:
        """Return repositories of a host where a blob is mountable, the last confirmed first."""

    def snapshots(self, names: Iterable[bytes]) -> dict[bytes, SnapshotEntry]:
        """Return the snapshots with these names, as far as there are any."""

    def artifact_check(self, name: bytes) -> ArtifactCheck | None: ...

    def facts_of(self, host: str) -> list[Fact]: ...

    def put_blob(self, where: RepositoryKey, key: bytes, entry: BlobEntry) -> None: ...

    def put_manifest(self, where: RepositoryKey, key: bytes, entry: ManifestEntry) -> None: ...

    def forget(self, where: RepositoryKey, keys: Iterable[bytes]) -> None:
        """Drop blobs and manifests."""

    def put_snapshot(self, name: bytes, entry: SnapshotEntry) -> None: ...

    def put_artifact_check(self, name: bytes, check: ArtifactCheck) -> None: ...

    def put_fact(self, host: str, fact: Fact) -> None: ...

    def sweep(
        self, moment: int, *, entries_before: int, looks_before: int, facts_before: int
    ) -> None:
        """Remove artifact checks last looked at before `looks_before`, facts learnt before
        `facts_before`, other entries confirmed before `entries_before`. Set `swept` to `moment`.
        """


class Notes:
    """An archive in memory. A blob or manifest whose value is None was forgotten."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Drop everything."""
        self.swept = 0
        # By host and key, then by repository.
        self.blobs: defaultdict[tuple[str, bytes], dict[str, BlobEntry | None]] = defaultdict(dict)
        self.manifests: dict[tuple[RepositoryKey, bytes], ManifestEntry | None] = {}
        self.snapshots_by_name: dict[bytes, SnapshotEntry] = {}
        self.artifact_checks: dict[bytes, ArtifactCheck] = {}
        # By host, then by name and segment.
        self.facts: defaultdict[str, dict[tuple[str, str], Fact]] = defaultdict(dict)

    def __bool__(self) -> bool:
        tables = (
            self.blobs,
            self.manifests,
            self.snapshots_by_name,
            self.artifact_checks,
            self.facts,
        )
        return any(tables)

    def blob(self, where: RepositoryKey, key: bytes) -> BlobEntry | None:
        host, repository = where
        return self.blobs[host, key].get(repository) if (host, key) in self.blobs else None

    def manifest(self, where: RepositoryKey, key: bytes) -> ManifestEntry | None:
        return self.manifests.get((where, key))

    def manifest_moments(self, where: RepositoryKey, keys: Iterable[bytes]) -> dict[bytes, int]:
        entries = ((key, self.manifest(where, key)) for key in keys)
        return {key: entry.confirmed for key, entry in entries if entry is not None}

    def holders_of(self, host: str, key: bytes) -> list[Holder]:
        entries = self.blobs.get((host, key), {})
        return [
            Holder(repository, entry.confirmed)
            for repository, entry in entries.items()
            if entry is not None and entry.is_mountable
        ]

    def snapshots(self, names: Iterable[bytes]) -> dict[bytes, SnapshotEntry]:
        return {
            name: self.snapshots_by_name[name] for name in names if name in self.snapshots_by_name
        }

    def artifact_check(self, name: bytes) -> ArtifactCheck | None:
        return self.artifact_checks.get(name)

    def facts_of(self, host: str) -> list[Fact]:
        return list(self.facts.get(host, {}).values())

    def put_blob(self, where: RepositoryKey, key: bytes, entry: BlobEntry) -> None:
        host, repository = where
        self.blobs[host, key][repository] = entry

    def put_manifest(self, where: RepositoryKey, key: bytes, entry: ManifestEntry) -> None:
        self.manifests[where, key] = entry

    def forget(self, where: RepositoryKey, keys: Iterable[bytes]) -> None:
        host, repository = where
        for key in keys:
            self.blobs[host, key][repository] = None
            self.manifests[where, key] = None

    def put_snapshot(self, name: bytes, entry: SnapshotEntry) -> None:
        self.snapshots_by_name[name] = entry

    def put_artifact_check(self, name: bytes, check: ArtifactCheck) -> None:
        self.artifact_checks[name] = check

    def put_fact(self, host: str, fact: Fact) -> None:
        self.facts[host][fact.name, fact.segment] = fact

    def sweep(
        self, moment: int, *, entries_before: int, looks_before: int, facts_before: int
    ) -> None:
        """Remove nothing: this process has put all entries."""
        self.swept = moment


def area(where: RepositoryKey) -> str:
    """Return host and first path segment of a repository: what is learnt of one repository in an area
    holds for all.
    """
    return f"{_host_of(where)} {_first_segment(where)}"


def _host_of(where: RepositoryKey) -> str:
    host, _ = where
    return host


def _first_segment(where: RepositoryKey) -> str:
    _, name = where
    return name.partition("/")[0]


class ProbeAnswers(NamedTuple):
    """Whether the answer to a probing POST, which looks for a blob and starts its upload, tells the
    truth (rule 11); None where that is not known.
    """

    absent: bool | None  # of an absent blob: 202
    present: bool | None  # of a present blob: 201


@dataclass
class HostFacts:
    """What was learnt of one registry host; None where it is not known."""

    mounts: bool | None = None
    # Whether the host accepts manifests that name absent blobs.
    is_lenient: bool | None = None
    # Bodies from this size on, in bytes, go in the kind's other dialect (docs/protocol-facts.md section 7.9).
    smallest_patch: int | None = None
    # What `Authenticator.restore` takes.
    login: object = None
    # By the first path segment of a repository's name.
    probes: dict[str, ProbeAnswers] = field(default_factory=dict)
    # By the first path segment of a repository's name.
    has_referrers_api: dict[str, bool] = field(default_factory=dict)

    def recall(self, fact: Fact) -> None:
        """Take a fact from an earlier run; a fact of another form than ours is ignored."""
        match fact.name, fact.value:
            case "mounts", bool(value):
                self.mounts = value
            case "is_lenient", bool(value):
                self.is_lenient = value
            case "smallest_patch", int(value) if not isinstance(value, bool):
                self.smallest_patch = value
            case "login", value:
                self.login = value
            case "probe_answers", [bool() | None as absent, bool() | None as present]:
                self.probes[fact.segment] = ProbeAnswers(absent, present)
            case "has_referrers_api", bool(value):
                self.has_referrers_api[fact.segment] = value


class Knowledge:
    """What registries have answered in this run, and what earlier runs left in the archive.

    `now` is the wall clock, `ttl` says for how many seconds an entry is believed (0: for ever).
    """

    def __init__(
        self,
        archive: Archive | None = None,
        *,
        now: Callable[[], float] = lambda: 0.0,
        ttl: float = 0.0,
    ) -> None:
        self._archive: Archive = Notes() if archive is None else archive
        self._now = now
        self._ttl = ttl

        # What this run learns of image layouts. No later run knows of it: another disk may be mounted
        # then (docs/design.md section 13).
        self._layouts = Notes()

        # In the tables below a digest is `str`, and its key (`key_of`), by which the archive knows it,
        # is `bytes`.

        # Blobs that a registry confirmed in this run.
        self._blobs: defaultdict[RepositoryKey, set[str]] = defaultdict(set)
        # Manifests that a registry confirmed in this run.
        self._manifests: defaultdict[RepositoryKey, set[str]] = defaultdict(set)
        # Blobs that an answer of this run implies (a manifest that names them, a probing POST), but
        # that were not confirmed one by one.
        self._believed: defaultdict[RepositoryKey, set[bytes]] = defaultdict(set)
        # By host and blob, the repositories where a manifest implies the blob: to mount it from.
        self._believed_holders: defaultdict[tuple[str, bytes], dict[str, None]] = defaultdict(dict)
        # Blobs that are known only by a probing POST, and that no HEAD has confirmed (rule 11).
        self._said_present: set[tuple[RepositoryKey, str]] = set()
        # By host and blob, the repositories with a committed manifest that names it, oldest first. A
        # run keeps this for each blob that it copies, so its size counts.
        self._holders: defaultdict[str, dict[str, tuple[str, ...]]] = defaultdict(dict)
        # What the archive says of the same. Several decisions on a blob ask for it; what this run adds
        # is in the tables above, and what it forgets in `_forgotten`.
        self._archived_holders = lru_cache(4096)(self._read_holders)
        # Snapshots that were read ahead, None where there is none, until the run has looked at the tag.
        self._recalled = dict[bytes, SnapshotEntry | None]()
        # Manifests that this run put into the archive.
        self._archived: set[tuple[RepositoryKey, bytes]] = set()

        # Whether a repository held manifests when this run asked.
        self._populated: dict[RepositoryKey, bool] = {}
        # Repositories, each with the name of one from which a mount to it was refused.
        self._refused_mounts: set[tuple[RepositoryKey, str]] = set()
        self._hosts: dict[str, HostFacts] = {}

        # Vouched manifests: those with which a target's tag answered in this run. A vouched manifest
        # makes its entries strong: its own, and those of all that it names, at any depth (I5).
        self._vouched: defaultdict[RepositoryKey, set[bytes]] = defaultdict(set)
        # Vouched manifests that `_strong_keys` has not followed yet.
        self._unread: defaultdict[RepositoryKey, list[bytes]] = defaultdict(list)
        # All other vouched manifests, and what they name at any depth.
        self._strong: defaultdict[RepositoryKey, set[bytes]] = defaultdict(set)
        # By manifest, the repositories where a tag names it, or names an index above it.
        self._shown_in: dict[bytes, tuple[RepositoryKey, ...]] = {}
        # Repositories where an answer of this run contradicted the state: there only strong entries
        # are believed.
        self._contradicted: set[RepositoryKey] = set()
        # What was forgotten in this run: no tag's answer makes it believed again.
        self._forgotten: set[tuple[RepositoryKey, bytes]] = set()

    def _archive_of(self, host: str) -> Archive:
        return self._layouts if host.startswith(f"{LAYOUT_SCHEME}:") else self._archive

    # Blobs and manifests.

    def has_blob(self, where: RepositoryKey, digest: str, *, careful: bool = False) -> bool:
        """Say whether a blob is known to be in a repository.

        `careful` is for blobs whose absence the registry would not notice.
        """
        if digest in self._blobs[where]:
            return True
        key = key_of(digest)
        if key in self._believed[where]:
            return True
        entry = self._archive_of(_host_of(where)).blob(where, key)
        return entry is not None and self._is_believed(where, key, entry.confirmed, careful)

    def is_confirmed(self, where: RepositoryKey, digest: str) -> bool:
        """Say whether a registry answered in this run that it holds a blob or manifest there."""
        return digest in self._blobs[where] or digest in self._manifests[where]

    def has_manifest(self, where: RepositoryKey, digest: str) -> bool:
        """Say whether a registry answered in this run that it holds a manifest there."""
        return digest in self._manifests[where]

    def believe_blob(self, where: RepositoryKey, digest: str) -> None:
        """Note a blob that a registry holds by its answer to a POST, unconfirmed by a HEAD. If the blob
        is forgotten, the next request for it is a HEAD (`needs_head`).
        """
        self._said_present.add((where, digest))
        self._believed[where].add(key_of(digest))
        self._put_blob(where, digest, is_mountable=False)

    def add_blob(self, where: RepositoryKey, digest: str) -> None:
        """Note a blob that a registry holds."""
        if digest not in self._blobs[where]:
            self._blobs[where].add(digest)
            self._put_blob(where, digest, is_mountable=False)

    def is_committed(self, where: RepositoryKey, digest: str) -> bool:
        """Say whether a manifest is known to be in a repository."""
        if digest in self._manifests[where]:
            return True
        key = key_of(digest)
        entry = self._archive_of(_host_of(where)).manifest(where, key)
        if entry is None:
            return self._is_shown_in(where, key)
        return self._is_believed(where, key, entry.confirmed, False)

    def commit(
        self, where: RepositoryKey, digest: str, blobs: Iterable[str], children: Iterable[str] = ()
    ) -> None:
        """Note a manifest that a registry holds; the blobs that it names may be mounted from there."""
        self._manifests[where].add(digest)
        key = key_of(digest)
        if (where, key) in self._archived:
            return
        self._archived.add((where, key))

        host, repository = where
        holders = self._holders[host]
        blobs = tuple(dict.fromkeys(blobs))
        for blob in blobs:
            self._blobs[where].add(blob)
            known = holders.get(blob, ())
            if repository not in known and len(known) < MOST_HOLDERS:
                holders[blob] = (*known, repository)
            self._put_blob(where, blob, is_mountable=True)
        entry = ManifestEntry(
            int(self._now()),
            tuple(key_of(blob) for blob in blobs),
            tuple(key_of(child) for child in children),
        )
        self._archive_of(_host_of(where)).put_manifest(where, key, entry)

    def _put_blob(self, where: RepositoryKey, digest: str, *, is_mountable: bool) -> None:
        host, repository = where
        # A blob that was mountable stays so.
        is_mountable = is_mountable or repository in self.holders(host, digest)
        entry = BlobEntry(int(self._now()), is_mountable)
        self._archive_of(host).put_blob(where, key_of(digest), entry)

    def forget(self, where: RepositoryKey, digest: str) -> None:
        """Drop what was believed of a digest and of what it names: a registry said otherwise."""
        key = key_of(digest)
        host, repository = where
        self._blobs[where].discard(digest)
        self._manifests[where].discard(digest)
        holders = self._holders[host]
        if repository in holders.get(digest, ()):
            holders[digest] = tuple(name for name in holders[digest] if name != repository)
        self._archived.discard((where, key))

        entry = self._archive_of(_host_of(where)).manifest(where, key)
        named_keys = () if entry is None else (*entry.blobs, *entry.children)
        keys = (key, *named_keys)
        self._archive_of(_host_of(where)).forget(where, keys)
        self._believed[where].difference_update(keys)
        self._forgotten.update((where, each) for each in keys)

    # Vouching (docs/design.md section 7).

    def record_miss(self, where: RepositoryKey, digest: str) -> None:
        """Note that a repository lacks a blob. If a vouched manifest there names the blob, the host is
        lenient.
        """
        facts = self.host(_host_of(where))
        if facts.is_lenient is not True and key_of(digest) in self._strong_keys(where):
            facts.is_lenient = True
            self._keep(_host_of(where), "is_lenient", True)

    def vouch(self, where: RepositoryKey, digest: str) -> None:
        """Note that a target's tag names this manifest: the manifest's entries are strong now."""
        key = key_of(digest)
        self._manifests[where].add(digest)
        self._vouched[where].add(key)
        self._unread[where].append(key)
        self._show_in(where, key)

    def learn_manifest(
        self, host: str, digest: str, blobs: Iterable[str], children: Iterable[str]
    ) -> None:
        """Note what a manifest names, for the repositories of a host where a tag's answer shows it: they
        are believed to hold all that it names. If one has lost a part, it is healed (I5).
        """
        key = key_of(digest)
        places = [
            where
            for where in self._shown_in.get(key, ())
            if _host_of(where) == host and self._is_shown_in(where, key)
        ]
        if not places:
            return
        entry = ManifestEntry(
            int(self._now()),
            tuple(key_of(blob) for blob in dict.fromkeys(blobs)),
            tuple(key_of(child) for child in children),
        )
        for where in places:
            self._believe(where, key, entry)

    def _believe(self, where: RepositoryKey, key: bytes, entry: ManifestEntry) -> None:
        """Believe that a repository holds what a manifest names that is there."""
        host, repository = where
        blobs = [blob for blob in entry.blobs if (where, blob) not in self._forgotten]
        self._believed[where].update(blobs)
        for blob in blobs:
            self._believed_holders[host, blob][repository] = None

        old = self._archive_of(_host_of(where)).manifest(where, key)
        if old is None or not self._is_young(old.confirmed, self._ttl or math.inf):
            self._archive_of(_host_of(where)).put_manifest(where, key, entry)
            for blob in blobs:
                self._archive_of(_host_of(where)).put_blob(
                    where, blob, BlobEntry(entry.confirmed, True)
                )

        self._strong_keys(where).update(entry.blobs)
        for child in entry.children:
            self._unread[where].append(child)
            self._show_in(where, child)

    def _show_in(self, where: RepositoryKey, key: bytes) -> None:
        places = self._shown_in.get(key, ())
        if where not in places:
            self._shown_in[key] = (*places, where)

    def _is_shown_in(self, where: RepositoryKey, key: bytes) -> bool:
        """Say whether a tag's answer in this run shows a manifest in a repository, and nothing has
        spoken against it since.
        """
        if where not in self._shown_in.get(key, ()) or (where, key) in self._forgotten:
            return False
        return key in self._strong_keys(where)

    def contradict(self, where: RepositoryKey) -> None:
        """Note that an answer of this run speaks against the entries of a repository: those that no
        manifest vouches for are not believed any more.
        """
        self._contradicted.add(where)
        self._vouched.pop(where, None)
        self._unread.pop(where, None)
        self._strong.pop(where, None)
        self._believed.pop(where, None)

    def set_populated(self, where: RepositoryKey, holds: bool = True) -> None:
        """Note whether a repository held manifests when this run asked, whose blobs may be there too.
        An empty repository contradicts what the state says of it.
        """
        self._populated[where] = holds
        if not holds:
            self.contradict(where)

    def is_empty(self, where: RepositoryKey) -> bool:
        """Say whether a repository held no manifests when this run listed it."""
        return self._populated.get(where) is False

    def _is_believed(self, where: RepositoryKey, key: bytes, confirmed: int, careful: bool) -> bool:
        is_usable = where not in self._contradicted
        if is_usable and self._is_young(confirmed, self._ttl or math.inf):
            careful = careful or self.host(_host_of(where)).is_lenient is True
            if not careful or self._is_young(confirmed, _FRESH_SECONDS):
                return True
        # A tag's answer in this run renews what is too old, and outweighs what speaks against it.
        return key in self._strong_keys(where)

    def _is_young(self, moment: int, seconds: float) -> bool:
        """Say whether a moment is at most `seconds` ago; a moment over a day ahead is not young."""
        return -_CLOCK_AHEAD_SECONDS <= self._now() - moment <= seconds

    def _strong_keys(self, where: RepositoryKey) -> set[bytes]:
        """Return the keys of a repository's vouched manifests and of what they name, at any depth;
        those in `_unread` are followed first.
        """
        strong = self._strong[where]
        unread = self._unread.pop(where, [])
        while unread:
            key = unread.pop()
            if key in strong:
                continue
            strong.add(key)
            entry = self._archive_of(_host_of(where)).manifest(where, key)
            if entry is not None:
                strong.update(entry.blobs)
                unread.extend(entry.children)
        return strong

    # Mounts and probes (docs/design.md section 6, rules 10 and 11).

    def mount_source(self, where: RepositoryKey, digest: str) -> str | None:
        """Return a repository of the same host from which to mount a blob; None where there is none."""
        host, repository = where
        for holder in self.holders(host, digest):
            if holder != repository and self.may_mount(where, holder):
                return holder
        return None

    def holders(self, host: str, digest: str) -> Iterator[str]:
        """Give the repositories of a host that hold a blob under a committed manifest."""
        key = key_of(digest)
        given = dict.fromkeys(self._holders[host].get(digest, ()))
        yield from given

        for repository in self._believed_holders.get((host, key), ()):
            if repository not in given and key in self._believed[host, repository]:
                given[repository] = None
                yield repository

        for holder in self._archived_holders(host, key):
            where = (host, holder.repository)
            if holder.repository in given or (where, key) in self._forgotten:
                continue
            if self._is_believed(where, key, holder.confirmed, False):
                yield holder.repository

    def _read_holders(self, host: str, key: bytes) -> tuple[Holder, ...]:
        holders = self._archive_of(host).holders_of(host, key)
        # The file has no checksum, and the name becomes a part of a URL.
        return tuple(holder for holder in holders if is_repository(holder.repository))

    def mounts(self, host: str) -> bool | None:
        """Say whether a host mounts, None where no mount has been answered yet."""
        return self.host(host).mounts

    def may_mount(self, where: RepositoryKey, source: str) -> bool:
        """Say whether a mount from `source` is worth asking for, or waiting for."""
        return (
            self.mounts(_host_of(where)) is not False
            and (where, source) not in self._refused_mounts
        )

    def refuse_mount(self, where: RepositoryKey, source: str) -> None:
        """Note a refused mount: that pair is not tried again.

        A host that refuses its first mount is taken for one that never mounts.
        """
        self._refused_mounts.add((where, source))
        if self.mounts(_host_of(where)) is None:
            self.host(_host_of(where)).mounts = False
            self._keep(_host_of(where), "mounts", False)

    def accept_mount(self, host: str) -> None:
        """Note that this host mounts; refusals, also earlier ones, then concern their pair only."""
        facts = self.host(host)
        if facts.mounts is not True:
            facts.mounts = True
            self._keep(host, "mounts", True)

    def needs_head(self, where: RepositoryKey, digest: str) -> bool:
        """Say whether a HEAD has to ask for an unknown blob, because the POST that starts its upload
        would not tell that it is there.

        A repository that is not known to have held manifests is asked by POST in any case: most blobs
        are absent there, and a probing POST costs no more than a plain POST.
        """
        answers = self.probed(where)
        if answers.absent is False or (where, digest) in self._said_present:
            return True
        return bool(self._populated.get(where)) and not answers.present

    def learn_probe(
        self, where: RepositoryKey, *, absent: bool | None = None, present: bool | None = None
    ) -> None:
        """Note how a repository answers a probing POST: see `ProbeAnswers`; None is no news."""
        old = self.probed(where)
        answers = ProbeAnswers(
            old.absent if absent is None else absent, old.present if present is None else present
        )
        if answers != old:
            segment = _first_segment(where)
            self.host(_host_of(where)).probes[segment] = answers
            self._keep(_host_of(where), "probe_answers", list(answers), segment)

    def probed(self, where: RepositoryKey) -> ProbeAnswers:
        """Return what is known of the answers to probing POSTs."""
        return self.host(_host_of(where)).probes.get(
            _first_segment(where), ProbeAnswers(None, None)
        )

    def present_blob(self, where: RepositoryKey) -> str | None:
        """Return a blob that an answer of this run shows to be in a repository, None where none does."""
        if self._blobs[where]:
            return min(self._blobs[where])
        blobs = sorted(self._believed[where])
        manifests = sorted(self._vouched.get(where, ()))
        for manifest in manifests:  # the list grows by the children of each index
            entry = self._archive_of(_host_of(where)).manifest(where, manifest)
            if entry is not None and not blobs:
                manifests.extend(entry.children)
                blobs = [
                    key
                    for key in entry.blobs
                    if self._archive_of(_host_of(where)).blob(where, key) is not None
                ]
        for key in blobs:
            if key.startswith(_ALGORITHMS["sha256"]):  # the key of a sha512 is only half a digest
                return digest_like(key)
        return None

    # Facts of hosts.

    def host(self, host: str) -> HostFacts:
        """Return what is known of a host, not older than a day; only this module changes it."""
        if host not in self._hosts:
            facts = self._hosts[host] = HostFacts()
            for fact in self._archive_of(host).facts_of(host):
                if self._is_young(fact.learnt, _FACTS_SECONDS):
                    facts.recall(fact)
        return self._hosts[host]

    def learn_login(self, host: str, login: object) -> None:
        """Keep how a host wants to be asked (`Authenticator.snapshot`)."""
        facts = self.host(host)
        if facts.login != login:
            facts.login = login
            self._keep(host, "login", login)

    def learn_smallest_patch(self, host: str, size: int | None) -> None:
        """Keep from which size on bodies go in the kind's other dialect; None where none does."""
        facts = self.host(host)
        if facts.smallest_patch != size:
            facts.smallest_patch = size
            self._keep(host, "smallest_patch", size)

    def has_referrers_api(self, where: RepositoryKey) -> bool | None:
        """Say whether a repository's registry has the referrers API, None where that is not known."""
        return self.host(_host_of(where)).has_referrers_api.get(_first_segment(where))

    def learn_referrers_api(self, where: RepositoryKey, has: bool) -> None:
        """Keep whether a repository's registry has the referrers API."""
        if self.has_referrers_api(where) is not has:
            segment = _first_segment(where)
            self.host(_host_of(where)).has_referrers_api[segment] = has
            self._keep(_host_of(where), "has_referrers_api", has, segment)

    def _keep(self, host: str, name: str, value: object, segment: str = "") -> None:
        self._archive_of(host).put_fact(host, Fact(name, segment, value, int(self._now())))

    # Tags, and artifacts of images.

    def snapshot(self, name: bytes) -> Snapshot | None:
        """Return what a tag named when its target last held it; None where that is not known."""
        entry = self._snapshot_entry(name)
        if entry is None or not self._is_young(entry.confirmed, self._ttl or math.inf):
            return None
        return entry.snapshot

    def _snapshot_entry(self, name: bytes) -> SnapshotEntry | None:
        if name in self._recalled:
            return self._recalled[name]
        return self._archive.snapshots([name]).get(name) if name else None

    def recall_snapshots(self, names: Collection[bytes]) -> None:
        """Read the snapshots of many tags at once, which the run will look at soon."""
        entries = self._archive.snapshots(names)
        self._recalled.update((name, entries.get(name)) for name in names)

    def record_snapshot(self, name: bytes, source: bytes, pushed: bytes) -> None:
        """Note what a tag names at its source, and what at its target: the keys of both digests. Nothing
        is noted under an empty name.
        """
        if not name:
            return
        snapshot = Snapshot(source, pushed)
        old = self._snapshot_entry(name)
        self._recalled.pop(name, None)
        # An unchanged tag is written again only after a quarter of `ttl`, so that most runs without
        # changes write nothing.
        is_recent = (
            old is not None
            and old.snapshot == snapshot
            and self._is_young(old.confirmed, self._ttl / 4 or math.inf)
        )
        if not is_recent:
            self._archive.put_snapshot(name, SnapshotEntry(int(self._now()), snapshot))

    def artifact_check(self, name: bytes) -> ArtifactCheck:
        """Return what is remembered of the artifacts of an image; NO_CHECK where nobody has looked."""
        check = self._archive.artifact_check(name) if name else None
        if check is None or not self._is_young(check.last, math.inf):
            return NO_CHECK
        return check

    def record_artifact_check(
        self, name: bytes, flags: int, listing_hash: bytes, *, first: int = 0
    ) -> None:
        """Note what a look at the artifacts of an image found; this does not age with `ttl`.

        `first` is the moment of the first look, 0 where this look is the first. Nothing is noted under
        an empty name.
        """
        if not name:
            return
        now = int(self._now())
        self._archive.put_artifact_check(
            name, ArtifactCheck(now, first or now, flags, listing_hash)
        )

    # The end of a run.

    def finish(self) -> None:
        """Renew the entries that this run's tags vouch for, once a quarter of `ttl` has passed; remove old
        entries once a day.
        """
        if self._ttl:
            for where, manifests in self._vouched.items():
                moments = self._archive_of(_host_of(where)).manifest_moments(where, manifests)
                for key, moment in moments.items():
                    if not self._is_young(moment, self._ttl / 4):
                        self._renew(where, key)

        now = int(self._now())
        if not self._is_young(self._archive.swept, _SWEEP_SECONDS):
            self._archive.sweep(
                now,
                entries_before=now - int(self._ttl) if self._ttl else 0,
                looks_before=now - _LONGEST_LOOK_SECONDS,
                facts_before=now - _FACTS_SECONDS,
            )

    def _renew(self, where: RepositoryKey, root: bytes) -> None:
        """Confirm a vouched manifest, and what it names at any depth."""
        now = int(self._now())
        unread = [root]
        while unread:
            key = unread.pop()
            entry = self._archive_of(_host_of(where)).manifest(where, key)
            if entry is None or entry.confirmed == now:
                continue
            self._archive_of(_host_of(where)).put_manifest(
                where, key, entry._replace(confirmed=now)
            )
            unread.extend(entry.children)
            for blob in entry.blobs:
                old = self._archive_of(_host_of(where)).blob(where, blob)
                if old is not None:
                    self._archive_of(_host_of(where)).put_blob(
                        where, blob, old._replace(confirmed=now)
                    )

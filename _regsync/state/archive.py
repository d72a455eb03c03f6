"""Entries that are kept from one run to the next, and the archive that keeps them.

Owns: the forms of entries and their keys; the protocol `Archive`, which the state file implements
(state/database.py); `MemoryArchive`, an archive in memory.
May not know: whether an entry is believed (state/knowledge.py), clocks, files, SQL.
Follows: docs/design.md section 8.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple, Protocol

from _regsync.crypto import hash_hex
from _regsync.oci import split_digest

# The first byte of a key, by the algorithm of its digest.
_ALGORITHMS = {"sha256": b"\1", "sha512": b"\2"}

# Length of a key in bytes.
DIGEST_BYTES = 33

# Maximum number of repositories from which the mount of one blob is tried.
MOST_HOLDERS = 32

# Flags of an artifact check. The flags 1, 2, 4 and 8 record which tags with artifacts the source's
# listing had (`Referrers.listed_tag_bits`).

# All artifacts are at the target.
COMPLETE = 32
# A run has copied the image: the image was not at the target already.
COPIED = 64


class RepositoryKey(NamedTuple):
    """One repository of one registry."""

    host: str  # `host` or `host:port`, as in reports; `oci-layout:PATH` for an image layout
    name: str

    @property
    def first_segment(self) -> str:
        """The first path segment of the name.

        Some registries have settings for each, as a project.
        """
        return self.name.partition("/")[0]

    @property
    def area(self) -> str:
        """Host and first segment. Some facts hold for all repositories of an area."""
        return f"{self.host} {self.first_segment}"


# The cache helps because the keys of an image's digests are needed some twenty times while the
# image is copied.
@lru_cache(4096)
def key_of(digest: str) -> bytes:
    """Return the key of a digest: a byte for the algorithm and the first 32 bytes of the hash.

    The first 32 bytes of a sha512 resist collisions as well as a sha256.
    """
    algorithm, encoded = split_digest(digest)
    return _ALGORITHMS[algorithm] + bytes.fromhex(encoded[:64])  # two hexadecimal digits a byte


def digest_like(key: bytes) -> str:
    """Return the digest of a key, or the first half of the digest if it is a sha512.

    Names of referrers tags have the same half. The algorithm is empty if the key is malformed.
    """
    for algorithm, mark in _ALGORITHMS.items():
        if key[:1] == mark:
            return f"{algorithm}:{key[1:].hex()}"
    return f":{key[1:].hex()}"  # another program has written this key


def is_whole(key: bytes) -> bool:
    """Report whether `digest_like` returns the complete digest of a key."""
    return key.startswith(_ALGORITHMS["sha256"])


def hashed_key(*words: str) -> bytes:
    """Return the name of a snapshot or artifact check: a hash of the words, 32 bytes."""
    return bytes.fromhex(hash_hex("sha256", "\0".join(words).encode()))


# All times in entries are whole seconds since 1970.


class BlobEntry(NamedTuple):
    """A blob that a repository holds."""

    confirmed_at: int  # when a registry's answer showed this
    is_mountable: bool  # whether a committed manifest of the repository names the blob


class ManifestEntry(NamedTuple):
    """A manifest that a repository holds."""

    confirmed_at: int  # when a registry's answer showed this
    blobs: tuple[bytes, ...]  # keys of the blobs that the manifest names
    children: tuple[bytes, ...]  # keys of the manifests that it names


class Snapshot(NamedTuple):
    """The digests of a tag at its source and its target when the target was last up to date."""

    source: bytes  # key of the digest at the source
    pushed: bytes  # key of the digest at the target; another one if the index is trimmed


class SnapshotEntry(NamedTuple):
    confirmed_at: int  # when the tag was last found up to date
    snapshot: Snapshot


class ArtifactCheck(NamedTuple):
    """The result of the last check of an image's artifacts at one target."""

    last: int  # time of the last check; 0 if there was none
    first: int  # time of the first check; 0 if there was none
    flags: int  # COMPLETE, COPIED, and 1, 2, 4 and 8 as above
    listing_hash: bytes  # hash of the digests that the source listed, 8 bytes

    @property
    def listed_tag_bits(self) -> int:
        """Which tags with artifacts the source's listing had: the flags 1, 2, 4 and 8."""
        return self.flags & ~(COMPLETE | COPIED)

    @property
    def is_complete(self) -> bool:
        return bool(self.flags & COMPLETE)

    @property
    def was_copied(self) -> bool:
        return bool(self.flags & COPIED)


NO_CHECK = ArtifactCheck(last=0, first=0, flags=0, listing_hash=bytes(8))


class Fact(NamedTuple):
    """One field of `HostFacts` as it is saved."""

    name: str
    segment: str  # first path segment of the repositories for which it holds; "" for the whole host
    value: object  # a value that JSON can represent
    learnt_at: int


class Archive(Protocol):
    """Entries that earlier runs have left, and that this run adds.

    A method that returns one entry returns None if there is no entry. A run finds all entries that
    it has added itself.
    """

    @property
    def swept_at(self) -> int:
        """When old entries were last removed. 0 if unknown."""

    def blob(self, where: RepositoryKey, key: bytes) -> BlobEntry | None: ...

    def manifest(self, where: RepositoryKey, key: bytes) -> ManifestEntry | None: ...

    def manifest_times(self, where: RepositoryKey, keys: Iterable[bytes]) -> dict[bytes, int]:
        """Return `confirmed_at` of each of these manifests that has an entry, by key."""

    def holders_of(self, host: str, key: bytes) -> dict[str, int]:
        """Return the repositories of a host from which a blob can be mounted, and `confirmed_at` of
        their entries, newest first.
        """

    def snapshots(self, names: Iterable[bytes]) -> dict[bytes, SnapshotEntry]:
        """Return the snapshots that have one of these names, by name."""

    def artifact_check(self, name: bytes) -> ArtifactCheck | None: ...

    def facts_of(self, host: str) -> list[Fact]: ...

    def put_blob(self, where: RepositoryKey, key: bytes, entry: BlobEntry) -> None: ...

    def put_manifest(self, where: RepositoryKey, key: bytes, entry: ManifestEntry) -> None: ...

    def forget(self, where: RepositoryKey, keys: Iterable[bytes]) -> None:
        """Remove the entries of blobs and manifests with these keys."""

    def put_snapshot(self, name: bytes, entry: SnapshotEntry) -> None: ...

    def put_artifact_check(self, name: bytes, check: ArtifactCheck) -> None: ...

    def put_fact(self, host: str, fact: Fact) -> None: ...

    def sweep(
        self, now: int, *, entries_before: int, checks_before: int, facts_before: int
    ) -> None:
        """Remove old entries, and set `swept_at` to `now`.

        Artifact checks are removed if their last check was before `checks_before`. Facts are
        removed if they were learnt before `facts_before`. Other entries are removed if they were
        confirmed before `entries_before`.
        """


class MemoryArchive:
    """An archive in memory. The value None marks a blob or manifest as forgotten."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.swept_at = 0
        # Outer keys: host and key of the blob. Inner keys: repository names.
        self.blobs: defaultdict[tuple[str, bytes], dict[str, BlobEntry | None]] = defaultdict(dict)
        # Keys: repository, and key of the manifest.
        self.manifests: dict[tuple[RepositoryKey, bytes], ManifestEntry | None] = {}
        self.snapshots_by_name: dict[bytes, SnapshotEntry] = {}
        # Keys: names of checks.
        self.artifact_checks: dict[bytes, ArtifactCheck] = {}
        # Outer keys: hosts. Inner keys: name and segment of the fact.
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
        return self.blobs.get((where.host, key), {}).get(where.name)

    def manifest(self, where: RepositoryKey, key: bytes) -> ManifestEntry | None:
        return self.manifests.get((where, key))

    def manifest_times(self, where: RepositoryKey, keys: Iterable[bytes]) -> dict[bytes, int]:
        entries = ((key, self.manifest(where, key)) for key in keys)
        return {key: entry.confirmed_at for key, entry in entries if entry is not None}

    def holders_of(self, host: str, key: bytes) -> dict[str, int]:
        entries = self.blobs.get((host, key), {})
        return {
            repository: entry.confirmed_at
            for repository, entry in entries.items()
            if entry is not None and entry.is_mountable
        }

    def snapshots(self, names: Iterable[bytes]) -> dict[bytes, SnapshotEntry]:
        return {
            name: self.snapshots_by_name[name] for name in names if name in self.snapshots_by_name
        }

    def artifact_check(self, name: bytes) -> ArtifactCheck | None:
        return self.artifact_checks.get(name)

    def facts_of(self, host: str) -> list[Fact]:
        return list(self.facts.get(host, {}).values())

    def put_blob(self, where: RepositoryKey, key: bytes, entry: BlobEntry) -> None:
        self.blobs[where.host, key][where.name] = entry

    def put_manifest(self, where: RepositoryKey, key: bytes, entry: ManifestEntry) -> None:
        self.manifests[where, key] = entry

    def forget(self, where: RepositoryKey, keys: Iterable[bytes]) -> None:
        for key in keys:
            self.blobs[where.host, key][where.name] = None
            self.manifests[where, key] = None

    def put_snapshot(self, name: bytes, entry: SnapshotEntry) -> None:
        self.snapshots_by_name[name] = entry

    def put_artifact_check(self, name: bytes, check: ArtifactCheck) -> None:
        self.artifact_checks[name] = check

    def put_fact(self, host: str, fact: Fact) -> None:
        self.facts[host][fact.name, fact.segment] = fact

    def sweep(
        self, now: int, *, entries_before: int, checks_before: int, facts_before: int
    ) -> None:
        """Set `swept_at`. There are no old entries, because this process has put all entries."""
        self.swept_at = now

"""What is kept of registries from one run to the next: entries, and what an archive of them can do.

Owns: the forms of entries and their keys; `Archive`, which the state file is (state/database.py);
`Notes`, an archive in memory.
May not know: whether an entry is believed (state/knowledge.py), clocks, files, SQL.
Follows: docs/design.md section 8.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple, Protocol

from _regsync.crypto import hash_hex
from _regsync.oci.reference import split_digest

# The first byte of a digest's key says the algorithm.
_ALGORITHMS = {"sha256": b"\1", "sha512": b"\2"}

# Bytes of a digest's key.
DIGEST_BYTES = 33

# Repositories from which the mount of one blob is tried at most.
MOST_HOLDERS = 32

# The flags of an artifact check. Its bits 1 to 8 say which tags with artifacts the source's listing
# showed (`Referrers.listed_tag_bits`).

# All artifacts are at the target.
COMPLETE = 32
# The image was copied, not found there.
COPIED = 64


class RepositoryKey(NamedTuple):
    """One repository of one registry."""

    host: str  # `host` or `host:port`, as reports show it; of an image layout `oci-layout:PATH`
    name: str

    @property
    def first_segment(self) -> str:
        """The part of the name that some registries give settings of its own, as a project."""
        return self.name.partition("/")[0]

    @property
    def area(self) -> str:
        """Host and first segment: what is learnt of one repository in an area holds for all."""
        return f"{self.host} {self.first_segment}"


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
    return f":{key[1:].hex()}"  # somebody else has written this key


def is_whole(key: bytes) -> bool:
    """Whether `digest_like` returns all of a digest, so that a registry can be asked for it."""
    return key.startswith(_ALGORITHMS["sha256"])


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

    def sweep(self, now: int, *, entries_before: int, looks_before: int, facts_before: int) -> None:
        """Remove artifact checks last looked at before `looks_before`, facts learnt before
        `facts_before`, other entries confirmed before `entries_before`. Set `swept` to `now`.
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
        return self.blobs.get((where.host, key), {}).get(where.name)

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

    def sweep(self, now: int, *, entries_before: int, looks_before: int, facts_before: int) -> None:
        """Remove nothing: this process has put all entries."""
        self.swept = now

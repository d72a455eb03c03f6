"""What is kept between runs: the entries, and what can be asked of a collection of them.

Owns: the forms of entries and their keys; `Archive`, which the state file is; `Notes`, an archive in memory.
May not know: clocks, files, SQL, whether an entry is believed.
Follows: docs/design.md section 8 ("Contents").
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple, Protocol

from _regsync.crypto import hash_hex
from _regsync.oci import reference

# A host (`host:port`, as reports show it) and the name of a repository.
RepositoryKey = tuple[str, str]

# The first byte of a key: the algorithm of its digest.
_ALGORITHMS = {"sha256": b"\1", "sha512": b"\2"}

DIGEST_BYTES = 33


def key_of(digest: str) -> bytes:
    """Return the 33 bytes that stand for a digest.

    Of sha512 they hold the first 256 bits, which are as hard to meet as a sha256.
    """
    algorithm, encoded = reference.split_digest(digest)
    return _ALGORITHMS[algorithm] + bytes.fromhex(encoded[:64])


def digest_like(key: bytes) -> str:
    """Return the digest of a key; of sha512 its first half, which is what a referrers tag has."""
    for algorithm, mark in _ALGORITHMS.items():
        if key[:1] == mark:
            return f"{algorithm}:{key[1:].hex()}"
    return f":{key[1:].hex()}"


def snapshot_name(*words: str) -> bytes:
    """Return the 32 bytes that identify a snapshot: of which tag, where from and to, by which rules."""
    return bytes.fromhex(hash_hex("sha256", "\0".join(words).encode()))


class BlobEntry(NamedTuple):
    """A blob that a repository holds. Moments are seconds of the wall clock."""

    confirmed: int
    is_mountable: bool  # a committed manifest of that repository names it


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


class ArtifactLook(NamedTuple):
    """A look at the artifacts of an image."""

    last: int
    first: int
    bits: int  # what was noted then; 0: the artifacts are not known to be there
    listed: bytes  # 8 bytes of a hash of what was listed


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
        """When what was too old was removed last; 0 where that is not known."""

    def blob(self, where: RepositoryKey, key: bytes) -> BlobEntry | None: ...

    def manifest(self, where: RepositoryKey, key: bytes) -> ManifestEntry | None: ...

    def holders_of(self, host: str, key: bytes) -> list[Holder]:
        """Return repositories of a host where a blob is mountable, the last confirmed first."""

    def snapshot(self, name: bytes) -> SnapshotEntry | None: ...

    def look(self, name: bytes) -> ArtifactLook | None: ...

    def facts_of(self, host: str) -> list[Fact]: ...

    def put_blob(self, where: RepositoryKey, key: bytes, entry: BlobEntry) -> None: ...

    def put_manifest(self, where: RepositoryKey, key: bytes, entry: ManifestEntry) -> None: ...

    def forget(self, where: RepositoryKey, keys: Iterable[bytes]) -> None:
        """Drop blobs and manifests."""

    def put_snapshot(self, name: bytes, entry: SnapshotEntry) -> None: ...

    def put_look(self, name: bytes, look: ArtifactLook) -> None: ...

    def put_fact(self, host: str, fact: Fact) -> None: ...

    def sweep(self, moment: int, *, oldest: int, oldest_look: int, oldest_fact: int) -> None:
        """Remove what was confirmed before these moments; remember that it was done."""


class Notes:
    """An archive in memory; None in place of an entry: it was forgotten."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Drop everything."""
        self.swept = 0
        # By host and key, then by repository.
        self.blobs: defaultdict[tuple[str, bytes], dict[str, BlobEntry | None]] = defaultdict(dict)
        self.manifests: dict[tuple[RepositoryKey, bytes], ManifestEntry | None] = {}
        self.snapshots: dict[bytes, SnapshotEntry] = {}
        self.looks: dict[bytes, ArtifactLook] = {}
        # By host, then by name and segment.
        self.facts: defaultdict[str, dict[tuple[str, str], Fact]] = defaultdict(dict)

    def __bool__(self) -> bool:
        return any((self.blobs, self.manifests, self.snapshots, self.looks, self.facts))

    def blob(self, where: RepositoryKey, key: bytes) -> BlobEntry | None:
        host, repository = where
        return self.blobs[host, key].get(repository) if (host, key) in self.blobs else None

    def manifest(self, where: RepositoryKey, key: bytes) -> ManifestEntry | None:
        return self.manifests.get((where, key))

    def holders_of(self, host: str, key: bytes) -> list[Holder]:
        entries = self.blobs.get((host, key), {})
        return [
            Holder(repository, entry.confirmed)
            for repository, entry in entries.items()
            if entry is not None and entry.is_mountable
        ]

    def snapshot(self, name: bytes) -> SnapshotEntry | None:
        return self.snapshots.get(name)

    def look(self, name: bytes) -> ArtifactLook | None:
        return self.looks.get(name)

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
        self.snapshots[name] = entry

    def put_look(self, name: bytes, look: ArtifactLook) -> None:
        self.looks[name] = look

    def put_fact(self, host: str, fact: Fact) -> None:
        self.facts[host][fact.name, fact.segment] = fact

    def sweep(self, moment: int, *, oldest: int, oldest_look: int, oldest_fact: int) -> None:
        """Keep everything: what is in memory is of this process."""
        self.swept = moment

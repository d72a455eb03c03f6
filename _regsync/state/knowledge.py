"""What this run believes about registries, repositories, blobs, manifests and tags.

Owns: which evidence is enough to believe that a repository holds a digest; facts about hosts; when
an entry of the archive is renewed.
May not know: clocks (`now` is an argument), sockets, tasks, files, SQL.
Invariants: every entry was made from a registry's answer. A wrong entry costs requests, and never
leads to a wrong image (I5).
Follows: docs/specification.md section 1.1 (three-step look-up), docs/design.md sections 6 (rules
10, 11), 7 and 8.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from _regsync.oci import LAYOUT_SCHEME, is_repository
from _regsync.state.archive import (
    MOST_HOLDERS,
    NO_CHECK,
    Archive,
    ArtifactCheck,
    BlobEntry,
    Fact,
    ManifestEntry,
    MemoryArchive,
    RepositoryKey,
    Snapshot,
    SnapshotEntry,
    digest_like,
    is_whole,
    key_of,
)

# A blob or manifest is believed to be in a repository if there is evidence of one of these kinds.
# Any evidence is enough to skip a transfer, and to put a manifest that names the digest.
#
# - confirmed: an answer of this run about the digest itself, or about a manifest that names the
#   digest and that this run put;
# - implied: a manifest that a tag of this repository names, and whose content this run has read,
#   names the blob; or a probing POST of this run was answered with 201 (rule 11);
# - archived: an entry of an earlier run that is at most `ttl` seconds old, or that is reachable: a
#   manifest that a tag names in this run names the digest, directly or through other entries.
#
# Entries that are not reachable must be at most 30 minutes old if the host accepts manifests that
# name absent blobs, or if the caller passes `must_be_recent`.
#
# After a refused manifest, only confirmed evidence is left: the caller forgets all other parts of
# the image, and asks the registry for each (I5). After `record_contradiction`, only confirmed
# evidence is left, and evidence of tagged manifests that is recorded later.

# Maximum age of a recent entry (docs/design.md section 7).
_RECENT_SECONDS = 30 * 60

# Maximum age of a fact about a host (docs/design.md section 8).
_FACT_SECONDS = 24 * 3600

# An entry whose time is further in the future than this is not believed: the clock was wrong.
_CLOCK_AHEAD_SECONDS = 24 * 3600

# Refused mounts, each from a repository that may have lost the blob since an earlier run, after which
# a host is recorded as one that does not mount.
_MOST_DOUBTFUL_REFUSALS = 3

# Seconds between two removals of old entries. A removal reads the whole file.
_SWEEP_SECONDS = 24 * 3600

# An artifact check is removed if the artifacts were last looked at longer ago than this: the image
# is no longer mirrored.
_ARTIFACT_CHECK_SECONDS = 400 * 86400


class ProbeAnswers(NamedTuple):
    """Whether a registry answers a probing POST correctly (rule 11). None means unknown.

    A probing POST finds out whether the repository has a blob. If it has not, the POST opens an
    upload.
    """

    is_202_if_absent: bool | None
    is_201_if_present: bool | None

    @property
    def are_useful(self) -> bool:
        """Report whether no answer is known to be wrong."""
        return self.is_202_if_absent is not False and self.is_201_if_present is not False


@dataclass
class HostFacts:
    """What runs have learnt about one registry host. None means unknown."""

    supports_mounts: bool | None = None
    # Whether the host has accepted a manifest that names absent blobs.
    accepts_absent_blobs: bool = False
    # Blobs of at least this many bytes are sent in the kind's fallback style
    # (docs/protocol-facts.md section 7.9). None means that no blob is.
    fallback_size: int | None = None
    # The saved challenge, in the form of `Authenticator.login_facts`.
    login: object = None
    # Keys: first path segments of repository names.
    probes: dict[str, ProbeAnswers] = field(default_factory=dict)
    # Keys: first path segments of repository names.
    has_referrers_api: dict[str, bool] = field(default_factory=dict)

    def learn(self, fact: Fact) -> None:
        """Set the field that a fact is about. A fact of an unknown form is ignored.

        The names of facts are those in the state file, and some differ from the fields'.
        """
        match fact.name, fact.value:
            case "mounts", bool(value):
                self.supports_mounts = value
            case "is_lenient", bool(value):
                self.accepts_absent_blobs = value
            case "smallest_patch", int() | None as value if not isinstance(value, bool):
                self.fallback_size = value
            case "login", value:
                self.login = value
            case "probe_answers", [bool() | None as if_absent, bool() | None as if_present]:
                self.probes[fact.segment] = ProbeAnswers(if_absent, if_present)
            case "has_referrers_api", bool(value):
                self.has_referrers_api[fact.segment] = value


@dataclass(slots=True)
class _Repository:
    """What this run has learnt about the content of one repository.

    The archive has no digests, so everything that is compared with its entries is kept by key
    (`bytes`, see `key_of`).
    """

    archive: Archive  # the archive that keeps this repository's entries

    # Confirmed evidence, by digest.
    confirmed_blobs: set[str] = field(default_factory=set)
    confirmed_manifests: set[str] = field(default_factory=set)

    # Implied evidence: keys of blobs.
    implied_keys: set[bytes] = field(default_factory=set)
    # Digests of blobs that a probing POST said to be present. `forget` does not remove them, so
    # that the next request for such a blob is a HEAD (`needs_head`).
    probed_blobs: set[str] = field(default_factory=set)

    # Keys of manifests that a tag names in this run.
    tagged_keys: set[bytes] = field(default_factory=set)
    # Keys of the tagged manifests and of the blobs and manifests below them. The entries of the
    # manifests in `unread_keys` still have to be read for this (see `_reachable_keys`).
    reachable_keys: set[bytes] = field(default_factory=set)
    unread_keys: list[bytes] = field(default_factory=list)

    # Keys that `forget` was called for. A tagged manifest is no evidence for them.
    forgotten_keys: set[bytes] = field(default_factory=set)
    # Whether an answer of this run contradicts the archive. Then an entry is believed only if it
    # is reachable.
    is_contradicted: bool = False

    # Whether the repository held manifests when this run asked. None if this run has not asked.
    is_populated: bool | None = None
    # Names of repositories from which a mount into this repository was refused.
    refused_sources: set[str] = field(default_factory=set)

    def record_contradiction(self) -> None:
        """Drop all evidence that is not confirmed. Evidence that is recorded later counts again."""
        self.is_contradicted = True
        self.implied_keys.clear()
        self.tagged_keys.clear()
        self.reachable_keys.clear()
        self.unread_keys.clear()


class _Repositories(dict[RepositoryKey, _Repository]):
    """The records of all repositories. Looking up an unknown repository adds an empty record."""

    def __init__(self, archive: Archive) -> None:
        self._archive = archive
        # Entries of image layouts. They are not saved, because another disk may be mounted in the
        # next run (docs/design.md section 13).
        self._layouts = MemoryArchive()

    def __missing__(self, where: RepositoryKey) -> _Repository:
        repository = self[where] = _Repository(self.archive_of(where.host))
        return repository

    def archive_of(self, host: str) -> Archive:
        return self._layouts if host.startswith(f"{LAYOUT_SCHEME}:") else self._archive


class Knowledge:
    """What registries have answered in this run, and what earlier runs left in the archive.

    `now` returns the time in seconds since 1970. `ttl` is the maximum age of an entry that is
    believed, in seconds; 0 means no maximum.
    """

    def __init__(
        self,
        archive: Archive | None = None,
        *,
        now: Callable[[], float] = lambda: 0.0,
        ttl: float = 0.0,
    ) -> None:
        self._archive: Archive = MemoryArchive() if archive is None else archive
        self._now = now
        self._ttl = ttl
        self._max_age = ttl or math.inf  # seconds
        # Entries in use are written again when they are older than this, in seconds. So most runs
        # without changes write nothing.
        self._renewal_age = ttl / 4 or math.inf

        self._repositories = _Repositories(self._archive)
        self._hosts: dict[str, HostFacts] = {}

        # Repositories from which a blob can be mounted, because a manifest there names the blob.
        #
        # By host and digest: names of repositories where this run has put such a manifest, oldest
        # first. A run has an entry for each blob that it copies, so the size of an entry counts.
        self._committed_holders: defaultdict[str, dict[str, tuple[str, ...]]] = defaultdict(dict)
        # By host and key of the blob: repositories where a tag names such a manifest. The inner
        # dicts are ordered sets: all their values are None.
        self._implied_holders = defaultdict[tuple[str, bytes], dict[RepositoryKey, None]](dict)
        # Repositories of the archive. Several decisions about one blob ask for them, so each is
        # read once. Later changes of this run are in the two tables above and in `forgotten_keys`.
        self._archived_holders = lru_cache(4096)(self._read_holders)

        # By host: refused mounts from repositories of which only an earlier run believed that they
        # hold the blob.
        self._doubtful_refusals = Counter[str]()

        # By key of a manifest: repositories where this run has found the manifest through a tag, or
        # through an index that it had found so. `_is_tagged` reports whether that still holds.
        self._tagged_in: dict[bytes, tuple[RepositoryKey, ...]] = {}

    # Blobs and manifests.

    def is_blob_believed(
        self, where: RepositoryKey, digest: str, *, must_be_recent: bool = False
    ) -> bool:
        """Report whether there is evidence that a repository holds a blob.

        Pass `must_be_recent` if the registry would accept a manifest although the blob is absent.
        An older entry is then believed only if it is reachable from a tag.
        """
        repository = self._repositories[where]
        key = key_of(digest)
        if digest in repository.confirmed_blobs or key in repository.implied_keys:
            return True
        entry = repository.archive.blob(where, key)
        return entry is not None and self._is_entry_believed(
            where, key, entry.confirmed_at, must_be_recent=must_be_recent
        )

    def is_confirmed(self, where: RepositoryKey, digest: str) -> bool:
        """Report whether this run has confirmed that a repository holds a blob or manifest."""
        repository = self._repositories[where]
        return digest in repository.confirmed_blobs or digest in repository.confirmed_manifests

    def is_manifest_confirmed(self, where: RepositoryKey, digest: str) -> bool:
        """Report whether this run has confirmed that a repository holds a manifest."""
        return digest in self._repositories[where].confirmed_manifests

    def is_manifest_believed(self, where: RepositoryKey, digest: str) -> bool:
        """Report whether there is evidence of a manifest with all its parts in a repository."""
        repository = self._repositories[where]
        if digest in repository.confirmed_manifests:
            return True
        key = key_of(digest)
        entry = repository.archive.manifest(where, key)
        if entry is None:
            return self._is_tagged(where, key)
        return self._is_entry_believed(where, key, entry.confirmed_at)

    def record_probed_blob(self, where: RepositoryKey, digest: str) -> None:
        """Record that a repository has answered 201 to a probing POST for a blob (rule 11).

        If the blob is forgotten later, `needs_head` returns True for it.
        """
        repository = self._repositories[where]
        repository.probed_blobs.add(digest)
        repository.implied_keys.add(key_of(digest))
        self._put_blob(where, digest, is_mountable=False)

    def confirm_blob(self, where: RepositoryKey, digest: str) -> None:
        """Record that a registry has confirmed a blob in a repository."""
        blobs = self._repositories[where].confirmed_blobs
        if digest not in blobs:
            blobs.add(digest)
            self._put_blob(where, digest, is_mountable=False)

    def confirm_manifest(
        self, where: RepositoryKey, digest: str, blobs: Iterable[str], children: Iterable[str] = ()
    ) -> None:
        """Record that a repository holds a manifest and the blobs that the manifest names.

        `blobs` and `children` are the digests that the manifest names. The blobs may be mounted
        from the repository from now on.
        """
        repository = self._repositories[where]
        repository.confirmed_manifests.add(digest)
        holders = self._committed_holders[where.host]
        blobs = tuple(dict.fromkeys(blobs))
        for blob in blobs:
            repository.confirmed_blobs.add(blob)
            names = holders.get(blob, ())
            if where.name not in names and len(names) < MOST_HOLDERS:
                holders[blob] = (*names, where.name)
            self._put_blob(where, blob, is_mountable=True)
        entry = self._new_entry(blobs, children)
        repository.archive.put_manifest(where, key_of(digest), entry)

    def _new_entry(self, blobs: Iterable[str], children: Iterable[str]) -> ManifestEntry:
        """Return an entry with the current time for a manifest that names these digests."""
        return ManifestEntry(
            int(self._now()),
            tuple(key_of(blob) for blob in blobs),
            tuple(key_of(child) for child in children),
        )

    def _put_blob(self, where: RepositoryKey, digest: str, *, is_mountable: bool) -> None:
        # A blob that was mountable stays mountable.
        is_mountable = is_mountable or where.name in self.holders(where.host, digest)
        entry = BlobEntry(int(self._now()), is_mountable)
        self._repositories[where].archive.put_blob(where, key_of(digest), entry)

    def forget(self, where: RepositoryKey, digest: str) -> None:
        """Drop all evidence of a blob or manifest, because an answer shows that it may be absent.

        If it is a manifest, evidence of the blobs and children that it names is dropped too, except
        confirmed evidence.
        """
        repository = self._repositories[where]
        repository.confirmed_blobs.discard(digest)
        repository.confirmed_manifests.discard(digest)
        holders = self._committed_holders[where.host]
        if where.name in holders.get(digest, ()):
            holders[digest] = tuple(name for name in holders[digest] if name != where.name)

        key = key_of(digest)
        manifest = repository.archive.manifest(where, key)  # None if it is a blob
        keys = (key,) if manifest is None else (key, *manifest.blobs, *manifest.children)
        repository.archive.forget(where, keys)
        repository.implied_keys.difference_update(keys)
        repository.forgotten_keys.update(keys)

    # What tags name (docs/design.md section 7, "Vouching").

    def record_absent_blob(self, where: RepositoryKey, digest: str) -> None:
        """Record that a repository lacks a blob.

        If a tagged manifest names the blob, the host has accepted a manifest without its blobs.
        Archived entries of the host are then believed for 30 minutes only.
        """
        is_known = self.facts_of(where.host).accepts_absent_blobs
        if not is_known and key_of(digest) in self._reachable_keys(where):
            self._record_fact(where.host, "is_lenient", True)

    def confirm_tagged_manifest(self, where: RepositoryKey, digest: str) -> None:
        """Record that a tag of a repository names a manifest."""
        key = key_of(digest)
        repository = self._repositories[where]
        repository.confirmed_manifests.add(digest)
        repository.tagged_keys.add(key)
        self._add_tagged(where, key)

    def record_tagged_content(
        self, host: str, digest: str, blobs: Iterable[str], children: Iterable[str]
    ) -> None:
        """Record what a manifest names, as evidence for all repositories where it is tagged.

        Does nothing if no tag of the host names the manifest, directly or through an index. `blobs`
        and `children` are the digests that the manifest names.
        """
        key = key_of(digest)
        repositories = [
            where
            for where in self._tagged_in.get(key, ())
            if where.host == host and self._is_tagged(where, key)
        ]
        if not repositories:
            return
        entry = self._new_entry(dict.fromkeys(blobs), children)
        for where in repositories:
            self._imply_content(where, key, entry)

    def _imply_content(
        self, where: RepositoryKey, manifest_key: bytes, manifest: ManifestEntry
    ) -> None:
        """Record that a repository holds all blobs and children that a tagged manifest names.

        The manifest is no evidence for forgotten blobs: an answer of this run has shown that they
        may be absent.
        """
        repository = self._repositories[where]
        repository.reachable_keys.update(manifest.blobs)
        for child in manifest.children:
            self._add_tagged(where, child)
        present_blobs = [blob for blob in manifest.blobs if blob not in repository.forgotten_keys]
        repository.implied_keys.update(present_blobs)
        for blob in present_blobs:
            self._implied_holders[where.host, blob][where] = None

        archived = repository.archive.manifest(where, manifest_key)
        if archived is not None and self._is_young(archived.confirmed_at, self._max_age):
            return  # so most runs write nothing
        repository.archive.put_manifest(where, manifest_key, manifest)
        for blob in present_blobs:
            entry = BlobEntry(manifest.confirmed_at, is_mountable=True)
            repository.archive.put_blob(where, blob, entry)

    def _add_tagged(self, where: RepositoryKey, manifest_key: bytes) -> None:
        """Record that a tag of a repository names a manifest, directly or through an index."""
        self._repositories[where].unread_keys.append(manifest_key)
        repositories = self._tagged_in.get(manifest_key, ())
        if where not in repositories:
            self._tagged_in[manifest_key] = (*repositories, where)

    def _is_tagged(self, where: RepositoryKey, manifest_key: bytes) -> bool:
        """Report whether a tag of a repository names a manifest, directly or through an index.

        Only tags and indexes that this run has read count. Returns False if the manifest was
        forgotten, or if a later answer has contradicted the evidence.
        """
        return (
            where in self._tagged_in.get(manifest_key, ())
            and manifest_key not in self._repositories[where].forgotten_keys
            and manifest_key in self._reachable_keys(where)  # emptied by a contradiction
        )

    def record_contradiction(self, where: RepositoryKey) -> None:
        """Record that an answer of this run contradicts the entries of a repository.

        Only confirmed evidence is left, and manifests that are found tagged after this call.
        """
        self._repositories[where].record_contradiction()

    def record_populated(self, where: RepositoryKey, is_populated: bool = True) -> None:
        """Record whether a repository holds manifests.

        A repository without manifests contradicts the archive.
        """
        repository = self._repositories[where]
        repository.is_populated = is_populated
        if not is_populated:
            repository.record_contradiction()

    def is_empty(self, where: RepositoryKey) -> bool:
        """Report whether a repository held no manifests when this run listed its tags."""
        return self._repositories[where].is_populated is False

    def _is_entry_believed(
        self, where: RepositoryKey, key: bytes, confirmed_at: int, *, must_be_recent: bool = False
    ) -> bool:
        """Report whether an entry of the archive with the time `confirmed_at` is believed: it is
        young enough and not contradicted, or it is reachable from a tag.
        """
        max_age = self._max_age
        if must_be_recent or self.facts_of(where.host).accepts_absent_blobs:
            max_age = min(_RECENT_SECONDS, max_age)
        is_contradicted = self._repositories[where].is_contradicted
        if not is_contradicted and self._is_young(confirmed_at, max_age):
            return True
        # This may read other entries, so it comes last.
        return key in self._reachable_keys(where)

    def _is_young(self, time: int, max_age: float) -> bool:
        """Report whether `time` is at most `max_age` seconds ago, or at most a day in the future."""
        return -_CLOCK_AHEAD_SECONDS <= self._now() - time <= max_age

    def _reachable_keys(self, where: RepositoryKey) -> set[bytes]:
        """Return the keys of a repository's tagged manifests, and of all content below them.

        Each manifest's entry is read once. A manifest without an entry is included without the
        content below it.
        """
        repository = self._repositories[where]
        reachable = repository.reachable_keys
        unread = repository.unread_keys
        while unread:
            key = unread.pop()
            if key in reachable:
                continue
            reachable.add(key)
            entry = repository.archive.manifest(where, key)
            if entry is not None:
                reachable.update(entry.blobs)
                unread.extend(entry.children)
        return reachable

    # Mounts and probes (docs/design.md section 6, rules 10 and 11).

    def mount_source(self, where: RepositoryKey, digest: str) -> str | None:
        """Return the name of a repository of the same host from which to mount a blob.

        Returns None if no such repository is known.
        """
        for holder in self.holders(where.host, digest):
            if holder != where.name and self.may_mount(where, holder):
                return holder
        return None

    def holders(self, host: str, digest: str) -> Iterator[str]:
        """Yield the names of repositories from which a blob can be mounted, best evidence first.

        A repository with several kinds of evidence is yielded several times.
        """
        yield from self._committed_holders[host].get(digest, ())

        key = key_of(digest)
        for where in self._implied_holders.get((host, key), ()):
            # `forget` and a contradiction remove evidence from `implied_keys` only.
            if key in self._repositories[where].implied_keys:
                yield where.name

        for where, confirmed_at in self._archived_holders(host, key):
            is_forgotten = key in self._repositories[where].forgotten_keys
            if not is_forgotten and self._is_entry_believed(where, key, confirmed_at):
                yield where.name

    def _read_holders(self, host: str, key: bytes) -> list[tuple[RepositoryKey, int]]:
        """Return the archived repositories of a blob, with the times of their entries."""
        holders = self._repositories.archive_of(host).holders_of(host, key)
        return [
            (RepositoryKey(host, name), confirmed_at)
            for name, confirmed_at in holders.items()
            # The file has no checksum, and the name becomes part of a URL.
            if is_repository(name)
        ]

    def supports_mounts(self, host: str) -> bool | None:
        """Report whether a host mounts blobs.

        Returns None until the first mount has been answered.
        """
        return self.facts_of(host).supports_mounts

    def may_mount(self, where: RepositoryKey, source: str) -> bool:
        """Report whether a mount from the repository `source` may succeed."""
        is_refused = source in self._repositories[where].refused_sources
        return not is_refused and self.supports_mounts(where.host) is not False

    def record_refused_mount(
        self, where: RepositoryKey, source: str, *, is_source_confirmed: bool
    ) -> None:
        """Record that a mount from `source` was refused. The same mount is not tried again.

        If the host has mounted nothing yet, it is recorded as one that does not mount. But if only
        an earlier run believed that `source` holds the blob, it may just have lost it: then the host
        is recorded when that has happened several times (docs/design.md section 6, rule 10).
        """
        self._repositories[where].refused_sources.add(source)
        if not is_source_confirmed:
            self._doubtful_refusals[where.host] += 1
        is_conclusive = is_source_confirmed or (
            self._doubtful_refusals[where.host] >= _MOST_DOUBTFUL_REFUSALS
        )
        if is_conclusive and self.supports_mounts(where.host) is None:
            self._record_fact(where.host, "mounts", False)

    def record_mount(self, host: str) -> None:
        """Record that a host has mounted a blob."""
        if self.supports_mounts(host) is not True:
            self._record_fact(host, "mounts", True)

    def needs_head(self, where: RepositoryKey, digest: str) -> bool:
        """Report whether a HEAD must check for a blob before a probing POST starts its upload.

        A HEAD is needed if the answer to the POST would not show whether the blob is present. It is
        not needed in a repository without known manifests: most blobs are absent there, and the
        upload needs the POST anyway.
        """
        repository = self._repositories[where]
        answers = self.probe_answers(where)
        if answers.is_202_if_absent is False:
            return True  # a 201 would not show that the blob is present
        if digest in repository.probed_blobs:
            return True  # the blob was forgotten after a 201
        return repository.is_populated is True and not answers.is_201_if_present

    def record_probe_answer(
        self,
        where: RepositoryKey,
        *,
        is_202_if_absent: bool | None = None,
        is_201_if_present: bool | None = None,
    ) -> None:
        """Record whether a probing POST was answered correctly (see `ProbeAnswers`).

        An argument of None leaves the recorded value as it is.
        """
        old = self.probe_answers(where)
        answers = ProbeAnswers(
            old.is_202_if_absent if is_202_if_absent is None else is_202_if_absent,
            old.is_201_if_present if is_201_if_present is None else is_201_if_present,
        )
        if answers != old:
            self._record_fact(where.host, "probe_answers", list(answers), where.first_segment)

    def probe_answers(self, where: RepositoryKey) -> ProbeAnswers:
        """Return whether a repository's registry answers probing POSTs correctly."""
        unknown = ProbeAnswers(is_202_if_absent=None, is_201_if_present=None)
        return self.facts_of(where.host).probes.get(where.first_segment, unknown)

    def choose_present_blob(self, where: RepositoryKey) -> str | None:
        """Return the digest of a blob that an answer of this run has shown to be in a repository.

        Returns None if there is no such blob. The age of an entry alone is not enough.
        """
        repository = self._repositories[where]
        if repository.confirmed_blobs:
            return min(repository.confirmed_blobs)
        # Reachable keys are keys of blobs and of manifests. Only the archive shows which are blobs.
        for key in sorted(repository.implied_keys or self._reachable_keys(where)):
            is_blob = (
                key in repository.implied_keys or repository.archive.blob(where, key) is not None
            )
            if is_blob and is_whole(key):
                return digest_like(key)
        return None

    # Facts of hosts.

    def facts_of(self, host: str) -> HostFacts:
        """Return what is known of a host. Only methods of this class may change the result.

        The first call reads the facts of the last day from the archive.
        """
        if host not in self._hosts:
            facts = self._hosts[host] = HostFacts()
            for fact in self._repositories.archive_of(host).facts_of(host):
                if self._is_young(fact.learnt_at, _FACT_SECONDS):
                    facts.learn(fact)
        return self._hosts[host]

    def record_login(self, host: str, login: object) -> None:
        """Record the challenge of a host, in the form of `Authenticator.login_facts`."""
        if self.facts_of(host).login != login:
            self._record_fact(host, "login", login)

    def record_fallback_size(self, host: str, size: int | None) -> None:
        """Record the size in bytes from which on blobs are sent in the kind's fallback style.

        None means that no blob is.
        """
        if self.facts_of(host).fallback_size != size:
            self._record_fact(host, "smallest_patch", size)

    def has_referrers_api(self, where: RepositoryKey) -> bool | None:
        """Report whether a repository's registry has the referrers API. Returns None if unknown."""
        return self.facts_of(where.host).has_referrers_api.get(where.first_segment)

    def record_referrers_api(self, where: RepositoryKey, has_api: bool) -> None:
        """Record whether a repository's registry has the referrers API."""
        if self.has_referrers_api(where) is not has_api:
            self._record_fact(where.host, "has_referrers_api", has_api, where.first_segment)

    def _record_fact(self, host: str, name: str, value: object, segment: str = "") -> None:
        """Learn a fact, and write it to the archive. `segment` is empty if it holds for the whole
        host.
        """
        fact = Fact(name, segment, value, int(self._now()))
        self.facts_of(host).learn(fact)
        self._repositories.archive_of(host).put_fact(host, fact)

    # Tags, and artifacts of images.

    def snapshots(self, names: Iterable[bytes]) -> dict[bytes, SnapshotEntry]:
        """Return the snapshots with these names that are known and not too old, by name.

        An empty name never has a snapshot.
        """
        return {
            name: entry
            for name, entry in self._archive.snapshots(filter(None, names)).items()
            if self._is_young(entry.confirmed_at, self._max_age)
        }

    def record_snapshot(
        self, name: bytes, snapshot: Snapshot, old: SnapshotEntry | None = None
    ) -> None:
        """Record what a tag names at its source and at its target. Does nothing if `name` is empty.

        `old` is the entry that `snapshots` has returned for the name.
        """
        if not name:
            return
        is_up_to_date = (
            old is not None
            and old.snapshot == snapshot
            and self._is_young(old.confirmed_at, self._renewal_age)
        )
        if not is_up_to_date:
            self._archive.put_snapshot(name, SnapshotEntry(int(self._now()), snapshot))

    def artifact_check(self, name: bytes) -> ArtifactCheck:
        """Return the last artifact check of an image. Returns NO_CHECK if there is none."""
        check = self._archive.artifact_check(name) if name else None
        # A check has no maximum age, but its time must not be in the future.
        if check is None or not self._is_young(check.last, math.inf):
            return NO_CHECK
        return check

    def record_artifact_check(
        self, name: bytes, flags: int, listing_hash: bytes, *, first: int = 0
    ) -> None:
        """Record the result of an artifact check. Does nothing if `name` is empty.

        `first` is the time of the first check of the image, or 0 if this check is the first. A
        check stays valid for longer than `ttl`.
        """
        if not name:
            return
        now = int(self._now())
        self._archive.put_artifact_check(
            name, ArtifactCheck(now, first or now, flags, listing_hash)
        )

    # The end of a run.

    def finish(self) -> None:
        """Renew the old entries of images that are still tagged. Remove old entries once a day."""
        if self._ttl:  # without a maximum age, no entry needs a new time
            for where, repository in self._repositories.items():
                times = repository.archive.manifest_times(where, repository.tagged_keys)
                self._renew(
                    where,
                    [key for key in times if not self._is_young(times[key], self._renewal_age)],
                )

        now = int(self._now())
        if not self._is_young(self._archive.swept_at, _SWEEP_SECONDS):
            self._archive.sweep(
                now,
                entries_before=now - int(self._ttl) if self._ttl else 0,
                checks_before=now - _ARTIFACT_CHECK_SECONDS,
                facts_before=now - _FACT_SECONDS,
            )

    def _renew(self, where: RepositoryKey, manifest_keys: Iterable[bytes]) -> None:
        """Set the time of the entries of these manifests, and of all entries below them, to now."""
        archive = self._repositories[where].archive
        now = int(self._now())
        unread = [*manifest_keys]
        renewed = set[bytes]()
        while unread:
            key = unread.pop()
            entry = archive.manifest(where, key)
            if entry is None or key in renewed:
                continue
            renewed.add(key)
            archive.put_manifest(where, key, entry._replace(confirmed_at=now))
            unread.extend(entry.children)
            for blob in entry.blobs:
                old = archive.blob(where, blob)
                if old is not None:
                    archive.put_blob(where, blob, old._replace(confirmed_at=now))

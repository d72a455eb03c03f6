"""What this run believes of registries, repositories, blobs, manifests and tags.

Owns: which entries of earlier runs are believed ("Vouching"); what was learnt of hosts; when an entry is renewed.
May not know: clocks (`now` is an argument), sockets, tasks, files, SQL.
Invariants: an entry exists only because a registry answered. Wrong entries cost requests, never a wrong image (I5).
Follows: docs/specification.md section 1.1 (three-step look-up), docs/design.md sections 6 (rules 10, 11), 7 and 8.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from _regsync.oci.reference import LAYOUT_SCHEME, is_repository
from _regsync.state.archive import (
    MOST_HOLDERS,
    NO_CHECK,
    Archive,
    ArtifactCheck,
    BlobEntry,
    Fact,
    ManifestEntry,
    Notes,
    RepositoryKey,
    Snapshot,
    SnapshotEntry,
    digest_like,
    is_whole,
    key_of,
)

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


class ProbeAnswers(NamedTuple):
    """Whether the answer to a probing POST, which looks for a blob and starts its upload, tells the
    truth (rule 11); None where that is not known.
    """

    absent: bool | None  # of an absent blob: 202
    present: bool | None  # of a present blob: 201


@dataclass
class HostFacts:
    """What was learnt of one registry host; None where it is not known."""

    supports_mounts: bool | None = None
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
                self.supports_mounts = value
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


@dataclass(slots=True)
class _Repository:
    """What this run believes of one repository.

    A digest is `str` in these sets; its key (`key_of`), by which the archive knows it, is `bytes`.
    """

    archive: Archive  # where entries of this repository are

    # What a registry confirmed in this run.
    blobs: set[str] = field(default_factory=set)
    manifests: set[str] = field(default_factory=set)
    # Blobs that an answer of this run implies (a manifest that names them, a probing POST), but
    # that were not confirmed one by one.
    implied: set[bytes] = field(default_factory=set)
    # Blobs that are known only by a probing POST, and that no HEAD has confirmed (rule 11).
    said_present: set[str] = field(default_factory=set)
    # Manifests that this run has put into the archive with their blobs.
    committed: set[bytes] = field(default_factory=set)
    # What was forgotten in this run: no tag's answer makes it believed again.
    forgotten: set[bytes] = field(default_factory=set)
    # Whether it held manifests when this run asked; None: nobody has asked.
    is_populated: bool | None = None
    # Repositories from which a mount to this one was refused.
    refused_sources: set[str] = field(default_factory=set)

    # Manifests that a tag of this repository named in this run. They vouch for all that they name, at
    # any depth: what a registry accepted with them is believed to be there (I5).
    tagged: set[bytes] = field(default_factory=set)
    # What is vouched for, so far as `_vouched_keys` has looked it up, and manifests still to look up.
    vouched: set[bytes] = field(default_factory=set)
    unexpanded: list[bytes] = field(default_factory=list)
    # Whether an answer of this run contradicted the state: then only what is vouched for is believed.
    is_contradicted: bool = False

    def contradict(self) -> None:
        """Believe only what this run confirms, or vouches for, from now on."""
        self.is_contradicted = True
        self.tagged.clear()
        self.vouched.clear()
        self.unexpanded.clear()
        self.implied.clear()


class _Repositories(dict[RepositoryKey, _Repository]):
    """All repositories by their keys; one that is asked for first has an empty record."""

    def __init__(self, archive: Archive) -> None:
        self._archive = archive
        # What this run learns of image layouts. No later run knows of it: another disk may be
        # mounted then (docs/design.md section 13).
        self._layouts = Notes()

    def __missing__(self, where: RepositoryKey) -> _Repository:
        repository = self[where] = _Repository(self.archive_of(where.host))
        return repository

    def archive_of(self, host: str) -> Archive:
        return self._layouts if host.startswith(f"{LAYOUT_SCHEME}:") else self._archive


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
        self._lifetime = ttl or math.inf  # seconds for which an entry is believed

        self._repositories = _Repositories(self._archive)
        self._hosts: dict[str, HostFacts] = {}

        # Repositories that hold a blob under a committed manifest, to mount it from, in three tables.
        # By host and digest, those that this run has committed, oldest first. A run keeps this for each
        # blob that it copies, so its size counts.
        self._holders: defaultdict[str, dict[str, tuple[str, ...]]] = defaultdict(dict)
        # By host and key, those where a manifest that this run has read implies the blob.
        self._implied_holders = defaultdict[tuple[str, bytes], dict[RepositoryKey, None]](dict)
        # Those of earlier runs. Several decisions on a blob ask for them; what this run adds is in the
        # tables above, and what it forgets in the record of the repository.
        self._archived_holders = lru_cache(4096)(self._read_holders)

        # By manifest, the repositories where a tag names it, or names an index above it.
        self._shown_in: dict[bytes, tuple[RepositoryKey, ...]] = {}

    # Blobs and manifests.

    def is_blob_believed(
        self, where: RepositoryKey, digest: str, *, must_be_recent: bool = False
    ) -> bool:
        """Say whether a blob is known to be in a repository.

        `must_be_recent` is for blobs whose absence the registry would not notice.
        """
        repository = self._repositories[where]
        if digest in repository.blobs:
            return True
        key = key_of(digest)
        if key in repository.implied:
            return True
        entry = repository.archive.blob(where, key)
        return entry is not None and self._is_believed(where, key, entry.confirmed, must_be_recent)

    def is_confirmed(self, where: RepositoryKey, digest: str) -> bool:
        """Say whether a registry answered in this run that it holds a blob or manifest there."""
        repository = self._repositories[where]
        return digest in repository.blobs or digest in repository.manifests

    def is_manifest_confirmed(self, where: RepositoryKey, digest: str) -> bool:
        """Say whether a registry answered in this run that it holds a manifest there."""
        return digest in self._repositories[where].manifests

    def record_probed_blob(self, where: RepositoryKey, digest: str) -> None:
        """Note a blob that a registry holds by its answer to a POST, unconfirmed by a HEAD. If the blob
        is forgotten, the next request for it is a HEAD (`needs_head`).
        """
        repository = self._repositories[where]
        repository.said_present.add(digest)
        repository.implied.add(key_of(digest))
        self._put_blob(where, digest, is_mountable=False)

    def confirm_blob(self, where: RepositoryKey, digest: str) -> None:
        """Note a blob that a registry holds."""
        blobs = self._repositories[where].blobs
        if digest not in blobs:
            blobs.add(digest)
            self._put_blob(where, digest, is_mountable=False)

    def is_manifest_believed(self, where: RepositoryKey, digest: str) -> bool:
        """Say whether a manifest is known to be in a repository."""
        repository = self._repositories[where]
        if digest in repository.manifests:
            return True
        key = key_of(digest)
        entry = repository.archive.manifest(where, key)
        if entry is None:
            return self._is_shown_in(where, key)
        return self._is_believed(where, key, entry.confirmed, must_be_recent=False)

    def confirm_manifest(
        self, where: RepositoryKey, digest: str, blobs: Iterable[str], children: Iterable[str] = ()
    ) -> None:
        """Note a manifest that a registry holds; the blobs that it names may be mounted from there."""
        repository = self._repositories[where]
        repository.manifests.add(digest)
        key = key_of(digest)
        if key in repository.committed:
            return
        repository.committed.add(key)

        holders = self._holders[where.host]
        blobs = tuple(dict.fromkeys(blobs))
        for blob in blobs:
            repository.blobs.add(blob)
            known = holders.get(blob, ())
            if where.name not in known and len(known) < MOST_HOLDERS:
                holders[blob] = (*known, where.name)
            self._put_blob(where, blob, is_mountable=True)
        repository.archive.put_manifest(where, key, self._entry(blobs, children))

    def _entry(self, blobs: Iterable[str], children: Iterable[str]) -> ManifestEntry:
        """Return the entry of a manifest that names these digests, confirmed now."""
        return ManifestEntry(
            int(self._now()),
            tuple(key_of(blob) for blob in blobs),
            tuple(key_of(child) for child in children),
        )

    def _put_blob(self, where: RepositoryKey, digest: str, *, is_mountable: bool) -> None:
        # A blob that was mountable stays so.
        is_mountable = is_mountable or where.name in self.holders(where.host, digest)
        entry = BlobEntry(int(self._now()), is_mountable)
        self._repositories[where].archive.put_blob(where, key_of(digest), entry)

    def forget(self, where: RepositoryKey, digest: str) -> None:
        """Drop what was believed of a digest: a registry said otherwise. Of what its manifest names, drop
        what was believed only because of the manifest or of an earlier run.
        """
        repository = self._repositories[where]
        repository.blobs.discard(digest)
        repository.manifests.discard(digest)
        holders = self._holders[where.host]
        if where.name in holders.get(digest, ()):
            holders[digest] = tuple(name for name in holders[digest] if name != where.name)

        key = key_of(digest)
        repository.committed.discard(key)

        entry = repository.archive.manifest(where, key)
        named_keys = () if entry is None else (*entry.blobs, *entry.children)
        keys = (key, *named_keys)
        repository.archive.forget(where, keys)
        repository.implied.difference_update(keys)
        repository.forgotten.update(keys)

    # Vouching (docs/design.md section 7).

    def record_absent_blob(self, where: RepositoryKey, digest: str) -> None:
        """Note that a repository lacks a blob. If it is vouched for there, the host has accepted a
        manifest without its blobs: the host is lenient.
        """
        facts = self.host(where.host)
        if facts.is_lenient is not True and key_of(digest) in self._vouched_keys(where):
            facts.is_lenient = True
            self._keep(where.host, "is_lenient", True)

    def confirm_tagged_manifest(self, where: RepositoryKey, digest: str) -> None:
        """Note that a target's tag names this manifest, which vouches for all that it names."""
        key = key_of(digest)
        repository = self._repositories[where]
        repository.manifests.add(digest)
        repository.tagged.add(key)
        repository.unexpanded.append(key)
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
            if where.host == host and self._is_shown_in(where, key)
        ]
        if not places:
            return
        entry = self._entry(dict.fromkeys(blobs), children)
        for where in places:
            self._believe(where, key, entry)

    def _believe(self, where: RepositoryKey, key: bytes, entry: ManifestEntry) -> None:
        """Believe that a repository holds all that one of its manifests names."""
        repository = self._repositories[where]
        blobs = [blob for blob in entry.blobs if blob not in repository.forgotten]
        repository.implied.update(blobs)
        for blob in blobs:
            self._implied_holders[where.host, blob][where] = None

        # Entries that are still believed are not written again.
        old = repository.archive.manifest(where, key)
        if old is None or not self._is_young(old.confirmed, self._lifetime):
            repository.archive.put_manifest(where, key, entry)
            for blob in blobs:
                repository.archive.put_blob(
                    where, blob, BlobEntry(entry.confirmed, is_mountable=True)
                )

        self._vouched_keys(where).update(entry.blobs)
        for child in entry.children:
            repository.unexpanded.append(child)
            self._show_in(where, child)

    def _show_in(self, where: RepositoryKey, key: bytes) -> None:
        places = self._shown_in.get(key, ())
        if where not in places:
            self._shown_in[key] = (*places, where)

    def _is_shown_in(self, where: RepositoryKey, key: bytes) -> bool:
        """Say whether a tag's answer in this run shows a manifest in a repository, and nothing has
        spoken against it since.
        """
        if where not in self._shown_in.get(key, ()) or key in self._repositories[where].forgotten:
            return False
        return key in self._vouched_keys(where)

    def record_contradiction(self, where: RepositoryKey) -> None:
        """Note that an answer of this run speaks against the entries of a repository: those that no
        manifest vouches for are not believed any more.
        """
        self._repositories[where].contradict()

    def set_populated(self, where: RepositoryKey, holds: bool = True) -> None:
        """Note whether a repository held manifests when this run asked, whose blobs may be there too.
        An empty repository contradicts what the state says of it.
        """
        repository = self._repositories[where]
        repository.is_populated = holds
        if not holds:
            repository.contradict()

    def is_empty(self, where: RepositoryKey) -> bool:
        """Say whether a repository held no manifests when this run listed it."""
        return self._repositories[where].is_populated is False

    def _is_believed(
        self, where: RepositoryKey, key: bytes, confirmed: int, must_be_recent: bool
    ) -> bool:
        """Say whether an entry of the archive is believed, which was `confirmed` at that moment.

        `must_be_recent` is for what the registry would not miss: there the entry has to be fresh.
        """
        is_contradicted = self._repositories[where].is_contradicted
        if not is_contradicted and self._is_young(confirmed, self._lifetime):
            must_be_fresh = must_be_recent or self.host(where.host).is_lenient is True
            if not must_be_fresh or self._is_young(confirmed, _FRESH_SECONDS):
                return True
        # A tag's answer in this run renews what is too old, and outweighs what speaks against it.
        return key in self._vouched_keys(where)

    def _is_young(self, moment: int, seconds: float) -> bool:
        """Say whether a moment is at most `seconds` ago; a moment over a day ahead is not young."""
        return -_CLOCK_AHEAD_SECONDS <= self._now() - moment <= seconds

    def _vouched_keys(self, where: RepositoryKey) -> set[bytes]:
        """Return the keys of a repository's tagged manifests and of what they name, at any depth, as
        far as the archive says what they name.

        Each manifest is looked up in the archive once, when the keys are next asked for.
        """
        repository = self._repositories[where]
        vouched = repository.vouched
        unexpanded = repository.unexpanded
        while unexpanded:
            key = unexpanded.pop()
            if key in vouched:
                continue
            vouched.add(key)
            entry = repository.archive.manifest(where, key)
            if entry is not None:
                vouched.update(entry.blobs)
                unexpanded.extend(entry.children)
        return vouched

    # Mounts and probes (docs/design.md section 6, rules 10 and 11).

    def mount_source(self, where: RepositoryKey, digest: str) -> str | None:
        """Return a repository of the same host from which to mount a blob; None where there is none."""
        for holder in self.holders(where.host, digest):
            if holder != where.name and self.may_mount(where, holder):
                return holder
        return None

    def holders(self, host: str, digest: str) -> Iterator[str]:
        """Yield the repositories of a host that hold a blob under a committed manifest, or are
        believed to hold it: first those that this run has committed, then those whose manifest it has
        read, then those of earlier runs.
        """
        committed = self._holders[host].get(digest, ())
        yield from committed

        key = key_of(digest)
        yielded = set(committed)
        for where in self._implied_holders.get((host, key), ()):
            is_still_believed = key in self._repositories[where].implied
            if is_still_believed and where.name not in yielded:
                yielded.add(where.name)
                yield where.name

        for where, confirmed in self._archived_holders(host, key):
            if where.name in yielded or key in self._repositories[where].forgotten:
                continue
            if self._is_believed(where, key, confirmed, must_be_recent=False):
                yield where.name

    def _read_holders(self, host: str, key: bytes) -> list[tuple[RepositoryKey, int]]:
        """Return the repositories that hold a blob, and when each was confirmed."""
        holders = self._repositories.archive_of(host).holders_of(host, key)
        return [
            (RepositoryKey(host, holder.repository), holder.confirmed)
            for holder in holders
            # The file has no checksum, and the name becomes a part of a URL.
            if is_repository(holder.repository)
        ]

    def supports_mounts(self, host: str) -> bool | None:
        """Say whether a host mounts, None where no mount has been answered yet."""
        return self.host(host).supports_mounts

    def may_mount(self, where: RepositoryKey, source: str) -> bool:
        """Say whether a mount from `source` is worth asking for, or waiting for."""
        is_refused = source in self._repositories[where].refused_sources
        return not is_refused and self.supports_mounts(where.host) is not False

    def record_refused_mount(self, where: RepositoryKey, source: str) -> None:
        """Note a refused mount: that pair is not tried again.

        A host that refuses its first mount is taken for one that never mounts.
        """
        self._repositories[where].refused_sources.add(source)
        if self.supports_mounts(where.host) is None:
            self.host(where.host).supports_mounts = False
            self._keep(where.host, "mounts", False)

    def record_mount(self, host: str) -> None:
        """Note that this host mounts; refusals, also earlier ones, then concern their pair only."""
        facts = self.host(host)
        if facts.supports_mounts is not True:
            facts.supports_mounts = True
            self._keep(host, "mounts", True)

    def needs_head(self, where: RepositoryKey, digest: str) -> bool:
        """Say whether a HEAD has to ask for an unknown blob, because the POST that starts its upload
        would not tell that it is there.

        A repository that is not known to have held manifests is asked by POST in any case: most blobs
        are absent there, and a probing POST costs no more than a plain POST.
        """
        repository = self._repositories[where]
        answers = self.probe_answers(where)
        if answers.absent is False or digest in repository.said_present:
            return True
        return bool(repository.is_populated) and not answers.present

    def record_probe_answer(
        self, where: RepositoryKey, *, absent: bool | None = None, present: bool | None = None
    ) -> None:
        """Note how a repository answers a probing POST: see `ProbeAnswers`; None is no news."""
        old = self.probe_answers(where)
        answers = ProbeAnswers(
            old.absent if absent is None else absent, old.present if present is None else present
        )
        if answers != old:
            segment = where.first_segment
            self.host(where.host).probes[segment] = answers
            self._keep(where.host, "probe_answers", list(answers), segment)

    def probe_answers(self, where: RepositoryKey) -> ProbeAnswers:
        """Return what is known of the answers to probing POSTs."""
        return self.host(where.host).probes.get(where.first_segment, ProbeAnswers(None, None))

    def choose_present_blob(self, where: RepositoryKey) -> str | None:
        """Return a blob that an answer of this run shows to be in a repository, None where none does."""
        repository = self._repositories[where]
        if repository.blobs:
            return min(repository.blobs)
        if repository.implied:
            keys: Iterable[bytes] = sorted(repository.implied)
        else:
            vouched = sorted(self._vouched_keys(where))
            keys = (key for key in vouched if repository.archive.blob(where, key) is not None)
        return next((digest_like(key) for key in keys if is_whole(key)), None)

    # Facts of hosts.

    def host(self, host: str) -> HostFacts:
        """Return what is known of a host, not older than a day; only this module changes it."""
        if host not in self._hosts:
            facts = self._hosts[host] = HostFacts()
            for fact in self._repositories.archive_of(host).facts_of(host):
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
        return self.host(where.host).has_referrers_api.get(where.first_segment)

    def learn_referrers_api(self, where: RepositoryKey, has: bool) -> None:
        """Keep whether a repository's registry has the referrers API."""
        if self.has_referrers_api(where) is not has:
            segment = where.first_segment
            self.host(where.host).has_referrers_api[segment] = has
            self._keep(where.host, "has_referrers_api", has, segment)

    def _keep(self, host: str, name: str, value: object, segment: str = "") -> None:
        self._repositories.archive_of(host).put_fact(
            host, Fact(name, segment, value, int(self._now()))
        )

    # Tags, and artifacts of images.

    def snapshots(self, names: Iterable[bytes]) -> dict[bytes, SnapshotEntry]:
        """Return what each of these tags named when its target last held it, where that is known. An
        empty name has no entry.
        """
        return {
            name: entry
            for name, entry in self._archive.snapshots(filter(None, names)).items()
            if self._is_young(entry.confirmed, self._lifetime)
        }

    def record_snapshot(
        self, name: bytes, snapshot: Snapshot, old: SnapshotEntry | None = None
    ) -> None:
        """Note what a tag names at its source, and what at its target: the keys of both digests. Nothing
        is noted under an empty name. `old` is the entry that was there.
        """
        if not name:
            return
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
            for where, repository in self._repositories.items():
                moments = repository.archive.manifest_moments(where, repository.tagged)
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
        """Confirm a tagged manifest, and what it names at any depth."""
        archive = self._repositories[where].archive
        now = int(self._now())
        unread = [root]
        while unread:
            key = unread.pop()
            entry = archive.manifest(where, key)
            if entry is None or entry.confirmed == now:
                continue
            archive.put_manifest(where, key, entry._replace(confirmed=now))
            unread.extend(entry.children)
            for blob in entry.blobs:
                old = archive.blob(where, blob)
                if old is not None:
                    archive.put_blob(where, blob, old._replace(confirmed=now))

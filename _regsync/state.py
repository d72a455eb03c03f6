"""What is known about blobs and manifests at targets, and who brings which blob where.

Owns: the hot tier of specification section 1.1 (three-step look-up), the claims of design.md section 6
rules 9 and 10, what was learnt about hosts. May not know: clocks, sockets, tasks. Invariants: I4 (skip
beats mount, mount beats upload), I5 (an entry exists only because a registry answered, or because its
owner brought it), rule 9: claims are made in promotion order, so an owner was always promoted before
those who wait for it and no cycle can form. Follows design.md sections 6 and 7.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field

from _regsync.oci import Descriptor

__all__ = ["Claims", "Knowledge", "Place", "PlaceKey", "Probe", "RepositoryKey", "Step", "Work"]

# Host key (host:port as shown in reports) and repository name.
RepositoryKey = tuple[str, str]
# Repository, digest, and whether it is a manifest.
PlaceKey = tuple[RepositoryKey, str, bool]


class Probe(enum.Enum):
    """How an unknown blob is asked for before it is uploaded."""

    NONE = "nothing there: open the upload at once"
    MOUNT = "one POST that mounts from the repository itself or opens the upload"
    HEAD = "a HEAD"


class Knowledge:
    """The hot tier: what registries answered in this run."""

    def __init__(self) -> None:
        self._blobs: dict[RepositoryKey, set[str]] = {}
        self._manifests: dict[RepositoryKey, set[str]] = {}
        self._holders: dict[tuple[str, str], dict[str, None]] = {}
        self._populated: set[RepositoryKey] = set()
        self._accepting: set[RepositoryKey] = set()
        self._refused: set[tuple[str, str, str]] = set()
        self._mountless: set[str] = set()
        self._mounting: set[str] = set()
        # What a POST that mounts from its own repository was seen to answer, per host and first
        # path segment: (202 for an absent blob, 201 for a present one).
        self._probes: dict[tuple[str, str], tuple[bool, bool]] = {}

    def has_blob(self, where: RepositoryKey, digest: str) -> bool:
        """Say whether a blob is known to be in a repository."""
        return digest in self._blobs.get(where, ())

    def add_blob(self, where: RepositoryKey, digest: str) -> None:
        """Note a blob that a registry confirmed."""
        self._blobs.setdefault(where, set()).add(digest)

    def is_committed(self, where: RepositoryKey, digest: str) -> bool:
        """Say whether a manifest is known to be in a repository."""
        return digest in self._manifests.get(where, ())

    def commit(self, where: RepositoryKey, digest: str, blobs: Iterable[str]) -> None:
        """Note a manifest that a registry holds; the blobs that it names may be mounted from there."""
        self._manifests.setdefault(where, set()).add(digest)
        self._populated.add(where)
        host, repository = where
        for blob in blobs:
            self.add_blob(where, blob)
            self._holders.setdefault((host, blob), {})[repository] = None

    def set_populated(self, where: RepositoryKey) -> None:
        """Note that a repository holds manifests, whichever they are."""
        self._populated.add(where)

    def mount_source(self, where: RepositoryKey, digest: str) -> str | None:
        """Return a repository of the same host from which a blob may be mounted."""
        host, repository = where
        if host in self._mountless:
            return None
        for holder in self._holders.get((host, digest), ()):
            if holder != repository and (host, repository, holder) not in self._refused:
                return holder
        return None

    def may_mount(self, host: str) -> bool:
        """Say whether waiting for a mount at this host is worth anything."""
        return host not in self._mountless

    def refuse_mount(self, where: RepositoryKey, source: str) -> None:
        """Note a refused mount: that pair is not tried again, nor a host that never mounted."""
        host, repository = where
        self._refused.add((host, repository, source))
        if host not in self._mounting:
            self._mountless.add(host)

    def accept_mount(self, host: str) -> None:
        """Note that this host mounts: a refusal then says something of one pair only."""
        self._mounting.add(host)

    def accept_upload(self, where: RepositoryKey) -> None:
        """Note that a repository has accepted an upload start (rule 14)."""
        self._accepting.add(where)

    def probe(self, where: RepositoryKey, allowed: bool) -> Probe:
        """Decide how an unknown blob is asked for (rule 11)."""
        if not allowed:
            return Probe.HEAD
        learnt = self._probes.get(_area(where))
        if where not in self._populated or learnt == (True, True):
            return Probe.MOUNT
        return Probe.HEAD

    def learn_probe(self, where: RepositoryKey, *, absent: bool = False, present: bool = False) -> None:
        """Note what a probing POST answered, where a HEAD said the same."""
        old = self._probes.get(_area(where), (False, False))
        self._probes[_area(where)] = (old[0] or absent, old[1] or present)

    def probe_is_trusted(self, where: RepositoryKey) -> bool:
        """Say whether a 201 to a probing POST was confirmed by a HEAD before."""
        return self._probes.get(_area(where), (False, False))[1]


def _area(where: RepositoryKey) -> tuple[str, str]:
    return where[0], where[1].partition("/")[0]


@dataclass(eq=False, slots=True)
class Work:
    """One image on its way to one repository, as far as claims are concerned.

    `missing` counts the blobs, and the children that another image brings, which are not there yet.
    """

    where: RepositoryKey
    blobs: tuple[Descriptor, ...]
    children: tuple[str, ...] = ()
    order: int = -1
    missing: int = 0
    skipped: int = 0
    failed: bool = False
    owned: dict[str, Place] = field(default_factory=dict)
    # Children that this image itself has to put.
    own_children: set[str] = field(default_factory=set)

    def is_ready(self) -> bool:
        """Say whether everything that its manifests name is in the repository (I1)."""
        return self.missing == 0 and not self.failed


@dataclass(eq=False, slots=True)
class Place:
    """One digest that somebody brings into one repository."""

    digest: str
    where: RepositoryKey
    owner: Work
    blob: Descriptor | None
    waiters: list[Work] = field(default_factory=list)
    # The leader of the same blob elsewhere on the host, whose commit this place waits for.
    leader: _Lead | None = None

    @property
    def key(self) -> PlaceKey:
        """Return what makes this place unique."""
        return (self.where, self.digest, self.blob is None)


@dataclass(eq=False, slots=True)
class _Lead:
    """The one upload of a digest to a host, and the places that will mount from it."""

    work: Work
    followers: list[Place] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Step:
    """One blob to bring to its place: by a mount when `mount_from` names a repository, else by upload."""

    work: Work
    blob: Descriptor
    mount_from: str | None


class Claims:
    """Who brings what; every method is one synchronous decision and returns what may start now."""

    def __init__(self, knowledge: Knowledge) -> None:
        self.knowledge = knowledge
        self._places: dict[PlaceKey, Place] = {}
        self._leads: dict[tuple[str, str], _Lead] = {}
        self._promoted = 0

    def promote(self, work: Work) -> list[Step]:
        """Claim all that `work` needs and nobody brings yet; return the steps to take at once."""
        work.order = self._promoted
        self._promoted += 1
        steps: list[Step] = []
        for blob in work.blobs:
            if self.knowledge.has_blob(work.where, blob.digest):
                work.skipped += 1
                continue
            work.missing += 1
            place = self._places.get((work.where, blob.digest, False))
            if place is not None:
                place.waiters.append(work)
            else:
                place = self._claim(work, blob.digest, blob)
                steps += self._moves(place)
        for child in work.children:
            if self.knowledge.is_committed(work.where, child):
                continue
            place = self._places.get((work.where, child, True))
            if place is not None:
                place.waiters.append(work)
                work.missing += 1
            else:
                self._claim(work, child, None)
                work.own_children.add(child)
        return steps

    def _claim(self, work: Work, digest: str, blob: Descriptor | None) -> Place:
        place = Place(digest, work.where, work, blob)
        self._places[place.key] = place
        work.owned[digest] = place
        return place

    def _moves(self, place: Place) -> list[Step]:
        """Decide how a blob comes to its place: mount, wait for the leader's commit, or upload."""
        assert place.blob is not None
        host = place.where[0]
        if source := self.knowledge.mount_source(place.where, place.digest):
            return [Step(place.owner, place.blob, source)]
        lead = self._leads.get((host, place.digest))
        if lead is not None and lead.work is not place.owner and self.knowledge.may_mount(host):
            # Rule 9 keeps this acyclic: the leader was promoted first.
            if lead.work.order < place.owner.order:
                lead.followers.append(place)
                place.leader = lead
                return []
        elif lead is None:
            self._leads[(host, place.digest)] = _Lead(place.owner)
        return [Step(place.owner, place.blob, None)]

    def arrived(self, work: Work, digest: str) -> list[Work]:
        """Note that what `work` owned is in its repository; return the images that are now ready."""
        place = work.owned.pop(digest)
        del self._places[place.key]
        if place.blob is not None:
            self.knowledge.add_blob(place.where, digest)
        else:
            work.own_children.discard(digest)
        relieved = [*place.waiters] if place.blob is None else [work, *place.waiters]
        for each in relieved:
            each.missing -= 1
        return [each for each in relieved if each.is_ready()]

    def committed(self, work: Work) -> list[Step]:
        """Note that the image is complete: those who waited for its blobs may mount them."""
        return self._hand_over(work, [])

    def mounts_refused(self, host: str) -> list[Step]:
        """Let nobody wait any longer at a host that does not mount."""
        waiting: list[Place] = []
        for (lead_host, _), lead in self._leads.items():
            if lead_host == host:
                waiting += lead.followers
                lead.followers = []
        return self._move_all(waiting)

    def failed(self, work: Work) -> tuple[list[Step], list[Work]]:
        """Pass on what a failed image owned to the earliest that waits for it.

        Returns the steps that take over, and the images that became ready by owning a child themselves.
        """
        work.failed = True
        orphans: list[Place] = []
        ready: list[Work] = []
        for place in work.owned.values():
            living = [each for each in place.waiters if not each.failed]
            if not living:
                del self._places[place.key]
                if place.leader is not None:
                    place.leader.followers.remove(place)
                continue
            place.owner, place.waiters = living[0], living[1:]
            place.owner.owned[place.digest] = place
            if place.blob is None:
                place.owner.own_children.add(place.digest)
                place.owner.missing -= 1
                ready += [place.owner] if place.owner.is_ready() else []
            elif place.leader is None:
                orphans.append(place)
        work.owned.clear()
        return self._hand_over(work, orphans), ready

    def _hand_over(self, work: Work, orphans: list[Place]) -> list[Step]:
        """End what `work` led: followers mount if it committed, else the earliest promoted one leads."""
        for blob in work.blobs:
            key = (work.where[0], blob.digest)
            lead = self._leads.get(key)
            if lead is not None and lead.work is work:
                del self._leads[key]
                orphans = orphans + lead.followers
        return self._move_all(orphans)

    def _move_all(self, places: list[Place]) -> list[Step]:
        # In promotion order, so that whoever leads was promoted before those who follow (rule 9).
        steps: list[Step] = []
        for place in sorted(places, key=lambda each: (each.owner.order, each.digest)):
            place.leader = None
            steps += self._moves(place)
        return steps

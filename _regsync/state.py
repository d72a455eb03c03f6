"""What is known about blobs and manifests at targets, and who brings which blob where.

Owns: the hot tier of specification section 1.1 (three-step look-up), the claims of design.md section 6
rules 9 and 10, what was learnt about hosts. May not know: clocks, sockets, tasks. Invariants: I4 (skip
beats mount, mount beats upload), I5 (an entry exists only because a registry answered, or because its
owner brought it), rule 9: claims are made in promotion order, so an owner was always promoted before
those who wait for it and no cycle can form. Follows design.md sections 6 and 7.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from _regsync.oci import Descriptor

__all__ = ["Claims", "Knowledge", "Place", "PlaceKey", "RepositoryKey", "Step", "Work"]

# Host key (host:port as shown in reports) and repository name.
RepositoryKey = tuple[str, str]
# Repository, digest, and whether it is a manifest: one digest may be wanted as both.
PlaceKey = tuple[RepositoryKey, str, bool]


class Knowledge:
    """The hot tier: what registries answered in this run."""

    def __init__(self) -> None:
        self._blobs: defaultdict[RepositoryKey, set[str]] = defaultdict(set)
        self._manifests: defaultdict[RepositoryKey, set[str]] = defaultdict(set)
        # Per host and blob, the repositories with a committed manifest that names it, oldest first.
        self._holders: defaultdict[tuple[str, str], dict[str, None]] = defaultdict(dict)
        self._populated: set[RepositoryKey] = set()
        self._refused: set[tuple[RepositoryKey, str]] = set()
        # Hosts that mounted something (True), and those of which only refusals are known (False).
        self._mounting: dict[str, bool] = {}
        # What a POST that mounts from its own repository was seen to answer, per host and first
        # path segment: (202 for an absent blob, 201 for a present one).
        self._probes: dict[tuple[str, str], tuple[bool, bool]] = {}

    def has_blob(self, where: RepositoryKey, digest: str) -> bool:
        """Say whether a blob is known to be in a repository."""
        return digest in self._blobs[where]

    def add_blob(self, where: RepositoryKey, digest: str) -> None:
        """Note a blob that a registry confirmed."""
        self._blobs[where].add(digest)

    def is_committed(self, where: RepositoryKey, digest: str) -> bool:
        """Say whether a manifest is known to be in a repository."""
        return digest in self._manifests[where]

    def commit(self, where: RepositoryKey, digest: str, blobs: Iterable[str]) -> None:
        """Note a manifest that a registry holds; the blobs that it names may be mounted from there."""
        self._manifests[where].add(digest)
        for blob in blobs:
            self.add_blob(where, blob)
            self._holders[where[0], blob][where[1]] = None

    def set_populated(self, where: RepositoryKey) -> None:
        """Note that a repository holds manifests of others: their blobs are worth asking for."""
        self._populated.add(where)

    def mount_source(self, where: RepositoryKey, digest: str) -> str | None:
        """Return a repository of the same host from which a blob may be mounted."""
        for holder in self._holders[where[0], digest]:
            if holder != where[1] and self.may_mount(where, holder):
                return holder
        return None

    def is_mountable(self, host: str, digest: str) -> bool:
        """Say whether a committed repository of the host holds a blob."""
        return bool(self._holders[host, digest])

    def may_mount(self, where: RepositoryKey, source: str) -> bool:
        """Say whether a mount from `source` is worth asking for, or waiting for."""
        return self._mounting.get(where[0], True) and (where, source) not in self._refused

    def refuse_mount(self, where: RepositoryKey, source: str) -> None:
        """Note a refused mount: that pair is not tried again, nor a host that never mounted (rule 10)."""
        self._refused.add((where, source))
        self._mounting.setdefault(where[0], False)

    def accept_mount(self, host: str) -> None:
        """Note that this host mounts: every refusal, also an earlier one, then says something of its pair."""
        self._mounting[host] = True

    def may_probe(self, where: RepositoryKey, allowed: bool) -> bool:
        """Say whether the POST that starts an upload asks for an unknown blob too, not a HEAD (rule 11)."""
        return allowed and (where not in self._populated or self._probed(where) == (True, True))

    def learn_probe(self, where: RepositoryKey, *, absent: bool = False, present: bool = False) -> None:
        """Note what a probing POST answered, where a HEAD said the same."""
        old = self._probed(where)
        self._probes[_area(where)] = (old[0] or absent, old[1] or present)

    def probe_is_trusted(self, where: RepositoryKey) -> bool:
        """Say whether a 201 to a probing POST was confirmed by a HEAD before."""
        return self._probed(where)[1]

    def _probed(self, where: RepositoryKey) -> tuple[bool, bool]:
        return self._probes.get(_area(where), (False, False))


def _area(where: RepositoryKey) -> tuple[str, str]:
    return where[0], where[1].partition("/")[0]


@dataclass(eq=False, repr=False)
class Work:
    """One image on its way to one repository, as far as claims are concerned.

    `missing` counts the blobs, and the children that another image brings, which are not there yet.
    """

    where: RepositoryKey
    blobs: tuple[Descriptor, ...]
    children: tuple[str, ...] = ()
    root: str = ""
    order: int = -1
    missing: int = 0
    skipped: int = 0
    failed: bool = False
    owned: dict[PlaceKey, Place] = field(default_factory=dict)

    @cached_property
    def named(self) -> dict[str, Descriptor]:
        """The blobs by digest."""
        return {blob.digest: blob for blob in self.blobs}

    @property
    def own_children(self) -> frozenset[str]:
        """The children that this image itself has to put."""
        return frozenset(digest for _, digest, is_manifest in self.owned if is_manifest)

    def is_ready(self) -> bool:
        """Say whether everything that its manifests name is in the repository (I1)."""
        return self.missing == 0 and not self.failed


@dataclass(eq=False, repr=False)
class Place:
    """One digest that somebody brings into one repository, and who waits for it in promotion order."""

    key: PlaceKey
    owner: Work
    waiters: list[Work] = field(default_factory=list)
    # The leader of the same blob elsewhere on the host, whose commit this place waits for.
    leader: _Lead | None = None

    @property
    def blob(self) -> Descriptor:
        """The blob as its present owner describes it: another image's size is no reason to fail this one."""
        return self.owner.named[self.key[1]]


@dataclass(eq=False, repr=False)
class _Lead:
    """The one upload of a digest to a host, and the places that will mount from it."""

    work: Work
    followers: list[Place] = field(default_factory=list)


class Step(NamedTuple):
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
            if place := self._claim(work, blob.digest, False):
                steps += self._moves(place)
        for child in work.children:
            # `Tree.needs` has left out those that are committed.
            work.missing += self._claim(work, child, True) is None
        if work.root:
            # An index that names this image waits for it instead of putting it once more, and another
            # tag of it is put behind the first one (I2).
            work.missing += self._claim(work, work.root, True) is None
        return steps

    def is_covered(self, host: str, digest: str) -> bool:
        """Say whether somebody brings a blob to a host already, or has (for `plan.elect`)."""
        return (host, digest) in self._leads or self.knowledge.is_mountable(host, digest)

    def _claim(self, work: Work, digest: str, is_manifest: bool) -> Place | None:
        """Return the place when it is `work`'s to fill; None when it waits for another image."""
        key = (work.where, digest, is_manifest)
        if key in self._places:
            self._places[key].waiters.append(work)
            return None
        self._places[key] = work.owned[key] = Place(key, work)
        return work.owned[key]

    def _moves(self, place: Place) -> list[Step]:
        """Decide how a blob comes to its place: mount, wait for the leader's commit, or upload."""
        where, digest, _ = place.key
        source = self.knowledge.mount_source(where, digest)
        if source is None:
            lead = self._leads.setdefault((where[0], digest), _Lead(place.owner))
            # Rule 9 keeps this acyclic: the leader was promoted first.
            if lead.work.order < place.owner.order and self.knowledge.may_mount(where, lead.work.where[1]):
                lead.followers.append(place)
                place.leader = lead
                return []
        return [Step(place.owner, place.blob, source)]

    def arrived(self, work: Work, digest: str) -> list[Work]:
        """Note that what `work` owned is in its repository; return the images that are now ready."""
        # A digest wanted as blob and as child arrives as blob first: children are put after all blobs.
        place = work.owned.pop((work.where, digest, False), None)
        if place is not None:
            self.knowledge.add_blob(work.where, digest)
            relieved = [work, *place.waiters]
        else:
            place = work.owned.pop((work.where, digest, True))
            relieved = place.waiters
        del self._places[place.key]
        for each in relieved:
            each.missing -= 1
        return [each for each in relieved if each.is_ready()]

    def committed(self, work: Work) -> list[Step]:
        """Note that the image is complete: whoever waits for one of its blobs may mount it."""
        return self._release(work, [])

    def mounts_refused(self, host: str) -> list[Step]:
        """Let nobody wait any longer for a mount that would be refused."""
        stuck = [
            place
            for (lead_host, _), lead in self._leads.items()
            if lead_host == host
            for place in lead.followers
            if not self.knowledge.may_mount(place.key[0], lead.work.where[1])
        ]
        return self._move_all(stuck)

    def failed(self, work: Work) -> tuple[list[Step], list[Work]]:
        """Pass on what a failed image owned to the earliest that waits for it.

        Returns the steps that take over, and the images that became ready by owning a child themselves.
        """
        work.failed = True
        orphans: list[Place] = []
        ready: list[Work] = []
        for place in work.owned.values():
            self._stop_following(place)
            heirs = [each for each in place.waiters if not each.failed]
            if not heirs:
                del self._places[place.key]
                continue
            place.owner, *place.waiters = heirs
            place.owner.owned[place.key] = place
            if not place.key[2]:
                orphans.append(place)
                continue
            place.owner.missing -= 1
            if place.owner.is_ready():
                ready.append(place.owner)
        work.owned.clear()
        return self._release(work, orphans), ready

    def _release(self, work: Work, places: list[Place]) -> list[Step]:
        """Move `places`, and those that followed a leader of what `work` brought or will not bring."""
        for blob in work.blobs:
            key = (work.where[0], blob.digest)
            lead = self._leads.get(key)
            if lead is None or (work.failed and lead.work is not work):
                continue
            if lead.work is work:
                del self._leads[key]
            places = places + lead.followers
        return self._move_all(places)

    def _move_all(self, places: list[Place]) -> list[Step]:
        # In promotion order, so that whoever leads was promoted before those who follow (rule 9).
        steps: list[Step] = []
        for place in sorted(places, key=lambda each: (each.owner.order, each.key)):
            self._stop_following(place)
            steps += self._moves(place)
        return steps

    @staticmethod
    def _stop_following(place: Place) -> None:
        if place.leader is not None:
            place.leader.followers.remove(place)
            place.leader = None

"""."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from typing import NamedTuple

from _regsync.oci.manifest import Descriptor
from _regsync.state.knowledge import Knowledge, RepositoryKey


class Election:
    """Which pending image to promote next: the greedy set cover of docs/specification.md section
    1.1, near-linear over a run. The highest gain goes next, then the lowest number: how many blobs
    others on its host want and nobody brings yet."""

    def __init__(self) -> None:
        self._blobs: dict[int, list[tuple[str, str]]] = {}
        self._gains: dict[int, int] = {}
        self._waiting: dict[tuple[str, str], list[int]] = {}
        self._heap: list[tuple[int, int]] = []

    def add(self, number: int, blobs: Iterable[tuple[str, str]]) -> None:
        """Let an image wait; `blobs` are the (host, digest) that nobody brings or has brought to
        the host.
        """
        self._blobs[number], self._gains[number] = list(blobs), 0
        for blob in self._blobs[number]:
            waiting = self._waiting.setdefault(blob, [])
            waiting.append(number)
            # The second to wait for a blob makes it a shared one for the first too.
            for each in waiting[-1:] if len(waiting) > 2 else waiting if len(waiting) == 2 else ():
                self._gain(each, 1)
        self._gain(number, 0)

    def take(self) -> int:
        """Return the number of the next one; what it brings counts for no other any more."""
        gain, number = heapq.heappop(self._heap)
        while self._gains.get(number) != -gain:
            gain, number = heapq.heappop(self._heap)
        del self._gains[number]
        for blob in self._blobs.pop(number):
            for each in self._waiting.pop(blob, ()):
                if each in self._gains:
                    self._gain(each, -1)
        return number

    def _gain(self, number: int, more: int) -> None:
        self._gains[number] += more
        heapq.heappush(self._heap, (-self._gains[number], number))


# Repository, digest, and whether it is a manifest: one digest may be wanted as both.
_PlaceKey = tuple[RepositoryKey, str, bool]


class Work:
    """One image on its way to one repository: its blobs in the order in which they go. `careful`:
    the registry would not miss one, and what earlier runs knew is not enough (docs/design.md
    section 7).
    """

    order = -1
    skipped = 0
    failed = False
    missing = 0  # blobs, and children of others, that are not there

    def __init__(
        self,
        where: RepositoryKey,
        blobs: Mapping[str, Descriptor],
        children: tuple[str, ...] = (),
        root: str = "",
        careful: bool = False,
    ) -> None:
        self.where = where
        self.blobs = blobs
        self.children = children
        self.root = root
        self.careful = careful
        self.owned = dict[_PlaceKey, _Place]()

    @property
    def own_children(self) -> frozenset[str]:
        return frozenset(digest for _, digest, is_manifest in self.owned if is_manifest)

    def is_ready(self) -> bool:
        """Say whether everything that its manifests name is in the repository (I1)."""
        return self.missing == 0 and not self.failed


class _Place:
    """One digest that somebody brings into one repository, and who waits for it in promotion order."""

    # Who brings the same blob elsewhere on the host, whose commit this place waits for, and since
    # when.
    leader: _Lead | None = None
    since = 0.0

    def __init__(self, key: _PlaceKey, owner: Work) -> None:
        self.key = key
        self.owner = owner
        self.waiters = list[Work]()

    @property
    def blob(self) -> Descriptor:
        """The blob as its present owner describes it: another image's size is no reason to fail
        this one.
        """
        return self.owner.blobs[self.key[1]]


_Lead = tuple[
    Work, list[_Place]
]  # who brings a digest to a host, and the places that will mount it from there


class Step(NamedTuple):
    """One blob to bring to its place: by a mount when `mount_from` names a repository, else by
    upload.
    """

    work: Work
    blob: Descriptor
    mount_from: str | None


class Claims:
    """Who brings what; every method is one synchronous decision and returns what may start now."""

    def __init__(self, knowledge: Knowledge, now: Callable[[], float] = float) -> None:
        self.knowledge = knowledge
        self._now = now
        self._places: dict[_PlaceKey, _Place] = {}
        self._leads: dict[tuple[str, str], _Lead] = {}
        # Per host that has not mounted or refused yet, the one mount that is tried, and who waits
        # for it.
        self._trials: dict[str, tuple[_Place, list[_Place]]] = {}
        self._order = count()

    def promote(self, work: Work) -> list[Step]:
        """Claim all that `work` needs and nobody brings yet; return the steps to take at once."""
        work.order = next(self._order)
        has_blob = self.knowledge.has_blob
        lacking = [
            digest
            for digest in work.blobs
            if not has_blob(work.where, digest, careful=work.careful)
        ]
        work.skipped = len(work.blobs) - len(lacking)
        work.missing = len(lacking)
        places = [self._claim(work, digest, False) for digest in lacking]
        # `Tree.needs` has left out children that are committed. An index that names this image
        # waits for it instead of putting it once more, and another tag of it is put behind the
        # first one (I2).
        for digest in (*work.children, *filter(None, [work.root])):
            work.missing += self._claim(work, digest, True) is None
        return self._move_all([place for place in places if place])

    def is_covered(self, host: str, digest: str) -> bool:
        """Say whether somebody brings a blob to a host already, or has (for `Election`)."""
        return (host, digest) in self._leads or any(self.knowledge.holders(host, digest))

    def _claim(self, work: Work, digest: str, is_manifest: bool) -> _Place | None:
        """Return the place when it is `work`'s to fill; None when it waits for another image."""
        key = (work.where, digest, is_manifest)
        if key in self._places:
            self._places[key].waiters.append(work)
            return None
        self._places[key] = work.owned[key] = _Place(key, work)
        return work.owned[key]

    def _moves(self, place: _Place) -> list[Step]:
        """Decide how a blob comes to its place: mount, wait for the leader's commit, or upload."""
        where, digest, _ = place.key
        source = self.knowledge.mount_source(where, digest)
        if source is not None and self.knowledge.mounts(where[0]) is None:
            tried, others = self._trials.setdefault(where[0], (place, []))
            if tried is not place:
                others.append(place)
                return []
        if source is None:
            leader, followers = lead = self._leads.setdefault((where[0], digest), (place.owner, []))
            # Rule 9 keeps this acyclic: the leader was promoted first.
            if leader.order < place.owner.order and self.knowledge.may_mount(
                where, leader.where[1]
            ):
                followers.append(place)
                place.leader = lead
                place.since = self._now()
                return []
        return [Step(place.owner, place.blob, source)]

    def arrived(self, work: Work, digest: str) -> list[Work]:
        """Note that what `work` owned is in its repository; return the images that are now ready."""
        # A digest wanted as blob and as child arrives as blob first: children are put after all
        # blobs.
        is_manifest = (work.where, digest, False) not in work.owned
        place = work.owned.pop((work.where, digest, is_manifest))
        del self._places[place.key]
        if not is_manifest:
            self.knowledge.add_blob(work.where, digest)
            work.missing -= 1
        for each in place.waiters:
            each.missing -= 1
            each.skipped += not is_manifest
        return [each for each in ([] if is_manifest else [work]) + place.waiters if each.is_ready()]

    def mount_ended(self, host: str, *, mounted: bool) -> list[Step]:
        """Take in how a mount ended: nobody waits for the first one any more, or for one that is
        refused.
        """
        _, moved = self._trials.pop(host, (None, []))
        for leader, followers in () if mounted else self._leads.values():
            there, source = leader.where
            if there == host:
                moved += [
                    each for each in followers if not self.knowledge.may_mount(each.key[0], source)
                ]
        return self._move_all(moved)

    def overdue(self, patience: float) -> list[Step]:
        """Let followers upload that have waited longer than `patience` seconds for their leader's
        commit.
        """
        before = self._now() - patience
        late = [
            place
            for _, followers in self._leads.values()
            for place in followers
            if place.since <= before
        ]
        for place in late:
            self._stop_following(place)
        return [Step(place.owner, place.blob, None) for place in late]

    def failed(self, work: Work) -> tuple[list[Step], list[Work]]:
        """Pass on what an image owned: the steps of the earliest that waited, and who is ready by
        owning a child.
        """
        work.failed = True
        orphans = list[_Place]()
        ready = list[Work]()
        for place in work.owned.values():
            orphans += self._stop_following(place)
            if heirs := [each for each in place.waiters if not each.failed]:
                place.owner, *place.waiters = heirs
                place.owner.owned[place.key] = place
                place.owner.missing -= place.key[2]
                if place.owner.is_ready():
                    ready.append(place.owner)
                if not place.key[2]:
                    orphans.append(place)
            else:
                del self._places[place.key]
        work.owned.clear()
        # Its own places may have waited for its own first mount.
        moved = {place.key: place for place in orphans if place.owner is not work}
        return self.released(work, list(moved.values())), ready

    def released(self, work: Work, places: Sequence[_Place] = ()) -> list[Step]:
        """Take in that an image is complete, or will not be: whoever waits for its blobs may go on,
        as `places`.
        """
        moved = list(places)
        for digest in work.blobs:
            leader, followers = self._leads.get(key := (work.where[0], digest), (None, []))
            if leader is work or not work.failed:
                moved += followers
            if leader is work:
                del self._leads[key]
        return self._move_all(moved)

    def _move_all(self, places: list[_Place]) -> list[Step]:
        # In promotion order, so that whoever leads was promoted before those who follow (rule 9).
        ordered = sorted(places, key=lambda each: (each.owner.order, each.key))
        for place in ordered:
            self._stop_following(place)
        # Rule 10: the first mount on a host is of the smallest blob.
        for place in sorted(ordered, key=lambda each: each.blob.size):
            host = place.key[0][0]
            if self.knowledge.mounts(host) is None and self.knowledge.mount_source(*place.key[:2]):
                self._trials.setdefault(host, (place, []))
        return [step for place in ordered for step in self._moves(place)]

    def _stop_following(self, place: _Place) -> list[_Place]:
        """Let a place wait for nothing; return those that waited for it to try the first mount."""
        if place.leader is not None:
            place.leader[1].remove(place)
            place.leader = None
        tried, waiting = self._trials.get(place.key[0][0], (None, []))
        if place in waiting:
            waiting.remove(place)
        if tried is not place:
            return []
        del self._trials[place.key[0][0]]
        return waiting

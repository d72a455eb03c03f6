"""What has to be copied for one image, who brings which blob where, and which mappings are one
process's share. Owns: the tree of an image in put order, the order of its blobs, the election of
leaders, the claims of design.md section 6 rules 9 and 10, which mapping gets which tag, shards. May
not know: how anything is asked or moved, clocks, tasks. Invariants: I2 (children before their
index), I4 (skip beats mount, mount beats upload), I10 (on a conflict the earlier mapping wins);
claims are made in promotion order: an owner was promoted before those who wait for it, no cycle can
form; shards are disjoint and together the whole. Mappings with a repository in common share one: it
is listed once, conflicts are seen. So do those below one base path of a target, which mount each
other's layers: as short a path as makes no group half more than a fair share. Follows design.md
sections 2, 3, 6, 7, specification 1.1."""

from __future__ import annotations

import enum
import heapq
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import NamedTuple

from _regsync.config import Config, MappingRule, Registry
from _regsync.errors import ConfigError, ContentError, RegistryError, clean
from _regsync.oci import IMAGE_CONFIGS, MAX_INDEX_DEPTH, Descriptor, Manifest
from _regsync.state import Knowledge, RepositoryKey

LATE_SHARE = 0.02  # of a run's requests, those that ask for late signatures (design.md section 8)
# What is noted of a look at an image's artifacts, beside `referrers.Referrers.shown`: it has some,
# they are all there.
HAS = 16
COMPLETE = 32
_MOST_BLOBS = (
    10_000  # of one image; real ones name hundreds, and a hostile index hundreds of thousands
)


class NotAtHand(ContentError):
    """A child that was left at the source, because its target seemed to hold it, is needed after
    all.
    """


class Tree(NamedTuple):
    """An image as it will stand at the target: `children` in put order, without the root."""

    root: Manifest
    children: tuple[Manifest, ...]
    source_digest: str

    @property
    def size(self) -> int:
        return sum(each.size for each in (self.root, *self.children))

    @property
    def names(self) -> frozenset[str]:
        """Everything that the target has to hold before the root: blobs and children, at hand or
        not.
        """
        return frozenset(
            each.digest for manifest in (self.root, *self.children) for each in manifest.names
        )

    def above(self, lost: frozenset[str]) -> frozenset[str]:
        """Return what has to be brought again where `lost` is gone: that, and each manifest that
        names it.
        """
        found = set(lost)
        for manifest in (*self.children, self.root):
            found |= {manifest.digest for each in manifest.names if each.digest in found}
        return frozenset(found)

    @property
    def is_image(self) -> bool:
        """Say whether every config is an image's: registries look into those (design.md section 7)."""
        return all(
            one.config.media_type in IMAGE_CONFIGS if one.config else not one.layers
            for one in (self.root, *self.children)
        )

    def needs(
        self, is_committed: Callable[[str], bool]
    ) -> tuple[tuple[Descriptor, ...], tuple[Manifest, ...]]:
        """Return the unique blobs and the children that the target lacks; a committed child stands
        for all below it.
        """
        if is_committed(self.root.digest):
            return (), ()
        by_digest = {child.digest: child for child in self.children}
        blobs = dict[str, Descriptor]()
        lacking = {self.root.digest}
        pending = [self.root]
        for manifest in pending:
            for blob in manifest.blobs:
                known = blobs.setdefault(blob.digest, blob)
                if known.size != blob.size:
                    raise ContentError(
                        f"{blob.digest} is named with {known.size} and with {blob.size} bytes"
                    )
            for digest in [entry.digest for entry in manifest.children]:
                if digest not in lacking and not is_committed(digest):
                    if digest not in by_digest:
                        raise NotAtHand(f"the index names {digest}, which is not at hand")
                    lacking.add(digest)
                    pending.append(by_digest[digest])
        if len(blobs) > _MOST_BLOBS:
            raise ContentError(f"the image names more than {_MOST_BLOBS} blobs")
        return tuple(blobs.values()), tuple(
            child for child in self.children if child.digest in lacking
        )


class Look(enum.IntEnum):
    """How an image's artifacts are looked at: not, when it is its turn, the top's at once, or with
    all below it.
    """

    NOT, LATE, TOP, ALL = range(4)


def look_again(
    record: tuple[int, int, int, bytes], shown: int, now: float, *, required: bool
) -> Look:
    """Decide on an unchanged image by its record (`Knowledge.look`), and by its tags in a listing."""
    if not record[2] & COMPLETE or (required and not record[2] & HAS):
        return Look.ALL
    if shown & ~record[2]:
        return Look.TOP
    pause = min(max(3600.0, (now - record[1]) / 4), 7 * 86400.0)
    return Look.LATE if now - record[0] >= pause else Look.NOT


def look_without_state(digest: str, now: float) -> Look:
    """Decide by digest and day in which hour of the day an unchanged image is looked at."""
    day, rest = divmod(int(now), 86400)
    return Look.ALL if (int(digest[-6:], 16) + day) % 24 == rest // 3600 else Look.NOT


def may_be_stale(error: RegistryError) -> bool:
    """Say whether a refused manifest may mean that something it names is gone (design.md section 7,
    I5).
    """
    if error.status >= 500:
        return "MANIFEST_BLOB_UNKNOWN" in error.codes
    return error.status not in (401, 403, 413, 429) and not is_immutable(
        error
    )  # zot and Quay say MANIFEST_INVALID


def is_immutable(error: RegistryError) -> bool:
    """Say whether this is how a tag that never moves is refused (design.md section 9)."""
    return "TAG_INVALID" in error.codes or "ImageTagAlreadyExistsException" in error.message


def grow(root: Manifest, fetched: Mapping[str, Manifest], source_digest: str) -> Tree:
    """Order an image's manifests so that each stands behind its own children (I2); ContentError for
    a deep one.
    """
    ordered: dict[str, Manifest] = {}

    def visit(manifest: Manifest, depth: int) -> None:
        if manifest.is_index and depth > MAX_INDEX_DEPTH:
            raise ContentError(f"indexes are nested more than {MAX_INDEX_DEPTH} deep")
        for entry in manifest.children:
            if (child := fetched.get(entry.digest)) and entry.digest not in ordered:
                visit(child, depth + 1)
                ordered[entry.digest] = child

    visit(root, 1)
    return Tree(root, tuple(ordered.values()), source_digest)


def order_blobs(
    blobs: Iterable[Descriptor], references: Mapping[str, int]
) -> dict[str, Descriptor]:
    """Return blobs by digest, by descending reference count over all images discovered so far; ties
    as they stand.
    """
    return {
        blob.digest: blob
        for blob in sorted(blobs, key=lambda blob: -references.get(blob.digest, 0))
    }


class Election:
    """Which pending image to promote next: the greedy set cover of specification section 1.1,
    near-linear over a run. The highest gain goes next, then the lowest number: how many blobs
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


def grouped(
    mappings: Iterable[MappingRule], keys: Callable[[MappingRule], list[object]]
) -> list[list[MappingRule]]:
    """Group mappings that have a key in common, each group in their order."""
    groups = dict[object, list[MappingRule]]()  # by key
    for mapping in mappings:
        found = {id(each): each for key in keys(mapping) if (each := groups.get(key))}
        group, *joined = sorted(found.values(), key=len, reverse=True) or [[]]
        more = [mapping, *(each for other in joined for each in other)]
        group += more
        groups.update((key, group) for each in more for key in keys(each))
    unique = {id(each): each for each in groups.values()}.values()
    return [sorted(each, key=lambda mapping: mapping.index) for each in unique]


class Wanted(NamedTuple):
    mapping: MappingRule
    tag: str
    targets: tuple[Registry, ...]


def assign(
    selected: Iterable[tuple[MappingRule, Iterable[str]]],
) -> tuple[list[Wanted], list[tuple[Wanted, MappingRule]]]:
    """Give each target tag to the first mapping that names it, once (design.md section 3): the tags
    to look up, and those that two mappings fight for, with the one that has them."""
    owners: dict[object, MappingRule] = {}
    wanted = list[Wanted]()
    conflicts = list[tuple[Wanted, MappingRule]]()
    for mapping, tags in selected:
        # Among tags of one digest, the version is put before the name that floats (I2).
        for tag in sorted(tags, key=lambda tag: not tag.removeprefix("v")[:1].isdigit()):
            free: list[Registry] = []
            for target, place in zip(mapping.targets, mapping.places, strict=True):
                owner = owners.get((place, tag))
                if owner is None:
                    owners[place, tag] = mapping
                    free.append(target)
                elif owner.content != mapping.content:
                    conflicts.append((Wanted(mapping, tag, (target,)), owner))
            if free:
                wanted.append(Wanted(mapping, tag, tuple(free)))
    return wanted, conflicts


# Repository, digest, and whether it is a manifest: one digest may be wanted as both.
_PlaceKey = tuple[RepositoryKey, str, bool]


class Work:
    """One image on its way to one repository: its blobs in the order in which they go. `careful`:
    the registry would not miss one, and what earlier runs knew is not enough (design.md section 7).
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


_INDEX = "JOB_COMPLETION_INDEX"  # Kubernetes sets it in the pods of an Indexed Job


def share(config: Config, number: int, total: int) -> Config:
    """Return the configuration with the mappings of one of `total` shards, in their order, and its
    own `cache_dir`.
    """
    groups = _groups(config.mappings, max(1.0, 1.5 * len(config.mappings) / total))
    shares: list[list[MappingRule]] = [[] for _ in range(total)]
    for group in sorted(groups, key=lambda group: (-len(group), group[0].index)):
        min(shares, key=len).extend(group)
    own = tuple(sorted(shares[number], key=lambda rule: rule.index))
    cache_dir = config.cache_dir and f"{config.cache_dir}/shard-{number}-of-{total}"
    return config._replace(mappings=own, cache_dir=cache_dir)


def parse_shard(text: str, environ: Mapping[str, str]) -> tuple[int, int]:
    """Read `I/N`, I from 0, or `/N` with I from the environment; ConfigError names what is wrong."""
    (number, _, total), where = text.partition("/"), clean(text, 40)
    if text[:1] == "/":
        where += f" ({_INDEX}: {clean(number := environ.get(_INDEX, 'not set'), 40)})"
    if all(re.fullmatch("[0-9]{1,3}", part) for part in (number, total)) and int(number) < int(
        total
    ):
        return int(number), int(total)
    hint = "the first of four is 0/4, the last 3/4; /4 is for the pods of an Indexed Job"
    raise ConfigError(f"--shard {where}: I/N is needed, I from 0 and below N", hint=hint)


def _groups(
    rules: Sequence[MappingRule], most: float, depth: int = 1
) -> Iterator[list[MappingRule]]:
    """Give what stays together where base paths have `depth` segments, or more in a group of more
    than `most`.
    """

    def keys(rule: MappingRule) -> list[object]:
        path = rule.target_repository.split("/")
        read = rule.source.place(rule.source_repository)
        return [
            read,
            *rule.places,
            *((each.origin, *path[:depth], "/") for each in rule.targets if depth < len(path)),
        ]

    for group in grouped(rules, keys):
        if len(group) <= most or all(rule.target_repository.count("/") < depth for rule in group):
            yield group
        else:
            yield from _groups(group, most, depth + 1)

"""Who copies what: the claims that promoted images hold on blobs and manifests.

Owns: which image copies which blob and puts which child manifest, and who waits for whom.
May not know: tasks, slots, how anything is copied; of time only for how long an image has waited.
Invariants: a digest that promoted images lack in a repository has exactly one owner. The owner was
promoted before all images that wait for the digest, so that no circle of waiting can form (rule 9).
The same events give the same steps (I10).
Follows: docs/specification.md section 1.1 "Cross-repo blob mounting"; docs/design.md section 6
rules 9 and 10.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import count
from typing import NamedTuple

from _regsync.oci.manifest import Descriptor
from _regsync.state.archive import RepositoryKey
from _regsync.state.knowledge import Knowledge


class ClaimKey(NamedTuple):
    """What is claimed: a digest in a repository, as blob or as manifest. An index may name the digest
    of a blob, so that both are claimed.
    """

    where: RepositoryKey
    digest: str
    is_manifest: bool


class ImageClaims:
    """What one promoted image lacks in its repository, and which claims it owns; only `Claims` changes
    an ImageClaims.

    `blobs` are all that the image names, by digest; `children` are the digests of the manifests below
    `root` that the repository lacks. With `careful` the registry would not notice that a blob is
    absent, so that an entry of an earlier run may not be enough to believe in the blob
    (docs/design.md section 7).
    """

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

        # Its place in the order of promotions.
        self.order = -1
        # What this image has to bring itself.
        self.owned = dict[ClaimKey, Claim]()
        # How many blobs are not in the repository yet, and how many manifests that other images put.
        self.missing = 0
        # The blobs that were in the repository, or that other images have copied there.
        self.present = list[Descriptor]()
        self.failed = False

    @property
    def own_children(self) -> frozenset[str]:
        """Return the manifests that this image has to put itself."""
        return frozenset(key.digest for key in self.owned if key.is_manifest)

    @property
    def own_blobs(self) -> int:
        """Return how many blobs this image has to copy itself."""
        return sum(1 for key in self.owned if not key.is_manifest)

    def is_ready(self) -> bool:
        """Say whether all that its manifests name is there, except its own children (I1)."""
        return self.missing == 0 and not self.failed


class Claim:
    """One digest that its owner brings to one repository, for itself and for the waiters."""

    def __init__(self, key: ClaimKey, owner: ImageClaims) -> None:
        self.key = key
        self.owner = owner
        # In promotion order: the first waiter inherits the claim.
        self.waiters = list[ImageClaims]()
        # The leader whose commit the owner awaits, to mount the blob; None while it awaits none.
        self.leader: Leader | None = None
        # When the owner began to wait for the leader.
        self.waits_since = 0.0

    @property
    def host(self) -> str:
        return self.key.where.host

    @property
    def blob(self) -> Descriptor:
        """Return the owner's descriptor: a wrong size in one image harms no other image."""
        return self.owner.blobs[self.key.digest]


class Leader(NamedTuple):
    """The image that copies a blob to a host first, and the claims that wait to mount the blob from
    the image's repository.
    """

    image: ImageClaims
    followers: list[Claim]


class FirstMount(NamedTuple):
    """The claim whose mount shows whether a host mounts at all, and the claims that wait for that."""

    tried: Claim
    waiting: list[Claim]


class Step(NamedTuple):
    """One blob to copy now: by mount when `mount_from` names a repository, else by upload."""

    claims: ImageClaims
    blob: Descriptor
    mount_from: str | None


class Claims:
    """The claims of all promoted images.

    Every method is one synchronous decision. It returns the steps that may start now, or the images
    whose manifests may be put now ("ready"), or both.
    """

    def __init__(self, knowledge: Knowledge, now: Callable[[], float] = float) -> None:
        self.knowledge = knowledge
        self._now = now
        self._claims = dict[ClaimKey, Claim]()
        # By host and digest.
        self._leaders = dict[tuple[str, str], Leader]()
        # By host; a host is left out once an answer has shown whether it mounts.
        self._first_mounts = dict[str, FirstMount]()
        self._order = count()

    def promote(self, image: ImageClaims) -> list[Step]:
        """Claim what `image` lacks and no image has claimed; let it wait for other images' claims.

        Returns the steps that may start now.
        """
        image.order = next(self._order)
        claimed = list[Claim]()
        for digest, blob in image.blobs.items():
            if self.knowledge.is_blob_believed(image.where, digest, must_be_recent=image.careful):
                image.present.append(blob)
                continue
            image.missing += 1
            claim = self._claim_or_wait(image, digest, is_manifest=False)
            if claim is not None:
                claimed.append(claim)

        # The manifests are claimed too. So an index that contains this image waits rather than put
        # the image again, and a second tag of the same image is put after the first tag.
        manifests = [*image.children, image.root] if image.root else image.children
        for digest in manifests:
            if self._claim_or_wait(image, digest, is_manifest=True) is None:
                image.missing += 1  # another image puts it

        return self._start(claimed)

    def is_covered(self, host: str, digest: str) -> bool:
        """Say whether a repository of a host holds a blob, or an image is copying it there."""
        return (host, digest) in self._leaders or any(self.knowledge.holders(host, digest))

    def blob_arrived(
        self, image: ImageClaims, digest: str, *, is_confirmed: bool = True
    ) -> list[ImageClaims]:
        """Note that a blob whose claim `image` owned is in the repository; return the images that are
        ready now. Without `is_confirmed`, no HEAD has shown that it is there.
        """
        if is_confirmed:
            self.knowledge.confirm_blob(image.where, digest)
        else:
            self.knowledge.record_probed_blob(image.where, digest)
        waiters = self._end_claim(image, ClaimKey(image.where, digest, is_manifest=False))
        for waiter in waiters:
            waiter.present.append(waiter.blobs[digest])
        return _count_down([image, *waiters])

    def manifest_arrived(self, image: ImageClaims, digest: str) -> list[ImageClaims]:
        """Note that `image` has put a manifest whose claim it owned; return the images that are ready
        now.
        """
        waiters = self._end_claim(image, ClaimKey(image.where, digest, is_manifest=True))
        # The owner has not counted it as missing, because it puts it itself.
        return _count_down(waiters)

    def mount_ended(self, host: str, *, mounted: bool) -> list[Step]:
        """Note how a mount ended; return the steps that may start now.

        Claims that waited for the first mount on the host go on. So do followers of a leader from
        whose repository they may not mount any more.
        """
        freed = list[Claim]()
        first = self._first_mounts.pop(host, None)
        if first is not None:
            freed += first.waiting
        if not mounted:
            for leader in self._leaders.values():
                source = leader.image.where
                if source.host != host:
                    continue
                freed += [
                    claim
                    for claim in leader.followers
                    if not self.knowledge.may_mount(claim.key.where, source.name)
                ]
        return self._start(freed)

    def stop_waiting_after(self, patience: float) -> list[Step]:
        """End the wait of followers that have waited `patience` seconds for their leader; return their
        uploads.
        """
        latest_begin = self._now() - patience
        overdue = [
            claim
            for leader in self._leaders.values()
            for claim in leader.followers
            if claim.waits_since <= latest_begin
        ]
        for claim in overdue:
            # This frees no other claim: a follower never makes the first mount on its host.
            self._stop_waiting(claim)
        return [Step(claim.owner, claim.blob, None) for claim in overdue]

    def complete(self, image: ImageClaims) -> list[Step]:
        """Note that an image is committed; return the mounts of its blobs that may start now."""
        return self._start(self._end_leads(image))

    def pass_on(self, image: ImageClaims) -> tuple[list[Step], list[ImageClaims]]:
        """Record that an image is not copied: each of its claims passes to its earliest waiter.

        Returns the steps that may start now, and the images that are ready now: those that have
        inherited the claim of the last manifest that they waited for.
        """
        image.failed = True
        # Claims of blobs that their owners have to decide on anew.
        undecided = dict[ClaimKey, Claim]()
        ready = list[ImageClaims]()
        for claim in image.owned.values():
            for freed in self._stop_waiting(claim):
                undecided[freed.key] = freed

            heirs = [waiter for waiter in claim.waiters if not waiter.failed]
            if not heirs:
                del self._claims[claim.key]
                continue
            claim.owner, *claim.waiters = heirs
            claim.owner.owned[claim.key] = claim
            if not claim.key.is_manifest:
                undecided[claim.key] = claim
                continue
            claim.owner.missing -= 1  # the heir puts the manifest itself
            if claim.owner.is_ready():
                ready.append(claim.owner)
        image.owned.clear()

        # A freed claim may be the failed image's own, which no image has inherited.
        to_start = [claim for claim in undecided.values() if claim.owner is not image]
        return self._start([*to_start, *self._end_leads(image)]), ready

    def _claim_or_wait(self, image: ImageClaims, digest: str, *, is_manifest: bool) -> Claim | None:
        """Claim a digest for `image`, or let `image` wait for the image that has claimed it (None)."""
        key = ClaimKey(image.where, digest, is_manifest)
        if key in self._claims:
            self._claims[key].waiters.append(image)
            return None
        claim = Claim(key, image)
        self._claims[key] = claim
        image.owned[key] = claim
        return claim

    def _end_claim(self, owner: ImageClaims, key: ClaimKey) -> list[ImageClaims]:
        """End a claim whose digest is in the repository; return those who waited for that."""
        del self._claims[key]
        return owner.owned.pop(key).waiters

    def _end_leads(self, image: ImageClaims) -> list[Claim]:
        """Let an image that has ended lead no more; return the claims that need not wait any longer."""
        host = image.where.host
        freed = list[Claim]()
        for digest in image.blobs:
            leader = self._leaders.get((host, digest))
            if leader is None:
                continue
            # From an image that is committed, the followers of other leaders may mount too.
            if leader.image is image or not image.failed:
                freed += leader.followers
            if leader.image is image:
                del self._leaders[host, digest]
        return freed

    def _start(self, claims: Iterable[Claim]) -> list[Step]:
        """Decide on claims that are new, or whose wait is over; return the steps that may start now.

        A claim may wait again: for its host's first mount, or for another leader.
        """
        # In promotion order, so that a leader was promoted before its followers (rule 9).
        ordered = sorted(claims, key=lambda claim: claim.owner.order)
        for claim in ordered:
            self._stop_waiting(claim)
        self._choose_first_mounts(ordered)

        steps = list[Step]()
        for claim in ordered:
            step = self._next_step(claim)
            if step is not None:
                steps.append(step)
        return steps

    def _choose_first_mounts(self, claims: list[Claim]) -> None:
        """Let the first mount on a host be that of the smallest blob: if the host does not mount, the
        others have waited for the shortest upload (rule 10).
        """
        for claim in sorted(claims, key=lambda claim: claim.blob.size):
            is_host_unknown = self.knowledge.supports_mounts(claim.host) is None
            if is_host_unknown and self.knowledge.mount_source(claim.key.where, claim.key.digest):
                self._first_mounts.setdefault(claim.host, FirstMount(claim, []))

    def _next_step(self, claim: Claim) -> Step | None:
        """Return a blob's mount or upload; None where the claim has to wait first, which is noted."""
        source = self.knowledge.mount_source(claim.key.where, claim.key.digest)
        if source is None:
            follows = self._follow_leader(claim)
        else:
            follows = self._follow_first_mount(claim)
        return None if follows else Step(claim.owner, claim.blob, source)

    def _follow_first_mount(self, claim: Claim) -> bool:
        """Let a claim wait until the first mount has shown whether the host mounts. Returns False where
        that is known, or the claim makes the first mount itself: it does not wait then.
        """
        if self.knowledge.supports_mounts(claim.host) is not None:
            return False
        first = self._first_mounts.setdefault(claim.host, FirstMount(claim, []))
        if first.tried is claim:
            return False
        first.waiting.append(claim)
        return True

    def _follow_leader(self, claim: Claim) -> bool:
        """Let a claim wait until an earlier image has committed the blob in another repository of the
        host, to mount it from there. Returns False where no such image can be waited for: the blob is
        uploaded now. The first image to ask becomes the leader.
        """
        host_and_digest = (claim.host, claim.key.digest)
        leader = self._leaders.setdefault(host_and_digest, Leader(claim.owner, []))
        # Images wait for older ones alone, so that they never wait in a circle (rule 9).
        if leader.image.order >= claim.owner.order:
            return False
        if not self.knowledge.may_mount(claim.key.where, leader.image.where.name):
            return False
        leader.followers.append(claim)
        claim.leader = leader
        claim.waits_since = self._now()
        return True

    def _stop_waiting(self, claim: Claim) -> list[Claim]:
        """Let a claim wait for nothing. If it was to make the first mount on its host, return the
        claims that waited for that mount.
        """
        if claim.leader is not None:
            claim.leader.followers.remove(claim)
            claim.leader = None

        first = self._first_mounts.get(claim.host)
        if first is None:
            return []
        if first.tried is claim:
            del self._first_mounts[claim.host]
            return first.waiting
        if claim in first.waiting:
            first.waiting.remove(claim)
        return []


def _count_down(images: list[ImageClaims]) -> list[ImageClaims]:
    """Note that one thing less is missing for these images; return those that are ready now."""
    for image in images:
        image.missing -= 1
    return [image for image in images if image.is_ready()]

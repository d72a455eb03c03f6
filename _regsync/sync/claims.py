"""Decide which promoted image copies which blob and puts which child manifest.

Owns: the claims of images on blobs and manifests, and which image waits for which.
May not know: tasks, slots, how anything is copied; any time except how long an image has waited.
Invariants: a digest that promoted images lack in a repository has exactly one owner. The owner was
promoted before all images that wait for the digest, so that images cannot wait for each other in a
circle (rule 9). The same events give the same steps (I10).
Follows: docs/specification.md section 1.1 "Cross-repo blob mounting"; docs/design.md section 6
rules 9 and 10.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import count
from typing import NamedTuple

from _regsync.oci.manifest import Descriptor
from _regsync.state import Knowledge, RepositoryKey


class ClaimKey(NamedTuple):
    """The object of a claim: a digest in a repository, as a blob or as a manifest.

    One digest can be both, if an index names the digest of a blob. Then there are two claims.
    """

    where: RepositoryKey
    digest: str
    is_manifest: bool


class ImageClaims:
    """The claims that one promoted image owns, and what it still lacks.

    Only `Claims` changes them.
    """

    def __init__(
        self,
        where: RepositoryKey,
        blobs: Mapping[str, Descriptor],
        manifests: tuple[str, ...] = (),
        requires_recent_evidence: bool = False,
    ) -> None:
        # The target repository.
        self.where = where
        # All blobs that the image names, by digest.
        self.blobs = blobs
        # The digests of the manifests below the root that the repository lacks, and of the root.
        self.manifests = manifests
        # Whether the registry would accept the image although a blob is absent. Then an old entry
        # of an earlier run is not enough to believe that a blob is present (docs/design.md section
        # 7).
        self.requires_recent_evidence = requires_recent_evidence

        # The number of the promotion. Images that were promoted earlier have lower numbers.
        self.order = -1
        # The claims that this image owns: the blobs it copies and the manifests it puts.
        self.owned = dict[ClaimKey, Claim]()
        # How many blobs the repository still lacks, plus how many manifests other images have to
        # put.
        self.missing = 0
        # The blobs that were in the repository already or that other images have copied there.
        self.present = list[Descriptor]()
        # Whether the image is not copied after all (`Claims.withdraw`).
        self.is_withdrawn = False

    @property
    def own_manifests(self) -> frozenset[str]:
        """The digests of the manifests that this image has to put."""
        return frozenset(key.digest for key in self.owned if key.is_manifest)

    @property
    def own_blob_count(self) -> int:
        """The number of blobs that this image has to copy."""
        return sum(1 for key in self.owned if not key.is_manifest)

    def is_ready(self) -> bool:
        """Report whether the image's manifests may be put (I1).

        The repository must have all blobs and children that they name, except the children that
        this image puts itself.
        """
        return self.missing == 0 and not self.is_withdrawn


class Claim:
    """The claim of one image, the owner, to copy a blob or put a manifest.

    Other images wait for it.
    """

    def __init__(self, key: ClaimKey, owner: ImageClaims) -> None:
        self.key = key
        self.owner = owner
        # In promotion order. If the owner is withdrawn, the first waiter becomes the owner.
        self.waiters = list[ImageClaims]()
        # When the last wait for a leader began, on the clock of the event loop.
        self.waiting_since = 0.0

    @property
    def host(self) -> str:
        return self.key.where.host

    @property
    def blob(self) -> Descriptor:
        """The owner's descriptor of the blob.

        Another image may give a wrong size for the same digest. That affects only that image.
        """
        return self.owner.blobs[self.key.digest]


class Leader(NamedTuple):
    """The first image that copies a blob to a host."""

    image: ImageClaims
    # The claims that wait until `image` is committed, to mount the blob from its repository.
    followers: list[Claim]


class FirstMount(NamedTuple):
    """The first mount on a host, which shows whether the host supports mounts."""

    claim: Claim
    # The claims that wait for the result of the first mount.
    waiting: list[Claim]


class Step(NamedTuple):
    """One blob to copy now."""

    # The claims of the image for which the blob is copied.
    claims: ImageClaims
    blob: Descriptor
    # The repository to mount the blob from. None: the blob is uploaded.
    mount_from: str | None


class Unblocked(NamedTuple):
    """The work that an event has made possible."""

    # The steps that may start now.
    steps: list[Step]
    # The images whose manifests may be put now.
    ready: list[ImageClaims]


class Claims:
    """The claims of all promoted images.

    No method waits. Methods return the steps that may start now, or the images whose manifests may
    be put now ("ready"), or both.
    """

    def __init__(self, knowledge: Knowledge, now: Callable[[], float] = float) -> None:
        self.knowledge = knowledge
        self._now = now
        self._claims = dict[ClaimKey, Claim]()
        # By host and digest of the blob.
        self._leaders = dict[tuple[str, str], Leader]()
        # By host. The entry is removed when the mount has ended.
        self._first_mounts = dict[str, FirstMount]()
        self._order = count()

    def promote(self, image: ImageClaims) -> list[Step]:
        """Claim the blobs and manifests that `image` lacks, unless another image has claimed them.

        For digests that are claimed already, the image becomes a waiter. Returns the steps that may
        start now.
        """
        image.order = next(self._order)
        claimed = list[Claim]()
        for digest, blob in image.blobs.items():
            if self.knowledge.is_blob_believed(
                image.where, digest, must_be_recent=image.requires_recent_evidence
            ):
                image.present.append(blob)
                continue
            image.missing += 1  # until the blob has arrived, whichever image copies it
            claim = self._claim_or_wait(image, digest, is_manifest=False)
            if claim is not None:
                claimed.append(claim)

        # The manifests are claimed too. So an index that contains this image waits until the image
        # is put instead of putting it again, and a second tag of the same image is put after the
        # first. Manifests that this image puts itself do not count in `missing`.
        for digest in image.manifests:
            is_put_by_other_image = self._claim_or_wait(image, digest, is_manifest=True) is None
            if is_put_by_other_image:
                image.missing += 1

        return self._next_steps(claimed)

    def is_covered(self, host: str, digest: str) -> bool:
        """Report whether a repository of a host has a blob, or an image is copying it there."""
        return (host, digest) in self._leaders or any(self.knowledge.holders(host, digest))

    def blob_arrived(
        self, image: ImageClaims, digest: str, *, is_confirmed: bool = True
    ) -> list[ImageClaims]:
        """Record that the repository has a blob whose claim `image` owned.

        Pass `is_confirmed=False` if only the answer to a probing POST says so. Returns the images
        that are ready now.
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
        """Record that `image` has put a manifest whose claim it owned.

        Returns the images that are ready now.
        """
        waiters = self._end_claim(image, ClaimKey(image.where, digest, is_manifest=True))
        # The owner is not counted down: `missing` does not include its own manifests.
        return _count_down(waiters)

    def mount_ended(self, host: str, *, mounted: bool) -> list[Step]:
        """Record how a mount on a host ended, and return the steps that may start now.

        These are the steps of claims that waited for the first mount on the host. If the mount was
        refused, they are also the uploads of blobs that can no longer be mounted: the host refuses
        all mounts, or those from one repository.
        """
        first_mount = self._first_mounts.pop(host, None)
        freed = [] if first_mount is None else list(first_mount.waiting)
        if not mounted:
            freed += [
                follower
                for leader in self._leaders.values()
                if leader.image.where.host == host
                for follower in leader.followers
                if not self.knowledge.may_mount(follower.key.where, leader.image.where.name)
            ]
        return self._next_steps(freed)

    def stop_waiting_after(self, patience: float) -> list[Step]:
        """End the wait of followers that have waited `patience` seconds for their leader.

        Returns the steps that upload their blobs.
        """
        latest_begin = self._now() - patience
        overdue = [
            claim
            for leader in self._leaders.values()
            for claim in leader.followers
            if claim.waiting_since <= latest_begin
        ]
        for claim in overdue:
            self._leave_queues(claim)
        return [Step(claim.owner, claim.blob, mount_from=None) for claim in overdue]

    def image_committed(self, image: ImageClaims) -> list[Step]:
        """Record that an image is committed, and return the mounts of its blobs that may start now."""
        return self._next_steps(self._release_followers(image))

    def withdraw(self, image: ImageClaims) -> Unblocked:
        """Record that an image is not copied, and pass each of its claims to the earliest waiter.

        A waiter becomes ready if it gets the claim on the last manifest that it waited for. A claim
        without a waiter is removed.
        """
        image.is_withdrawn = True
        freed = [*self._cancel_first_mount(image), *self._release_followers(image)]
        inherited = list[Claim]()
        ready = list[ImageClaims]()
        for claim in image.owned.values():
            self._leave_queues(claim)
            new_owner = self._pass_on(claim)
            if new_owner is None:
                continue
            if claim.key.is_manifest:
                new_owner.missing -= 1  # it puts the manifest itself now
                if new_owner.is_ready():
                    ready.append(new_owner)
            else:
                inherited.append(claim)
        image.owned.clear()
        return Unblocked(self._next_steps([*inherited, *freed]), ready)

    def _pass_on(self, claim: Claim) -> ImageClaims | None:
        """Make the earliest waiter the owner of a claim, and return this new owner.

        Removes the claim and returns None if no image waits for it.
        """
        candidates = [waiter for waiter in claim.waiters if not waiter.is_withdrawn]
        if not candidates:
            del self._claims[claim.key]
            return None
        new_owner = candidates[0]
        claim.owner = new_owner
        claim.waiters = candidates[1:]
        new_owner.owned[claim.key] = claim
        return new_owner

    def _claim_or_wait(self, image: ImageClaims, digest: str, *, is_manifest: bool) -> Claim | None:
        """Claim a digest for `image`, and return the claim.

        Returns None if another image has claimed the digest. Then `image` becomes a waiter.
        """
        key = ClaimKey(image.where, digest, is_manifest)
        if key in self._claims:
            self._claims[key].waiters.append(image)
            return None
        claim = Claim(key, image)
        self._claims[key] = claim
        image.owned[key] = claim
        return claim

    def _end_claim(self, owner: ImageClaims, key: ClaimKey) -> list[ImageClaims]:
        """Remove a claim whose digest is in the repository now, and return the claim's waiters."""
        del self._claims[key]
        return owner.owned.pop(key).waiters

    def _cancel_first_mount(self, image: ImageClaims) -> list[Claim]:
        """If an image was to make the first mount on its host, let another claim make it.

        Returns the claims of other images that waited for the mount.
        """
        host = image.where.host
        first_mount = self._first_mounts.get(host)
        if first_mount is None or first_mount.claim.owner is not image:
            return []
        del self._first_mounts[host]
        return [claim for claim in first_mount.waiting if claim.owner is not image]

    def _release_followers(self, image: ImageClaims) -> list[Claim]:
        """End the leadership of an image that is committed or withdrawn, for all its blobs.

        Returns the claims that need not wait for their leaders any more. Those of leaders that
        remain still have to be removed from the followers, which `_next_steps` does.
        """
        host = image.where.host
        freed = list[Claim]()
        for digest in image.blobs:
            leader = self._leaders.get((host, digest))
            if leader is None:
                continue
            is_leader = leader.image is image
            # From the repository of a committed image, the followers of other images can mount too.
            if is_leader or not image.is_withdrawn:
                freed += leader.followers
            if is_leader:
                del self._leaders[host, digest]
        return freed

    def _next_steps(self, claims: Iterable[Claim]) -> list[Step]:
        """Decide anew about claims that are new or whose wait is over, and return the steps of
        those that may start now.

        Each other claim is queued: behind the first mount on its host, or behind a leader, which is
        an older image that copies the blob to another repository of the host.
        """
        # In promotion order, so that the oldest image becomes the leader of the others (rule 9).
        ordered = sorted(claims, key=lambda claim: claim.owner.order)
        for claim in ordered:
            self._leave_queues(claim)
        self._choose_first_mounts(ordered)

        steps = list[Step]()
        for claim in ordered:
            mount_from = self.knowledge.mount_source(claim.key.where, claim.key.digest)
            if mount_from is None:
                is_queued = self._queue_behind_leader(claim)
            else:
                is_queued = self._queue_behind_first_mount(claim)
            if not is_queued:
                steps.append(Step(claim.owner, claim.blob, mount_from))
        return steps

    def _choose_first_mounts(self, claims: list[Claim]) -> None:
        """Choose the smallest blob for the first mount on each host.

        If the host refuses the mount, the blob is uploaded in its place. The other claims wait for
        that upload, so it should be short (rule 10).
        """
        for claim in sorted(claims, key=lambda claim: claim.blob.size):
            if claim.host in self._first_mounts:
                continue
            is_host_unknown = self.knowledge.supports_mounts(claim.host) is None
            if is_host_unknown and self.knowledge.mount_source(claim.key.where, claim.key.digest):
                self._first_mounts[claim.host] = FirstMount(claim, [])

    def _queue_behind_first_mount(self, claim: Claim) -> bool:
        """Let a claim wait for the first mount on its host. Returns False, and does not queue it, if
        it makes that mount itself, or if it is known whether the host supports mounts.
        """
        if self.knowledge.supports_mounts(claim.host) is not None:
            return False
        first = self._first_mounts[claim.host]  # added by `_choose_first_mounts`
        if first.claim is claim:
            return False
        first.waiting.append(claim)
        return True

    def _queue_behind_leader(self, claim: Claim) -> bool:
        """Let a claim wait for an older image that copies its blob to the host, to mount it then.

        Such an image is the leader. If there is none, the claim's image becomes the leader. Returns
        False, and does not queue the claim, if the blob is to be uploaded now.
        """
        host_and_digest = (claim.host, claim.key.digest)
        leader = self._leaders.setdefault(host_and_digest, Leader(claim.owner, []))
        # An image waits only for images that were promoted earlier, so no circle can form (rule 9).
        if leader.image.order >= claim.owner.order:
            return False
        if not self.knowledge.may_mount(claim.key.where, leader.image.where.name):
            return False
        leader.followers.append(claim)
        claim.waiting_since = self._now()
        return True

    def _leave_queues(self, claim: Claim) -> None:
        """End the wait of a claim for a leader or for the first mount, if it waits."""
        leader = self._leaders.get((claim.host, claim.key.digest))
        if leader is not None and claim in leader.followers:
            leader.followers.remove(claim)
        first_mount = self._first_mounts.get(claim.host)
        if first_mount is not None and claim in first_mount.waiting:
            first_mount.waiting.remove(claim)


def _count_down(images: list[ImageClaims]) -> list[ImageClaims]:
    """Reduce `missing` of each image by one, and return the images that are ready now."""
    for image in images:
        image.missing -= 1
    return [image for image in images if image.is_ready()]

"""Who copies what: the claims that promoted images hold on blobs and manifests.

Owns: which image copies which blob and puts which child manifest, and who waits for whom.
May not know: tasks, slots, how anything is copied; of time only for how long an image has waited.
Invariants: a digest that promoted images lack in a repository has exactly one owner, promoted
before all that wait for it, so that no circle of waiting can form (rule 9); the same events give
the same steps (I10).
Follows: docs/specification.md section 1.1 "Cross-repo blob mounting"; docs/design.md section 6
rules 9 and 10.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import count
from typing import NamedTuple

from _regsync.oci.manifest import Descriptor
from _regsync.state.knowledge import Knowledge, RepositoryKey


class ClaimKey(NamedTuple):
    """What is claimed: a digest in a repository. An index may name the digest of a blob, so that one
    digest is wanted as blob and as manifest.
    """

    where: RepositoryKey
    digest: str
    is_manifest: bool


class ImageClaims:
    """What one promoted image lacks in its repository, and what it owns of that.

    `careful`: the registry would not notice that a blob is absent, so that what earlier runs knew of
    it may not be enough (docs/design.md section 7). Only `Claims` changes it.
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
        self.owned = dict[ClaimKey, Claim]()
        # Blobs, and children that others put, that are not in the repository yet.
        self.missing = 0
        # Blobs that were in the repository, or that others copied there.
        self.skipped = 0
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
        """Say whether everything that its manifests name is in the repository (I1)."""
        return self.missing == 0 and not self.failed


class Claim:
    """One digest that its owner brings to one repository, for itself and for those who wait."""

    def __init__(self, key: ClaimKey, owner: ImageClaims) -> None:
        self.key = key
        self.owner = owner
        # In promotion order: the first of them inherits the claim.
        self.waiters = list[ImageClaims]()
        # Who copies the same blob elsewhere on the host, if the owner waits to mount it from there;
        # and since when it waits.
        self.leader: Leader | None = None
        self.waits_since = 0.0

    @property
    def host(self) -> str:
        host, _ = self.key.where
        return host

    @property
    def blob(self) -> Descriptor:
        """Return the blob as its owner describes it: a wrong size in one image harms no other."""
        return self.owner.blobs[self.key.digest]


class Leader(NamedTuple):
    """The image that copies a blob to a host first, and the claims that wait to mount it from the
    repository of that image.
    """

    image: ImageClaims
    followers: list[Claim]


class FirstMount(NamedTuple):
    """The mount that finds out whether a host mounts at all, and the claims that wait for it."""

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
        # By host, while none of its answers says whether it mounts.
        self._first_mounts = dict[str, FirstMount]()
        self._order = count()

    def promote(self, image: ImageClaims) -> list[Step]:
        """Claim all that `image` lacks and nobody has claimed; wait for the rest."""
        image.order = next(self._order)
        lacking = [
            digest
            for digest in image.blobs
            if not self.knowledge.has_blob(image.where, digest, careful=image.careful)
        ]
        image.skipped = len(image.blobs) - len(lacking)
        image.missing = len(lacking)

        claimed = list[Claim]()
        for digest in lacking:
            claim = self._claim_or_wait(image, digest, is_manifest=False)
            if claim is not None:
                claimed.append(claim)

        # The manifests are claimed too. So an index that contains this image waits for it, rather
        # than putting it again, and a second tag of the same image is put after the first.
        # `Tree.missing_at` has left out children that are committed.
        manifests = [*image.children, image.root] if image.root else image.children
        for digest in manifests:
            if self._claim_or_wait(image, digest, is_manifest=True) is None:
                image.missing += 1

        return self._start(claimed)

    def is_covered(self, host: str, digest: str) -> bool:
        """Say whether some image copies a blob to a host already, or has done so."""
        return (host, digest) in self._leaders or any(self.knowledge.holders(host, digest))

    def arrived(
        self, image: ImageClaims, digest: str, *, is_confirmed: bool = True
    ) -> list[ImageClaims]:
        """Note that what `image` owned is in its repository; return the images that are ready now."""
        # A digest that is wanted as blob and as child arrives as blob first: children are put when
        # all blobs are there.
        key = ClaimKey(image.where, digest, is_manifest=False)
        if key not in image.owned:
            key = key._replace(is_manifest=True)
        claim = image.owned.pop(key)
        del self._claims[key]

        waiting = claim.waiters
        for waiter in claim.waiters:
            waiter.missing -= 1
        if not key.is_manifest:
            if is_confirmed:
                self.knowledge.add_blob(image.where, digest)
            else:
                self.knowledge.believe_blob(image.where, digest)
            image.missing -= 1
            for waiter in claim.waiters:
                waiter.skipped += 1
            waiting = [image, *claim.waiters]
        return [waiter for waiter in waiting if waiter.is_ready()]

    def mount_ended(self, host: str, *, mounted: bool) -> list[Step]:
        """Note how a mount ended. Claims that waited for the first mount on the host go on; so do those
        that wait for a leader from whose repository they may not mount any more.
        """
        moved = list[Claim]()
        first = self._first_mounts.pop(host, None)
        if first is not None:
            moved += first.waiting
        if not mounted:
            for leader in self._leaders.values():
                leader_host, repository = leader.image.where
                if leader_host == host:
                    moved += [
                        claim
                        for claim in leader.followers
                        if not self.knowledge.may_mount(claim.key.where, repository)
                    ]
        return self._start(moved)

    def stop_waiting_after(self, patience: float) -> list[Step]:
        """Let followers upload when they have waited `patience` seconds for their leader's commit."""
        before = self._now() - patience
        overdue = [
            claim
            for leader in self._leaders.values()
            for claim in leader.followers
            if claim.waits_since <= before
        ]
        for claim in overdue:
            self._stop_waiting(claim)
        return [Step(claim.owner, claim.blob, None) for claim in overdue]

    def complete(self, image: ImageClaims) -> list[Step]:
        """Note that an image is committed: claims on that host may mount its blobs now."""
        return self._start(self._end_leads(image))

    def pass_on(self, image: ImageClaims) -> tuple[list[Step], list[ImageClaims]]:
        """Record that an image is not copied: each of its claims goes to the earliest image waiting for it.

        Returns the steps that may start now, and the images that are ready now. Such an image
        now owns the claim of the last manifest that it waited for, and can put it.
        """
        image.failed = True
        blob_claims = dict[ClaimKey, Claim]()
        ready = list[ImageClaims]()
        for claim in image.owned.values():
            # Claims that waited for this one to try the first mount on the host.
            for freed in self._stop_waiting(claim):
                blob_claims[freed.key] = freed

            waiters = [waiter for waiter in claim.waiters if not waiter.failed]
            if not waiters:
                del self._claims[claim.key]
                continue
            self._pass_on(claim, waiters)
            if not claim.key.is_manifest:
                blob_claims[claim.key] = claim
            elif claim.owner.is_ready():
                ready.append(claim.owner)
        image.owned.clear()

        # A claim that nobody inherited may be among these: it waited for another claim of the failed
        # image to try the first mount on the host.
        to_start = [claim for claim in blob_claims.values() if claim.owner is not image]
        return self._start([*to_start, *self._end_leads(image)]), ready

    def _claim_or_wait(self, image: ImageClaims, digest: str, *, is_manifest: bool) -> Claim | None:
        """Return the claim that `image` now owns; None when it waits for another image's."""
        key = ClaimKey(image.where, digest, is_manifest)
        if key in self._claims:
            self._claims[key].waiters.append(image)
            return None
        claim = Claim(key, image)
        self._claims[key] = claim
        image.owned[key] = claim
        return claim

    @staticmethod
    def _pass_on(claim: Claim, waiters: list[ImageClaims]) -> None:
        claim.owner, *claim.waiters = waiters
        claim.owner.owned[claim.key] = claim
        if claim.key.is_manifest:
            claim.owner.missing -= 1  # it puts this child itself, so it waits for it no more

    def _end_leads(self, image: ImageClaims) -> list[Claim]:
        """Let an image lead no more; return the claims that need not wait any longer."""
        host, _ = image.where
        moved = list[Claim]()
        for digest in image.blobs:
            leader = self._leaders.get((host, digest))
            if leader is None:
                continue
            # A commit lets the followers of other leaders mount too.
            if leader.image is image or not image.failed:
                moved += leader.followers
            if leader.image is image:
                del self._leaders[host, digest]
        return moved

    def _start(self, claims: Iterable[Claim]) -> list[Step]:
        """Decide anew on claims that wait for nothing any more; return the steps to take now."""
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
        """Let the first mount on a host be that of the smallest blob (rule 10)."""
        for claim in sorted(claims, key=lambda claim: claim.blob.size):
            is_unknown = self.knowledge.mounts(claim.host) is None
            if is_unknown and self.knowledge.mount_source(claim.key.where, claim.key.digest):
                self._first_mounts.setdefault(claim.host, FirstMount(claim, []))

    def _next_step(self, claim: Claim) -> Step | None:
        """Decide how a blob comes to its repository: by mount, by upload, or (None) not yet."""
        source = self.knowledge.mount_source(claim.key.where, claim.key.digest)
        is_waiting = self._follows_leader(claim) if source is None else self._awaits_mount(claim)
        return None if is_waiting else Step(claim.owner, claim.blob, source)

    def _awaits_mount(self, claim: Claim) -> bool:
        """Say whether a blob waits until the first mount has shown whether the host mounts."""
        if self.knowledge.mounts(claim.host) is not None:
            return False
        first = self._first_mounts.setdefault(claim.host, FirstMount(claim, []))
        if first.tried is claim:
            return False
        first.waiting.append(claim)
        return True

    def _follows_leader(self, claim: Claim) -> bool:
        """Say whether a blob waits until an earlier image has committed it elsewhere on the host."""
        by_blob = (claim.host, claim.key.digest)
        leader = self._leaders.setdefault(by_blob, Leader(claim.owner, []))
        _, repository = leader.image.where
        # The leader was promoted first, else there could be a circle (rule 9).
        is_earlier = leader.image.order < claim.owner.order
        if not is_earlier or not self.knowledge.may_mount(claim.key.where, repository):
            return False
        leader.followers.append(claim)
        claim.leader = leader
        claim.waits_since = self._now()
        return True

    def _stop_waiting(self, claim: Claim) -> list[Claim]:
        """Let a claim wait for nothing; return those that waited for it to try the first mount."""
        if claim.leader is not None:
            claim.leader.followers.remove(claim)
            claim.leader = None
        first = self._first_mounts.get(claim.host)
        if first is None:
            return []
        if claim in first.waiting:
            first.waiting.remove(claim)
        if first.tried is not claim:
            return []
        del self._first_mounts[claim.host]
        return first.waiting

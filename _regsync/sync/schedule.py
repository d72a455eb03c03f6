"""Copy the images that discovery has found, with one coroutine for each promoted image.

Owns: when an image is promoted, which means that it claims the blobs that its target lacks and that
its coroutine starts; when an image has one of the slots that bound concurrent copies; what happens
if a target lacks something that the state says it has.
May not know: tags, mappings, how requests are sent and blobs transferred, which image is promoted
next (`election`), which image copies which blob (`claims`).
Invariants: a manifest is put after everything that it names (I1, I2); a wrong state costs requests
and fails no image (I5, "Healing"); an image that waits for other images holds no slot (I8); an
image that has ended holds no claims (I9); images are promoted one after another, so that the same
images make the same claims (I10), and an image waits only for images promoted before it.
Follows: docs/specification.md section 1.1 "Pipeline" and section 1.6; docs/design.md sections 6, 7
and 9.
"""

from __future__ import annotations

import enum
import heapq
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import anyio

from _regsync.errors import RegistryError, Side, SyncError
from _regsync.oci.manifest import Descriptor, Manifest
from _regsync.registry.repository import Repository, is_immutable, may_lack_part
from _regsync.registry.transport import Transport
from _regsync.state import Knowledge, RepositoryKey, Snapshot, key_of
from _regsync.sync.claims import Claims, ImageClaims, Step
from _regsync.sync.discovery import Discovery
from _regsync.sync.election import Pending
from _regsync.sync.image import BlobResult, ChildNotFetched, Image, ImageCopy, Traffic
from _regsync.sync.once import gather
from _regsync.sync.referrer_lists import ReferrerLists
from _regsync.sync.staging import SMALL_BLOB
from _regsync.sync.transfer import BlobTransfer, BytesFrom

if TYPE_CHECKING:
    from _regsync.sync.dry_run import DryRun

# Images that are promoted at the same time. Each has a coroutine (docs/design.md section 9).
_MAX_PROMOTED = 512

# Blobs of one image that are copied at the same time.
_MAX_BLOB_TASKS = 16

# Seconds. A target may not see a blob immediately after the blob was uploaded, so a refused
# manifest is put again after each of these pauses (I5).
_ABSENT_PAUSES = (0.5, 1.0, 2.0)

# How often an image starts again after its manifest was refused: once for the digests that the
# first refusal names, once for all digests believed from the state, and once for blobs that were
# believed from the answer to a POST.
_MOST_RESTARTS = 3

# Seconds. If another image has not committed a shared blob after this time, the blob is uploaded
# instead of mounted.
_MOUNT_PATIENCE = 600.0


class Phase(enum.Enum):
    """The phase of a promoted image. It holds a slot only in phase AT_WORK.

    from      event                                                           to
    --------  --------------------------------------------------------------  ---------
              the image is promoted                                           WAITING
    WAITING   it may copy a blob, or all blobs are present                    QUEUED
    QUEUED    a slot is free, and no older image is queued                    AT_WORK
    AT_WORK   its steps have ended, and other images copy the missing blobs   WAITING
    AT_WORK   it is committed, has failed, or has to start again              (removed)
    WAITING   the run ends, and no other image will copy the missing blobs    ABANDONED
    QUEUED    the run ends before it has copied anything                      ABANDONED
    """

    WAITING = enum.auto()
    QUEUED = enum.auto()
    AT_WORK = enum.auto()
    ABANDONED = enum.auto()


class _Promoted:
    """One promoted image with its phase and its steps. Each step copies one blob."""

    def __init__(self, image: Image, claims: ImageClaims, manifests_by_blob: Counter[str]) -> None:
        self.image = image
        self.claims = claims
        self.phase = Phase.WAITING
        # Whether it has been at work. Only such images continue during a drain.
        self.has_begun = False
        # By digest, the repository at the target's host that has a blob which the source lacks.
        self.other_holders = dict[str, Repository]()
        # Steps that have not started.
        self.steps = list[Step]()
        # How many steps are under way.
        self.running = 0
        # By blob digest, how many manifests name the blob. The scheduler shares and updates it.
        self._manifests_by_blob = manifests_by_blob
        # `next_step` waits for this event, and `wake` sets it. An event cannot be reset, so each
        # wait creates a new event.
        self._changed = anyio.Event()

    def wake(self) -> None:
        """Make `next_step` check its conditions again."""
        self._changed.set()

    async def next_step(self) -> Step | None:
        """Wait for a step that may start, and count it in `running`.

        Returns None if no further step will start, because all blobs are in the repository, a step
        has failed, or the run ends.
        """
        while not self._is_over():
            may_start = self.phase is Phase.AT_WORK and self.running < _MAX_BLOB_TASKS
            if may_start and self.steps:
                self.running += 1  # `Scheduler._finish_step` counts it down
                return self._take_step()
            self._changed = anyio.Event()  # the old event may be set already
            await self._changed.wait()
        return None

    def _take_step(self) -> Step:
        """Remove and return the step whose blob is named by the most manifests, or the oldest of
        them.

        The most other images wait for this blob.
        """
        step = max(self.steps, key=lambda step: self._manifests_by_blob[step.blob.digest])
        self.steps.remove(step)
        return step

    def _is_over(self) -> bool:
        """Report whether no further step will start."""
        if self.image.error is not None or self.phase is Phase.ABANDONED:
            return True
        return self.phase is Phase.AT_WORK and self.claims.is_ready()

    def can_only_wait(self) -> bool:
        """Report whether the image must wait for other images, so that it needs no slot."""
        if self.running or self.steps:
            return False
        return self.image.error is None and not self.claims.is_ready()


class Scheduler:
    """The promoted images, at most `slots` of them at work.

    An image passes through these methods:

        add_image       the image is pending, and takes part in the election
        _promote_next   the elected image claims the blobs that its target lacks; its coroutine starts
        _copy_image     its blobs are copied and its manifests put; then its artifacts are pending
        _start_again    its target lacked something that the state said it has: it is pending again
    """

    def __init__(
        self,
        transfer: BlobTransfer | DryRun,
        knowledge: Knowledge,
        discovery: Discovery,
        *,
        slots: int,
        start: Callable[..., None],
        queue_lookup: Callable[[str, Callable[[], Awaitable[None]]], None],
        lists: ReferrerLists | None,
        on_end: Callable[[ImageCopy], None],
        transport: Transport,
    ) -> None:
        """Create a scheduler that calls `on_end` with each copy that has ended.

        `start` starts a task. `queue_lookup` queues a look-up for a source (host:port). `lists`
        adds artifacts to the referrer lists of targets, and is None in a dry run.
        """
        self._transfer = transfer
        self._knowledge = knowledge
        self._discovery = discovery
        self._start_task = start
        self._queue_lookup = queue_lookup
        self._on_end = on_end
        self._lists = lists

        self.pending = Pending()
        # Set, and replaced by a new event, when fewer images are pending than the limit. Discovery
        # waits for this event.
        self._room_event = anyio.Event()

        self._claims = Claims(knowledge, anyio.current_time)
        # The promoted images that have not ended, oldest first.
        self._promoted = dict[ImageClaims, _Promoted]()
        # A heap of the images in phase QUEUED, each with the number of its promotion.
        self._queue = list[tuple[int, _Promoted]]()
        # The images in phase AT_WORK. Each holds one slot.
        self._at_work = set[_Promoted]()
        self._slots = slots

        # Whether the run is about to end, so that no further image is promoted.
        self.is_draining = False
        # When the drain cancels the remaining copies, on the clock of the event loop. None before.
        self.drain_deadline: float | None = None

        # By blob digest, how many manifests of the images looked up so far name the blob.
        self.manifests_by_blob = Counter[str]()
        # By target repository and reference, the artifacts that the target has. The value is True
        # if this run has copied the artifact.
        self._artifacts_at_target = dict[tuple[RepositoryKey, str], bool]()
        # The hosts to which images of this run are copied.
        self._target_hosts = set[str]()
        # The progress line reads the transport's counters.
        self.transport = transport
        # How many images were selected so far. An image counts once for each target.
        self.images_known = 0
        # How many of them have an outcome.
        self.images_done = 0
        self.traffic = Traffic()

    # For the run and its progress line.

    @property
    def bytes_moved(self) -> int:
        """Return the bytes of blobs that were sent to targets."""
        return self.transport.bytes_sent

    @property
    def images(self) -> list[Image]:
        """Return the images that were promoted and have not ended, oldest first."""
        return [promoted.image for promoted in self._promoted.values()]

    async def wait_for_room(self) -> None:
        """Wait until fewer images are pending than the limit, or a drain begins."""
        while self.pending.is_full() and not self.is_draining:
            await self._room_event.wait()

    def add_image(self, image: Image) -> None:
        """Make an image pending. The caller calls `advance` after the last image."""
        host = image.target.host.key
        self._target_hosts.add(host)
        sizes = {
            blob.digest: blob.size
            for manifest in (image.tree.root, *image.tree.children)
            for blob in manifest.blobs
        }
        # Only blobs that no image has copied to this host, or is about to copy, have to be
        # uploaded. All other blobs can be mounted, so they do not count in the election.
        uncovered_digests = [
            digest for digest in sizes if not self._claims.is_covered(host, digest)
        ]
        self.pending.add(image, [(host, digest) for digest in uncovered_digests])
        for digest in uncovered_digests:
            self.traffic.expect(host, digest, sizes[digest])

    def record_artifact(
        self, target: Repository, reference: str, *, is_copied: bool = False
    ) -> None:
        """Record that a target has an artifact. `is_copied` says whether this run has copied it."""
        self._artifacts_at_target.setdefault((target.key, reference), is_copied)

    def add_artifacts(self, images: Sequence[Image]) -> None:
        """Make artifacts pending.

        Their subjects must be at the target. The caller calls `advance`.
        """
        self.pending.add_artifacts(images)

    def commit(self, where: RepositoryKey, manifest: Manifest) -> None:
        """Record that a repository has a manifest and all blobs and children that it names."""
        blobs = [blob.digest for blob in manifest.blobs]
        children = [child.digest for child in manifest.children]
        self._knowledge.confirm_manifest(where, manifest.digest, blobs, children)

    def end_long_waits(self) -> None:
        """Upload the blobs that images have waited more than _MOUNT_PATIENCE to mount."""
        self._add_steps(self._claims.stop_waiting_after(_MOUNT_PATIENCE))
        self.advance()

    def drain(self) -> None:
        """Promote no further image. Images that have begun continue, even if no slot is free.

        Otherwise an image whose blobs are all copied could wait for a slot until the drain ends.
        """
        self.is_draining = True
        self._room_event.set()
        self.advance()

    # Slots and promotion.

    def advance(self) -> None:
        """Give free slots to the oldest queued images.

        If none is queued, promote further images.
        """
        # During a drain, every queued image may continue, even if no slot is free (see `drain`).
        while len(self._at_work) < self._slots or self.is_draining:
            if self._queue:
                _, promoted = heapq.heappop(self._queue)
                self._give_slot(promoted)
            elif self._may_promote():
                self._promote_next()
            else:
                break

        if not self._at_work:
            # No image is at work, so nothing would wake the images that still wait. They are
            # abandoned, so that the run ends and reports them. Without a drain no image waits here,
            # because an image waits only for older images (rule 9).
            for promoted in self._promoted.values():
                self._abandon(promoted)

    def _give_slot(self, promoted: _Promoted) -> None:
        """Give a slot to a queued image.

        During a drain, an image that must copy blobs is abandoned.
        """
        if self.is_draining and not promoted.has_begun and not promoted.claims.is_ready():
            self._abandon(promoted)
            return
        self._at_work.add(promoted)
        promoted.phase = Phase.AT_WORK
        promoted.has_begun = True
        promoted.wake()

    def _abandon(self, promoted: _Promoted) -> None:
        """Leave an image undone. Its claims are not passed on, because the run ends."""
        promoted.phase = Phase.ABANDONED
        promoted.wake()

    def _may_promote(self) -> bool:
        if self.is_draining or len(self._promoted) >= _MAX_PROMOTED:
            return False
        return len(self.pending) > 0

    def _promote_next(self) -> None:
        """Promote the elected image: claim what its target lacks, and start the image's coroutine.

        If its tree contradicts itself or is too large, the image fails instead. If a manifest that
        the target lacks was not fetched, the image starts again.

        This method must not await, so that the owner of a claim is older than all images that wait
        for the claim (rule 9).
        """
        image = self.pending.take()
        if not self.pending.is_full():
            self._room_event.set()
            self._room_event = anyio.Event()

        try:
            claims = self._build_claims(image)
        except ChildNotFetched:  # the target seemed to have the child when the image was looked up
            self._start_again(image)
            return
        except SyncError as error:
            source = image.source.name_of(image.reference)
            image.error = error.add_context(Side.SOURCE, "read", source)
            self._finish_failed(image)
            return

        promoted = _Promoted(image, claims, self.manifests_by_blob)
        self._promoted[claims] = promoted
        self._add_steps(self._claims.promote(claims))
        if claims.is_ready():  # there is no blob to copy, only manifests to put
            self._request_slot(promoted)
        self._start_task(self._copy_image, promoted)

    def _build_claims(self, image: Image) -> ImageClaims:
        """Find the parts that the target lacks. Raises the errors of `Tree.missing_at`."""
        where = image.target.store_key
        missing = image.tree.missing_at(
            lambda digest: self._knowledge.is_manifest_believed(where, digest)
        )
        return ImageClaims(
            where,
            blobs={blob.digest: blob for blob in missing.blobs},
            manifests=tuple(manifest.digest for manifest in (*missing.children, image.tree.root)),
            requires_recent_evidence=not image.tree.is_image,
        )

    def _add_steps(self, steps: Iterable[Step]) -> None:
        """Add each step to its image, and queue the image for a slot.

        The caller calls `advance`.
        """
        for step in steps:
            promoted = self._promoted[step.claims]
            promoted.steps.append(step)
            self._request_slot(promoted)

    def _queue_ready(self, ready: Iterable[ImageClaims]) -> None:
        """Queue images that may put their manifests for a slot. The caller calls `advance`."""
        for claims in ready:
            self._request_slot(self._promoted[claims])

    def _request_slot(self, promoted: _Promoted) -> None:
        """Queue an image for a slot, unless it is queued or has a slot. In any case wake it."""
        if promoted.phase is Phase.WAITING:
            promoted.phase = Phase.QUEUED
            heapq.heappush(self._queue, (promoted.claims.order, promoted))
        promoted.wake()

    # Copying an image.

    async def _copy_image(self, promoted: _Promoted) -> None:
        """Copy one promoted image: its blobs, its children, its root. Then make its artifacts
        pending.
        """
        image = promoted.image
        claims = promoted.claims

        await self._copy_blobs(promoted)
        if promoted.phase is Phase.ABANDONED:
            return  # it holds no slot, and stays in `_promoted` so that the run reports it

        is_committed = await self._put_manifests(image, claims)
        del self._promoted[claims]
        self._at_work.remove(promoted)
        image.blobs_present = len(claims.present)
        for blob in claims.present:
            self.traffic.record(claims.where, blob, BlobResult.PRESENT)

        if is_committed:
            # Images that wait for this image may mount its blobs now.
            self._add_steps(self._claims.image_committed(claims))
            self._finish_copied(image)
            self.add_artifacts(image.dependents)
        else:
            # Images that wait for this image inherit its claims, and copy the blobs themselves.
            unblocked = self._claims.withdraw(claims)
            self._add_steps(unblocked.steps)
            self._queue_ready(unblocked.ready)
            if image.error is not None:
                self._finish_failed(image)
            else:
                self._start_again(image)
        self.advance()

    async def _copy_blobs(self, promoted: _Promoted) -> None:
        """Copy the blobs whose claims an image owns, at most _MAX_BLOB_TASKS at the same time.

        A step may be added late: if the image inherits the claim of a failed image, or if another
        image has committed the blob in a repository from which it can now be mounted.
        """
        step = await promoted.next_step()
        if step is None:
            return
        image = promoted.image
        blobs = promoted.claims.blobs.values()
        try:
            # Only a layout can lack blobs as a source.
            promoted.other_holders = await self._find_other_holders(image, blobs)
            async with anyio.create_task_group() as copies:
                while step is not None:
                    copies.start_soon(self._copy_blob, promoted, step)
                    step = await promoted.next_step()
        except SyncError as error:
            # No copy has begun: `_copy_blob` records errors, and raises none.
            image.error = error
            self._finish_step(promoted)

    async def _find_other_holders(
        self, image: Image, blobs: Iterable[Descriptor]
    ) -> dict[str, Repository]:
        """Find a repository for each blob that the source of an image lacks, by digest.

        Raises the error of `_find_other_holder` if a blob is found nowhere.
        """
        where = image.target.store_key
        lacking_blobs = [
            blob
            for blob in blobs
            if image.source.known_read_error(blob) is not None
            and not self._knowledge.is_blob_believed(where, blob.digest)
        ]
        holders = await gather(
            partial(self._find_other_holder, image, blob) for blob in lacking_blobs
        )
        return {blob.digest: holder for blob, holder in zip(lacking_blobs, holders, strict=True)}

    async def _find_other_holder(self, image: Image, blob: Descriptor) -> Repository:
        """Find a repository that has a blob which the source lacks.

        Returns the target, or another repository of its host from which the blob can be mounted.
        Raises the error of reading the blob at the source if there is no such repository.
        """
        target = image.target
        if await target.has_blob(blob, with_retries=True):
            return target  # `_copy_blob` records that the blob is there
        # The receipt that was used to write the layout may name a repository that has the blob
        # (docs/design.md section 13, "Thin").
        name = image.source.far_repository(blob.digest)
        if name is not None and name != target.name:
            other = self._discovery.repository(target.host.registry, name, Side.SOURCE)
            if await other.has_blob(blob, with_retries=True):
                self._knowledge.confirm_blob(other.store_key, blob.digest)
                return other
        error = image.source.known_read_error(blob)
        assert error is not None
        raise error

    async def _copy_blob(self, promoted: _Promoted, step: Step) -> None:
        """Copy one blob, and wake the images that wait for it.

        An error is recorded in the image. The other steps under way continue, so that their uploads
        are not wasted.
        """
        image = promoted.image
        step = self._with_mount_source(promoted, step)
        result: BlobResult | None = None  # None if the transfer fails
        try:
            result = await self._transfer_blob(promoted, step)
        except SyncError as error:
            image.error = image.error or error  # the first error is reported
        else:
            blob = step.blob
            image.copy.record_blob(blob, result)
            self.traffic.record(step.claims.where, blob, result)
            is_confirmed = result is not BlobResult.BELIEVED
            ready = self._claims.blob_arrived(step.claims, blob.digest, is_confirmed=is_confirmed)
            self._queue_ready(ready)

        if step.mount_from is not None:
            # Other claims may wait to see whether the host mounts blobs, even if this blob was
            # present.
            is_mounted = result is BlobResult.MOUNTED
            steps = self._claims.mount_ended(image.target.host.key, mounted=is_mounted)
            self._add_steps(steps)
        self._finish_step(promoted)

    def _finish_step(self, promoted: _Promoted) -> None:
        """Record that a step has ended.

        If the image can only wait now, its slot is released (I8).
        """
        promoted.running -= 1
        if promoted.can_only_wait():
            promoted.phase = Phase.WAITING
            self._at_work.remove(promoted)
        promoted.wake()
        self.advance()

    async def _transfer_blob(self, promoted: _Promoted, step: Step) -> BlobResult:
        """Mount or upload a blob, unless `_find_other_holders` has found it at the target."""
        image = promoted.image
        # The repository that has the blob.
        holder = promoted.other_holders.get(step.blob.digest, image.source)
        if holder is image.target:
            return BlobResult.PRESENT
        bytes_from = self._decide_staging(image, step.blob)
        return await self._transfer.copy_blob(step, holder, image.target, bytes_from)

    def _with_mount_source(self, promoted: _Promoted, step: Step) -> Step:
        """Turn an upload into a mount if another repository of the host has the blob.

        Either `_find_other_holders` has found the repository, because the source lacks the blob, or
        another image has committed the blob there since the step was created.
        """
        holder = promoted.other_holders.get(step.blob.digest)
        if holder is not None and holder is not promoted.image.target:
            return step._replace(mount_from=holder.api_name)
        where = step.claims.where
        if step.mount_from is not None or not self._knowledge.supports_mounts(where.host):
            return step
        source = self._knowledge.mount_source(where, step.blob.digest)
        return step._replace(mount_from=source)

    def _decide_staging(self, image: Image, blob: Descriptor) -> BytesFrom:
        """Decide where the bytes of a blob are kept for further uploads (rule 13).

        They are kept on disk if the image has several targets, and in memory if the blob is small
        and will be uploaded again for another image. Returns SOURCE if they are not kept.
        """
        # Reading a layout again costs no requests.
        if image.source.is_local:
            return BytesFrom.SOURCE
        if image.copy.has_several_targets:
            return BytesFrom.DISK
        # On a host that mounts, a blob is uploaded once, however many images name it.
        never_mounts = self._knowledge.supports_mounts(image.target.host.key) is False
        has_several_hosts = len(self._target_hosts) > 1
        is_shared = self.manifests_by_blob[blob.digest] > 1
        is_uploaded_again = is_shared and (never_mounts or has_several_hosts)
        if is_uploaded_again and blob.size <= SMALL_BLOB:
            return BytesFrom.MEMORY
        return BytesFrom.SOURCE

    # Putting the manifests of an image.

    async def _put_manifests(self, image: Image, claims: ImageClaims) -> bool:
        """Put the children that an image has claimed, then its root, unless a blob has failed.

        Returns whether the image is committed. If not, its error is set, or the image has to start
        again because the state was wrong (docs/design.md section 7, "Healing").
        """
        if image.error is not None:
            return False
        root = image.tree.root
        try:
            if not self._is_put_already(image):
                refusal = await self._try_to_put(image, claims)
                if refusal is not None:
                    await self._prepare_restart(image, refusal)
                    return False
        except SyncError as error:
            image.error = error
            return False

        self._record_put(claims, root)  # the children are recorded as soon as each is put
        if image.snapshot_key:
            snapshot = Snapshot(key_of(image.tree.source_digest), key_of(root.digest))
            self._knowledge.record_snapshot(image.snapshot_key, snapshot)
        return True

    def _is_put_already(self, image: Image) -> bool:
        """Report whether an artifact is at the target because another image has copied it there.

        The other image may be another tag of the same subject, or an index that names the artifact.
        """
        if (image.target.key, image.reference) in self._artifacts_at_target:
            return True
        # In a layout an artifact needs its own entry in index.json, even if an index names it.
        if not image.artifact or image.target.is_local:
            return False
        return self._knowledge.is_manifest_confirmed(image.target.store_key, image.reference)

    async def _try_to_put(self, image: Image, claims: ImageClaims) -> RegistryError | None:
        """Put the manifests, several times with pauses if the target does not see its blobs yet.

        Returns None if the root is at the target. Returns the refusal if the target may lack
        something that the state says it has. Raises SyncError for any other failure.
        """
        refusal = await self._put_once(image, claims)
        for pause in _ABSENT_PAUSES:
            if refusal is None or not _reports_missing_part(refusal):
                break
            if self._unconfirmed_digests(image, refusal):
                break  # the state may be wrong, so the image must start again
            # The target has confirmed every part in this run, so it needs time to see them.
            await anyio.sleep(pause)
            refusal = await self._put_once(image, claims)
        return refusal

    async def _put_once(self, image: Image, claims: ImageClaims) -> RegistryError | None:
        """Put the manifests once. Returns and raises the same as `_try_to_put`."""
        try:
            on_put = partial(self._record_put, claims)
            await self._transfer.put_manifests(image, claims.own_manifests, on_put)
        except RegistryError as refusal:
            if is_immutable(refusal) and await self._handle_immutable_tag(image, refusal):
                return None
            if may_lack_part(refusal) and self._may_start_again(image, refusal):
                return refusal
            raise
        return None

    def _may_start_again(self, image: Image, refusal: RegistryError) -> bool:
        """Report whether an image may start again after a refusal.

        It may always start again once. After that, it may start again only if some of its parts
        have not been confirmed by an answer of this run.
        """
        if image.restarts == 0:
            return True
        return image.restarts < _MOST_RESTARTS and bool(self._unconfirmed_digests(image, refusal))

    def _record_put(self, claims: ImageClaims, manifest: Manifest) -> None:
        """Record that a manifest is in its repository, and wake the images that wait for a child."""
        self.commit(claims.where, manifest)
        if manifest.digest in claims.own_manifests:
            self._queue_ready(self._claims.manifest_arrived(claims, manifest.digest))
            self.advance()

    def _unconfirmed_digests(self, image: Image, refusal: RegistryError) -> frozenset[str]:
        """Return the digests of a refused image that no answer of this run has confirmed at the
        target.

        If the first refusal names some of these digests, only the named digests are returned, which
        saves requests. After a second refusal all are returned, because the first refusal was not
        complete.
        """
        where = image.target.store_key
        unconfirmed_digests = frozenset(
            digest
            for digest in image.tree.required_digests
            if not self._knowledge.is_confirmed(where, digest)
        )
        named_digests = unconfirmed_digests & refusal.digests
        is_first_refusal = image.restarts == 0
        if named_digests and is_first_refusal:
            return named_digests
        return unconfirmed_digests

    async def _prepare_restart(self, image: Image, refusal: RegistryError) -> None:
        """Forget all parts of a refused image that the target may lack, so that the image can start
        again: its next attempt asks the target for these parts, and sends those that are absent.

        The target may lack a part if no answer of this run has confirmed it. If all are confirmed,
        and the refusal reports that one is missing, the target is asked for each part. Raises the
        refusal if there is no part to forget.
        """
        doubtful_digests = self._unconfirmed_digests(image, refusal)
        if not doubtful_digests and _reports_missing_part(refusal):
            # The target has lost a part that this run has confirmed, or its answer was wrong.
            doubtful_digests = await image.target.missing_parts_of(
                image.tree.root, image.tree.children
            )
        if not doubtful_digests:
            raise refusal
        text = f"{refusal}; the blobs and manifests it names are checked again"
        self._discovery.log_once("debug", "healing", text)
        # The manifests above a doubtful part go too, because they are evidence of this part.
        for digest in image.tree.with_ancestors(doubtful_digests):
            self._knowledge.forget(image.target.store_key, digest)
        image.restarts += 1

    async def _handle_immutable_tag(self, image: Image, refusal: RegistryError) -> bool:
        """Handle the refusal to overwrite a tag. Returns whether the tag names the image already.

        If the tag names another image, the refusal stands, but on ECR it does not count as a
        failure (docs/design.md section 9).
        """
        digest_at_target = await image.target.head_manifest(image.reference)
        is_same_image = digest_at_target == image.tree.root.digest
        if is_same_image and refusal.retries > 0:
            return True  # the first attempt has probably put the image, and its answer was lost

        is_ecr = image.target.host.registry.kind.startswith("ecr")
        is_tag_kept = is_same_image or (is_ecr and digest_at_target is not None)
        if not is_tag_kept:
            return False
        self._discovery.log_once("debug", "tag_immutable_exists", str(refusal))
        image.is_kept_by_immutable_tag = not is_same_image
        if not image.artifact:
            image.copy.immutable_digest = digest_at_target
        elif is_same_image:
            self.record_artifact(image.target, image.reference)
        return is_same_image

    def _start_again(self, image: Image) -> None:
        """Fetch the manifests that the image's tree lacks, then make the image pending again."""
        self._queue_lookup(image.source.host.key, partial(self._fetch_lacking, image))

    async def _fetch_lacking(self, image: Image) -> None:
        try:
            image.tree = await self._discovery.complete_tree(image.source, image.tree)
        except SyncError as error:
            image.error = error
            self._finish_failed(image)
        else:
            self.add_image(image)
        self.advance()

    # The end of an image.

    def _finish_copied(self, image: Image) -> None:
        # An artifact of several images counts as copied for the first image only.
        is_first = (image.target.key, image.reference) not in self._artifacts_at_target
        image.copy.record_success(image, is_copied=is_first)
        if image.artifact:
            self.record_artifact(image.target, image.reference, is_copied=True)
        self.end_if_complete(image.copy)

    def _finish_failed(self, image: Image) -> None:
        image.copy.record_failure(image)
        self.end_if_complete(image.copy)

    def end_if_complete(self, copy: ImageCopy) -> None:
        """End a copy if all its images have ended.

        Before that, the artifacts are added to the referrer lists of a target without a referrers
        API. Does nothing if an image of the copy is unfinished.
        """
        if copy.unfinished_images:
            return

        # An artifact that could not be copied must not be listed.
        listing = dict[str, list[Descriptor]]()
        for subject, entries in copy.listing.items():
            entries_at_target = [
                entry
                for entry in entries
                if (copy.target.key, entry.digest) in self._artifacts_at_target
            ]
            if entries_at_target:
                listing[subject] = entries_at_target
        copy.listing = listing

        if self._lists is not None and listing:
            self._start_task(self._list_artifacts, copy, self._lists)
        else:
            self._on_end(copy)

    async def _list_artifacts(self, copy: ImageCopy, lists: ReferrerLists) -> None:
        """Add the artifacts of a copy to the referrer lists of its target, then end the copy."""
        try:
            for subject, entries in copy.listing.items():
                added_digests = await lists.ensure_listed(
                    copy.source, copy.target, subject, entries
                )
                # A list may lack artifacts that the target had before this run, because another
                # writer has replaced the list. Such artifacts count as copied.
                relisted_digests = {
                    digest
                    for digest in added_digests
                    if not self._artifacts_at_target[copy.target.key, digest]
                }
                copy.artifacts_skipped -= len(relisted_digests)
                copy.artifacts_copied |= relisted_digests
        except SyncError as error:
            copy.error = copy.error or error
        self._on_end(copy)


def _reports_missing_part(refusal: RegistryError) -> bool:
    """Report whether a manifest was refused because the registry does not find a part of it."""
    return refusal.status == 404 or any(code.endswith("_UNKNOWN") for code in refusal.codes)

"""Copy what discovery found: one coroutine for each promoted image, from its claims to its end.

Owns: when an image is promoted (it claims the blobs that its target lacks, and its coroutine
starts) and when it has a slot (few images may copy at the same time); what is done when a target
lacks something that the state says it holds.
May not know: tags, mappings, how requests are sent and blobs moved, which image is next
(`election`), who copies which blob (`claims`).
Invariants: a manifest is put when all that it names is there (I1, I2); a wrong state costs requests
and fails no image (I5, "Healing"); an image that waits for others holds no slot (I8); nothing is
left claimed by an image that has ended (I9); images are promoted one after another, so that the
same images give the same claims (I10), and an image waits only for images promoted before it.
Follows: docs/specification.md section 1.1 "Pipeline" and section 1.6; docs/design.md sections 6, 7
and 9.
"""

from __future__ import annotations

import enum
import heapq
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

import anyio

from _regsync.errors import RegistryError, Side, SyncError
from _regsync.oci.manifest import Descriptor, Manifest
from _regsync.registry.repository import Repository, is_immutable, may_be_stale
from _regsync.registry.transport import Transport
from _regsync.state.archive import RepositoryKey, Snapshot, key_of
from _regsync.state.knowledge import Knowledge
from _regsync.sync.claims import Claims, ImageClaims, Step
from _regsync.sync.discovery import Discovery
from _regsync.sync.election import Pending
from _regsync.sync.image import BlobResult, Image, ImageCopy, NotAtHand, Traffic
from _regsync.sync.once import gather
from _regsync.sync.referrer_lists import ReferrerLists
from _regsync.sync.staging import SMALL_BLOB
from _regsync.sync.transfer import BlobTransfer, StageIn

if TYPE_CHECKING:
    from _regsync.sync.dry_run import DryRun

# Promoted images at the same time; each has a coroutine (docs/design.md section 9).
_MAX_PROMOTED = 512

# Blobs of one image that are copied at the same time.
_MAX_BLOB_TASKS = 16

# A target may deny for a moment what this run has just copied there. A refused manifest is put again
# after each of these pauses, in seconds (I5).
_ABSENT_PAUSES = (0.5, 1.0, 2.0)

# How often an image starts again after refusals: for what the first one names, for all that the state
# was believed of, and for what only the answer to a POST said to be there.
_MOST_HEALINGS = 3

# Seconds for which an image waits for another image, which may be slow, to commit a blob: the blob
# can be mounted then.
_MOUNT_PATIENCE = 600.0


class Phase(enum.Enum):
    """Where a promoted image stands. It holds a slot in one phase only.

    from      when                                                            to
    --------  --------------------------------------------------------------  ---------
              it is promoted                                                  WAITING
    WAITING   it may copy a blob, or all is there and it may put manifests    QUEUED
    QUEUED    a slot is free, and no older image wants one                    AT_WORK
    AT_WORK   its steps have ended, and other images copy the rest            WAITING
    AT_WORK   it is committed, has failed, or has to start again              (gone)
    WAITING   the run ends, and nothing that it waits for will come           ABANDONED
    QUEUED    the run ends, and it has not copied anything yet                ABANDONED
    """

    WAITING = enum.auto()
    QUEUED = enum.auto()
    AT_WORK = enum.auto()
    ABANDONED = enum.auto()


class _Promoted:
    """One promoted image: its phase, and its steps, each of which copies one blob."""

    def __init__(self, image: Image, claims: ImageClaims, manifests_by_blob: Counter[str]) -> None:
        self.image = image
        self.claims = claims
        self.phase = Phase.WAITING
        # Whether it has been at work. A drain lets only such images end.
        self.has_begun = False
        # Whether `Scheduler._prepare` has looked for blobs that the source lacks; and by digest, which
        # repositories hold them.
        self.is_prepared = False
        self.elsewhere = dict[str, Repository]()
        # Steps that the claims have given it and that have not started.
        self.steps = list[Step]()
        # How many steps are under way.
        self.running = 0
        # The scheduler's own counter, which goes on growing: by digest, how many manifests name a blob.
        self._manifests_by_blob = manifests_by_blob
        # `next_step` waits for this event, and `wake` sets it. An event cannot be reset, so each
        # wait has a new one.
        self._changed = anyio.Event()

    def wake(self) -> None:
        """Let `next_step` look again."""
        self._changed.set()

    async def next_step(self) -> Step | None:
        """Wait for a step that may start, and count it in `running`.

        None when no further step comes: all is in the repository, a step has failed, or the run ends.
        """
        while not self._is_over():
            may_start = self.phase is Phase.AT_WORK and self.running < _MAX_BLOB_TASKS
            if may_start and self.steps:
                self.running += 1  # `Scheduler._end_step` counts it down
                return self._take_step()
            self._changed = anyio.Event()  # the last one may be set already
            await self._changed.wait()
        return None

    def _take_step(self) -> Step:
        """Remove and return the step whose blob most manifests name; among equals, the oldest.

        Other images wait for that blob, so it goes first.
        """
        step = max(self.steps, key=lambda step: self._manifests_by_blob[step.blob.digest])
        self.steps.remove(step)
        return step

    def _is_over(self) -> bool:
        """Say whether no further step starts."""
        if self.image.error is not None or self.phase is Phase.ABANDONED:
            return True
        return self.phase is Phase.AT_WORK and self.claims.is_ready()

    def is_idle(self) -> bool:
        """Say whether the image can only wait for other images; a failed one waits for none."""
        if self.running or self.steps:
            return False
        return self.image.error is None and not self.claims.is_ready()


class Scheduler:
    """The promoted images, at most `slots` of them at work.

    How an image goes:

        add_image       it is pending: the election chooses among the pending images
        _promote_next   it is elected, claims what its target lacks, and has a coroutine from now on
        _copy_image     its blobs are copied, its manifests put; then its artifacts are pending
        _start_again    its target lacked something that the state said it holds: pending once more

    `start` starts a task. `queue_lookup` queues one that asks a source (host:port). `lists` writes lists of
    referrers at targets; it is None in a dry run. `on_end` is called with each copy that has ended.
    """

    # What the progress display says of an image at work.
    verb = "copying"

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
        self._transfer = transfer
        self._knowledge = knowledge
        self._discovery = discovery
        self._start_task = start
        self._queue_lookup = queue_lookup
        self._on_end = on_end
        self._lists = lists

        self.pending = Pending()
        # Discovery waits for this event while too many images are pending.
        self._room = anyio.Event()

        self._claims = Claims(knowledge, anyio.current_time)
        # Oldest first.
        self._promoted = dict[ImageClaims, _Promoted]()
        # A heap of the images in phase QUEUED, each with its place in the order of promotions.
        self._queue = list[tuple[int, _Promoted]]()
        # The images in phase AT_WORK: each holds one of the slots.
        self._at_work = set[_Promoted]()
        self._slots = slots

        # While draining no further image is promoted.
        self.is_draining = False
        # When the images that have begun are cancelled, on the clock of the event loop.
        self.drain_ends: float | None = None

        # By the digest of a blob, how many manifests of discovered images name it.
        self.manifests_by_blob = Counter[str]()
        # By target repository and reference, the artifacts that the target holds: True for an
        # artifact that this run copied.
        self._artifacts_at_target = dict[tuple[RepositoryKey, str], bool]()
        # The hosts to which images of this run are copied.
        self._target_hosts = set[str]()
        # A display reads the transport's counters.
        self.transport = transport
        # Images times targets, as far as they are known.
        self.images_known = 0
        self.images_done = 0
        self.traffic = Traffic()
        # By host, the images that have failed there.
        self.failures = Counter[str]()

    # For the run and its progress display.

    @property
    def bytes_moved(self) -> int:
        """Return the bytes of blobs that were sent to targets."""
        return self.transport.bytes_sent

    @property
    def images(self) -> dict[ImageClaims, Image]:
        """Return the images that were promoted and have not ended, oldest first."""
        return {claims: promoted.image for claims, promoted in self._promoted.items()}

    def under_way(self) -> list[str]:
        """Return the source references of the images at work."""
        return [
            promoted.image.source.reference(promoted.image.reference)
            for promoted in self._promoted.values()
            if promoted.phase is Phase.AT_WORK
        ]

    async def wait_for_room(self) -> None:
        """Wait while too many images are pending; a drain ends the wait."""
        while self.pending.is_full() and not self.is_draining:
            if self._room.is_set():  # it was set for an earlier wait, and events cannot be reset
                self._room = anyio.Event()
            await self._room.wait()

    def add_image(self, image: Image) -> None:
        """Make an image pending. The caller calls `advance` after the last one."""
        host = image.target.host.key
        self._target_hosts.add(host)
        sizes = {
            blob.digest: blob.size
            for manifest in (image.tree.root, *image.tree.children)
            for blob in manifest.blobs
        }
        # The election counts only blobs that no image has copied to this host or is about to copy.
        # They alone have to be sent: all others can be mounted.
        uncovered = [digest for digest in sizes if not self._claims.is_covered(host, digest)]
        self.pending.add(image, [(host, digest) for digest in uncovered])
        for digest in uncovered:
            self.traffic.expect(host, digest, sizes[digest])

    def record_artifact(self, target: Repository, reference: str, *, copied: bool = False) -> None:
        """Note that a target holds an artifact, and whether this run has copied it there."""
        self._artifacts_at_target.setdefault((target.key, reference), copied)

    def add_artifacts(self, images: Sequence[Image]) -> None:
        """Make artifacts pending whose subject is at the target. The caller calls `advance` then."""
        self.pending.add_artifacts(images)

    def commit(self, where: RepositoryKey, manifest: Manifest) -> None:
        """Note that a repository holds a manifest and all blobs and children that it names."""
        blobs = [blob.digest for blob in manifest.blobs]
        children = [child.digest for child in manifest.children]
        self._knowledge.confirm_manifest(where, manifest.digest, blobs, children)

    def end_long_waits(self) -> None:
        """Let images upload the blobs that they have waited too long to mount."""
        self._give_steps(self._claims.stop_waiting_after(_MOUNT_PATIENCE))
        self.advance()

    def drain(self) -> None:
        """Promote no further image. Images that have begun may end, and need no free slot for it: else
        an image whose blobs are all copied could still wait for one.
        """
        self.is_draining = True
        self._room.set()
        self.advance()

    # When images begin and go on.

    def advance(self) -> None:
        """Give free slots to the oldest images that want one; then promote further images."""
        while len(self._at_work) < self._slots or self.is_draining:
            if self._queue:
                _, promoted = heapq.heappop(self._queue)
                self._give_slot(promoted)
            elif self._may_promote():
                self._promote_next()
            else:
                break

        if not self._at_work:
            # No image is at work, so nothing will wake the images that still wait. Outside a drain
            # there are none, because an image waits for older ones alone (rule 9). Should that rule
            # be broken, the run ends all the same, and names these images.
            for promoted in self._promoted.values():
                self._abandon(promoted)

    def _give_slot(self, promoted: _Promoted) -> None:
        """Let a queued image work. A drain lets no image begin that still has blobs to copy."""
        if self.is_draining and not promoted.has_begun and not promoted.claims.is_ready():
            self._abandon(promoted)
            return
        self._at_work.add(promoted)
        promoted.phase = Phase.AT_WORK
        promoted.has_begun = True
        promoted.wake()

    def _abandon(self, promoted: _Promoted) -> None:
        """Leave an image undone. Its claims pass to nobody, because the run ends."""
        promoted.phase = Phase.ABANDONED
        promoted.wake()

    def _may_promote(self) -> bool:
        if self.is_draining or len(self._promoted) >= _MAX_PROMOTED:
            return False
        return len(self.pending) > 0

    def _promote_next(self) -> None:
        """Take the elected image, claim what its target lacks, and start the image's coroutine.

        Nothing is awaited here, so that the owner of a claim is older than all images that wait for
        it (rule 9).
        """
        image = self.pending.take()
        if not self.pending.is_full():
            self._room.set()

        where = image.target.pool
        try:
            blobs, children = image.tree.missing_at(
                lambda digest: self._knowledge.is_manifest_believed(where, digest)
            )
        except NotAtHand:  # when the image was looked up, the target seemed to hold the child
            self._start_again(image)
            return
        except SyncError as error:
            source = image.source.reference(image.reference)
            image.error = error.with_place(Side.SOURCE, "read", source)
            self._end_failed(image)
            return

        claims = ImageClaims(
            where,
            {blob.digest: blob for blob in blobs},
            tuple(child.digest for child in children),
            image.tree.root.digest,
            careful=not image.tree.is_image,
        )
        promoted = _Promoted(image, claims, self.manifests_by_blob)
        self._promoted[claims] = promoted
        self._give_steps(self._claims.promote(claims))
        if claims.is_ready():
            self._want_slot(promoted)
        self._start_task(self._copy_image, promoted)

    def _give_steps(self, steps: Iterable[Step]) -> None:
        """Give each step to its image, which then wants a slot; the caller calls `advance`."""
        for step in steps:
            promoted = self._promoted[step.claims]
            promoted.steps.append(step)
            self._want_slot(promoted)

    def _wake_ready(self, ready: Iterable[ImageClaims]) -> None:
        """Let images put their manifests, for which they want a slot; the caller calls `advance`."""
        for claims in ready:
            self._want_slot(self._promoted[claims])

    def _want_slot(self, promoted: _Promoted) -> None:
        """Queue an image that has something to do; wake it if it is queued or at work already."""
        if promoted.phase is Phase.WAITING:
            promoted.phase = Phase.QUEUED
            heapq.heappush(self._queue, (promoted.claims.order, promoted))
        promoted.wake()

    # How an image is copied.

    async def _copy_image(self, promoted: _Promoted) -> None:
        """Copy one promoted image: its blobs, its children, its root. Then its artifacts are pending.

        A failure is recorded in the image. An image whose target lacks something that the state says
        it holds starts again. In both cases its claims pass to the images that wait for them.
        """
        image = promoted.image
        claims = promoted.claims

        await self._copy_blobs(promoted)
        if promoted.phase is Phase.ABANDONED:
            return  # it holds no slot; it stays in `_promoted`, so that the run knows of it

        is_committed = image.error is None and await self._put_manifests(image, claims)

        if is_committed:
            # Images that wait for this one may mount its blobs now.
            self._give_steps(self._claims.complete(claims))
        else:
            # Images that wait for this one inherit its claims, and copy the blobs themselves.
            steps, ready = self._claims.pass_on(claims)
            self._give_steps(steps)
            self._wake_ready(ready)
        del self._promoted[claims]
        self._at_work.remove(promoted)

        image.blobs_present = len(claims.present)
        for blob in claims.present:
            self.traffic.record(claims.where, blob, BlobResult.PRESENT)
        if is_committed:
            self._end_copied(image)
            self.add_artifacts(image.dependents)
        elif image.error is not None:
            self._end_failed(image)
        else:  # nothing failed: the target lacks something that the state said it holds
            self._start_again(image)
        self.advance()

    async def _copy_blobs(self, promoted: _Promoted) -> None:
        """Copy the blobs whose claims an image owns, up to `_MAX_BLOB_TASKS` at the same time.

        A step may come late: when the claim of a failed image passes to this one, or when another
        image has committed a blob elsewhere on the host, from where it can be mounted now.
        """
        image = promoted.image
        with ExitStack() as room:
            async with anyio.create_task_group() as blobs:
                while step := await promoted.next_step():
                    if not promoted.is_prepared:
                        await self._prepare(promoted, room)
                    if image.error is None:
                        blobs.start_soon(self._copy_blob, promoted, step)
                    else:
                        self._end_step(promoted)

    async def _prepare(self, promoted: _Promoted, room: ExitStack) -> None:
        """Before anything of an image is written, find the blobs that its source is known to lack, and
        have the target keep room for the image until `room` is closed.

        Only an image layout lacks blobs that its images name, or has to keep room. The image fails
        where a blob is nowhere, or where there is too little room.
        """
        image = promoted.image
        claims = promoted.claims
        promoted.is_prepared = True
        lacking = [
            blob
            for blob in claims.blobs.values()
            if image.source.known_read_error(blob) is not None
            and not self._knowledge.is_blob_believed(claims.where, blob.digest)
        ]
        try:
            holders = await gather(partial(self._find_elsewhere, image, blob) for blob in lacking)
            room.enter_context(self._transfer.reserving(image, claims.blobs.values()))
        except SyncError as error:
            image.error = error
            return
        for blob, holder in zip(lacking, holders, strict=True):
            promoted.elsewhere[blob.digest] = holder

    async def _find_elsewhere(self, image: Image, blob: Descriptor) -> Repository:
        """Return the repository that holds a blob which the source lacks: the target, or another one
        of its host from which the blob can be mounted. Raises why the source cannot give it.
        """
        target = image.target
        if await target.has_blob(blob, with_retries=True):
            return target
        # A receipt may have said, when the layout was written, who holds the blob on the far side
        # (docs/design.md section 13, "Thin").
        name = image.source.far_repository(blob.digest)
        if name is not None and name != target.name:
            other = self._discovery.repository(target.host.registry, name, Side.SOURCE)
            if await other.has_blob(blob, with_retries=True):
                self._knowledge.confirm_blob(other.pool, blob.digest)
                return other
        lack = image.source.known_read_error(blob)
        assert lack is not None
        raise lack

    async def _copy_blob(self, promoted: _Promoted, step: Step) -> None:
        """Copy one blob, and let go on what has waited for it. A failure fails the image, but stops none
        of its steps that are under way.
        """
        image = promoted.image
        step = self._with_mount_source(promoted, step)
        result = None
        try:
            result = await self._bring_blob(promoted, step)
        except SyncError as error:
            image.error = image.error or error
        else:
            blob = step.blob
            image.copy.record_blob(blob, result)
            self.traffic.record(step.claims.where, blob, result)
            is_confirmed = result is not BlobResult.BELIEVED
            ready = self._claims.blob_arrived(step.claims, blob.digest, is_confirmed=is_confirmed)
            self._wake_ready(ready)

        if step.mount_from is not None:
            # Other claims may wait to see whether the host mounts, also where no mount was needed.
            is_mounted = result is BlobResult.MOUNTED
            steps = self._claims.mount_ended(image.target.host.key, mounted=is_mounted)
            self._give_steps(steps)
        self._end_step(promoted)

    def _end_step(self, promoted: _Promoted) -> None:
        """Note that a step has ended. An image that can only wait now gives its slot back (I8)."""
        promoted.running -= 1
        if promoted.is_idle():
            promoted.phase = Phase.WAITING
            self._at_work.remove(promoted)
        promoted.wake()
        self.advance()

    async def _bring_blob(self, promoted: _Promoted, step: Step) -> BlobResult:
        """Bring a blob to its repository by mount or upload, unless `_prepare` has found it there."""
        image = promoted.image
        holder = promoted.elsewhere.get(step.blob.digest, image.source)
        if holder is image.target:
            return BlobResult.PRESENT
        stage_in = self._where_to_stage(image, step.blob)
        return await self._transfer.copy_blob(step, holder, image.target, stage_in)

    def _with_mount_source(self, promoted: _Promoted, step: Step) -> Step:
        """Turn an upload into a mount where another repository of the host holds the blob: one that
        `_prepare` has found, because the source lacks the blob, or one that has committed it since the
        claims gave the step.
        """
        holder = promoted.elsewhere.get(step.blob.digest)
        if holder is not None and holder is not promoted.image.target:
            return step._replace(mount_from=holder.api_name)
        if step.mount_from is not None or not self._knowledge.supports_mounts(
            step.claims.where.host
        ):
            return step
        source = self._knowledge.mount_source(step.claims.where, step.blob.digest)
        return step._replace(mount_from=source)

    def _where_to_stage(self, image: Image, blob: Descriptor) -> StageIn:
        """Say where a blob's bytes are kept for later uploads (rule 13): on disk when other targets
        need the blob, in memory when it is small and will be uploaded again for another image.
        """
        # A directory can be read again at no cost.
        if image.source.is_local:
            return None
        if image.copy.has_several_targets:
            return "disk"
        # On a host that mounts, a blob is uploaded once, however many images name it.
        never_mounts = self._knowledge.supports_mounts(image.target.host.key) is False
        is_shared = self.manifests_by_blob[blob.digest] > 1
        is_uploaded_again = is_shared and (never_mounts or len(self._target_hosts) > 1)
        if is_uploaded_again and blob.size <= SMALL_BLOB:
            return "memory"
        return None

    # How its manifests are put.

    async def _put_manifests(self, image: Image, claims: ImageClaims) -> bool:
        """Put the children that this image has claimed, then its root; return whether the root is in
        the repository now.

        After False the image has failed if `image.error` is set. Otherwise the target lacks a blob
        or child that the state says it holds: this has been forgotten, and the image has to start
        again (docs/design.md section 7, "Healing").
        """
        root = image.tree.root
        try:
            if not self._is_put_already(image):
                refusal = await self._try_to_put(image, claims)
                if refusal is not None:
                    await self._forget_lost(image, refusal)
                    return False
        except SyncError as error:
            image.error = error
            return False

        self._record_put(claims, root)
        if image.snapshot_key:
            snapshot = Snapshot(key_of(image.tree.source_digest), key_of(root.digest))
            self._knowledge.record_snapshot(image.snapshot_key, snapshot)
        return True

    def _is_put_already(self, image: Image) -> bool:
        """Say whether an artifact is at the target since another image has brought it: another tag of
        its subject, or an index that names it too.
        """
        if (image.target.key, image.reference) in self._artifacts_at_target:
            return True
        # In a layout an artifact has an entry of its own, which its index does not make.
        if not image.artifact or image.target.is_local:
            return False
        return self._knowledge.is_manifest_confirmed(image.target.pool, image.reference)

    async def _try_to_put(self, image: Image, claims: ImageClaims) -> RegistryError | None:
        """Put the manifests, if need be again after a pause; None when the root is at the target.

        Returns a refusal that may mean that the target has lost something. Raises SyncError for any
        other failure.
        """
        refusal = await self._put_once(image, claims)
        for pause in _ABSENT_PAUSES:
            if refusal is None or not _denies_existence(refusal):
                break
            if self._unconfirmed(image, refusal):
                break  # the state may be wrong: this is healed, not waited for
            # The target denies what this run has copied there: it is late to see it.
            await anyio.sleep(pause)
            refusal = await self._put_once(image, claims)
        return refusal

    async def _put_once(self, image: Image, claims: ImageClaims) -> RegistryError | None:
        """Put the manifests once; results as of `_try_to_put`."""
        try:
            on_put = partial(self._record_put, claims)
            await self._transfer.put_manifests(image, claims.own_children, on_put)
        except RegistryError as refusal:
            if is_immutable(refusal) and await self._check_immutable_tag(image, refusal):
                return None
            if may_be_stale(refusal) and self._may_heal(image, refusal):
                return refusal
            raise
        return None

    def _may_heal(self, image: Image, refusal: RegistryError) -> bool:
        """Say whether an image may start again after a refusal: the first time in any case, later only
        while it has parts that no answer of this run has confirmed.
        """
        if image.healings == 0:
            return True
        return image.healings < _MOST_HEALINGS and bool(self._unconfirmed(image, refusal))

    def _record_put(self, claims: ImageClaims, manifest: Manifest) -> None:
        """Note that a manifest is in its repository; images that wait for a child may go on."""
        self.commit(claims.where, manifest)
        if manifest.digest in claims.own_children:
            self._wake_ready(self._claims.manifest_arrived(claims, manifest.digest))
            self.advance()

    def _unconfirmed(self, image: Image, refusal: RegistryError) -> frozenset[str]:
        """Return the digests of a refused image that may be lost: no answer of this run has confirmed
        them at the target.

        If the refusal names some of them, only those: the others cost no request then. The names are
        believed once: a second refusal shows that the first one did not name all that is lost.
        """
        where = image.target.pool
        unconfirmed = frozenset(
            digest
            for digest in image.tree.required_digests
            if not self._knowledge.is_confirmed(where, digest)
        )
        named = unconfirmed & refusal.digests
        return named if named and image.healings == 0 else unconfirmed

    async def _forget_lost(self, image: Image, refusal: RegistryError) -> None:
        """Forget the blobs and children that the target may have lost, and every manifest that names
        one of them.

        If this run has confirmed all parts of the image, the target is asked for each. Raises the
        refusal when nothing is lost.
        """
        lost = self._unconfirmed(image, refusal)
        if not lost and _denies_existence(refusal):
            # What this run has seen at the target is gone, or was never there.
            lost = await image.target.missing_parts_of(image.tree.root, image.tree.children)
        if not lost:
            raise refusal
        text = f"{refusal}; the blobs and manifests it names are checked again"
        self._discovery.log_once("debug", "healing", text)
        for digest in image.tree.with_ancestors(lost):
            self._knowledge.forget(image.target.pool, digest)
        image.healings += 1

    async def _check_immutable_tag(self, image: Image, refusal: RegistryError) -> bool:
        """Ask what an immutable tag names; return whether it names the image already.

        Notes in `image` whether the refusal is no failure: at ecr kinds it is none even if the tag
        names another image (docs/design.md section 9).
        """
        digest_at_target = await image.target.head_manifest(image.reference)
        is_ours = digest_at_target == image.tree.root.digest
        is_ecr = image.target.host.registry.kind.startswith("ecr")
        is_skipped_at_ecr = is_ecr and digest_at_target is not None
        image.is_kept_by_immutable_tag = is_ours or is_skipped_at_ecr

        # After a retry the image was probably put by the first attempt, whose answer was lost.
        is_put_by_us = is_ours and refusal.retries > 0
        if image.is_kept_by_immutable_tag and not is_put_by_us:
            self._discovery.log_once("debug", "tag_immutable_exists", str(refusal))
            if not image.artifact:
                image.copy.immutable_digest = digest_at_target
            elif is_ours:
                self.record_artifact(image.target, image.reference)
        return is_ours

    def _start_again(self, image: Image) -> None:
        """Fetch the manifests that are not at hand, then make the image pending again."""
        self._queue_lookup(image.source.host.key, partial(self._fetch_lacking, image))

    async def _fetch_lacking(self, image: Image) -> None:
        try:
            image.tree = await self._discovery.complete_tree(image.source, image.tree)
        except SyncError as error:
            image.error = error
            self._end_failed(image)
        else:
            self.add_image(image)
        self.advance()

    # How it ends.

    def _end_copied(self, image: Image) -> None:
        # An artifact that several images have is copied by the first of them.
        is_first = (image.target.key, image.reference) not in self._artifacts_at_target
        image.copy.record_success(image, copied=is_first)
        if image.artifact:
            self.record_artifact(image.target, image.reference, copied=True)
        self.end_if_complete(image.copy)

    def _end_failed(self, image: Image) -> None:
        image.copy.record_failure(image)
        self.end_if_complete(image.copy)

    def end_if_complete(self, copy: ImageCopy) -> None:
        """End a copy if all its images have ended. A target without the referrers API gets lists of
        the artifacts first.
        """
        if copy.unfinished_images:
            return

        # Only what the target holds is listed: an artifact that has failed is not.
        listing = dict[str, list[Descriptor]]()
        for subject, entries in copy.listing.items():
            at_target = [
                entry
                for entry in entries
                if (copy.target.key, entry.digest) in self._artifacts_at_target
            ]
            if at_target:
                listing[subject] = at_target
        copy.listing = listing

        if self._lists is not None and listing:
            self._start_task(self._list_artifacts, copy, self._lists)
        else:
            self._on_end(copy)

    async def _list_artifacts(self, copy: ImageCopy, lists: ReferrerLists) -> None:
        """Have the target's lists name the artifacts of a copy, then end the copy."""
        try:
            for subject, entries in copy.listing.items():
                added = await lists.ensure_listed(copy.source, copy.target, subject, entries)
                # The target may have held artifacts that its list did not name, because another writer
                # had replaced it. They count as copied, like those that this run has copied.
                relisted = {
                    digest
                    for digest in added
                    if not self._artifacts_at_target[copy.target.key, digest]
                }
                copy.artifacts_skipped -= len(relisted)
                copy.artifacts_copied |= relisted
        except SyncError as error:
            copy.error = copy.error or error
        self._on_end(copy)


def _denies_existence(refusal: RegistryError) -> bool:
    """Say whether a manifest was refused because the registry denies that a part of it exists."""
    return refusal.status == 404 or any(code.endswith("_UNKNOWN") for code in refusal.codes)

"""Copy what discovery found: one coroutine for each promoted image, from its claims to its end.

Owns: the promotions, the image slots, the healing of a state that was wrong.
May not know: tags, mappings, how anything is asked or moved, which image is next (`election`), who
copies which blob (`claims`).
Invariants: I1 and I2 (a manifest is put when all that it names is there), I5 "Healing", I8 (an
image that waits for others holds no slot), I9, I10; images are promoted one after another, and an
image waits only for images promoted before it.
Follows: docs/specification.md section 1.1 "Pipeline" and section 1.6; docs/design.md sections 6, 7
and 9.
"""

from __future__ import annotations

import enum
import heapq
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial

import anyio

from _regsync.errors import RegistryError, Side, SyncError
from _regsync.oci.manifest import Descriptor, Manifest
from _regsync.registry.repository import is_immutable, may_be_stale
from _regsync.registry.transport import Transport
from _regsync.state.knowledge import Knowledge, RepositoryKey, key_of
from _regsync.sync.claims import Claims, ImageClaims, Step
from _regsync.sync.discovery import Discovery
from _regsync.sync.election import Pending
from _regsync.sync.image import BlobResult, Image, ImageCopy, NotAtHand, order_blobs
from _regsync.sync.staging import SMALL_BLOB
from _regsync.sync.transfer import BlobTransfer, Keep

# Images with a coroutine (docs/design.md section 9).
_MAX_PROMOTED = 512

# Blobs of one image that are copied at the same time.
_MAX_BLOB_TASKS = 16

# Seconds before a manifest is put again that was refused for something that this run copied (I5).
_ABSENT_PAUSES = (0.5, 1.0, 2.0)

# Seconds for which an image waits to mount a blob that another one is to commit on the same host:
# the other one may crawl.
_MOUNT_PATIENCE = 600.0


class Phase(enum.Enum):
    """Where a promoted image stands. It holds a slot in one phase only.

    from      when                                                            to
    --------  --------------------------------------------------------------  ---------
              it is promoted                                                  WAITING
    WAITING   it may copy a blob, or all is there and it may put manifests    QUEUED
    QUEUED    a slot is free, and it is the oldest image that wants one       AT_WORK
    AT_WORK   its running steps have ended, and the rest is up to others      WAITING
    AT_WORK   it is committed, has failed, or has to start again              (gone)
    WAITING   the run ends, and nothing that it waits for will come           ABANDONED
    QUEUED    the run ends, and it has not copied anything yet                ABANDONED
    """

    WAITING = enum.auto()
    QUEUED = enum.auto()
    AT_WORK = enum.auto()
    ABANDONED = enum.auto()


class _Promoted:
    """One promoted image: its phase, the steps that it has been given, how many of them run."""

    def __init__(self, image: Image, work: ImageClaims) -> None:
        self.image = image
        self.work = work
        self.phase = Phase.WAITING
        self.has_begun = False
        self.steps = deque[Step]()
        self.running = 0
        self._changed = anyio.Event()

    def wake(self) -> None:
        """Let `next_step` look again."""
        self._changed.set()

    async def next_step(self) -> Step | None:
        """Wait for the next blob to copy; None when no further one comes: all is in the repository,
        a step has failed, or the run ends.
        """
        while not self._is_over():
            may_start = self.phase is Phase.AT_WORK and self.running < _MAX_BLOB_TASKS
            if may_start and self.steps:
                self.running += 1
                return self.steps.popleft()
            self._changed = anyio.Event()
            await self._changed.wait()
        return None

    def _is_over(self) -> bool:
        if self.image.error is not None or self.phase is Phase.ABANDONED:
            return True
        return self.phase is Phase.AT_WORK and self.work.is_ready()

    def is_idle(self) -> bool:
        """Say whether the image can do nothing until another one has done something."""
        if self.running or self.steps:
            return False
        return self.image.error is None and not self.work.is_ready()


class Scheduler:
    """Images on their way, at most `slots` of them at work.

    `start` starts a task. `ask` queues a question for a source. `keep_list` is
    `referrers.Referrers.keep` where lists are kept. `ended` is told of each copy.
    """

    def __init__(
        self,
        mover: BlobTransfer,
        knowledge: Knowledge,
        discovery: Discovery,
        *,
        slots: int,
        start: Callable[..., None],
        ask: Callable[[str, Callable[[], Awaitable[None]]], None],
        keep_list: Callable[..., Awaitable[set[str]]] | None,
        ended: Callable[[ImageCopy], None],
        transport: Transport,
    ) -> None:
        self._mover = mover
        self._knowledge = knowledge
        self._discovery = discovery
        self._start_task = start
        self._ask = ask
        self._ended = ended
        self._keep_list = keep_list

        # Images that wait for their promotion, and what discovery waits for while they are many.
        self.pending = Pending()
        self._room = anyio.Event()

        # Promoted images, oldest first; those that want a slot, by their order.
        self._claims = Claims(knowledge, anyio.current_time)
        self._promoted = dict[ImageClaims, _Promoted]()
        self._queue = list[tuple[int, _Promoted]]()
        self._slots = slots
        self._slots_in_use = 0

        # No further image is promoted, and until when what has begun may go on.
        self.draining = False
        self.drain_ends: float | None = None

        # How often each blob is named by all images that were discovered: their order follows it.
        self.references = Counter[str]()
        # Artifacts that are there, by repository and digest or tag: whether this run copied them.
        self.delivered = dict[tuple[RepositoryKey, str], bool]()
        # Target hosts, and blobs that are on disk or about to be.
        self._hosts = set[str]()
        self._staged = set[str]()

        # For a display: images known and done, bytes expected, and where to ask for the rest.
        self.transport = transport
        self.images_known = 0
        self.images_done = 0
        self.bytes_expected = 0

    # What a run asks.

    @property
    def images(self) -> dict[ImageClaims, Image]:
        """Return the images that were promoted and have not ended, oldest first."""
        return {work: promoted.image for work, promoted in self._promoted.items()}

    def under_way(self) -> list[str]:
        """Return the source references of the images at work."""
        return [
            promoted.image.source.reference(promoted.image.reference)
            for promoted in self._promoted.values()
            if promoted.phase is Phase.AT_WORK
        ]

    async def wait_for_room(self) -> None:
        """Let discovery rest while too much waits for its promotion."""
        while self.pending.is_full() and not self.draining:
            if self._room.is_set():
                self._room = anyio.Event()
            await self._room.wait()

    def add_image(self, image: Image) -> None:
        """Let an image wait for its promotion; the caller calls `advance` after the last one."""
        host = image.target.host.key
        self._hosts.add(host)
        digests = {
            blob.digest
            for manifest in (image.tree.root, *image.tree.children)
            for blob in manifest.blobs
        }
        # Blobs that no other image has, or will have, copied to this host. What most images share is
        # promoted first.
        uncovered = [
            (host, digest) for digest in digests if not self._claims.is_covered(host, digest)
        ]
        self.pending.add(image, uncovered)

    def add_artifacts(self, images: Sequence[Image]) -> None:
        """Let artifacts wait for their promotion: their subject is at the target. The caller calls
        `advance` afterwards.
        """
        self.pending.add_artifacts(images)

    def commit(self, where: RepositoryKey, manifest: Manifest) -> None:
        """Note that a manifest is in a repository, and all that it names."""
        blobs = [blob.digest for blob in manifest.blobs]
        children = [child.digest for child in manifest.children]
        self._knowledge.commit(where, manifest.digest, blobs, children)

    def hurry(self) -> None:
        """Let images upload what they have waited to mount for too long."""
        self._hand_out(self._claims.stop_waiting_after(_MOUNT_PATIENCE))
        self.advance()

    def drain(self) -> None:
        """Begin no further image. What has begun may end, whatever the slots, so that no manifest
        waits for a blob.
        """
        self.draining = True
        self._room.set()
        self.advance()

    # When images begin and go on.

    def advance(self) -> None:
        """Give free slots to the oldest images that want one; then promote further images."""
        while self._slots_in_use < self._slots or self.draining:
            if self._queue:
                _, promoted = heapq.heappop(self._queue)
                self._give_slot(promoted)
            elif self._may_promote():
                self._promote_next()
            else:
                break

        if self._slots_in_use == 0:
            # A run that is not draining does not come here while rule 9 holds. If it does, these
            # images must neither be lost silently nor keep the run from ending.
            for promoted in self._promoted.values():
                self._abandon(promoted)

    def _give_slot(self, promoted: _Promoted) -> None:
        if self.draining and not promoted.has_begun and not promoted.work.is_ready():
            self._abandon(promoted)
            return
        self._slots_in_use += 1
        promoted.phase = Phase.AT_WORK
        promoted.has_begun = True
        promoted.wake()

    def _abandon(self, promoted: _Promoted) -> None:
        """Leave an image undone; what it has claimed is not passed on, for the run ends."""
        promoted.phase = Phase.ABANDONED
        promoted.wake()

    def _may_promote(self) -> bool:
        if self.draining or len(self._promoted) >= _MAX_PROMOTED:
            return False
        return len(self.pending) > 0

    def _promote_next(self) -> None:
        image = self.pending.take()
        if not self.pending.is_full():
            self._room.set()
        self._promote(image)

    def _promote(self, image: Image) -> None:
        """Claim what an image lacks, in one step, so that the order of claims is that of promotions
        (rule 9), and start its coroutine.
        """
        where = image.target.key
        try:
            blobs, children = image.tree.missing_at(
                lambda digest: self._knowledge.is_committed(where, digest)
            )
        except NotAtHand:  # what was known of the target has been forgotten since
            self._start_again(image)
            return
        except SyncError as error:
            source = image.source.reference(image.reference)
            image.error = error.with_place(Side.SOURCE, "read", source)
            self._end_failed(image)
            return

        work = ImageClaims(
            where,
            order_blobs(blobs, self.references),
            tuple(child.digest for child in children),
            image.tree.root.digest,
            careful=not image.tree.is_image,
        )
        promoted = _Promoted(image, work)
        self._promoted[work] = promoted
        steps = self._claims.promote(work)
        self._hand_out(steps, [work] if work.is_ready() else [])
        self._start_task(self._copy_image, promoted)

    def _hand_out(self, steps: Iterable[Step], ready: Iterable[ImageClaims] = ()) -> None:
        """Give images their next steps, or tell them that all is there; `advance` follows."""
        called = dict.fromkeys(ready)
        for step in steps:
            self._promoted[step.claims].steps.append(step)
            called[step.claims] = None
        for work in called:
            promoted = self._promoted[work]
            if promoted.phase is Phase.WAITING:
                promoted.phase = Phase.QUEUED
                heapq.heappush(self._queue, (work.order, promoted))
            promoted.wake()

    # How an image is copied.

    async def _copy_image(self, promoted: _Promoted) -> None:
        """Copy one promoted image: its blobs, its children, its root; its artifacts follow it.

        A failure is recorded in the image, and what the image owned goes to others.
        """
        image = promoted.image
        work = promoted.work

        # Blobs that are ours to copy, at once or because another image has failed, has committed
        # them elsewhere, or has taken too long. The others are copied by their owners.
        async with anyio.create_task_group() as blobs:
            while step := await promoted.next_step():
                blobs.start_soon(self._copy_blob, promoted, step)
        if promoted.phase is Phase.ABANDONED:
            return

        is_committed = image.error is None and await self._put_manifests(image, work)

        # Whoever waits for this image goes on: to mount what is committed now, else to copy it.
        if is_committed:
            self._hand_out(self._claims.complete(work))
        else:
            self._hand_out(*self._claims.fail(work))
        del self._promoted[work]
        self._slots_in_use -= 1

        image.blobs_present = work.skipped
        if is_committed:
            self._end_copied(image)
            self.add_artifacts(image.dependents)
        elif image.error is not None:
            self._end_failed(image)
        else:
            self._start_again(image)
        self.advance()

    async def _copy_blob(self, promoted: _Promoted, step: Step) -> None:
        """Copy one blob, by mount or upload. Its failure is the image's; the other blobs of the
        image that are on their way go on.
        """
        image = promoted.image
        blob = step.blob
        step = self._with_mount_source(step)
        keep = self._where_to_keep(image, blob)
        bytes_to_read = self._bytes_to_read(step, keep)
        self.bytes_expected += bytes_to_read
        if keep == "disk":
            self._staged.add(blob.digest)

        result = None
        try:
            result = await self._mover.copy(step, image.source, image.target, keep)
        except SyncError as error:
            image.error = image.error or error
        else:
            image.copy.record_blob(blob, result)
            if result is not BlobResult.UPLOADED:
                self.bytes_expected -= bytes_to_read
            self._hand_out((), self._claims.arrived(step.claims, blob.digest))

        if step.mount_from is not None:
            host = image.target.host.key
            self._hand_out(self._claims.mount_ended(host, mounted=result is BlobResult.MOUNTED))
        self._end_step(promoted)

    def _end_step(self, promoted: _Promoted) -> None:
        """Note that a step has ended; an image that waits for others now gives its slot back (I8)."""
        promoted.running -= 1
        if promoted.is_idle():
            promoted.phase = Phase.WAITING
            self._slots_in_use -= 1
        promoted.wake()
        self.advance()

    def _with_mount_source(self, step: Step) -> Step:
        """Mount what was to be uploaded, when another repository has committed it since."""
        host, _ = step.claims.where
        if step.mount_from is not None or not self._knowledge.mounts(host):
            return step
        source = self._knowledge.mount_source(step.claims.where, step.blob.digest)
        return step._replace(mount_from=source)

    def _where_to_keep(self, image: Image, blob: Descriptor) -> Keep:
        """Say where a blob is kept for others that need it: on disk for other targets, in memory
        when it is small and cannot be mounted (rule 13).
        """
        if image.copy.has_several_targets:
            return "disk"
        never_mounts = self._knowledge.mounts(image.target.host.key) is False
        is_shared = self.references[blob.digest] > 1 and (never_mounts or len(self._hosts) > 1)
        return "memory" if is_shared and blob.size <= SMALL_BLOB else None

    def _bytes_to_read(self, step: Step, keep: Keep) -> int:
        """Return how much a step will read from the source, as far as one can say now."""
        if step.mount_from is not None:
            return 0
        is_staged = keep == "disk" and step.blob.digest in self._staged
        return 0 if is_staged else step.blob.size

    # How its manifests are put.

    async def _put_manifests(self, image: Image, work: ImageClaims) -> bool:
        """Put the children that this image has claimed, then its root; return whether the root is
        in the repository now.

        The order keeps I1 (a manifest is put after all that it names) and I2 (children before their
        index). False has one of two meanings. With `image.error` the image has failed. Without an
        error the target lacks a blob or child that was recorded as present: the record is
        forgotten, and the image has to start again (docs/design.md section 7, "Healing").
        """
        root = image.tree.root
        # Two tags of one subject share its artifacts: each is put with the first tag only.
        is_put_already = (work.where, image.reference) in self.delivered
        try:
            if not is_put_already:
                refusal = await self._try_to_put(image, work)
                if refusal is not None:
                    await self._forget_lost(image, refusal)
                    return False
        except SyncError as error:
            image.error = error
            return False

        self._record_put(work, root)
        if image.snapshot:
            source_key = key_of(image.tree.source_digest)
            self._knowledge.record_snapshot(image.snapshot, source_key, key_of(root.digest))
        return True

    async def _try_to_put(self, image: Image, work: ImageClaims) -> RegistryError | None:
        """Put the manifests; return the refusal that may mean that the target has lost something.

        A target that denies what this run has copied there may be late to see it, and is asked
        again after a while. Raises SyncError for any other failure.
        """
        pauses = iter(_ABSENT_PAUSES)
        on_put = partial(self._record_put, work)
        while True:
            try:
                await self._mover.put_manifests(image, work.own_children, on_put)
                return None
            except RegistryError as error:
                if is_immutable(error) and await self._has_immutable_tag(image, error):
                    return None
                if image.has_been_healed or not may_be_stale(error):
                    raise
                pause = next(pauses, None)
                is_late = _denies_existence(error) and not self._unconfirmed(image, error)
                if pause is None or not is_late:
                    return error
            await anyio.sleep(pause)

    def _record_put(self, work: ImageClaims, manifest: Manifest) -> None:
        """Note that a manifest is in its repository; images that wait for it may go on."""
        self.commit(work.where, manifest)
        if manifest.digest in work.own_children:
            self._hand_out((), self._claims.arrived(work, manifest.digest))
            self.advance()

    def _unconfirmed(self, image: Image, refusal: RegistryError) -> frozenset[str]:
        """Return what a refused image names and no answer of this run has confirmed: only what the
        refusal names, where it names some of it.
        """
        where = image.target.key
        unconfirmed = frozenset(
            digest
            for digest in image.tree.required_digests
            if not self._knowledge.is_confirmed(where, digest)
        )
        return unconfirmed & refusal.digests or unconfirmed

    async def _forget_lost(self, image: Image, refusal: RegistryError) -> None:
        """Forget what the target has lost, and every manifest that names it. Raises the refusal
        when nothing of the image is lost.
        """
        lost = self._unconfirmed(image, refusal)
        if not lost and _denies_existence(refusal):
            lost = await image.target.missing_parts_of(image.tree.root, image.tree.children)
        if not lost:
            raise refusal
        text = f"{refusal}; what was believed to be there is checked"
        self._discovery.say("debug", "healing", text)
        for digest in image.tree.with_ancestors(lost):
            self._knowledge.forget(image.target.key, digest)
        image.has_been_healed = True

    async def _has_immutable_tag(self, image: Image, refusal: RegistryError) -> bool:
        """Say whether a tag that may not be moved names the image already (docs/design.md section
        9). When it names another one, nothing has failed at ecr kinds.
        """
        held = await image.target.head_manifest(image.reference)
        is_ours = held == image.tree.root.digest
        is_ecr = image.target.host.registry.kind.startswith("ecr")
        image.is_kept_by_immutable_tag = is_ours or (held is not None and is_ecr)

        # An attempt whose answer was lost may have put it: then this run has copied it.
        is_put_by_us = is_ours and refusal.retries > 0
        if image.is_kept_by_immutable_tag and not is_put_by_us:
            self._discovery.say("debug", "tag_immutable_exists", str(refusal))
            if not image.artifact:
                image.copy.immutable_digest = held
            elif is_ours:
                self.delivered.setdefault((image.target.key, image.reference), False)
        return is_ours

    def _start_again(self, image: Image) -> None:
        """Fetch the manifests that an image lacks now, and let it stand for election again."""
        self._ask(image.source.host.key, partial(self._fetch_lacking, image))

    async def _fetch_lacking(self, image: Image) -> None:
        try:
            image.tree = await self._discovery.completed(image.source, image.tree)
        except SyncError as error:
            image.error = error
            self._end_failed(image)
        else:
            self.add_image(image)
        self.advance()

    # How it ends.

    def _end_copied(self, image: Image) -> None:
        place = (image.target.key, image.reference)
        image.copy.record_success(image, copied=place not in self.delivered)
        if image.artifact:
            self.delivered.setdefault(place, True)
        self.end_if_complete(image.copy)

    def _end_failed(self, image: Image) -> None:
        image.copy.record_failure(image)
        self.end_if_complete(image.copy)

    def end_if_complete(self, delivery: ImageCopy) -> None:
        """End a copy whose images have all ended; a target without the referrers API has to
        list the artifacts first.
        """
        if delivery.unfinished_images:
            return
        listing = dict[str, list[Descriptor]]()
        for subject, entries in delivery.listing.items():
            at_target = [
                entry for entry in entries if (delivery.target.key, entry.digest) in self.delivered
            ]
            if at_target:
                listing[subject] = at_target
        delivery.listing = listing

        if self._keep_list is not None and listing:
            self._start_task(self._list_artifacts, delivery, self._keep_list)
        else:
            self._ended(delivery)

    async def _list_artifacts(
        self, delivery: ImageCopy, keep_list: Callable[..., Awaitable[set[str]]]
    ) -> None:
        """Have the target list its artifacts, then end the copy."""
        try:
            for subject, entries in delivery.listing.items():
                added = await keep_list(delivery.source, delivery.target, subject, entries)
                # The target held these, and its list did not name them: another writer lost them.
                relisted = {
                    digest for digest in added if not self.delivered[delivery.target.key, digest]
                }
                delivery.artifacts_skipped -= len(relisted)
                delivery.artifacts_copied |= relisted
        except SyncError as error:
            delivery.error = delivery.error or error
        self._ended(delivery)


def _denies_existence(refusal: RegistryError) -> bool:
    """Say whether a refused manifest was refused because something is said not to exist."""
    return refusal.status == 404 or any(code.endswith("_UNKNOWN") for code in refusal.codes)

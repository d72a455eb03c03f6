"""Copy the images that discovery has found: which is next, who copies which blob, when manifests go.

Owns: the election, the claims, the slots, and what happens if a target lacks what the state says.
May not know: tags, mappings, how a blob is moved.
Invariants: I1, I2, I5, I8, I9, I10. An image waits only for images that were promoted before it.

Promotion is synchronous: an image claims each blob and manifest that its target lacks, or joins the
claim of an older image. The first image of a claim brings it. The claims of one blob in all
repositories of a host stand in a line, the oldest first: its first image is the leader of the
specification, and the others wait until it has ended, to mount the blob. So there is one upload a
host, and no circle of waits.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, count
from typing import TYPE_CHECKING

import anyio
import anyio.abc

from _regsync.errors import RegistryError, Side, SyncError
from _regsync.oci import Descriptor, Manifest
from _regsync.registry.repository import Repository, is_immutable, may_lack_part
from _regsync.registry.runs import Transport
from _regsync.state import Knowledge, RepositoryKey, Snapshot
from _regsync.sync.artifacts import ReferrerLists
from _regsync.sync.blobs import SMALL_BLOB, Blobs
from _regsync.sync.discovery import Discovery
from _regsync.sync.image import BlobResult, ChildNotFetched, Image, ImageCopy, Traffic
from _regsync.sync.once import gather

if TYPE_CHECKING:
    from _regsync.sync.dry_run import DryRun

# Images that are promoted at the same time, and blobs of one image that are copied so.
_MAX_PROMOTED = 512
_MAX_BLOB_TASKS = 16

# Discovery pauses while so many images, or bytes of manifests, are pending.
_MAX_PENDING = 512
_MAX_PENDING_BYTES = 64 * 1024 * 1024

# Seconds before a manifest is put again that was refused although its parts are there.
_ABSENT_PAUSES = (0.5, 1.0, 2.0)
_MOST_RESTARTS = 2

HostBlob = tuple[str, str]


class Pending:
    """The images that wait for their promotion.

    Artifacts whose subject is at its target come first. Of the others, a greedy set cover elects
    the image with the most blobs that no image copies yet and that other pending images need on the
    same host (docs/specification.md section 1.1); of equal ones, the oldest.
    """

    def __init__(self) -> None:
        self.artifacts = deque[Image]()
        # By the number of an image: it, and its blobs.
        self._images = dict[int, tuple[Image, list[HostBlob]]]()
        self._wanted_by = dict[HostBlob, list[int]]()
        # Gains, negative, and the numbers of images. A gain may be outdated, but is never too low:
        # only a new image raises the gains of others.
        self._heap = list[tuple[int, int]]()
        self._bytes = 0
        self._numbers = count()

    def __len__(self) -> int:
        return len(self.artifacts) + len(self._images)

    def is_full(self) -> bool:
        return len(self._images) >= _MAX_PENDING or self._bytes > _MAX_PENDING_BYTES

    def add(self, image: Image, blobs: Iterable[HostBlob]) -> None:
        number = next(self._numbers)
        own_blobs = list(blobs)
        self._images[number] = (image, own_blobs)
        self._bytes += image.tree.size
        gainers = {number}
        for blob in own_blobs:
            rivals = self._wanted_by.setdefault(blob, [])
            rivals.append(number)
            if len(rivals) == 2:
                gainers.add(rivals[0])
        for each in gainers:
            heapq.heappush(self._heap, (-self._gain_of(each), each))

    def take(self) -> Image:
        if self.artifacts:
            return self.artifacts.popleft()
        while True:
            gain, number = heapq.heappop(self._heap)
            if number in self._images:
                gain_now = self._gain_of(number)
                if gain_now == -gain:
                    break
                heapq.heappush(self._heap, (-gain_now, number))
        image, blobs = self._images.pop(number)
        for blob in blobs:
            self._wanted_by.pop(blob, None)  # it gains nobody any more
        self._bytes -= image.tree.size
        return image

    def _gain_of(self, number: int) -> int:
        _, blobs = self._images[number]
        return sum(len(self._wanted_by.get(blob, ())) > 1 for blob in blobs)


class Slots:
    """How many images are at work. A free slot goes to the oldest that waits, else `refill` is
    called, which promotes another image into it and returns whether there was one."""

    def __init__(self, most: int, refill: Callable[[], bool]) -> None:
        self.most = float(most)
        self.used = 0
        self._refill = refill
        self._queue = list[tuple[int, anyio.Event]]()

    def fill(self) -> None:
        while self.used < self.most:
            if self._queue:
                heapq.heappop(self._queue)[1].set()
            elif not self._refill():
                return
            self.used += 1

    async def leave_while(self, order: int, wait: Awaitable[object]) -> None:
        """Give the slot of an image back, wait, and take one again."""
        self.used -= 1
        self.fill()
        await wait
        turn = anyio.Event()
        heapq.heappush(self._queue, (order, turn))
        self.fill()
        await turn.wait()


class Claim:
    """A blob or manifest that promoted images lack in one repository. The first of them brings it."""

    def __init__(self, job: Job, digest: str, *, is_blob: bool) -> None:
        self.where = job.where
        self.digest = digest
        self.is_blob = is_blob
        self.jobs = [job]  # in the order of promotion
        # The claims of the blob on this host, the oldest first; empty when nobody has to wait.
        self.line = list[Claim]()


class Job:
    """A promoted image, and what its target lacks."""

    def __init__(self, image: Image, order: int) -> None:
        self.image = image
        self.order = order
        self.where = image.target.store_key
        # With the descriptors of blobs, because another image may give a wrong size.
        self.open = dict[Claim, Descriptor | None]()
        self.brought = list[Claim]()
        self.present = list[Descriptor]()
        self.has_begun = False
        self.changed = anyio.Event()

    def wake(self) -> None:
        self.changed.set()
        self.changed = anyio.Event()


class Scheduler:
    """The images of a run on their way to their targets."""

    def __init__(
        self,
        blobs: Blobs | DryRun,
        knowledge: Knowledge,
        discovery: Discovery,
        *,
        slots: int,
        lists: ReferrerLists,
        on_end: Callable[[ImageCopy], None],
        transport: Transport,
        copied_to: Mapping[str, Sequence[str]],
    ) -> None:
        """`copied_to` has the target repositories of each source repository."""
        self._blobs = blobs
        self._known = knowledge
        self._discovery = discovery
        self.tasks: anyio.abc.TaskGroup  # of the images that are being copied
        self._on_end = on_end
        self._lists = lists
        self.transport = transport
        self._copied_to = copied_to

        self.pending = Pending()
        self._room = anyio.Event()
        self._slots = Slots(slots, self._promote_next)
        self._order = count()
        self._jobs = dict[Job, None]()
        self._claims = dict[tuple[RepositoryKey, str, bool], Claim]()
        self._lines = dict[HostBlob, list[Claim]]()
        self.is_draining = False

        self._manifests_by_blob = Counter[str]()
        # By target and reference, the artifacts that this run has put.
        self._artifacts_at_target = set[tuple[RepositoryKey, str]]()
        self.images_known = 0
        self.images_done = 0
        self.traffic = Traffic()

    # For the run and its progress display.

    @property
    def bytes_moved(self) -> int:
        return self.transport.bytes_sent

    async def wait_for_room(self) -> None:
        while self.pending.is_full():
            await self._room.wait()

    def add_image(self, image: Image) -> None:
        """Make an image pending. The caller calls `advance` after the last image."""
        host = image.target.host.key
        self._count_blobs(image)
        sizes = {digest: blob.size for digest, blob in image.tree.blobs.items()}
        uncovered = [digest for digest in sizes if not self._is_covered(host, digest)]
        self.pending.add(image, [(host, digest) for digest in uncovered])
        for digest in uncovered:
            self.traffic.expect(host, digest, sizes[digest])

    def _is_covered(self, host: str, digest: str) -> bool:
        return (host, digest) in self._lines or any(self._known.holders(host, digest))

    def add_artifacts(self, images: Sequence[Image]) -> None:
        """Make artifacts pending whose subjects are at their targets."""
        for image in images:
            self._count_blobs(image)
        self.pending.artifacts.extend(images)

    def _count_blobs(self, image: Image) -> None:
        """Count how many manifests of an image and its artifacts name each blob. If source and target
        share a host, also record that the source has the blobs, so that they can be mounted from there.
        """
        is_host_shared = image.source.host.key == image.target.host.key
        trees = (each.tree for each in image.with_dependents())
        for manifest in chain.from_iterable(tree.manifests for tree in trees):
            self._manifests_by_blob.update(blob.digest for blob in manifest.blobs)
            if is_host_shared and not manifest.is_trimmed:
                self._commit(image.source.store_key, manifest)

    def _commit(self, where: RepositoryKey, manifest: Manifest) -> None:
        blobs = [blob.digest for blob in manifest.blobs]
        children = [child.digest for child in manifest.children]
        self._known.confirm_manifest(where, manifest.digest, blobs, children)

    def advance(self) -> None:
        self._slots.fill()

    def drain(self) -> None:
        """Promote no further image; images that have begun go on."""
        self.is_draining = True
        self._slots.most = float("inf")
        for job in [*self._jobs]:
            job.wake()
        self.advance()

    # Promotion.

    def _promote_next(self) -> bool:
        """Promote the elected image into a slot. Returns False if there is none to promote."""
        while self.pending and not self.is_draining and len(self._jobs) < _MAX_PROMOTED:
            image = self.pending.take()
            if not self.pending.is_full():
                self._room.set()
                self._room = anyio.Event()
            try:
                job = self._promote(image)
            except ChildNotFetched:
                self._start_again(image)
            except SyncError as error:
                source = image.source.name_of(image.reference)
                image.error = error.add_context(Side.SOURCE, "read", source)
                self._finish_failed(image)
            else:
                self._jobs[job] = None
                self.tasks.start_soon(self._copy, job)
                return True
        return False

    def _promote(self, image: Image) -> Job:
        """Claim what the target lacks. No await: the first image of a claim is the oldest one."""
        job = Job(image, next(self._order))
        where, known = job.where, self._known
        must_be_recent = not image.tree.is_image
        is_believed = partial(known.is_manifest_believed, where, must_be_recent=must_be_recent)
        blobs, children = image.tree.missing_at(is_believed)
        for blob in blobs:
            if known.is_blob_believed(where, blob.digest, must_be_recent=must_be_recent):
                job.present.append(blob)
            else:
                self._join(job, blob.digest, blob)
        for manifest in (*children, image.tree.root):
            self._join(job, manifest.digest, None)
        return job

    def _join(self, job: Job, digest: str, blob: Descriptor | None) -> None:
        key = (job.where, digest, blob is None)
        claim = self._claims.get(key)
        if claim is None:
            claim = self._claims[key] = Claim(job, digest, is_blob=blob is not None)
            if blob is not None:
                claim.line = self._lines.setdefault((job.where.host, digest), [])
                claim.line.append(claim)
        else:
            claim.jobs.append(job)
        job.open[claim] = blob

    def _may_start(self, claim: Claim, job: Job) -> bool:
        """Report whether an image brings a blob, and need not wait for another repository."""
        if not claim.is_blob or claim.jobs[0] is not job:
            return False
        if not claim.line or claim.line[0] is claim:
            return True
        if self._known.mount_source(job.where, claim.digest) is not None:
            return True
        return not self._known.may_mount(job.where, claim.line[0].where.name)

    # One image.

    async def _copy(self, job: Job) -> None:
        """Copy a promoted image. It holds a slot while one of its steps runs."""
        image = job.image
        is_committed = False
        try:
            is_committed = await self._bring_and_put(job)
        except SyncError as error:
            image.error = image.error or error
        del self._jobs[job]
        self._withdraw(job, is_committed=is_committed)
        if is_committed or image.error is not None:
            for blob in job.present:
                self._record_blob(job, blob, BlobResult.PRESENT)
        if is_committed:
            self._finish_copied(image)
            self.pending.artifacts.extend(image.dependents)
        elif image.error is not None:
            self._finish_failed(image)
        else:
            self._start_again(image)
        self._slots.used -= 1
        self.advance()

    async def _bring_and_put(self, job: Job) -> bool:
        """Bring the blobs and put the manifests. Returns False if the image has to start again."""
        while job.image.error is None:
            if self.is_draining and not job.has_begun and any(claim.is_blob for claim in job.open):
                return False
            mine = [claim for claim in job.open if self._may_start(claim, job)]
            if mine:
                job.has_begun = True
                await self._bring(job, mine)
            elif any(claim.is_blob or claim.jobs[0] is not job for claim in job.open):
                await self._slots.leave_while(job.order, job.changed.wait())
            else:
                job.has_begun = True
                return await self._put(job)
        return False

    async def _bring(self, job: Job, claims: list[Claim]) -> None:
        """Copy blobs, those first that most manifests name now. All errors are waited for."""

        async def work() -> None:
            while claims and job.image.error is None:
                claim = max(claims, key=lambda claim: self._manifests_by_blob[claim.digest])
                claims.remove(claim)
                await self._bring_one(job, claim)

        async with anyio.create_task_group() as tasks:
            for _ in range(min(len(claims), _MAX_BLOB_TASKS)):
                tasks.start_soon(work)

    async def _bring_one(self, job: Job, claim: Claim) -> None:
        image, blob, known = job.image, job.open[claim], self._known
        assert blob is not None
        could_mount = known.supports_mounts(job.where.host)
        result = BlobResult.PRESENT
        try:
            source = await self._source_of(blob, image)
            if source is not image.target:
                result = await self._blobs.copy(
                    blob,
                    source,
                    image.target,
                    mount_from=None if source is image.source else source.api_name,
                    is_shared=self._is_needed_again(image, blob),
                    present=job.present[0].digest if job.present else None,
                )
        except SyncError as error:
            image.error = image.error or error
            return
        finally:
            if known.supports_mounts(job.where.host) is not could_mount:
                for other in [*self._jobs]:  # nobody has to wait for a mount any more
                    other.wake()
        self._record_blob(job, blob, result)
        known.confirm_blob(job.where, blob.digest, by_probe=result is BlobResult.BELIEVED)
        self._end_claim(claim)

    def _record_blob(self, job: Job, blob: Descriptor, result: BlobResult) -> None:
        blobs = job.image.copy.blobs
        # An image that starts again finds what it has brought.
        if result is not BlobResult.PRESENT or blob.digest not in blobs:
            blobs[blob.digest] = (blob, result)
        self.traffic.record(job.where, blob, result)

    def _is_needed_again(self, image: Image, blob: Descriptor) -> bool:
        """Report whether the bytes of a blob are worth keeping: other targets need them, or it is
        small, and other manifests name it."""
        is_named_again = self._manifests_by_blob[blob.digest] > 1
        return image.copy.has_several_targets or (is_named_again and blob.size <= SMALL_BLOB)

    async def _source_of(self, blob: Descriptor, image: Image) -> Repository:
        """Return where a blob is read: at the image's source, or in a repository of the target's host
        if the source is a layout that lacks it. It is the target itself if that has the blob.

        Raises the error of reading a blob that is nowhere.
        """
        source, target = image.source, image.target
        if not source.is_local:
            return source
        with suppress(SyncError):  # what cannot be looked at may be elsewhere
            if await source.has_blob(blob):
                return source
        if await target.has_blob(blob, with_retries=True):
            return target
        far = source.far_repository(blob.digest)
        # If the receipt was made of a layout, the mappings say where its repository is.
        names = [] if far is None else [*self._copied_to.get(far, ()), far]
        for name in dict.fromkeys(names):
            other = self._discovery.repository(target.host.registry, name, Side.SOURCE)
            if name != target.name and await other.has_blob(blob, with_retries=True):
                self._known.confirm_blob(other.store_key, blob.digest)
                return other
        async with await source.open_blob(blob):  # raises the error that says what is lost
            return source

    def _end_claim(self, claim: Claim) -> None:
        """Record that the first image of a claim has brought it, and wake the others."""
        del self._claims[claim.where, claim.digest, not claim.is_blob]
        owner, *others = claim.jobs
        claim.jobs = [owner]
        del owner.open[claim]
        owner.brought.append(claim)
        for job in others:
            blob = job.open.pop(claim)
            if blob is not None:
                job.present.append(blob)
            job.wake()

    def _withdraw(self, job: Job, *, is_committed: bool) -> None:
        """End the claims of an image: what it did not bring, the next image of the claim brings."""
        for claim in (*job.open, *job.brought):
            was_first_in_line = claim.line[:1] == [claim]
            claim.jobs.remove(job)
            if claim.jobs:  # the next one may be younger than others in the line
                claim.line.sort(key=lambda each: each.jobs[0].order)
                claim.jobs[0].wake()
            elif claim.line:
                claim.line.remove(claim)
            if not claim.jobs and claim in job.open:
                del self._claims[claim.where, claim.digest, not claim.is_blob]
            if was_first_in_line:
                self._move_up(claim, is_committed=is_committed)

    def _move_up(self, claim: Claim, *, is_committed: bool) -> None:
        """Wake those who have waited for the first claim of a line: all of them if its image is at the
        target, so that they can mount the blob, or else the next one.
        """
        waiting = [*claim.line] if is_committed else claim.line[:1]
        if is_committed:
            claim.line.clear()
        if not claim.line:
            del self._lines[claim.where.host, claim.digest]
        for each in waiting:
            each.jobs[0].wake()

    # Its manifests.

    async def _put(self, job: Job) -> bool:
        """Put the children that the image has claimed, then its root. False: start again."""
        image = job.image
        if not self._is_put_already(image) and not await self._try_to_put(job):
            return False
        self._record_put(job, image.tree.root)
        if image.snapshot_key:
            root = image.tree.root
            snapshot = Snapshot(image.tree.source_digest, root.digest)
            self._known.record_snapshot(image.snapshot_key, snapshot)
        return True

    def _is_put_already(self, image: Image) -> bool:
        if (image.target.key, image.reference) in self._artifacts_at_target:
            return True
        is_remote_artifact = bool(image.artifact) and not image.target.is_local
        where = image.target.store_key
        return is_remote_artifact and self._known.is_manifest_confirmed(where, image.reference)

    def _record_put(self, job: Job, manifest: Manifest) -> None:
        self._commit(job.where, manifest)
        claim = self._claims.get((job.where, manifest.digest, True))
        if claim is not None and claim.jobs[0] is job:
            self._end_claim(claim)

    async def _try_to_put(self, job: Job) -> bool:
        """Put the manifests. Returns False if parts that the target lacks were forgotten."""
        image = job.image
        pauses = iter(_ABSENT_PAUSES)
        is_checked = False
        while True:
            try:
                await self._put_manifests(job)
                return True
            except RegistryError as error:
                refusal = error
            if is_immutable(refusal) and await self._handle_immutable_tag(image, refusal):
                return True
            if not may_lack_part(refusal) or image.restarts == _MOST_RESTARTS:
                raise refusal
            pause = next(pauses, None) if _reports_missing_part(refusal) else None
            if not is_checked and (pause is None or self._parts_at_target(job)[1]):
                # The state may be wrong, or a probing POST was answered wrongly.
                is_checked = True
                with suppress(SyncError):  # the refusal is what the user has to know
                    if await self._forget_absent_parts(job):
                        image.restarts += 1
                        return False
            if pause is None:
                raise refusal
            await anyio.sleep(pause)  # the target may not see yet what it has just taken

    async def _put_manifests(self, job: Job) -> None:
        """Put the children that the image has claimed, each before its index, and then the root (I2).
        A dry run puts nothing.
        """
        image = job.image
        claimed = {claim.digest for claim in job.open}
        children = [child for child in image.tree.children if child.digest in claimed]
        await gather(
            partial(self._put_child, job, child) for child in children if not child.is_index
        )
        for child in children:  # the indexes among them, each after those that it names
            if child.is_index:
                await self._put_child(job, child)
        if not self._discovery.reads_only:
            await image.target.put_manifest(image.reference, image.tree.root)

    async def _put_child(self, job: Job, child: Manifest) -> None:
        if not self._discovery.reads_only:
            await job.image.target.put_child(child)
        self._record_put(job, child)

    def _parts_at_target(self, job: Job) -> tuple[list[str], list[str]]:
        """Return the parts of an image that its target has to have before the manifests which it still
        puts, and those of them that no answer of this run has shown there.
        """
        tree, own = job.image.tree, {claim.digest for claim in job.open}
        children = (child.digest for each in tree.manifests for child in each.children)
        parts = [*tree.blobs, *(child for child in dict.fromkeys(children) if child not in own)]
        return parts, [part for part in parts if not self._known.is_confirmed(job.where, part)]

    async def _forget_absent_parts(self, job: Job) -> bool:
        """Ask the target for the parts of an image that no answer of this run has shown there, or
        for all of them if there are none. If one is absent, it is forgotten with all manifests of
        the image, so that these are put again.
        """
        tree, target, known = job.image.tree, job.image.target, self._known
        blobs = tree.blobs

        async def is_absent(digest: str) -> bool:
            if digest not in blobs:
                return await target.head_manifest(digest) is None
            has_blob = await target.has_blob(blobs[digest], with_retries=True)
            if has_blob:
                known.confirm_blob(job.where, digest)
            if has_blob is None:  # only what this run has brought is there for certain
                return not known.is_confirmed(job.where, digest)
            return not has_blob

        parts, unconfirmed = self._parts_at_target(job)
        asked = unconfirmed or parts
        answers = await gather(partial(is_absent, digest) for digest in asked)
        absent = [digest for digest, answer in zip(asked, answers, strict=True) if answer]
        for manifest in tree.manifests if absent else ():
            known.forget(job.where, manifest.digest)
        for digest in absent:
            known.forget(job.where, digest)
        return bool(absent)

    async def _handle_immutable_tag(self, image: Image, refusal: RegistryError) -> bool:
        """Return whether a tag that may not be overwritten names the image already.

        On ECR it is no failure if it names another one (docs/design.md section 9).
        """
        digest = await self._discovery.find_digest(image.target, image.reference)
        is_same = digest == image.tree.root.digest
        if is_same and refusal.retries > 0:
            return True  # put by the first attempt, whose answer was lost
        is_ecr = image.target.host.registry.kind.startswith("ecr")
        if not is_same and not (is_ecr and digest is not None):
            return False
        self._discovery.log_once("debug", "tag_immutable_exists", str(refusal))
        image.is_kept_by_immutable_tag = not is_same
        if not image.artifact:
            image.copy.immutable_digest = digest
        elif is_same:
            self._artifacts_at_target.add((image.target.key, image.reference))
        return is_same

    def _start_again(self, image: Image) -> None:
        if not self.is_draining:
            self.tasks.start_soon(self._fetch_lacking, image)

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
        name = (image.target.key, image.reference)
        image.copy.record_success(image, is_copied=name not in self._artifacts_at_target)
        if image.artifact:
            self._artifacts_at_target.add(name)
        self.end_if_complete(image.copy)

    def _finish_failed(self, image: Image) -> None:
        image.copy.record_failure(image)
        self.end_if_complete(image.copy)

    def end_if_complete(self, copy: ImageCopy) -> None:
        """End a copy if all its images have ended, and add its artifacts to the target's lists."""
        if copy.unfinished_images:
            return
        if copy.listing and not self._discovery.reads_only:
            self.tasks.start_soon(self._list_artifacts, copy)
        else:
            self._on_end(copy)

    async def _list_artifacts(self, copy: ImageCopy) -> None:
        try:
            for subject, entries in copy.listing.items():
                there = [
                    each
                    for each in entries
                    if copy.artifacts.get(each.digest) in ("synced", "skipped")
                ]
                if there:
                    await self._lists.ensure_listed(copy.source, copy.target, subject, there)
        except SyncError as error:
            copy.error = copy.error or error
        self._on_end(copy)


def _reports_missing_part(refusal: RegistryError) -> bool:
    return refusal.status == 404 or any(code.endswith("_UNKNOWN") for code in refusal.codes)

"""Bring what discovery found: promote images, start their steps, put their manifests, end each in
one way. Owns: what is pending, the image slots, the healing of a state that was wrong. May not
know: tags, mappings, how anything is asked or moved. Invariants: I8 (a waiting image has no task
and no slot), I9, I10, I5 "Healing"; who brings what is `plan.Claims`' to decide. Follows
docs/specification.md 1.1 "Pipeline", docs/design.md sections 6, 7, 9."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import count

import anyio

from _regsync.errors import RegistryError, Side, SyncError
from _regsync.oci.manifest import Manifest
from _regsync.registry.repository import is_immutable, may_be_stale
from _regsync.registry.transport import Transport
from _regsync.state.database import key_of
from _regsync.state.knowledge import Knowledge, RepositoryKey
from _regsync.sync.claims import Claims, Election, Step, Work
from _regsync.sync.discovery import Discovery
from _regsync.sync.image import Delivery, Image, NotAtHand, order_blobs
from _regsync.sync.staging import SMALL_BLOB
from _regsync.sync.transfer import Keep, Mover

# images, bytes of manifests, at which discovery rests
_MOST_PENDING = 512


_HEAVIEST_PENDING = 64 * 1024 * 1024


_ABSENT_PAUSES = (
    0.5,
    1.0,
    2.0,
)  # before a manifest is put again that was refused for what this run brought (I5)


_MOUNT_PATIENCE = (
    600.0  # for a blob that another image is to have on the same host: a leader may crawl
)


class Execution:
    """Images on their way, at most `slots` with a step running. `start` starts a task, `ask` queues
    a question for a source, `keep_list` is `referrers.Referrers.keep` where lists are kept, `ended`
    is told of each delivery."""

    def __init__(
        self,
        mover: Mover,
        knowledge: Knowledge,
        discovery: Discovery,
        *,
        slots: int,
        start: Callable[..., None],
        ask: Callable[[str, Callable[[], Awaitable[None]]], None],
        keep_list: Callable[..., Awaitable[set[str]]] | None,
        ended: Callable[[Delivery], None],
        transport: Transport,
    ) -> None:
        self._mover = mover
        self._knowledge = knowledge
        self._discovery = discovery
        self._most_slots = slots
        self._start_task = start
        self._ask = ask
        self._ended = ended
        self.transport = transport
        self._keep_list = keep_list
        self._claims = Claims(knowledge, anyio.current_time)
        # Artifacts that are there, by repository and digest or tag: whether this run brought them.
        self.delivered = dict[tuple[RepositoryKey, str], bool]()
        self.references = Counter[
            str
        ]()  # how often each blob is named by what was discovered: their order follows it
        self._read = set[str]()
        self._hosts = set[str]()
        self._slots = 0
        # what waits for its promotion
        self.pending = dict[int, Image]()
        self._pending_bytes = 0
        self._election = Election()
        self._numbers = count()
        self._room = anyio.Event()
        # those begun, oldest first
        self.images = dict[Work, Image]()
        self._ready = list[tuple[int, int, Image]]()
        self.draining = False  # no further image is promoted
        self.ends: float | None = None  # when that is over
        self.known = self.done = self.expected = (
            0  # for a display: images known and done, bytes expected
        )

    def under_way(self) -> list[str]:
        return [
            image.source.reference(image.reference)
            for image in self.images.values()
            if image.running
        ]

    def _is_full(self) -> bool:
        return len(self.pending) >= _MOST_PENDING or self._pending_bytes > _HEAVIEST_PENDING

    async def wait_for_room(self) -> None:
        """Let discovery rest while too much is pending."""
        while self._is_full() and not self.draining:
            self._room = anyio.Event() if self._room.is_set() else self._room
            await self._room.wait()

    def drain(self) -> None:
        """Begin no further image; what has begun may end, whatever the slots, so that no manifest
        waits for a blob.
        """
        self.draining = True
        self._room.set()
        self.advance()

    def add(self, image: Image) -> None:
        """Let an image wait for its promotion; `advance` follows. Once numbered it keeps its place."""
        if image.number < 0:
            image.number = next(self._numbers)
        self.pending[image.number] = image
        self._pending_bytes += image.tree.size
        host = image.target.host.key
        self._hosts.add(host)
        digests = {
            blob.digest
            for manifest in (image.tree.root, *image.tree.children)
            for blob in manifest.blobs
        }
        blobs = [(host, digest) for digest in digests if not self._claims.is_covered(host, digest)]
        self._election.add(image.number, blobs)

    def commit(self, where: RepositoryKey, manifest: Manifest) -> None:
        blobs = [blob.digest for blob in manifest.blobs]
        self._knowledge.commit(
            where, manifest.digest, blobs, [each.digest for each in manifest.children]
        )

    def advance(self) -> None:
        """Start whatever may start: steps of promoted images first, then the next image."""
        while self._slots < self._most_slots or (self.draining and self._ready):
            if self._ready:
                image = heapq.heappop(self._ready)[2]
                if not self.draining or image.work.is_ready() or image.has_begun:
                    self._start(image)
            elif self.pending and not self.draining:
                image = self.pending.pop(self._election.take())
                self._pending_bytes -= image.tree.size
                self._promote(image)
                if not self._is_full():
                    self._room.set()
            else:
                return

    def hurry(self) -> None:
        """Let those go on that have waited for a mount for too long."""
        self._queue(self._claims.overdue(_MOUNT_PATIENCE))
        self.advance()

    def _promote(self, image: Image) -> None:
        where = image.target.key
        try:
            blobs, children = image.tree.needs(
                lambda digest: self._knowledge.is_committed(where, digest)
            )
        except NotAtHand:  # forgotten since it was looked up
            return self._ask(image.source.host.key, partial(self._complete, image))
        except SyncError as error:
            image.error = error.located(
                Side.SOURCE, "read", image.source.reference(image.reference)
            )
            return self._close(image)
        ordered = order_blobs(blobs, self.references)
        lacking = tuple(child.digest for child in children)
        image.work = Work(
            where, ordered, lacking, image.tree.root.digest, careful=not image.tree.is_image
        )
        self.images[image.work] = image
        return self._queue(
            self._claims.promote(image.work), [image.work] if image.work.is_ready() else ()
        )

    async def _complete(self, image: Image) -> None:
        """Fetch what an image lacks of its manifests, and let it wait for its turn again, before
        others.
        """
        try:
            image.tree = await self._discovery.completed(image.source, image.tree)
        except SyncError as error:
            image.error = error
            self._close(image)
        else:
            self.add(image)
        self.advance()

    def _queue(self, steps: Sequence[Step], ready: Sequence[Work] = ()) -> None:
        """Let images with something to do have a slot: at once if they hold one, else in their
        turn.
        """
        for step in steps:
            self.images[step.work].queue.append(partial(self._bring, self.images[step.work], step))
        for work in ready:
            self.images[work].queue.append(partial(self._finish, self.images[work]))
        for image in [
            self.images[work] for work in dict.fromkeys((*(step.work for step in steps), *ready))
        ]:
            if image.running:
                self._start(image)
            else:
                heapq.heappush(self._ready, (image.work.order, id(image), image))

    def _start(self, image: Image) -> None:
        steps = image.queue
        image.queue = []
        if image.error is not None or not steps:
            return
        self._slots += not image.running
        image.has_begun = True
        image.running = image.running + len(steps)
        for step in steps:
            self._start_task(step)

    async def _bring(self, image: Image, step: Step) -> None:
        blob = step.blob
        where = image.target.key
        mounts = self._knowledge.mounts(image.target.host.key)
        if step.mount_from is None and mounts:
            step = step._replace(
                mount_from=self._knowledge.mount_source(where, blob.digest)
            )  # committed since then
        # What cannot be mounted and others need too is kept, when it is small (rule 13).
        several = self.references[blob.digest] > 1 and (mounts is False or len(self._hosts) > 1)
        keep: Keep = (
            "disk"
            if image.delivery.fan_out
            else "memory"
            if several and blob.size <= SMALL_BLOB
            else None
        )
        # One read of a source serves all targets; a mount reads nothing.
        reads = step.mount_from is None and not (keep == "disk" and blob.digest in self._read)
        self._read.update([blob.digest] if keep == "disk" else [])
        self.expected += blob.size * reads
        try:
            brought = await self._mover.bring(step, image.source, image.target, keep)
        except SyncError as error:
            image.error = image.error or error
            mounted = False
        else:
            if brought is None:
                return  # dropped while draining: its image stays undone
            mounted = brought == "mounted"
            image.delivery.mounted += mounted
            image.delivery.present += brought == "there"
            image.delivery.transferred += [blob] * (brought == "uploaded")
            if brought != "uploaded":
                self.expected -= blob.size * reads
            self._queue((), self._claims.arrived(step.work, blob.digest))
        if step.mount_from is not None:
            self._queue(self._claims.mount_ended(image.target.host.key, mounted=mounted))
        self._settle(image)

    async def _finish(self, image: Image) -> None:
        """Put the manifests of an image whose blobs are all there (I1, I2)."""
        work = image.work
        try:
            whole = await self._put(image, work)
        except SyncError as error:
            image.error = image.error or error
        else:
            del self.images[work]
            if whole:
                if image.snapshot:
                    keys = key_of(image.tree.source_digest), key_of(image.tree.root.digest)
                    self._knowledge.take_snapshot(image.snapshot, *keys)
                self._queue(self._claims.released(work))
                self._close(image)
            else:
                self._queue(*self._claims.failed(work))
                self._ask(image.source.host.key, partial(self._complete, image))
        self._settle(image)

    async def _put(self, image: Image, work: Work) -> bool:
        """Put the manifests; False when the target lost what was believed there: it is forgotten
        now (I5).
        """

        def arrived(child: Manifest) -> None:
            self.commit(work.where, child)
            self._queue((), self._claims.arrived(work, child.digest))

        # An artifact may have been put for another tag, whose own waits for the same one.
        for pause in (
            () if (work.where, image.reference) in self.delivered else (*_ABSENT_PAUSES, None)
        ):
            try:
                await self._mover.put(image.tree, work, image.target, image.reference, arrived)
                break
            except RegistryError as error:
                if is_immutable(error) and await self._stands(image, error):
                    break
                if image.healed or not may_be_stale(error):
                    raise
                # It may be about what it names, or all, of what this run did not confirm.
                found = {
                    each
                    for each in image.tree.names
                    if not self._knowledge.is_confirmed(work.where, each)
                }
                lost = frozenset(found & error.digests or found)
                if not lost and (
                    error.status == 404 or any(code.endswith("_UNKNOWN") for code in error.codes)
                ):
                    # All of it was confirmed in this run. A registry that is late to see it gets
                    # some time.
                    if pause is not None:
                        await anyio.sleep(pause)
                        continue
                    lost = await image.target.absent(image.tree.root, image.tree.children)
                if not lost:
                    raise
                self._discovery.say(
                    "debug", "healing", f"{error}; what was believed to be there is checked"
                )
                for digest in image.tree.above(lost):
                    self._knowledge.forget(work.where, digest)
                image.healed = True
                return False
        self.commit(work.where, image.tree.root)
        if image.tree.root.digest in work.own_children:
            arrived(image.tree.root)
        return True

    async def _stands(self, image: Image, error: RegistryError) -> bool:
        """Say whether a tag that never moves names the image; with another one there, nothing
        failed at ecr kinds.
        """
        held = await image.target.head_manifest(image.reference)
        digest = image.tree.root.digest
        image.stands = held == digest or (
            held is not None and image.target.host.registry.kind.startswith("ecr")
        )
        if image.stands and not (
            held == digest and error.retries
        ):  # by an attempt whose answer was lost
            self._discovery.say("debug", "tag_immutable_exists", str(error))
            if not image.artifact:
                image.delivery.stands = held
            elif held == digest:
                self.delivered.setdefault((image.target.key, image.reference), False)
        return held == digest

    def _settle(self, image: Image) -> None:
        """Note that one step ended; a failed image ends with its last step and passes on what it
        owned.
        """
        image.running -= 1
        if not image.running:
            self._slots -= 1
            if image.error is not None and self.images.pop(image.work, None) is not None:
                self._close(image)
                self._queue(*self._claims.failed(image.work))
        self.advance()

    def _close(self, image: Image) -> None:
        """Note that an image is at its target, or will not be: what hangs on it follows, or never
        will.
        """
        whole = image.delivery
        ended = [image]
        whole.present += image.work.skipped
        whole.error = whole.error or (None if image.stands else image.error)
        if image.error is None:
            self.follow(image.then)
            place = (image.target.key, image.reference)
            if image.artifact and place in self.delivered:
                whole.skipped += 1
            elif image.artifact:
                self.delivered[place] = True
                whole.brought.add(image.reference)
                whole.planned.append(f"carry {image.artifact}")
        else:
            for each in ended:
                ended += each.then
            whole.failed += sum(bool(each.artifact) for each in ended) * (not image.stands)
        whole.open -= len(ended)
        self.conclude(whole)

    def follow(self, images: Sequence[Image]) -> None:
        """Promote what hangs on something that is there now."""
        for each in images:
            each.number = next(self._numbers)
            (self.add if self.draining else self._promote)(each)

    def conclude(self, whole: Delivery) -> None:
        """End a delivery whose images have all ended; a target without the API is to list the
        artifacts first.
        """
        if whole.open:
            return
        there = {
            subject: [each for each in entries if (whole.target.key, each.digest) in self.delivered]
            for subject, entries in whole.listing.items()
        }
        whole.listing = {subject: entries for subject, entries in there.items() if entries}
        if self._keep_list is not None and whole.listing:
            self._start_task(self._list, whole, self._keep_list)
        else:
            self._ended(whole)

    async def _list(self, whole: Delivery, keep: Callable[..., Awaitable[set[str]]]) -> None:
        try:
            for subject, entries in whole.listing.items():
                added = await keep(whole.source, whole.target, subject, entries)
                lost = {
                    each for each in added if not self.delivered[whole.target.key, each]
                }  # by another writer
                whole.skipped -= len(lost)
                whole.brought |= lost
        except SyncError as error:
            whole.error = whole.error or error
        self._ended(whole)

"""Conduct one run: listings, look-ups and transfers at the same time, every image to one outcome.

Owns: the queues, the image slots, the promotion of images and the isolation of failures. May not know:
how anything is asked, moved or printed. Invariants: I8 (a waiting image has no task and no slot), I9,
I10; every selected image ends in exactly one outcome unless the run is interrupted. Decisions about who
brings what are `state.Claims`'; this module starts what they return. Follows specification sections 1.1
"Pipeline", 1.6 and 3; design.md section 9.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import islice
from typing import Any

import anyio
import anyio.abc

from _regsync import plan
from _regsync.claims import Claims, Step, Work
from _regsync.config import Config, MappingRule
from _regsync.discover import Discovery, Sighting
from _regsync.errors import MappingConflict, RegsyncError, Side, SyncError
from _regsync.oci import Manifest
from _regsync.plan import Tree, Wanted
from _regsync.registry import Repository
from _regsync.report import Outcome, Report
from _regsync.state import Knowledge
from _regsync.store import Staging
from _regsync.tags import compile_glob
from _regsync.transfer import Mover
from _regsync.transport import Transport

__all__ = ["DRAIN_SECONDS", "Progress", "Run"]

# Specification section 1.6.
DRAIN_SECONDS = 25.0
# Enough to hide a round trip of 100 ms at 160 tags a second; a fixed number, whatever the tags.
_LOOK_UPS_PER_SOURCE = 16
# Discovery rests while so many images wait, or so many bytes of their manifests, which are in memory.
_MOST_PENDING, _HEAVIEST_PENDING = 512, 64 * 1024 * 1024
# An election looks at so many: it is made anew for each promotion.
_ELECTED_AMONG = 64


class Progress:
    """What a progress display shows: images known and done, bytes moved and expected, who has to wait."""

    def __init__(self, paused: Mapping[str, float], under_way: Callable[[], list[str]]) -> None:
        self.known = self.done = self.bytes = self.expected = 0
        # By host, until when it asked not to be asked; the images that have a step running, oldest first.
        self.paused, self.under_way = paused, under_way


@dataclass(eq=False, repr=False)
class _Image:
    """One image on its way to one target under one reference."""

    source: Repository
    target: Repository
    tree: Tree
    source_name: str
    reference: str
    fan_out: bool
    began: float
    digests: frozenset[str]
    work: Work | None = None
    queue: list[Step] = field(default_factory=list)
    finishing: bool = False
    running: int = 0
    ended: bool = False
    error: RegsyncError | None = None
    transferred: list[str] = field(default_factory=list)
    mounted: int = 0
    present: int = 0
    bytes: int = 0


class Run:
    """One run over a configuration's mappings, or over one image."""

    def __init__(
        self, transport: Transport, config: Config, emit: Callable[[Outcome], None], report: Report
    ) -> None:
        self.progress = Progress(transport.paused, self._under_way)
        self._transport, self._config = transport, config
        self._emit, self._report = emit, report
        self._log = transport.edge.log
        self._knowledge = Knowledge()
        self._claims = Claims(self._knowledge)
        self._discovery = Discovery(transport, self._knowledge)
        self._staging = Staging(config.cache_dir)
        self._mover = Mover(transport, self._knowledge, self._staging, self._count_bytes)
        self._questions: dict[str, deque[Callable[[], Awaitable[None]]]] = {}
        self._workers: Counter[str] = Counter()
        self._references: Counter[str] = Counter()
        self._read: set[str] = set()
        self._pending: deque[_Image] = deque()
        self._pending_bytes = 0
        self._room = anyio.Event()
        self._images: dict[Work, _Image] = {}
        self._ready: list[tuple[int, int, _Image]] = []
        self._globs = cache(compile_glob)
        self._slots = 0
        self._draining = False
        self._tasks: anyio.abc.TaskGroup | None = None

    def _count_bytes(self, count: int) -> None:
        self.progress.bytes += count

    def _under_way(self) -> list[str]:
        return [image.source_name for image in self._images.values() if image.running]

    # --- the run ------------------------------------------------------------------------------

    async def sync(self, stop: anyio.Event) -> None:
        """Run every mapping once."""
        self._prepare(self._config.mappings)
        groups = plan.target_groups(self._config.mappings)
        await self._conduct(
            stop, [(group[0].source.authority, partial(self._list, group)) for group in groups]
        )

    async def copy(
        self, mapping: MappingRule, reference: str, target_reference: str, stop: anyio.Event
    ) -> None:
        """Copy one image: `reference` at the source, `target_reference` (tag or digest) at the target."""
        self._prepare([mapping])
        item = partial(self._look_up, Wanted(mapping, reference, mapping.targets), target_reference)
        await self._conduct(stop, [(mapping.source.authority, item)])

    def _prepare(self, mappings: tuple[MappingRule, ...] | list[MappingRule]) -> None:
        """Read what every registry in use names, so that an unusable file stops all before any request."""
        for mapping in mappings:
            for registry in (mapping.source, *mapping.targets):
                self._transport.prepare(registry)
        if any(mapping.artifacts.enabled for mapping in mappings):
            self._log(
                "warning",
                "referrers_stay",
                "this version does not copy referrers: signatures, SBOMs and attestations stay behind "
                "(artifacts.enabled: false, or --no-artifacts, says that this is meant)",
            )

    async def _conduct(
        self, stop: anyio.Event, items: list[tuple[str, Callable[[], Awaitable[None]]]]
    ) -> None:
        execution = anyio.CancelScope()
        try:
            async with anyio.create_task_group() as outer:
                outer.start_soon(self._drain, stop, execution)
                with execution:
                    async with anyio.create_task_group() as tasks:
                        self._tasks = tasks
                        for source, item in items:
                            self._ask(source, item)
                outer.cancel_scope.cancel()
        finally:
            self._tasks = None
            self._staging.close()
        # A question that the deadline cut off stands in no queue any more.
        self._report.interrupted = self._draining and (execution.cancelled_caught or self._left_undone())
        if not self._draining:
            for image in list(self._images.values()):
                # Cannot happen while rule 9 holds; if it does, the image must not be lost silently.
                image.error = RegsyncError("the run ended while this image waited for another one")
                self._end_image(image, "failed")

    def _left_undone(self) -> bool:
        return bool(self._pending or self._images or any(self._questions.values()))

    async def _drain(self, stop: anyio.Event, execution: anyio.CancelScope) -> None:
        await stop.wait()
        text = f"stopping: what is under way may end, for {DRAIN_SECONDS:.0f} s; a second signal ends it now"
        self._log("warning", "stopping", text)
        self._draining = True
        self._room.set()
        execution.deadline = anyio.current_time() + DRAIN_SECONDS

    def _ask(self, source: str, item: Callable[[], Awaitable[None]]) -> None:
        """Queue a question for one source; at most a fixed number of workers ask."""
        self._questions.setdefault(source, deque()).append(item)
        if self._workers[source] < _LOOK_UPS_PER_SOURCE:
            self._workers[source] += 1
            assert self._tasks is not None
            self._tasks.start_soon(self._work_off, source)

    def _is_full(self) -> bool:
        return len(self._pending) >= _MOST_PENDING or self._pending_bytes > _HEAVIEST_PENDING

    async def _work_off(self, source: str) -> None:
        queue = self._questions[source]
        while queue and not self._draining:
            if self._is_full():
                self._room = anyio.Event() if self._room.is_set() else self._room
                await self._room.wait()
                continue
            await queue.popleft()()
        self._workers[source] -= 1

    # --- discovery ----------------------------------------------------------------------------

    async def _list(self, group: list[MappingRule]) -> None:
        """List and select for mappings that write a common repository, then ask for each tag (I10)."""
        selected: list[tuple[MappingRule, tuple[str, ...]]] = []
        for mapping in group:
            try:
                kept = await self._select(mapping)
                selected.append((mapping, kept))
            except SyncError as error:
                # Its tags are not known: it counts as one failed image per target.
                self._fail(Wanted(mapping, "*", mapping.targets), error)
        assignment = plan.assign(selected)
        for lost, owner in assignment.conflicts:
            clash = MappingConflict(
                f"mappings[{owner.index}] writes this tag too, from another source",
                hint="give one of the two mappings another `to`, or narrow its tags",
            )
            self._fail(lost, clash)
        await self._list_targets(assignment.wanted)
        for wanted in assignment.wanted:
            self._ask(wanted.mapping.source.authority, partial(self._look_up, wanted, wanted.tag))

    async def _select(self, mapping: MappingRule) -> tuple[str, ...]:
        source = self._discovery.repository(mapping.source, mapping.source_repository, Side.SOURCE)
        selection = await self._discovery.select(mapping, source)
        if selection.shortfall is not None:
            kept, floor = selection.shortfall
            self._log("warning", "min_tags", f"{source}: {kept} tags were found, min_tags asks for {floor}")
        if not selection.kept:
            self._log("warning", "nothing_selected", f"{source}: the mapping selects no tag")
        self._report.mappings[mapping.index] = {
            "from": str(source),
            "to": mapping.target_repository,
            "selected": len(selection.kept),
            "dropped": dict(sorted(Counter(selection.dropped.values()).items())),
        }
        return tuple(selection.kept)

    async def _list_targets(self, wanted: tuple[Wanted, ...]) -> None:
        """List each target repository that is to hold two tags or more (design.md section 6 rule 6)."""
        tags: Counter[Repository] = Counter()
        for each in wanted:
            for registry in each.targets:
                name = each.mapping.target_repository
                tags[self._discovery.repository(registry, name, Side.TARGET)] += 1

        async def ask(target: Repository) -> None:
            try:
                await self._discovery.target_tags(target)
            except SyncError:
                return  # kept by the discovery, and raised for each image that needs it

        async with anyio.create_task_group() as group:
            for target, count in tags.items():
                if count > 1:
                    group.start_soon(ask, target)

    async def _look_up(self, wanted: Wanted, target_reference: str) -> None:
        """Ask what one source reference names and which targets lack it; queue what has to be copied."""
        began = anyio.current_time()
        source_name, named = self._names(wanted, target_reference)
        targets: list[Repository] = []
        for target, name in named.items():
            if self._is_immutable(wanted.mapping, target, target_reference):
                self._end(source_name, name, "skipped", reason="immutable_tag")
            else:
                targets.append(target)
        if not targets:
            return
        try:
            sighting = await self._discovery.look_up(
                wanted.mapping, wanted.tag, target_reference, tuple(targets)
            )
        except SyncError as error:
            for target in targets:
                self._end(source_name, named[target], "failed", error=error)
            return
        fan_out = len(wanted.mapping.targets) > 1
        self._sighted(sighting, source_name, target_reference, began, fan_out=fan_out)

    def _names(self, wanted: Wanted, reference: str) -> tuple[str, dict[Repository, str]]:
        """Return the source's full name, and each target with the full name of what it is to hold."""
        mapping = wanted.mapping
        source = self._discovery.repository(mapping.source, mapping.source_repository, Side.SOURCE)
        found = [
            self._discovery.repository(each, mapping.target_repository, Side.TARGET)
            for each in wanted.targets
        ]
        self.progress.known += len(found)
        return source.reference(wanted.tag), {target: target.reference(reference) for target in found}

    def _is_immutable(self, mapping: MappingRule, target: Repository, tag: str) -> bool:
        """Skip tier 1: the tag never moves, and the target's listing, fetched anyway, names it."""
        pattern = mapping.tags.immutable_tags
        listed = self._discovery.listed(target)
        return pattern is not None and listed is not None and tag in listed and self._globs(pattern)(tag)

    def _sighted(
        self, sighting: Sighting, source_name: str, reference: str, began: float, *, fan_out: bool
    ) -> None:
        if ":" in reference:
            # Pushed by digest: a trimmed index has its own.
            reference = sighting.digest
        digests: set[str] = set()
        if sighting.tree is not None:
            for manifest in (sighting.tree.root, *sighting.tree.children):
                blobs = [blob.digest for blob in manifest.blobs]
                self._references.update(blobs)
                digests.update(blobs)
                if manifest.digest in sighting.at_source:
                    # Where source and target share a host, the source is the first to mount from.
                    self._knowledge.commit(sighting.source.key, manifest.digest, blobs)
        for verdict in sighting.verdicts:
            name = verdict.target.reference(reference)
            if verdict.error is not None:
                self._end(source_name, name, "failed", error=verdict.error)
            elif verdict.reason is not None:
                # What its blobs are is not known, and need not be: another tag of it is one manifest PUT.
                self._knowledge.commit(verdict.target.key, sighting.digest, ())
                self._end(
                    source_name,
                    name,
                    "skipped",
                    reason=verdict.reason,
                    digest=sighting.digest,
                    source_digest=sighting.source_digest,
                )
            else:
                assert sighting.tree is not None
                image = _Image(
                    source=sighting.source,
                    target=verdict.target,
                    tree=sighting.tree,
                    source_name=source_name,
                    reference=reference,
                    fan_out=fan_out,
                    began=began,
                    digests=frozenset(digests),
                )
                self._pending.append(image)
                self._pending_bytes += image.tree.size
        self._advance()

    def _end(self, source: str, target: str, status: str, **details: Any) -> None:
        self.progress.done += 1
        self._emit(Outcome(source=source, target=target, status=status, **details))

    def _fail(self, wanted: Wanted, error: SyncError) -> None:
        source, named = self._names(wanted, wanted.tag)
        for target in named.values():
            self._end(source, target, "failed", error=error)

    # --- execution ----------------------------------------------------------------------------

    def _advance(self) -> None:
        """Start whatever may start: steps of promoted images first, then the next image."""
        while self._slots < self._config.max_concurrent_transfers:
            if self._ready:
                _, _, image = heapq.heappop(self._ready)
                self._start(image)
            elif self._pending and not self._draining:
                self._promote(self._next())
                if not self._is_full():
                    self._room.set()
            else:
                return

    def _next(self) -> _Image:
        """Take the pending image that leads best; within one repository nobody mounts, and order holds."""
        window = list(islice(self._pending, _ELECTED_AMONG))
        chosen = 0
        if len({image.target.key for image in window}) > 1:
            candidates = [(image.target.host.key, image.digests) for image in window]
            chosen = plan.elect(candidates, self._claims.is_covered)
        image = self._pending[chosen]
        del self._pending[chosen]
        self._pending_bytes -= image.tree.size
        return image

    def _promote(self, image: _Image) -> None:
        where = image.target.key
        try:
            blobs, children = image.tree.needs(lambda digest: self._knowledge.is_committed(where, digest))
        except SyncError as error:
            image.error = error.located(Side.SOURCE, "read", image.source_name)
            self._end_image(image, "failed")
            return
        ordered = plan.order_blobs(blobs, self._references)
        root = image.tree.root.digest
        work = Work(where, ordered, tuple(child.digest for child in children), root)
        image.work = work
        self._images[work] = image
        self._queue(self._claims.promote(work))
        if work.is_ready():
            self._make_ready(image)

    def _queue(self, steps: list[Step]) -> None:
        for step in steps:
            image = self._images[step.work]
            image.queue.append(step)
            self._schedule(image)

    def _make_ready(self, image: _Image) -> None:
        image.finishing = True
        self._schedule(image)

    def _schedule(self, image: _Image) -> None:
        """Let an image with something to do have a slot: at once if it holds one, else in its turn."""
        if image.running:
            self._start(image)
        else:
            assert image.work is not None
            heapq.heappush(self._ready, (image.work.order, id(image), image))

    def _start(self, image: _Image) -> None:
        assert self._tasks is not None
        steps, image.queue = image.queue, []
        finishing, image.finishing = image.finishing, False
        if image.ended or image.error is not None or not (steps or finishing):
            return
        self._slots += not image.running
        image.running += len(steps) + finishing
        for step in steps:
            self._tasks.start_soon(self._bring, image, step)
        if finishing:
            self._tasks.start_soon(self._finish, image)

    async def _bring(self, image: _Image, step: Step) -> None:
        blob = step.blob
        # One read of a source serves all targets; a mount reads nothing.
        reads = step.mount_from is None and not (image.fan_out and blob.digest in self._read)
        self._read.update([blob.digest] if image.fan_out else [])
        self.progress.expected += blob.size * reads
        try:
            brought = await self._mover.bring(step, image.source, image.target, fan_out=image.fan_out)
        except SyncError as error:
            image.error = image.error or error
        else:
            image.bytes += brought.bytes
            image.mounted += brought.mounted
            image.present += not (brought.mounted or brought.uploaded)
            if brought.uploaded:
                image.transferred.append(step.blob.digest)
            else:
                self.progress.expected -= blob.size * reads
            for work in self._claims.arrived(step.work, step.blob.digest):
                self._make_ready(self._images[work])
        if step.mount_from is not None:
            self._queue(self._claims.mounts_refused(image.target.host.key))
        self._settle(image)

    async def _finish(self, image: _Image) -> None:
        """Put the manifests of an image whose blobs are all there (I1, I2)."""
        work = image.work
        assert work is not None

        def arrived(child: Manifest) -> None:
            self._knowledge.commit(work.where, child.digest, [blob.digest for blob in child.blobs])
            for ready in self._claims.arrived(work, child.digest):
                self._make_ready(self._images[ready])

        try:
            await self._mover.put_children(image.tree, work, image.target, arrived)
            await image.target.put_manifest(image.reference, image.tree.root)
        except SyncError as error:
            image.error = image.error or error
        else:
            root = image.tree.root
            self._knowledge.commit(work.where, root.digest, [blob.digest for blob in root.blobs])
            if root.digest in work.own_children:
                arrived(root)
            self._queue(self._claims.committed(work))
            self._end_image(image, "synced")
        self._settle(image)

    def _settle(self, image: _Image) -> None:
        """Note that one step ended; a failed image ends with its last step and passes on what it owned."""
        image.running -= 1
        if not image.running:
            self._slots -= 1
            if image.error is not None and not image.ended:
                assert image.work is not None
                steps, ready = self._claims.failed(image.work)
                self._end_image(image, "failed")
                self._queue(steps)
                for work in ready:
                    self._make_ready(self._images[work])
        self._advance()

    def _end_image(self, image: _Image, status: str) -> None:
        image.ended = True
        work = image.work
        if work is not None:
            del self._images[work]
        root = image.tree.root
        self._end(
            image.source_name,
            image.target.reference(image.reference),
            status,
            digest=root.digest if status == "synced" else None,
            source_digest=image.tree.source_digest,
            error=image.error,
            bytes=image.bytes,
            duration=anyio.current_time() - image.began,
            transferred=tuple(image.transferred),
            mounted=image.mounted,
            skipped=image.present + (work.skipped if work is not None else 0),
        )

"""Conduct one run: listings, look-ups and transfers at the same time, every image to one outcome.
Owns: the queues of questions, the isolation of failures, the drain, the state's load and save. May
not know: how anything is asked, moved or printed, nor in which order images are brought.
Invariants: I10; every selected image ends in exactly one outcome unless the run is interrupted.
Follows docs/specification.md 1.1 "Pipeline", 1.6 and 3; docs/design.md 9."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from functools import cache, partial
from typing import Any, Literal

import anyio
import anyio.abc

from _regsync.config.model import Config, MappingRule
from _regsync.errors import MappingConflict, RegsyncError, Side, SyncError
from _regsync.registry.repository import Repository
from _regsync.registry.throttle import hopeless
from _regsync.registry.transport import Transport
from _regsync.state.database import StateFile, digest_like, key_of
from _regsync.state.knowledge import Knowledge
from _regsync.sync.discovery import Discovery, Sighting, together
from _regsync.sync.dry_run import Rehearsal
from _regsync.sync.image import Delivery, Image
from _regsync.sync.mappings import Wanted, assign, grouped
from _regsync.sync.referrers import COMPLETE, HAS, LATE_SHARE, Artifact, Look, Referrers, look_again
from _regsync.sync.report import Outcome, Report
from _regsync.sync.schedule import Execution
from _regsync.sync.staging import Staging
from _regsync.sync.transfer import Mover
from _regsync.tags import compile_glob, select_literals

# docs/specification.md section 1.6; how often a drain, and those who wait for a mount, are looked
# at.
DRAIN_SECONDS = 25.0


_DRAIN_TICK = 2.0


_HURRY_SECONDS = 30.0


# Enough to hide a round trip of 100 ms at 160 tags a second; a fixed number, whatever the tags.
_LOOK_UPS_PER_SOURCE = 16


class Run:
    """One run over a configuration's mappings, or over one image."""

    def __init__(
        self,
        transport: Transport,
        config: Config,
        emit: Callable[[Outcome], None],
        report: Report,
        rehearse: Literal["plan", "analysis"] | None = None,
        state: StateFile | None = None,
    ) -> None:
        """Prepare a run, or its rehearsal: `plan` asks what it would ask, `analysis` reads every
        image.
        """
        self._transport = transport
        self._config = config
        self._emit = emit
        self._report = report
        self._log = transport.edge.log
        self._globs = cache(compile_glob)
        self._state = state or StateFile(config.cache_dir, self._log)
        self._state.load(keep=rehearse is None)
        wall = transport.edge.wall
        self._knowledge = Knowledge(self._state, now=wall, ttl=config.cache_ttl)
        self._whole = rehearse == "analysis"
        self._plans = rehearse == "plan"
        self._discovery = Discovery(
            transport, self._knowledge, reads_only=rehearse is not None, whole=self._whole
        )
        self._staging = Staging(config.cache_dir, config.staging_size_limit)
        mover = (Rehearsal if rehearse else Mover)(transport, self._knowledge, self._staging)
        self.rehearsal = mover if isinstance(mover, Rehearsal) else None
        self._referrers = Referrers(self._discovery, self._knowledge, wall, self._state.is_used)
        self.execution = Execution(
            mover,
            self._knowledge,
            self._discovery,
            transport=transport,
            slots=config.max_concurrent_transfers,
            start=self._start,
            ask=self._ask,
            ended=self._end_whole,
            keep_list=None if rehearse else self._referrers.keep,
        )
        # Images whose next look at their artifacts is due: when the last one was, what it costs,
        # its source.
        self._late: list[tuple[int, int, str, Callable[..., Coroutine[Any, Any, None]]]] = []
        self._questions: dict[str, deque[Callable[[], Awaitable[None]]]] = {}
        self._workers: Counter[str] = Counter()
        self._asking = set[
            anyio.CancelScope
        ]()  # of questions, in the end of those that were cut off
        self._tasks: anyio.abc.TaskGroup | None = None

    def _start(self, task: Callable[..., Coroutine[Any, Any, None]], *arguments: Any) -> None:
        assert self._tasks is not None
        self._tasks.start_soon(task, *arguments)

    async def sync(self, stop: anyio.Event) -> None:
        groups = grouped(
            self._config.mappings, lambda mapping: mapping.places
        )  # listed together (I10)
        await self._conduct(
            stop, [(group[0].source.authority, partial(self._list, group)) for group in groups]
        )

    async def copy(
        self, mapping: MappingRule, reference: str, target_reference: str, stop: anyio.Event
    ) -> None:
        """Copy one image: `reference` at the source, `target_reference` (tag or digest) at the
        target.
        """
        item = partial(self._look_up, Wanted(mapping, reference, mapping.targets), target_reference)
        await self._conduct(stop, [(mapping.source.authority, item)])

    async def _conduct(
        self, stop: anyio.Event, items: list[tuple[str, Callable[[], Awaitable[None]]]]
    ) -> None:
        execution = anyio.CancelScope()
        for registry in self._config.in_use:
            self._transport.prepare(registry)  # an unusable file stops all before any request
        try:
            async with anyio.create_task_group() as outer:
                outer.start_soon(self._drain, stop, execution)
                outer.start_soon(self._state.commit_regularly)
                with execution:
                    async with anyio.create_task_group() as tasks:
                        self._tasks = tasks
                        for source, item in items:
                            self._ask(source, item)
                    async with anyio.create_task_group() as tasks:
                        self._tasks = tasks
                        await self._look_late()
                outer.cancel_scope.cancel()
        finally:
            self._tasks = None
            # Without the lock, what is there beside our own may be another run's that is at work.
            self._staging.close(
                sweep=not self.execution.draining,
                failed=self._report.exit_status() != 0,
                leftovers=self._state.is_kept,
            )
            self._discovery.keep_logins()
            self._knowledge.finish()
            self._state.close()
        undone = any(
            (self.execution.pending, self.execution.images, self._asking, *self._questions.values())
        )
        self._report.interrupted = self.execution.draining and (
            execution.cancelled_caught or undone
        )
        for image in () if self.execution.draining else list(self.execution.images.values()):
            # Cannot happen while rule 9 holds; if it does, the image must not be lost silently.
            image.delivery.error = RegsyncError(
                "the run ended while this image waited for another one"
            )
            self._end_whole(image.delivery)

    async def _drain(self, stop: anyio.Event, execution: anyio.CancelScope) -> None:
        while not stop.is_set():
            with anyio.move_on_after(_HURRY_SECONDS):
                await stop.wait()
            self.execution.hurry()
        text = f"stopping: what is under way may end, for {DRAIN_SECONDS:.0f} s; a second signal ends it now"
        self._log("warning", "stopping", text)
        self.execution.drain()
        for scope in self._asking:
            scope.cancel()  # they would find what is not brought any more
        self.execution.ends = execution.deadline = anyio.current_time() + DRAIN_SECONDS
        before = dict[anyio.CancelScope, int]()
        asked = -1
        while True:
            left = {scope: lease.unsent() for scope, lease in self._transport.streams.items()}
            dropped = hopeless(
                before, left, (execution.deadline - anyio.current_time()) / _DRAIN_TICK
            )
            for scope in dropped:
                scope.cancel()
            # Whatever waits, for a registry that is ill or asks for a pause, is left when nothing
            # else goes on.
            busy = any(limit.in_use for limit in self._transport.gate.limits.values())
            count = (
                -1
                if busy
                else sum(counter.total() for counter in self._transport.requests.values())
            )
            if count == asked >= 0:
                execution.cancel()
            # the others' speeds change by that
            before = {} if dropped else left
            asked = count
            await anyio.sleep(_DRAIN_TICK)

    def _ask(self, source: str, item: Callable[[], Awaitable[None]]) -> None:
        """Queue a question for one source; at most a fixed number of workers ask."""
        self._questions.setdefault(source, deque()).append(item)
        if self._workers[source] < _LOOK_UPS_PER_SOURCE:
            self._workers[source] += 1
            self._start(self._work_off, source)

    async def _work_off(self, source: str) -> None:
        queue = self._questions[source]
        while queue and not self.execution.draining:
            with anyio.CancelScope() as scope:
                self._asking.add(scope)
                await queue.popleft()()
                self._asking.remove(scope)
            await self.execution.wait_for_room()
        self._workers[source] -= 1

    async def _list(self, group: list[MappingRule]) -> None:
        """List and select for mappings that write a common repository, then ask for each tag (I10)."""
        kept = await together(partial(self._select, mapping) for mapping in group)
        wanted, conflicts = assign(zip(group, kept, strict=True))
        for lost, owner in conflicts:
            text = f"mappings[{owner.index}] writes this tag too, from another source"
            hint = "give one of the two mappings another `to`, or narrow its tags"
            self._fail(lost, MappingConflict(text, hint=hint))
        await self._list_targets(wanted)
        for each in wanted:
            self._ask(each.mapping.source.authority, partial(self._look_up, each, each.tag))

    async def _select(self, mapping: MappingRule) -> tuple[str, ...]:
        source = self._source(mapping)
        try:
            kept, dropped, floor = select_literals(mapping.tags) or await self._discovery.select(
                mapping.tags, source
            )
        except SyncError as error:
            # Its tags are not known: it counts as one failed image per target.
            self._fail(Wanted(mapping, "*", mapping.targets), error)
            return ()
        if len(kept) < floor:
            self._log(
                "warning",
                "min_tags",
                f"{source}: {len(kept)} tags were found, min_tags asks for {floor}",
            )
        if not kept:
            self._log("warning", "nothing_selected", f"{source}: the mapping selects no tag")
        self._report.mappings[mapping.index] = {
            "from": str(source),
            "to": mapping.target_repository,
            "selected": len(kept),
            "dropped": dict(sorted(Counter(dropped.values()).items())),
        }
        return kept

    async def _list_targets(self, wanted: list[Wanted]) -> None:
        """List each target repository where that answers two tags or more (docs/design.md section 6
        rule 6).
        """
        tags: Counter[Repository] = Counter()
        for each in wanted:
            mapping = each.mapping
            tag = each.tag
            for target in self._targets(each):
                # A tag that an earlier run left there is asked for by itself, unless it never
                # moves.
                name = self._discovery.snapshot_name(
                    mapping, self._source(mapping), target, tag, tag
                )
                if self._never_moves(mapping, tag) or self._knowledge.snapshot(name) is None:
                    tags[target] += 1
        several = [target for target, count in tags.items() if count > 1]
        with suppress(SyncError):  # kept by the discovery, and raised for each image that needs it
            await together(partial(self._discovery.target_tags, target) for target in several)

    def _source(self, mapping: MappingRule) -> Repository:
        return self._discovery.repository(mapping.source, mapping.source_repository, Side.SOURCE)

    def _targets(self, wanted: Wanted) -> list[Repository]:
        name = wanted.mapping.target_repository
        return [self._discovery.repository(each, name, Side.TARGET) for each in wanted.targets]

    async def _look_up(self, wanted: Wanted, reference: str) -> None:
        """Ask what one source reference names and which targets lack it; queue what has to be
        copied.
        """
        began = anyio.current_time()
        mapping = wanted.mapping
        targets = self._targets(wanted)
        self.execution.known += len(targets)
        source_name = self._source(mapping).reference(wanted.tag)
        asked = list[Repository]()
        for target in targets:
            # Skip tier 1: the tag never moves, and the target's listing, fetched anyway, names it.
            if (
                self._never_moves(mapping, reference)
                and reference in (self._discovery.names(target) or ())
                and not self._shows_more(mapping, target, wanted.tag, reference)
            ):
                self._end(
                    source_name, target.reference(reference), "skipped", reason="immutable_tag"
                )
            else:
                asked.append(target)
        try:
            if asked:
                sighting = await self._discovery.look_up(
                    mapping, wanted.tag, reference, tuple(asked)
                )
                # Pushed by digest: a trimmed index has its own.
                reference = sighting.digest if ":" in reference else reference
                await self._take(mapping, sighting, source_name, reference, began)
        except SyncError as error:
            for target in asked:
                self._end(source_name, target.reference(reference), "failed", error=error)

    def _shows_more(
        self, mapping: MappingRule, target: Repository, tag: str, reference: str
    ) -> bool:
        """Say whether a tag that never moves is looked at all the same, for its artifacts."""
        source = self._source(mapping)
        rule = mapping.artifacts
        name = self._discovery.snapshot_name(mapping, source, target, tag, reference)
        if (known := self._knowledge.snapshot(name)) is None or not rule.enabled:
            return rule.require_artifacts
        self._knowledge.take_snapshot(name, *known)  # of a tag that never moves it does not age
        record = self._knowledge.look(self._referrers.record(mapping, source, target, *known))
        shown = self._referrers.shown(source, digest_like(known[0]))
        wall = self._transport.edge.wall()
        return look_again(record, shown, wall, required=rule.require_artifacts) > Look.LATE

    def _never_moves(self, mapping: MappingRule, tag: str) -> bool:
        pattern = None if self._whole else mapping.tags.immutable_tags
        return pattern is not None and self._globs(pattern)(tag)

    async def _look_late(self) -> None:
        """Look again at the artifacts of images that are due, the oldest first (docs/design.md
        section 8).
        """
        share = LATE_SHARE * sum(counter.total() for counter in self._transport.requests.values())
        # Chance rounds, so that a small configuration, too, comes to its share over many runs.
        chance = self._transport.edge.chance()
        used = 0.0
        left = 0
        for _, cost, source, take in sorted(self._late, key=lambda each: each[0]):
            late = used + cost * (1 - chance) <= share and not self.execution.draining
            used = used + cost
            left = left + (not late)
            if late:
                self._ask(source, partial(take, True))
            else:
                await take(False)  # asks for nothing
        if left:
            self._log(
                "debug",
                "looks_due",
                f"{left} images are due for a look at their artifacts, in a later run",
            )

    async def _take(
        self,
        mapping: MappingRule,
        sighting: Sighting,
        source_name: str,
        reference: str,
        began: float,
        late: bool | None = None,
    ) -> None:
        """Let the execution have what is not there; while `late` is None a look at artifacts may be
        put off.
        """
        wholes = [
            Delivery(
                sighting.source,
                each.target,
                source_name,
                reference,
                sighting.digest,
                sighting.source_digest,
                began,
                each.held == sighting.digest,
                each.error,
            )
            for each in sighting.ends
        ]
        found = stripped = list[Artifact]()
        if mapping.artifacts.enabled or (self._plans and not all(whole.there for whole in wholes)):
            need = max(self._referrers.need(mapping, each) for each in wholes)
            if need == Look.LATE and late is None:
                # A target without the API is asked for its list, where it has one.
                lists = [
                    one
                    for one in wholes
                    if one.known[2] & HAS and not self._referrers.has_api(one.target)
                ]
                take = partial(self._take, mapping, sighting, source_name, reference, began)
                last = min(each.known[0] for each in wholes)
                self._late.append((last, 1 + len(lists), sighting.source.host.key, take))
                return
            try:
                if need > Look.LATE or late:
                    found, stripped = await self._referrers.look(mapping, sighting, wholes, need)
                else:
                    for whole in wholes:
                        whole.record = b""
            except SyncError as error:
                for whole in wholes:
                    whole.error = whole.error or error
        seen = [each for each in (sighting, *(artifact.sighting for artifact in found)) if each]
        for each in seen:
            self._note(each)
        for whole, end in zip(wholes, sighting.ends, strict=True):
            for each in seen:
                if self.rehearsal and each.tree:
                    self.rehearsal.look_at(
                        source_name if each is sighting else "", each.tree, whole.target.key
                    )
            if whole.there:
                self._knowledge.take_snapshot(
                    end.snapshot, key_of(whole.source_digest), key_of(whole.digest)
                )
            whole.fan_out = len(mapping.targets) > 1
            whole.stripped = len(stripped)
            whole.planned = [f"strip {each}" for each in stripped]
            then = [] if whole.error else self._hang(whole, found)
            if sighting.tree is None or whole.there or whole.error:
                whole.open -= 1
                self.execution.follow(then)
                self.execution.conclude(whole)
            else:
                self.execution.add(Image(whole, sighting.tree, reference, end.snapshot, then))
        self.execution.advance()

    def _note(self, sighting: Sighting) -> None:
        """Count what a tree names; where source and target share a host, the source is the first to
        mount from.
        """
        if sighting.tree is None:
            return
        shared = any(each.target.host.key == sighting.source.host.key for each in sighting.ends)
        for manifest in (sighting.tree.root, *sighting.tree.children):
            self.execution.references.update(blob.digest for blob in manifest.blobs)
            if shared and manifest.digest in sighting.at_source:
                self.execution.commit(sighting.source.key, manifest)

    def _hang(self, whole: Delivery, found: list[Artifact]) -> list[Image]:
        """Note what hangs on an image; return what its target lacks of it, behind that what hangs
        on it in turn.
        """
        under = dict[str, Image]()
        first = list[Image]()
        missed = set[str]()
        for each in found:
            sighting = each.sighting
            if each.entry is not None:
                whole.listing.setdefault(each.subject, []).append(each.entry)
            end = (
                next((one for one in sighting.ends if one.target is whole.target), None)
                if sighting
                else None
            )
            if each.subject in missed or (end is not None and end.error is not None):
                whole.error = whole.error or (end.error if end else None)
                whole.failed = whole.failed + 1
                missed.add(each.reference)  # nor is anything put that hangs on it
            elif (
                end is None
                or sighting is None
                or sighting.tree is None
                or end.held == sighting.digest
            ):
                whole.skipped += 1
                self.execution.delivered.setdefault((whole.target.key, each.reference), False)
            else:
                snapshot = b"" if each.entry else end.snapshot
                image = Image(whole, sighting.tree, each.reference, snapshot, [], str(each))
                (under[each.subject].then if each.subject in under else first).append(image)
                whole.open += 1
                for digest in (
                    sighting.source_digest,
                    *(child.digest for child in sighting.tree.children),
                ):
                    under.setdefault(digest, image)
        # Not complete any more, should this run be ended.
        if first and whole.known[2]:
            self._knowledge.looked(whole.record, 0, bytes(8))
        return first

    def _end(self, source: str, target: str, status: str, **details: Any) -> None:
        self.execution.done += 1
        if error := details.get("error"):
            error.shed()
        self._report.outcomes.append(
            Outcome(source=source, target=target, status=status, **details)
        )
        self._emit(self._report.outcomes[-1])

    def _fail(self, wanted: Wanted, error: SyncError) -> None:
        name = self._source(wanted.mapping).reference(wanted.tag)
        for target in self._targets(wanted):
            self.execution.known += 1
            self._end(name, target.reference(wanted.tag), "failed", error=error)

    def _end_whole(self, whole: Delivery) -> None:
        bits = whole.bits | HAS * bool(whole.brought or whole.skipped) | COMPLETE
        if whole.record and (whole.error is None or whole.known[2]):
            self._knowledge.looked(whole.record, bits if whole.error is None else 0, whole.listed)
        synced = "synced" if self.rehearsal is None else "would_sync"
        failed = whole.error is not None
        unchanged = (whole.there or whole.stands is not None) and not whole.brought
        reason = "unchanged" if whole.stands is None else "tag_immutable_exists"
        self._end(
            whole.source_name,
            whole.target.reference(whole.reference),
            "failed" if failed else "skipped" if unchanged else synced,
            reason=reason if unchanged and not failed else None,
            digest=None if failed else whole.stands or whole.digest,
            source_digest=whole.source_digest,
            error=whole.error,
            bytes=sum(blob.size for blob in whole.transferred),
            duration=anyio.current_time() - whole.began,
            transferred=tuple(blob.digest for blob in whole.transferred),
            mounted=whole.mounted,
            skipped=whole.present,
            planned=tuple(whole.planned),
            artifacts={
                "synced": len(whole.brought),
                "skipped": whole.skipped,
                "failed": whole.failed,
                "stripped": whole.stripped,
            },
        )

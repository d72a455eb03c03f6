"""Carry out one run: listings, look-ups and copies at the same time, every image to one outcome.

Owns: the queues of look-ups, the isolation of failures, the drain, when the state is loaded and
saved.
May not know: how anything is asked, copied or printed, nor in which order images are copied.
Invariants: I10; every selected image ends in exactly one outcome unless the run is interrupted.
Follows: docs/specification.md section 1.1 "Pipeline", sections 1.6 and 3; docs/design.md section 9.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from functools import cache, partial
from itertools import chain
from typing import TYPE_CHECKING, Literal

import anyio
import anyio.abc

from _regsync.config.model import Config, MappingRule
from _regsync.errors import MappingConflict, RegsyncError, Side, SyncError
from _regsync.layout.layouts import Layouts
from _regsync.oci.reference import is_digest, split_full_name
from _regsync.registry.repository import Repository
from _regsync.registry.transport import Transport
from _regsync.state.archive import COPIED, Snapshot, key_of
from _regsync.state.database import StateFile
from _regsync.state.knowledge import Knowledge
from _regsync.sync.artifact_checks import SearchDepth, flags_after
from _regsync.sync.discovery import Discovery, TagLookup, TargetTag
from _regsync.sync.image import NO_SEARCH, Image, ImageCopy
from _regsync.sync.mappings import ALL_TAGS, WantedTag, assign, grouped
from _regsync.sync.once import gather
from _regsync.sync.referrers import Artifact, FoundArtifacts, Referrers
from _regsync.sync.report import MappingSelection, Outcome, Report, Room, Undone
from _regsync.sync.schedule import Scheduler
from _regsync.sync.staging import Staging
from _regsync.sync.transfer import BlobTransfer
from _regsync.tags import compile_glob
from _regsync.text import time_text

if TYPE_CHECKING:
    from _regsync.state.seen import FirstSeen
    from _regsync.sync.dry_run import DryRun
    from _regsync.sync.lockfile import Lock
    from _regsync.sync.retry import Retry

# docs/specification.md section 1.6: what is under way may end in this time.
DRAIN_SECONDS = 25.0

# Seconds between two looks at whether a drain still moves.
_DRAIN_TICK = 2.0
# Seconds between two looks for images that have waited too long for a mount.
_HURRY_SECONDS = 30.0

# Enough to hide a round trip of 100 ms at 160 tags a second; a fixed number, however many tags.
_WORKERS_PER_SOURCE = 16

# A task that asks a source what there is. It starts copies, or queues further look-ups.
_Lookup = Callable[[], Awaitable[None]]


class Run:
    """One run over a configuration's mappings, or over one image.

    How it goes; all of it happens at the same time:

        _list_mappings   which tags do the mappings select?
        _look_up         what does a tag name, and which targets lack it?
        _start_copies    what the targets lack goes to the scheduler, which copies it
        _end_copy        an image has come to its target, or has failed: one outcome
    """

    def __init__(
        self,
        transport: Transport,
        config: Config,
        emit: Callable[[Outcome], None],
        report: Report,
        kind: Literal["sync", "copy", "plan", "analysis"] = "sync",
        state: StateFile | None = None,
        *,
        recheck: bool = False,
        first_seen: FirstSeen | None = None,
        lock: Lock | None = None,
        retry: Retry | None = None,
    ) -> None:
        """Prepare a run; `emit` is called with each outcome.

        A run of kind `copy` copies one image. Two kinds are dry runs, which change nothing. A plan asks
        what the run would ask and says what it would copy; an analysis reads the manifests of every
        selected image as well.
        With `recheck` the artifacts of all images are looked at, whatever the state says of them.
        `min_age` goes by `first_seen`; without it nothing is held back.
        With a lock, names and digests of sources are the lock's (sync/locked.py).
        With `retry` nothing is asked for but the images that it wants; the configuration is narrowed to
        them (`Retry.narrowed`).
        """
        machine = transport.machine
        is_dry_run = kind in ("plan", "analysis")
        self._transport = transport
        self._config = config
        self._emit = emit
        self._report = report
        self._report.is_dry_run = is_dry_run
        self._log = machine.log
        self._is_plan = kind == "plan"
        self._is_analysis = kind == "analysis"
        self._recheck = recheck
        self._compiled_glob = cache(compile_glob)

        self._state = state or StateFile(config.cache_dir, machine.log)
        self._state.load(may_write=not is_dry_run)
        knowledge = Knowledge(self._state, now=machine.wall, ttl=config.cache_ttl)
        self._knowledge = knowledge

        self._layouts = Layouts(transport, recheck=recheck)
        discovery_type, referrers_type = _kinds_of_search(lock)
        self._discovery = discovery_type(
            transport,
            knowledge,
            layouts=self._layouts,
            reads_only=is_dry_run,
            wants_all_trees=self._is_analysis,
        )
        self._referrers = referrers_type(
            self._discovery,
            knowledge,
            machine.wall,
            has_state=self._state.is_used,
            recheck=recheck,
            never_lists_tags=kind == "copy",
        )
        self._staging = Staging(config.cache_dir, config.staging_size_limit)
        self.dry_run: DryRun | None = None
        if is_dry_run:
            from _regsync.sync.dry_run import DryRun  # other runs do without

            self.dry_run = DryRun(transport, knowledge)
        self.scheduler = Scheduler(
            self.dry_run or BlobTransfer(transport, knowledge, self._staging),
            knowledge,
            self._discovery,
            transport=transport,
            slots=config.max_concurrent_transfers,
            start=self._start,
            queue_lookup=self._queue_lookup,
            on_end=self._end_copy,
            lists=None if is_dry_run else self._referrers.lists,
        )

        self._first_seen = first_seen
        # The source repositories of which some mapping holds digests back. All mappings note there what
        # they see: `latest` may name what `1.2.3` has named for long.
        self._aged_repositories = {
            mapping.source.repository_key(mapping.source_repository)
            for mapping in config.mappings
            if mapping.min_age
        }
        # By mapping, until when each tag is held back that no target gets or has.
        self._held_tags = defaultdict[int, list[int]](list)

        self._retry = retry

        # By source (host:port), the look-ups that have not begun.
        self._lookups = defaultdict[str, deque[_Lookup]](deque)
        # By source, the workers that run its look-ups, each by the scope that cancels it.
        self._workers = defaultdict[str, set[anyio.CancelScope]](set)
        # The mappings that were not listed yet, by index, and the tags that the others select, each
        # with the tag or digest at the targets.
        self._unlisted = dict[int, MappingRule]()
        self._wanted = list[tuple[WantedTag, str]]()
        # When the run began, on the clock of the event loop.
        self._began = 0.0
        # The group of all look-ups and copies, while the run goes on.
        self._tasks: anyio.abc.TaskGroup | None = None
        # The group of copies whose images were put and are not safe yet.
        self._endings: anyio.abc.TaskGroup | None = None

    # The run as a whole.

    async def sync(self, stop: anyio.Event) -> None:
        """Copy what the mappings select; `stop` ends the run early."""
        self._unlisted = {mapping.index: mapping for mapping in self._config.mappings}
        # Mappings that write one target repository are listed together, so that the earlier one
        # wins a conflict (I10).
        groups = grouped(self._config.mappings, lambda mapping: mapping.target_keys)
        for group in groups:
            self._queue_lookup(group[0].source.authority, partial(self._list_mappings, group))
        await self._conduct(stop)

    async def copy(
        self, mapping: MappingRule, reference: str, target_reference: str, stop: anyio.Event
    ) -> None:
        """Copy one image: `reference` at the source, `target_reference` (tag or digest) at the
        target; `stop` ends the run early.
        """
        wanted = WantedTag(mapping, reference, mapping.targets)
        self._wanted.append((wanted, target_reference))
        self.scheduler.images_known += len(wanted.targets)
        tags = self._tags_at(wanted, target_reference)
        self._discovery.load_snapshots(tags)
        self._queue_lookup(mapping.source.authority, partial(self._look_up, wanted, tags))
        await self._conduct(stop)

    async def _conduct(self, stop: anyio.Event) -> None:
        """Carry out a run: the look-ups that are queued lead to all others, and to all copies."""
        self._began = anyio.current_time()
        for registry in self._config.in_use:
            # An unusable file stops all before any request.
            self._transport.prepare(registry)
            self._layouts.prepare(registry)

        work = anyio.CancelScope()
        try:
            async with anyio.create_task_group() as watchers:
                # These run as long as the work does.
                watchers.start_soon(self._watch_over, work, stop)
                watchers.start_soon(self._state.commit_regularly)
                watchers.start_soon(self._layouts.commit_regularly)
                if self._first_seen is not None:
                    watchers.start_soon(self._first_seen.save_regularly)
                # What is put into a layout is reported when a commit has made it safe there, so the
                # copies end after the work.
                async with anyio.create_task_group() as self._endings:
                    with work:
                        async with (
                            self._discovery.target_workers.running(),
                            anyio.create_task_group() as self._tasks,
                        ):
                            for source, lookups in self._lookups.items():
                                for _ in lookups:
                                    self._start_worker(source)
                    await self._layouts.commit()
                watchers.cancel_scope.cancel()
        finally:
            # Also after an error, and when a second signal cancels all: what was learnt is kept.
            self._tasks = None
            self._complete_report()
            self._discovery.warn_of_missing_platforms()
            await self._save()

        if self.scheduler.draining:
            self._report.interrupted = work.cancelled_caught or bool(self._report.undone)
        else:
            self._report.interrupted = False
            self._fail_lost_images()
            self._report.undone = []
            self._tell_held_mappings()

    def _complete_report(self) -> None:
        """Add to the report what no single image shows."""
        self._report.mappings_undone = len(self._unlisted)
        self._report.undone = self._find_undone()
        traffic = self.scheduler.traffic
        self._report.saved = {"present": traffic.present, "mounted": traffic.mounted}
        self._report.rooms = self._find_rooms()

    async def _watch_over(self, work: anyio.CancelScope, stop: anyio.Event) -> None:
        """See that no image waits for ever to mount a blob; after `stop`, drain."""
        while not stop.is_set():
            with anyio.move_on_after(_HURRY_SECONDS):
                await stop.wait()
            self.scheduler.hurry()
        await self._drain(work)

    async def _drain(self, work: anyio.CancelScope) -> None:
        """Begin nothing new; cancel the work after DRAIN_SECONDS, or when nothing moves any more.

        Does not return: when the work has ended, `_conduct` cancels this task.
        """
        text = f"stopping: copies under way have {DRAIN_SECONDS:.0f} s to end; a second signal stops at once"
        self._log("warning", "stopping", text)
        self.scheduler.drain()
        for scope in chain.from_iterable(self._workers.values()):
            scope.cancel()  # nothing that is found from now on will be copied

        deadline = anyio.current_time() + DRAIN_SECONDS
        self.scheduler.drain_ends = deadline
        work.deadline = deadline

        # How many requests the run had sent at the last look; None if one was under way then.
        requests_before: int | None = None
        while True:
            if self._is_request_under_way():
                requests_before = None
            else:
                # All that is left waits: for a registry that is away, or, if no request has been sent
                # since the last look, for the end of a pause that a registry asked for.
                requests = sum(counter.total() for counter in self._transport.requests.values())
                if self._transport.recovery.is_waiting() or requests == requests_before:
                    work.cancel()
                requests_before = requests
            await anyio.sleep(_DRAIN_TICK)

    def _is_request_under_way(self) -> bool:
        """Say whether a request is under way that may help a copy to its end."""
        # Each request holds a permit. A probe of a registry that is away holds one too, but copies
        # nothing.
        permits = sum(limit.in_use for limit in self._transport.gate.limits.values())
        return permits > self._transport.recovery.count_probes()

    async def _save(self) -> None:
        """Keep what the next run can use, and delete the other files of this run."""
        has_failed = self._report.exit_status() != 0
        # Staged files that this run did not write may be another run's, unless this run has the
        # lock of the state: only then may they be deleted.
        self._staging.close(
            sweep=not self.scheduler.draining, failed=has_failed, leftovers=self._state.is_writer
        )
        self._layouts.close(sweep=not self.scheduler.draining and not has_failed)
        self._discovery.save_logins()
        self._knowledge.finish()
        self._state.close()
        if self._first_seen is not None:
            with anyio.CancelScope(shield=True):  # these times can be learnt in no other way
                await self._first_seen.save()

    def _find_undone(self) -> list[Undone]:
        """Return what has no outcome: images, and as `REPO:*` the mappings that were not listed."""
        if not self._unlisted and self.scheduler.images_done == self.scheduler.images_known:
            return []

        selected = list(self._wanted)
        for mapping in self._unlisted.values():
            tags = [ALL_TAGS] if self._retry is None else self._retry.tags_of(mapping)
            all_wanted = self._wanted_of([WantedTag(mapping, tag, mapping.targets) for tag in tags])
            selected += [(wanted, wanted.tag) for wanted in all_wanted]

        ended = {(outcome.source, outcome.target) for outcome in self._report.outcomes}
        undone = list[Undone]()
        for wanted, reference in selected:
            source_name = self._discovery.source_of(wanted.mapping).reference(wanted.tag)
            for target in self._targets(wanted):
                name = Undone(source_name, target.reference(reference))
                if name not in ended:
                    undone.append(name)
        return undone

    def _find_rooms(self) -> list[Room]:
        """Return what a dry run says of the image layouts that a run would write."""
        if self.dry_run is None or not self._is_plan:
            return []
        targets = [target for mapping in self._config.mappings for target in mapping.targets]
        return [
            Room(
                host.key,
                to_write=self.dry_run.bytes_to_write(host.key),
                left_out=sum(host.saved.values()),
                free=host.layout.free_bytes(),
            )
            for host in self._layouts.written_to(targets)
        ]

    def _fail_lost_images(self) -> None:
        """Fail the images that still wait for other images. There are none, because an image waits for
        older ones alone (rule 9). Should that rule be broken, they must not be lost silently.
        """
        for image in list(self.scheduler.images.values()):
            text = "the run ended while this image waited for another one"
            image.copy.error = RegsyncError(text)
            self._end_copy(image.copy)

    # Look-ups and tasks.

    def _start(
        self, task: Callable[..., Coroutine[object, object, None]], *arguments: object
    ) -> None:
        assert self._tasks is not None
        self._tasks.start_soon(task, *arguments)

    def _queue_lookup(self, source: str, lookup: _Lookup) -> None:
        """Queue a look-up for a source (host:port). It waits for a worker, and all for the run to begin."""
        self._lookups[source].append(lookup)
        if self._tasks is not None:
            self._start_worker(source)

    def _start_worker(self, source: str) -> None:
        """Start one more worker for a source's look-ups, unless it has enough."""
        workers = self._workers[source]
        if len(workers) < _WORKERS_PER_SOURCE:
            # The scope is there before the task runs, so that it counts, and a drain can cancel it.
            scope = anyio.CancelScope()
            workers.add(scope)
            self._start(self._run_lookups, source, scope)

    async def _run_lookups(self, source: str, scope: anyio.CancelScope) -> None:
        """Run the look-ups of a source, one after another, until none is left or a drain begins."""
        queue = self._lookups[source]
        with scope:
            while queue and not self.scheduler.draining:
                lookup = queue.popleft()
                await lookup()
                await self.scheduler.wait_for_room()
        self._workers[source].remove(scope)

    # Which tags.

    async def _list_mappings(self, group: list[MappingRule]) -> None:
        """Select the tags of mappings that write a common repository, then have each looked up."""
        selected = await gather(partial(self._select, mapping) for mapping in group)
        tags, conflicts = assign(zip(group, selected, strict=True))
        tags = self._wanted_of(tags)

        for conflict in conflicts:
            owner = conflict.owner.index
            text = f"mappings[{owner}] writes this tag too, from another source"
            hint = "give one of the two mappings another `to`, or narrow its tags"
            self._fail(conflict.wanted, MappingConflict(text, hint=hint))

        for mapping in group:
            del self._unlisted[mapping.index]
        self._wanted += [(wanted, wanted.tag) for wanted in tags]
        self.scheduler.images_known += sum(len(wanted.targets) for wanted in tags)

        lookups = [(wanted, self._tags_at(wanted, wanted.tag)) for wanted in tags]
        await self._list_targets(lookups)
        for wanted, target_tags in lookups:
            source = wanted.mapping.source.authority
            self._queue_lookup(source, partial(self._look_up, wanted, target_tags))

    async def _select(self, mapping: MappingRule) -> tuple[str, ...]:
        """Return the tags that a mapping selects. Where its source cannot be listed, the mapping
        fails: no tags, and one failed image for each target.
        """
        source = self._discovery.source_of(mapping)
        try:
            selection = await self._discovery.select_tags(mapping)
        except SyncError as error:
            self._report.selections[mapping.index] = MappingSelection(
                str(source), mapping.target_repository, error=error
            )
            self._fail(WantedTag(mapping, ALL_TAGS, mapping.targets), error)
            return ()

        for event, text in selection.doubts(str(source)):
            self._log("warning", event, text)
        reasons = Counter(selection.dropped.values())
        self._report.selections[mapping.index] = MappingSelection(
            str(source),
            mapping.target_repository,
            selected=len(selection.kept),
            dropped=dict(sorted(reasons.items())),
        )
        return selection.kept

    def _wanted_of(self, tags: list[WantedTag]) -> list[WantedTag]:
        """Return those of a mapping's tags that are copied: all, unless this run is a retry."""
        return tags if self._retry is None else self._retry.wanted(tags)

    async def _list_targets(self, lookups: Sequence[tuple[WantedTag, Sequence[TargetTag]]]) -> None:
        """List each target repository whose listing could spare looking up two tags or more
        (docs/design.md section 6, rule 6).
        """
        self._discovery.load_snapshots([tag for _, tags in lookups for tag in tags])
        # By target, for how many tags a listing may spare the request: a tag that never moves may be
        # there, and a tag without a snapshot is probably absent.
        spared = Counter[Repository]()
        for wanted, tags in lookups:
            never_moves = self._never_moves(wanted.mapping, wanted.tag)
            spared.update(
                tag.target for tag in tags if never_moves or self._discovery.is_probably_absent(tag)
            )

        worth_listing = [target for target, count in spared.items() if count >= 2]
        # An error is not lost here: the discovery keeps it, and raises it for each image that needs
        # the listing.
        with suppress(SyncError):
            await gather(partial(self._discovery.target_tags, target) for target in worth_listing)

    def _targets(self, wanted: WantedTag) -> list[Repository]:
        """Return the repositories that a tag is copied to."""
        name = wanted.mapping.target_repository
        return [
            self._discovery.repository(registry, name, Side.TARGET) for registry in wanted.targets
        ]

    def _tags_at(self, wanted: WantedTag, target_reference: str) -> list[TargetTag]:
        """Return what the look-up of a tag fills in; `target_reference` is its tag or digest at the
        targets.
        """
        return self._discovery.new_target_tags(
            self._targets(wanted), wanted.mapping, wanted.tag, target_reference
        )

    # One image.

    async def _look_up(self, wanted: WantedTag, tags: Sequence[TargetTag]) -> None:
        """Find out what a tag names and which targets lack it; start the copies."""
        began = anyio.current_time()
        mapping = wanted.mapping
        source_name = self._discovery.source_of(mapping).reference(wanted.tag)

        unsettled = list[TargetTag]()
        for tag in tags:
            if self._is_settled(mapping, tag):
                target_name = tag.target.reference(tag.reference)
                outcome = Outcome(
                    source_name,
                    target_name,
                    "skipped",
                    reason="immutable_tag",
                    started=began - self._began,
                )
                self._end(outcome)
            else:
                unsettled.append(tag)
        if not unsettled:
            return

        first_seen = self._first_seen if self._notes_ages(mapping) else None
        try:
            lookup = await self._discovery.look_up(
                mapping, wanted.tag, unsettled, first_seen=first_seen
            )
        except SyncError as error:
            for tag in unsettled:
                target_name = tag.target.reference(tag.reference)
                started = began - self._began
                self._end(Outcome(source_name, target_name, "failed", error=error, started=started))
            return

        self._end_held(wanted, lookup, source_name, began)
        if lookup.targets:
            copies = _copies_of(lookup, source_name, began)
            artifacts = await self._find_artifacts(mapping, lookup, copies)
            self._start_copies(mapping, lookup, copies, artifacts)

    def _notes_ages(self, mapping: MappingRule) -> bool:
        """Say whether the times are noted at which digests are first seen at a mapping's source: some
        mapping of this source repository has `min_age`.
        """
        if not self._aged_repositories:
            return False
        key = mapping.source.repository_key(mapping.source_repository)
        return key in self._aged_repositories

    def _end_held(
        self, wanted: WantedTag, lookup: TagLookup, source_name: str, began: float
    ) -> None:
        """End an image at the targets that do not get it yet, because its digest is younger than
        `min_age`.
        """
        until = lookup.held_until
        if until is None or not lookup.held_tags:
            return
        text = f"{source_name}: held back by min_age until {time_text(until)}"
        self._log("info", "held", text)
        for tag in lookup.held_tags:
            outcome = Outcome(
                source_name,
                tag.target.reference(wanted.tag),
                "skipped",
                digest=tag.digest,
                source_digest=lookup.source_digest,
                reason="min_age",
                until=until,
                started=began - self._began,
                duration=anyio.current_time() - began,
            )
            self._end(outcome)
        if len(lookup.held_tags) == len(wanted.targets):
            self._held_tags[wanted.mapping.index].append(until)

    def _tell_held_mappings(self) -> None:
        """Warn of the mappings whose tags are all held back: their targets get nothing."""
        tag_counts = Counter(wanted.mapping.index for wanted, _ in self._wanted)
        for mapping in self._config.mappings:
            moments = self._held_tags[mapping.index]
            if moments and len(moments) == tag_counts[mapping.index]:
                place = f"{self._discovery.source_of(mapping)} -> {mapping.target_repository}"
                text = (
                    f"{place}: min_age holds back everything that the mapping selects"
                    f" (tags: {len(moments)}), until {time_text(min(moments))} at the earliest"
                )
                self._log("warning", "all_held", text)

    def _never_moves(self, mapping: MappingRule, tag: str) -> bool:
        """Say whether a tag matches `immutable_tags`: it is not looked up where the target has it."""
        pattern = mapping.tags.immutable_tags
        if pattern is None or self._is_analysis:  # an analysis reads every image
            return False
        return self._compiled_glob(pattern)(tag)

    def _is_settled(self, mapping: MappingRule, tag: TargetTag) -> bool:
        """Say whether a tag is skipped without a request (skip tier 1): it never moves, the target
        was listed anyway and has it, and its artifacts are not to be looked at.
        """
        if not self._never_moves(mapping, tag.reference):
            return False
        if self._recheck and mapping.artifacts.enabled:
            return False
        names_at_target = self._discovery.known_listing(tag.target) or ()  # None: it was not listed
        if tag.reference not in names_at_target:
            return False
        return not self._has_artifact_news(mapping, tag)

    def _has_artifact_news(self, mapping: MappingRule, tag: TargetTag) -> bool:
        """Say whether a tag that never moves is looked up all the same, for its artifacts. Renews its
        snapshot, which would expire: if the tag is skipped, no look-up renews it.
        """
        entry = tag.snapshot_entry
        if not mapping.artifacts.enabled or entry is None:
            return False
        self._knowledge.record_snapshot(tag.snapshot_key, entry.snapshot, entry)
        source = self._discovery.source_of(mapping)
        return self._referrers.may_have_new_artifacts(mapping, source, tag.target, *entry.snapshot)

    async def _find_artifacts(
        self, mapping: MappingRule, lookup: TagLookup, copies: Sequence[ImageCopy]
    ) -> FoundArtifacts:
        """Find the artifacts of an image, if it is time to look for them (docs/design.md section 8).

        In a plan `stripped` has all artifacts that stay behind. After an error none is returned, and
        the error is set in the copies.
        """
        artifacts = FoundArtifacts()
        try:
            depth = SearchDepth.NONE
            if mapping.artifacts.enabled:
                depth = self._referrers.plan_search(mapping, lookup, copies)
            if depth is SearchDepth.NONE:
                for copy in copies:
                    copy.artifact_search = NO_SEARCH
            else:
                artifacts = await self._referrers.find(mapping, lookup, copies, depth)

            if self._is_plan:
                left_behind = await self._referrers.find_left_behind(mapping, lookup)
                artifacts = artifacts._replace(stripped=left_behind)
        except SyncError as error:
            for copy in copies:
                copy.error = copy.error or error
            return FoundArtifacts()
        return artifacts

    def _start_copies(
        self,
        mapping: MappingRule,
        lookup: TagLookup,
        copies: Sequence[ImageCopy],
        artifacts: FoundArtifacts,
    ) -> None:
        """Give the scheduler what the targets lack of an image and its artifacts."""
        lookups = [lookup]
        lookups += [artifact.lookup for artifact in artifacts.copied if artifact.lookup is not None]
        for found in lookups:
            self._expect_blobs(found)

        for copy, tag in zip(copies, lookup.targets, strict=True):
            if self.dry_run is not None:
                self.dry_run.count_copy(copy, lookups)
            copy.has_several_targets = len(mapping.targets) > 1
            copy.artifacts_stripped = len(artifacts.stripped)
            copy.planned = [f"strip {artifact}" for artifact in artifacts.stripped]
            self._start_copy(copy, lookup, tag, artifacts.copied)
        self.scheduler.advance()

    def _start_copy(
        self, copy: ImageCopy, lookup: TagLookup, tag: TargetTag, artifacts: Sequence[Artifact]
    ) -> None:
        """Give the scheduler what one target lacks; `advance` follows."""
        if copy.already_at_target:
            snapshot = Snapshot(key_of(copy.source_digest), key_of(copy.digest))
            self._knowledge.record_snapshot(tag.snapshot_key, snapshot, tag.snapshot_entry)

        missing = list[Image]()
        if artifacts and copy.error is None:
            missing = self._missing_artifacts(copy, artifacts)
        if missing:
            # If this run is killed before the artifacts are copied, the next run looks at them all.
            search = copy.artifact_search
            self._knowledge.record_artifact_check(
                search.key,
                search.last_check.flags & COPIED,
                bytes(8),
                first=search.last_check.first,
            )

        tree = None if copy.already_at_target else lookup.tree
        if tree is not None and copy.error is None:
            # The artifacts refer to the image, so they are put after it (I2).
            image = Image(copy, tree, copy.reference, tag.snapshot_key, missing)
            self.scheduler.add_image(image)
        else:
            # The image itself is not copied, so its artifacts need not wait for it.
            copy.unfinished_images -= 1
            self.scheduler.add_artifacts(missing)
            self.scheduler.end_if_complete(copy)

    def _expect_blobs(self, lookup: TagLookup) -> None:
        """Count how many manifests name each blob of an image; the scheduler orders blobs by that.

        Where source and target share a host, note that the blobs can be mounted from the source.
        """
        tree = lookup.tree
        if tree is None:
            return
        source = lookup.source
        is_host_shared = any(tag.target.host.key == source.host.key for tag in lookup.targets)
        for manifest in (tree.root, *tree.children):
            self.scheduler.manifests_by_blob.update(blob.digest for blob in manifest.blobs)
            if is_host_shared and manifest.digest in lookup.digests_at_source:
                self.scheduler.commit(source.pool, manifest)

    def _missing_artifacts(self, copy: ImageCopy, artifacts: Sequence[Artifact]) -> list[Image]:
        """Count the artifacts of a copy; return those that its target lacks, as images to copy.

        An artifact whose subject is missing too is not returned: it is put after its subject, among
        the subject's dependents (I2).
        """
        missing = list[Image]()
        # By digest of a manifest, the missing artifact that the manifest is a part of.
        image_of_digest = dict[str, Image]()
        # References of the artifacts that have failed.
        failed = set[str]()

        for artifact in artifacts:
            if artifact.entry is not None:
                copy.listing.setdefault(artifact.subject, []).append(artifact.entry)

            # None: the target was not asked for the artifact, because it is known to hold it.
            tag = artifact.lookup.tag_at(copy.target) if artifact.lookup is not None else None
            error = tag.error if tag is not None else None
            if error is not None or artifact.subject in failed:
                copy.error = copy.error or error
                copy.artifacts_failed += 1
                failed.add(artifact.reference)  # an artifact that refers to it fails too
                continue

            image = _missing_artifact(copy, artifact, tag) if tag is not None else None
            if image is None:
                copy.artifacts_skipped += 1
                self.scheduler.record_artifact(copy.target, artifact.reference)
                continue

            copy.unfinished_images += 1
            if artifact.subject in image_of_digest:
                image_of_digest[artifact.subject].dependents.append(image)
            else:
                missing.append(image)
            # Later artifacts may refer to this one, or to a child of it.
            children = (child.digest for child in image.tree.children)
            for digest in (image.tree.source_digest, *children):
                image_of_digest.setdefault(digest, image)
        return missing

    # Outcomes.

    def _end_copy(self, copy: ImageCopy) -> None:
        """End a copy; what was put into a layout is reported when it is safe there."""
        has_put = copy.is_copied or bool(copy.artifacts_copied)
        may_be_lost = copy.error is None and has_put and copy.target.has_unsaved()
        if may_be_lost and self._endings is not None:
            self._endings.start_soon(self._end_when_safe, copy)
        else:
            self._record_end(copy)

    async def _end_when_safe(self, copy: ImageCopy) -> None:
        try:
            await copy.target.wait_until_saved()
        except SyncError as error:
            copy.error = error
        self._record_end(copy)

    def _record_end(self, copy: ImageCopy) -> None:
        """Record the search for a copy's artifacts in the state, and report how the copy ended."""
        # After a failure the artifacts are not complete. If the state says that already, the only news
        # can be that the image itself was copied.
        search = copy.artifact_search
        has_news = copy.error is None or search.last_check.is_complete or copy.is_copied
        if search.key and has_news:
            self._knowledge.record_artifact_check(
                search.key, flags_after(copy), search.listing_hash, first=search.last_check.first
            )
        outcome = copy.outcome(
            started=copy.began - self._began,
            duration=anyio.current_time() - copy.began,
            is_dry_run=self.dry_run is not None,
        )
        self._end(outcome)

    def _fail(self, wanted: WantedTag, error: SyncError) -> None:
        """Report a tag that is not looked up as a failed image for each target."""
        source_name = self._discovery.source_of(wanted.mapping).reference(wanted.tag)
        for reported in self._wanted_of([wanted]):
            for target in self._targets(reported):
                self.scheduler.images_known += 1
                target_name = target.reference(reported.tag)
                started = anyio.current_time() - self._began
                self._end(Outcome(source_name, target_name, "failed", error=error, started=started))

    def _end(self, outcome: Outcome) -> None:
        """Count and report how an image ended."""
        self.scheduler.images_done += 1
        if outcome.error is not None:
            outcome.error.drop_frames()  # they would keep buffers alive until the report is written
            reference = getattr(outcome.error, "reference", None) or outcome.target
            host, _ = split_full_name(reference)
            self.scheduler.failures[host] += 1
        self._report.outcomes.append(outcome)
        self._emit(outcome)


def _kinds_of_search(
    lock: Lock | None,
) -> tuple[Callable[..., Discovery], Callable[..., Referrers]]:
    """Return what makes the discovery and the referrers of a run. A run from a lock differs from others
    here alone: it takes names and digests from the lock.
    """
    if lock is None:
        return Discovery, Referrers
    from _regsync.sync.locked import LockedDiscovery, LockedReferrers

    return partial(LockedDiscovery, lock), LockedReferrers


def _missing_artifact(copy: ImageCopy, artifact: Artifact, tag: TargetTag) -> Image | None:
    """Return an artifact as an image to copy; None if its target holds it."""
    lookup = artifact.lookup
    if lookup is None or lookup.tree is None or tag.digest == lookup.digest:
        return None
    # Only a tag of cosign's has a snapshot. An entry of a list is put by its digest.
    snapshot_key = tag.snapshot_key if artifact.entry is None else b""
    return Image(copy, lookup.tree, artifact.reference, snapshot_key, [], str(artifact))


def _copies_of(lookup: TagLookup, source_name: str, began: float) -> list[ImageCopy]:
    """Return the copies of an image, one for each target that was looked at."""
    copies = []
    for tag in lookup.targets:
        # An image that is asked for by its digest is put by the digest of what is pushed, which is
        # another one where an index is trimmed to the wanted platforms.
        reference = lookup.digest if is_digest(tag.reference) else tag.reference
        copies.append(
            ImageCopy(
                source=lookup.source,
                target=tag.target,
                source_name=source_name,
                source_reference=lookup.reference,
                reference=reference,
                digest=lookup.digest,
                source_digest=lookup.source_digest,
                began=began,
                already_at_target=tag.digest == lookup.digest,
                error=tag.error,
            )
        )
    return copies

"""Carry out one run: listings, look-ups and copies run concurrently; each image has one outcome.

Owns: the queues of look-ups, the isolation of failures, the drain, when the state is loaded and
saved.
May not know: how requests are sent, how images are copied and in which order, how outcomes are
printed.
Invariants: I10; every selected image has exactly one outcome, unless the run is interrupted.
Follows: docs/specification.md section 1.1 "Pipeline", sections 1.6 and 3; docs/design.md section 9.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from functools import cache, partial
from itertools import chain
from typing import TYPE_CHECKING, Literal, NamedTuple

import anyio
import anyio.abc

from _regsync.config import Config, MappingRule
from _regsync.errors import MappingConflict, RegsyncError, Side, SyncError
from _regsync.layouts import Layouts
from _regsync.oci import is_digest
from _regsync.registry.repository import Repository
from _regsync.registry.runs import Transport
from _regsync.state import COPIED, NO_CHECK, Knowledge, Snapshot, StateFile, key_of
from _regsync.sync.artifact_checks import SearchDepth, flags_after
from _regsync.sync.blobs import Blobs, Staging
from _regsync.sync.discovery import Discovery, TagLookup, TargetTag
from _regsync.sync.image import NO_SEARCH, Image, ImageCopy
from _regsync.sync.mappings import ALL_TAGS, WantedTag, assign_tags, group_mappings
from _regsync.sync.once import gather
from _regsync.sync.referrers import Artifact, FoundArtifacts, Referrers, no_artifact_error
from _regsync.sync.report import LayoutSpace, MappingSelection, Outcome, Report, Undone
from _regsync.sync.work import Scheduler
from _regsync.tags import compile_glob
from _regsync.text import time_text

if TYPE_CHECKING:
    from _regsync.state import FirstSeen
    from _regsync.sync.dry_run import DryRun
    from _regsync.sync.lockfile import Lock
    from _regsync.sync.retry import Retry

# Seconds for which copies under way may continue after a signal (docs/specification.md section
# 1.6).
DRAIN_SECONDS = 25.0

# Seconds between two checks whether a drain still makes progress.
_DRAIN_TICK = 2.0

# A listing of a target repository costs at least one request, so it must save more than one.
_MIN_SAVED_REQUESTS = 2

# Concurrent look-ups at one source. With a round trip of 100 ms they look up 160 tags a second.
_WORKERS_PER_SOURCE = 16

# A look-up at a source. It starts copies, or queues further look-ups.
_Lookup = Callable[[], Awaitable[None]]


class _TagToLookUp(NamedTuple):
    """A selected tag, and the same tag at each of its targets."""

    wanted: WantedTag
    target_tags: Sequence[TargetTag]


class _SelectedImage(NamedTuple):
    """A selected tag, and its tag or digest at the targets."""

    wanted: WantedTag
    target_reference: str


class Run:
    """One run over the mappings of a configuration, or over one image.

    An image passes through these methods, while other images are at other stages:

        _list_mappings   select the tags of mappings
        _look_up         resolve a tag at its source and its targets
        _start_copies    hand the image to the scheduler for the targets that lack it
        _end_copy        report the outcome after the scheduler has copied the image
    """

    def __init__(
        self,
        transport: Transport,
        config: Config,
        emit: Callable[[Outcome], None],
        report: Report,
        kind: Literal["sync", "copy", "plan"] = "sync",
        state: StateFile | None = None,
        *,
        recheck: bool = False,
        first_seen: FirstSeen | None = None,
        lock: Lock | None = None,
        retry: Retry | None = None,
    ) -> None:
        """Prepare a run, and load the state. `emit` is called with each outcome.

        A run of kind "copy" copies one image. A run of kind "plan" is a dry run, which changes
        nothing and finds out what a run would copy.

        With `recheck` the run searches for the artifacts of all images, whatever the state says.
        `first_seen` has the times that `min_age` counts from. Without it no image is held back.
        With `lock` the tags and digests of sources are taken from the lock (sync/locked.py).
        With `retry` only the images of the retry are copied, and `config` is the result of
        `Retry.narrow`.
        """
        machine = transport.machine
        is_dry_run = kind == "plan"
        self._transport = transport
        self._config = config
        self._emit = emit
        self._report = report
        self._report.is_dry_run = is_dry_run
        self._log = machine.log
        self._recheck = recheck
        self._retry = retry
        self._first_seen = first_seen
        # Compiles each pattern of `immutable_tags` once.
        self._compiled_glob = cache(compile_glob)

        self._state = state or StateFile(config.cache_dir, machine.log)
        self._state.load(may_write=not is_dry_run)
        self._knowledge = Knowledge(self._state, now=machine.wall, ttl=config.cache_ttl)

        self._layouts = Layouts(transport, recheck=recheck)
        make_discovery: Callable[..., Discovery] = Discovery
        make_referrers: Callable[..., Referrers] = Referrers
        if lock is not None:
            from _regsync.sync.locked import LockedDiscovery, LockedReferrers

            make_discovery = partial(LockedDiscovery, lock)
            make_referrers = LockedReferrers
        self._discovery = make_discovery(
            transport, self._knowledge, layouts=self._layouts, reads_only=is_dry_run
        )
        self._referrers = make_referrers(
            self._discovery,
            self._knowledge,
            machine.wall,
            has_state=self._state.is_used,
            recheck=recheck,
            never_lists_tags=kind == "copy",
        )
        staging = None
        if config.cache_dir is not None and self._state.is_writer:
            staging = f"{config.cache_dir}/staged"
        self._staging = Staging(staging, config.staging_size_limit)
        self._dry_run: DryRun | None = None
        if is_dry_run:
            from _regsync.sync.dry_run import DryRun  # most runs do not need this module

            self._dry_run = DryRun(self._knowledge)
        self.scheduler = Scheduler(
            self._dry_run or Blobs(transport, self._knowledge, self._staging),
            self._knowledge,
            self._discovery,
            transport=transport,
            slots=config.max_concurrent_transfers,
            start=self._start_task,
            queue_lookup=self._queue_lookup,
            on_end=self._end_copy,
            lists=None if is_dry_run else self._referrers.lists,
        )

        # The source repositories for which some mapping has `min_age`. All mappings from these
        # repositories record when a digest is first seen, because several tags may name one digest.
        self._aged_repositories = {
            mapping.source.repository_key(mapping.source_repository)
            for mapping in config.mappings
            if mapping.min_age
        }
        # By mapping index, until when tags are held back at all their targets, in seconds since
        # 1970.
        self._held_until = defaultdict[int, list[int]](list)

        # By source (host:port), the look-ups that have not started.
        self._lookups = defaultdict[str, deque[_Lookup]](deque)
        # By source (host:port), the cancel scope of each worker that runs look-ups.
        self._workers = defaultdict[str, set[anyio.CancelScope]](set)
        # By index, the mappings whose tags have not been selected yet.
        self._unlisted = dict[int, MappingRule]()
        # The tags that have been selected.
        self._selected = list[_SelectedImage]()
        # When the run began, on the clock of the event loop.
        self._run_began = 0.0
        # The look-ups and copies. None before and after them.
        self._tasks: anyio.abc.TaskGroup | None = None
        # The copies into layouts that wait until a power cut can no longer lose them.
        self._unsaved_copies: anyio.abc.TaskGroup | None = None

    # The run as a whole.

    async def sync(self, stop: anyio.Event) -> None:
        """Copy the images that the mappings select. If `stop` is set, the run drains and ends."""
        self._unlisted = {mapping.index: mapping for mapping in self._config.mappings}
        # Mappings with a common target repository are listed together, so that the earlier mapping
        # wins a conflict (I10).
        groups = group_mappings(self._config.mappings, lambda mapping: mapping.target_keys)
        for group in groups:
            self._queue_lookup(group[0].source.authority, partial(self._list_mappings, group))
        await self._run_lookups_and_copies(stop)

    async def copy(
        self, mapping: MappingRule, reference: str, target_reference: str, stop: anyio.Event
    ) -> None:
        """Copy one image. If `stop` is set, the run drains and ends.

        `reference` and `target_reference` are the tag or digest at the source and at the targets.
        """
        wanted = WantedTag(mapping, reference, mapping.targets)
        self._selected.append(_SelectedImage(wanted, target_reference))
        self.scheduler.images_known += len(wanted.targets)
        tags = self._new_target_tags(wanted, target_reference)
        self._discovery.load_snapshots(tags)
        self._queue_lookup(mapping.source.authority, partial(self._look_up, wanted, tags))
        await self._run_lookups_and_copies(stop)

    async def _run_lookups_and_copies(self, stop: anyio.Event) -> None:
        """Run the queued look-ups and everything that they start, then save the state.

        The report is complete afterwards.
        """
        self._run_began = anyio.current_time()
        for registry in self._config.registries_in_use:
            # An unusable file must raise its error before the first request.
            self._transport.dialer.prepare(registry)
            self._layouts.prepare(registry)

        # The look-ups and copies. A drain cancels them when its time is over.
        work = anyio.CancelScope()
        try:
            async with anyio.create_task_group() as watchers:
                # These tasks are cancelled when the work has ended.
                watchers.start_soon(self._drain_when, stop, work)
                watchers.start_soon(self._state.commit_regularly)
                watchers.start_soon(self._layouts.commit_regularly)
                await self._run_until_saved(work)
                watchers.cancel_scope.cancel()
        finally:
            # The state is saved even after an error, and if a second signal cancels the run.
            self._tasks = None
            self._complete_report()
            self._discovery.warn_of_missing_platforms()
            await self._save()

        if self.scheduler.is_draining:
            self._report.interrupted = work.cancelled_caught or bool(self._report.undone)
        else:
            self._report.interrupted = False
            self._fail_lost_images()
            self._report.undone = []
            self._warn_of_held_mappings()

    async def _run_until_saved(self, work: anyio.CancelScope) -> None:
        """Run the look-ups and copies in `work`, and wait until all layouts are saved.

        A copy into a layout ends when the layout has been saved, so some copies end after `work`.
        """
        async with anyio.create_task_group() as self._unsaved_copies:
            with work:
                async with anyio.create_task_group() as self._tasks:
                    for source, lookups in self._lookups.items():
                        for _ in lookups:
                            self._start_worker(source)
            await self._layouts.commit()

    def _complete_report(self) -> None:
        """Set the fields of the report that cover the whole run."""
        self._report.mappings_undone = len(self._unlisted)
        self._report.undone = self._find_undone()
        traffic = self.scheduler.traffic
        self._report.saved = {"present": traffic.present_bytes, "mounted": traffic.mounted_bytes}
        self._report.layout_spaces = self._find_layout_spaces()

    async def _drain_when(self, stop: anyio.Event, work: anyio.CancelScope) -> None:
        """When `stop` is set, start nothing new, and cancel the work after DRAIN_SECONDS or when it
        makes no progress.

        Does not return. The task is cancelled when the work has ended.
        """
        await stop.wait()
        text = f"stopping: copies under way have {DRAIN_SECONDS:.0f} s to end; a second signal stops at once"
        self._log("warning", "stopping", text)
        self.scheduler.drain()
        for scope in chain.from_iterable(self._workers.values()):
            scope.cancel()  # images that are looked up from now on would not be copied

        deadline = anyio.current_time() + DRAIN_SECONDS
        self.scheduler.drain_deadline = deadline
        work.deadline = deadline

        # How many requests had been sent at the last check, if none was under way then.
        sent_before: int | None = None
        while True:
            sent: int | None = None
            if not self._is_request_under_way():
                sent = sum(counter.total() for counter in self._transport.requests.values())
                # Every remaining copy waits: for an unreachable registry, or, if no request was
                # sent since the last check, for the end of a pause that a registry asked for.
                is_waiting = any(reach.is_out for reach in self._transport.reaches)
                if is_waiting or sent == sent_before:
                    work.cancel()
            sent_before = sent
            await anyio.sleep(_DRAIN_TICK)

    def _is_request_under_way(self) -> bool:
        """Report whether a request other than a probe of an unreachable registry is under way."""
        # Each request holds a permit, and so does each probe.
        limits = self._transport.limits.values()
        return any(each.used > each.is_out * each.is_probed for each in limits)

    async def _save(self) -> None:
        """Save the state for the next run, and delete temporary files."""
        has_failed = self._report.exit_status() != 0
        # Staged files that this run did not write may belong to another process, unless this run
        # holds the lock of the state. Only then may they be deleted.
        self._staging.close()
        self._layouts.close(remove_partials=not self.scheduler.is_draining and not has_failed)
        self._discovery.save_logins()
        self._knowledge.finish()
        self._state.close()

    def _find_undone(self) -> list[Undone]:
        """Return the images without an outcome. A mapping that was not listed is named `REPO:*`."""
        if not self._unlisted and self.scheduler.images_done == self.scheduler.images_known:
            return []

        selected_images = list(self._selected)
        for mapping in self._unlisted.values():
            tags = [ALL_TAGS] if self._retry is None else self._retry.tags_of(mapping)
            all_wanted = self._filter_by_retry(
                [WantedTag(mapping, tag, mapping.targets) for tag in tags]
            )
            selected_images += [_SelectedImage(wanted, wanted.tag) for wanted in all_wanted]

        ended_names = {(outcome.source, outcome.target) for outcome in self._report.outcomes}
        undone = list[Undone]()
        for wanted, target_reference in selected_images:
            source_name = self._discovery.source_of(wanted.mapping).name_of(wanted.tag)
            for target in self._targets(wanted):
                name = Undone(source_name, target.name_of(target_reference))
                if name not in ended_names:
                    undone.append(name)
        return undone

    def _find_layout_spaces(self) -> list[LayoutSpace]:
        """Return the space that a run would need in each image layout. Only a dry run reports it."""
        if self._dry_run is None:
            return []
        targets = [target for mapping in self._config.mappings for target in mapping.targets]
        return [
            LayoutSpace(
                host.key,
                to_write=self._dry_run.bytes_to_write[host.key],
                left_out=sum(host.left_out_sizes.values()),
                free=host.free_bytes(),
            )
            for host in self._layouts.layouts_among(targets)
        ]

    def _fail_lost_images(self) -> None:
        """Report the images that still wait for other images as failed.

        There are none, because an image waits only for older images (docs/design.md section 6,
        rule 9). If that rule is ever broken, these images must not be missing in the report.
        """
        for image in self.scheduler.images:
            text = "the run ended while this image waited for another one"
            image.copy.error = RegsyncError(text)
            self._end_copy(image.copy)

    # Look-ups and tasks.

    def _start_task(
        self, task: Callable[..., Coroutine[object, object, None]], *arguments: object
    ) -> None:
        assert self._tasks is not None
        self._tasks.start_soon(task, *arguments)

    def _queue_lookup(self, source: str, lookup: _Lookup) -> None:
        """Queue a look-up for the workers of a source (host:port).

        No worker starts before the run.
        """
        self._lookups[source].append(lookup)
        if self._tasks is not None:
            self._start_worker(source)

    def _start_worker(self, source: str) -> None:
        """Start another worker for a source, unless the source has _WORKERS_PER_SOURCE of them."""
        workers = self._workers[source]
        if len(workers) < _WORKERS_PER_SOURCE:
            # Register the worker before its task runs, so that it counts and a drain can cancel it.
            scope = anyio.CancelScope()
            workers.add(scope)
            self._start_task(self._run_lookups, source, scope)

    async def _run_lookups(self, source: str, scope: anyio.CancelScope) -> None:
        """Run queued look-ups of a source until the queue is empty or a drain begins."""
        queue = self._lookups[source]
        with scope:
            while queue and not self.scheduler.is_draining:
                lookup = queue.popleft()
                await lookup()
                await self.scheduler.wait_for_room()
        self._workers[source].remove(scope)

    # Selecting tags.

    async def _list_mappings(self, group: list[MappingRule]) -> None:
        """Select the tags of mappings with a common target repository, and queue their look-ups."""
        selections = await gather(partial(self._select_tags, mapping) for mapping in group)
        assigned, conflicts = assign_tags(zip(group, selections, strict=True))
        all_wanted = self._filter_by_retry(assigned)

        for conflict in conflicts:
            owner = conflict.owner.index
            text = f"mappings[{owner}] writes this tag too, from another source"
            hint = "give one of the two mappings another `to`, or narrow its tags"
            self._report_failure(conflict.wanted, MappingConflict(text, hint=hint))

        for mapping in group:
            del self._unlisted[mapping.index]
        self._selected += [_SelectedImage(wanted, wanted.tag) for wanted in all_wanted]
        self.scheduler.images_known += sum(len(wanted.targets) for wanted in all_wanted)

        tags = [
            _TagToLookUp(wanted, self._new_target_tags(wanted, wanted.tag)) for wanted in all_wanted
        ]
        await self._list_targets(tags)
        for wanted, target_tags in tags:
            source = wanted.mapping.source.authority
            self._queue_lookup(source, partial(self._look_up, wanted, target_tags))

    async def _select_tags(self, mapping: MappingRule) -> tuple[str, ...]:
        """Return the tags that a mapping selects.

        If the source cannot be listed, returns no tags and reports one failed image for each
        target.
        """
        source = self._discovery.source_of(mapping)
        try:
            selection = await self._discovery.select_tags(mapping)
        except SyncError as error:
            self._report.selections[mapping.index] = MappingSelection(
                str(source), mapping.target_repository, error=error
            )
            self._report_failure(WantedTag(mapping, ALL_TAGS, mapping.targets), error)
            return ()

        for event, text in selection.warnings(str(source)):
            self._log("warning", event, text)
        reasons = Counter(selection.dropped.values())
        self._report.selections[mapping.index] = MappingSelection(
            str(source),
            mapping.target_repository,
            selected=len(selection.kept),
            dropped=dict(sorted(reasons.items())),
        )
        return selection.kept

    def _filter_by_retry(self, tags: list[WantedTag]) -> list[WantedTag]:
        """Return the tags that are copied: all of `tags`, or the tags of the retry."""
        return tags if self._retry is None else self._retry.filter_tags(tags)

    async def _list_targets(self, tags: Sequence[_TagToLookUp]) -> None:
        """Load the snapshots of tags, and list each target repository if that may save requests.

        A listing saves the request for an immutable tag that is there, and for a tag that is absent
        (docs/design.md section 6, rule 6).
        """
        self._discovery.load_snapshots([tag for each in tags for tag in each.target_tags])
        # By target, how many requests its listing may save.
        saved_requests = Counter[Repository]()
        for wanted, target_tags in tags:
            is_immutable = self._is_immutable(wanted.mapping, wanted.tag)
            saved_requests.update(
                tag.target
                for tag in target_tags
                if is_immutable or self._discovery.is_probably_absent(tag)
            )

        worth_listing = [
            target for target, count in saved_requests.items() if count >= _MIN_SAVED_REQUESTS
        ]
        # The discovery keeps the error of a listing, and raises it for each image of that target.
        with suppress(SyncError):
            await gather(
                partial(self._discovery.list_target_tags, target) for target in worth_listing
            )

    def _targets(self, wanted: WantedTag) -> list[Repository]:
        """Return the target repositories of a tag."""
        name = wanted.mapping.target_repository
        return [
            self._discovery.repository(registry, name, Side.TARGET) for registry in wanted.targets
        ]

    def _new_target_tags(self, wanted: WantedTag, target_reference: str) -> list[TargetTag]:
        """Create a TargetTag for each target of a tag."""
        return self._discovery.new_target_tags(
            self._targets(wanted), wanted.mapping, wanted.tag, target_reference
        )

    # Looking up one image.

    async def _look_up(self, wanted: WantedTag, tags: Sequence[TargetTag]) -> None:
        """Look up a tag at its source and its targets, and start the copies that are needed."""
        lookup_began = anyio.current_time()
        mapping = wanted.mapping
        tags_to_look_up = self._skip_immutable_tags(wanted, tags)
        if not tags_to_look_up:
            return

        repository_key = mapping.source.repository_key(mapping.source_repository)
        first_seen = self._first_seen if repository_key in self._aged_repositories else None
        try:
            lookup = await self._discovery.look_up(
                mapping, wanted.tag, tags_to_look_up, first_seen=first_seen
            )
        except SyncError as error:
            source_name = self._discovery.source_of(mapping).name_of(wanted.tag)
            started = lookup_began - self._run_began
            for tag in tags_to_look_up:
                target_name = tag.target.name_of(tag.reference)
                outcome = Outcome(source_name, target_name, "failed", error=error, started=started)
                self._report_outcome(outcome)
            return

        self._report_held_tags(wanted, lookup, lookup_began)
        if lookup.targets:
            copies = _copies_of(lookup, lookup_began)
            artifacts = await self._find_artifacts(mapping, lookup, copies)
            self._start_copies(mapping, lookup, copies, artifacts)

    def _skip_immutable_tags(self, wanted: WantedTag, tags: Sequence[TargetTag]) -> list[TargetTag]:
        """Report the tags that are skipped without a request, and return all other tags."""
        mapping = wanted.mapping
        source = self._discovery.source_of(mapping)
        tags_to_look_up = list[TargetTag]()
        for tag in tags:
            is_skipped = self._is_immutable_at_target(mapping, tag)
            entry = tag.snapshot_entry
            # Without a snapshot the tag's digest is not known, and so neither are its artifacts.
            if is_skipped and mapping.artifacts.enabled and entry is not None:
                # Recorded again, because the snapshot would expire while the tag is skipped, or
                # while its look-ups fail in run after run.
                self._knowledge.record_snapshot(tag.snapshot_key, entry.snapshot, entry)
                is_skipped = not self._referrers.may_have_new_artifacts(
                    mapping, source, tag, entry.snapshot
                )
            if not is_skipped:
                tags_to_look_up.append(tag)
                continue
            outcome = Outcome(
                source.name_of(wanted.tag),
                tag.target.name_of(tag.reference),
                "skipped",
                reason="immutable_tag",
                started=anyio.current_time() - self._run_began,
            )
            self._report_outcome(outcome)
        return tags_to_look_up

    def _report_held_tags(self, wanted: WantedTag, lookup: TagLookup, lookup_began: float) -> None:
        """Report an image as skipped at the targets that do not get it yet because of `min_age`.

        `lookup_began` is on the clock of the event loop.
        """
        until = lookup.held_until
        if until is None or not lookup.held_tags:
            return
        source_name = lookup.source.name_of(lookup.reference)
        text = f"{source_name}: held back by min_age until {time_text(until)}"
        self._log("info", "held", text)
        for tag in lookup.held_tags:
            outcome = Outcome(
                source_name,
                tag.target.name_of(tag.reference),
                "skipped",
                digest=tag.digest,
                source_digest=lookup.source_digest,
                reason="min_age",
                until=until,
                started=lookup_began - self._run_began,
                duration=anyio.current_time() - lookup_began,
            )
            self._report_outcome(outcome)
        if len(lookup.held_tags) == len(wanted.targets):
            self._held_until[wanted.mapping.index].append(until)

    def _warn_of_held_mappings(self) -> None:
        """Log a warning for each mapping whose tags are all held back."""
        tag_counts = Counter(selected.wanted.mapping.index for selected in self._selected)
        for mapping in self._config.mappings:
            moments = self._held_until[mapping.index]
            if moments and len(moments) == tag_counts[mapping.index]:
                source = self._discovery.source_of(mapping)
                text = (
                    f"{source} -> {mapping.target_repository}:"
                    " min_age holds back everything that the mapping selects"
                    f" (tags: {len(moments)}), until {time_text(min(moments))} at the earliest"
                )
                self._log("warning", "all_held", text)

    def _is_immutable(self, mapping: MappingRule, tag: str) -> bool:
        """Report whether a tag matches `immutable_tags`."""
        pattern = mapping.tags.immutable_tags
        return pattern is not None and self._compiled_glob(pattern)(tag)

    def _is_immutable_at_target(self, mapping: MappingRule, tag: TargetTag) -> bool:
        """Report whether a tag is immutable, and in the listing of the target.

        Such a tag is skipped without a request, unless it may have new artifacts. This is skip tier
        1 in docs/specification.md section 3. Returns False if --recheck asks for its artifacts.
        """
        if not self._is_immutable(mapping, tag.reference):
            return False
        if self._recheck and mapping.artifacts.enabled:
            return False
        listing = self._discovery.known_listing(tag.target)
        return listing is not None and tag.reference in listing

    async def _find_artifacts(
        self, mapping: MappingRule, lookup: TagLookup, copies: Sequence[ImageCopy]
    ) -> FoundArtifacts:
        """Search for the artifacts of an image, if a search is due (docs/design.md section 8).

        In a dry run, `stripped` of the result has all artifacts that are not copied. After an error
        the result is empty, and the error is set in the copies.
        """
        artifacts = FoundArtifacts()
        copies_without_error = [copy for copy in copies if copy.error is None]
        try:
            if mapping.artifacts.enabled and copies_without_error:
                artifacts = await self._search_if_due(mapping, lookup, copies_without_error)
            if self._dry_run is not None:
                left_behind = await self._referrers.find_left_behind(mapping, lookup)
                artifacts = artifacts._replace(stripped=left_behind)
        except SyncError as error:
            for copy in copies:
                copy.error = copy.error or error
            return FoundArtifacts()
        return artifacts

    async def _search_if_due(
        self, mapping: MappingRule, lookup: TagLookup, copies: Sequence[ImageCopy]
    ) -> FoundArtifacts:
        """Search for the artifacts of an image if a search is due, and set `artifact_search` of
        copies.

        If the mapping requires an artifact and the image has none, also sets the error of each copy
        whose target lacks the image. Raises SyncError if a request fails.
        """
        for copy in copies:
            copy.artifact_search = self._referrers.prepare_search(mapping, copy)
        depth = self._referrers.choose_depth(mapping, lookup, copies)
        if depth is SearchDepth.NONE:
            for copy in copies:
                copy.artifact_search = NO_SEARCH
            return FoundArtifacts()

        artifacts = await self._referrers.find(mapping, lookup, copies, depth)
        error = no_artifact_error(mapping, lookup, artifacts)
        for copy in copies:
            copy.artifact_search = copy.artifact_search._replace(
                listing_hash=artifacts.listing_hash
            )
            # A target that has the image already keeps it (docs/specification.md section 3).
            # `error` is None if the mapping requires no artifact, or if the image has one.
            if not copy.already_at_target:
                copy.error = error
        return artifacts

    def _start_copies(
        self,
        mapping: MappingRule,
        lookup: TagLookup,
        copies: Sequence[ImageCopy],
        artifacts: FoundArtifacts,
    ) -> None:
        """Hand an image and its artifacts to the scheduler, for the targets that lack them."""
        lookups = [lookup]
        lookups += [artifact.lookup for artifact in artifacts.copied if artifact.lookup is not None]
        for each in lookups:
            self._count_blobs(each)

        for copy, tag in zip(copies, lookup.targets, strict=True):
            copy.has_several_targets = len(mapping.targets) > 1
            copy.artifacts_stripped = len(artifacts.stripped)
            copy.planned = [f"strip {artifact}" for artifact in artifacts.stripped]
            self._start_copy(copy, lookup, tag, artifacts.copied)
        self.scheduler.advance()

    def _start_copy(
        self, copy: ImageCopy, lookup: TagLookup, tag: TargetTag, artifacts: Sequence[Artifact]
    ) -> None:
        """Hand an image and its artifacts to the scheduler, for one target.

        The caller calls `Scheduler.advance` after the last target.
        """
        if copy.already_at_target:
            snapshot = Snapshot(key_of(copy.source_digest), key_of(copy.digest))
            self._knowledge.record_snapshot(tag.snapshot_key, snapshot, tag.snapshot_entry)

        artifact_images = self._plan_artifacts(copy, artifacts) if copy.error is None else []
        if artifact_images:
            # If this run is killed before the artifacts are copied, the next run must search again.
            # So the check is recorded without COMPLETE, and without a hash of the source's listing.
            search = copy.artifact_search
            self._knowledge.record_artifact_check(
                search.key,
                flags=search.last_check.flags & COPIED,
                listing_hash=NO_CHECK.listing_hash,
                first=search.last_check.first,
            )

        tree = None if copy.already_at_target else lookup.tree
        if tree is not None and copy.error is None:
            # The artifacts refer to the image, so they are put after it (I2).
            image = Image(copy, tree, copy.reference, tag.snapshot_key, artifact_images)
            self.scheduler.add_image(image)
        else:
            # The image is at the target already, or has failed, so only artifacts can be
            # unfinished.
            copy.unfinished_images -= 1
            self.scheduler.add_artifacts(artifact_images)
            self.scheduler.end_if_complete(copy)

    def _count_blobs(self, lookup: TagLookup) -> None:
        """Count how many manifests name each blob of an image. The scheduler orders blobs by the
        counts.

        If source and target share a host, also record that the source has the blobs, so that they
        can be mounted from there.
        """
        tree = lookup.tree
        if tree is None:
            return
        source = lookup.source
        is_host_shared = any(tag.target.host.key == source.host.key for tag in lookup.targets)
        for manifest in (tree.root, *tree.children):
            self.scheduler.manifests_by_blob.update(blob.digest for blob in manifest.blobs)
            if is_host_shared and not manifest.is_trimmed:
                self.scheduler.commit(source.store_key, manifest)

    def _plan_artifacts(self, copy: ImageCopy, artifacts: Sequence[Artifact]) -> list[Image]:
        """Return an Image for each artifact that the target lacks.

        All artifacts are counted in `copy`, as unfinished, skipped or failed. If an artifact could
        not be looked up at the target, its error is set in `copy`.

        Each artifact follows its subject in `artifacts`. A missing artifact of a missing artifact
        is not returned, but added to the dependents of its subject, so that it is put after its
        subject (I2).
        """
        missing_images = list[Image]()
        # By digest of a manifest, the missing artifact that the manifest belongs to.
        image_of_digest = dict[str, Image]()
        # The digests of the artifacts that could not be looked up at the target, and those below.
        failed_digests = set[str]()

        for artifact in artifacts:
            if artifact.entry is not None:
                copy.listing.setdefault(artifact.subject, []).append(artifact.entry)

            # None if no look-up was made, because the target is known to have the artifact.
            tag = artifact.lookup.tag_at(copy.target) if artifact.lookup is not None else None
            error = tag.error if tag is not None else None
            if error is not None or artifact.subject in failed_digests:
                copy.error = copy.error or error
                copy.artifacts_failed += 1
                failed_digests.update((artifact.digest, *artifact.subjects))  # theirs fail too
                continue

            image = _image_of_artifact(copy, artifact, tag) if tag is not None else None
            if image is None:
                copy.artifacts_skipped += 1
                self.scheduler.record_artifact(copy.target, artifact.reference)
                continue

            copy.unfinished_images += 1
            if artifact.subject in image_of_digest:
                image_of_digest[artifact.subject].dependents.append(image)
            else:
                missing_images.append(image)
            # The subject of a later artifact may be this artifact, or a child of it.
            children = (child.digest for child in image.tree.children)
            for digest in (image.tree.source_digest, *children):
                image_of_digest.setdefault(digest, image)
        return missing_images

    # Outcomes.

    def _end_copy(self, copy: ImageCopy) -> None:
        """Report how a copy ended. A copy into a layout is reported after the layout was saved."""
        has_put = copy.is_copied or bool(copy.artifacts_copied)
        may_be_lost = copy.error is None and has_put and copy.target.is_local
        if may_be_lost and self._unsaved_copies is not None:
            self._unsaved_copies.start_soon(self._end_when_saved, copy)
        else:
            self._report_copy(copy)

    async def _end_when_saved(self, copy: ImageCopy) -> None:
        try:
            await copy.target.wait_until_saved()
        except SyncError as error:
            copy.error = error
        self._report_copy(copy)

    def _report_copy(self, copy: ImageCopy) -> None:
        """Record the search for a copy's artifacts in the state, and report how the copy ended."""
        search = copy.artifact_search
        # After a failure the record says that artifacts are missing. If the last record says so
        # too, a new record is needed only for an image that this run has copied.
        is_worth_recording = copy.error is None or search.last_check.is_complete or copy.is_copied
        if search.key and is_worth_recording:
            self._knowledge.record_artifact_check(
                search.key, flags_after(copy), search.listing_hash, first=search.last_check.first
            )
        outcome = copy.outcome(
            started=copy.began - self._run_began,
            duration=anyio.current_time() - copy.began,
            is_dry_run=self._dry_run is not None,
        )
        self._report_outcome(outcome)

    def _report_failure(self, wanted: WantedTag, error: SyncError) -> None:
        """Report a tag that was not looked up as failed at each of its targets.

        With a retry only the targets of the retry are reported.
        """
        source_name = self._discovery.source_of(wanted.mapping).name_of(wanted.tag)
        for reported in self._filter_by_retry([wanted]):
            for target in self._targets(reported):
                self.scheduler.images_known += 1  # the tag was not counted as a selected tag
                target_name = target.name_of(reported.tag)
                started = anyio.current_time() - self._run_began
                outcome = Outcome(source_name, target_name, "failed", error=error, started=started)
                self._report_outcome(outcome)

    def _report_outcome(self, outcome: Outcome) -> None:
        """Add an outcome to the report, count it, and emit it."""
        self.scheduler.images_done += 1
        if outcome.error is not None:
            outcome.error.drop_frames()  # the frames would keep buffers alive until the run ends
        self._report.outcomes.append(outcome)
        self._emit(outcome)


def _image_of_artifact(copy: ImageCopy, artifact: Artifact, tag: TargetTag) -> Image | None:
    """Return an artifact as an image to copy. Returns None if its target has the artifact."""
    lookup = artifact.lookup
    if lookup is None or lookup.tree is None or tag.digest == lookup.digest:
        return None
    # Only cosign's tags have snapshots. An artifact from a list of referrers is put by its digest.
    snapshot_key = tag.snapshot_key if artifact.tag is not None else b""
    return Image(copy, lookup.tree, artifact.reference, snapshot_key, [], str(artifact))


def _copies_of(lookup: TagLookup, lookup_began: float) -> list[ImageCopy]:
    """Create the copies of an image, one for each target that was looked up."""
    copies = []
    for tag in lookup.targets:
        # If the target reference is a digest, it must be the digest of the manifest that is put.
        # That digest differs from the source's if the index was trimmed to `platforms`.
        reference = lookup.digest if is_digest(tag.reference) else tag.reference
        copies.append(
            ImageCopy(
                source=lookup.source,
                target=tag.target,
                source_reference=lookup.reference,
                reference=reference,
                digest=lookup.digest,
                source_digest=lookup.source_digest,
                began=lookup_began,
                already_at_target=tag.digest == lookup.digest,
                error=tag.error,
            )
        )
    return copies

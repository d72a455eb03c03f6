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
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import anyio
import anyio.abc

from _regsync import edge
from _regsync.config import Config, MappingRule
from _regsync.errors import Side, SyncError
from _regsync.oci import is_digest
from _regsync.registry.repository import Repository
from _regsync.registry.runs import Transport
from _regsync.state import Knowledge, RepositoryKey, Snapshot, StateFile
from _regsync.sync.artifacts import Artifact, Referrers, explain_refusal
from _regsync.sync.blobs import Blobs, Staging
from _regsync.sync.discovery import Discovery, TagLookup, TargetTag
from _regsync.sync.image import Image, ImageCopy
from _regsync.sync.mappings import ALL_TAGS, Retry, WantedTag, assign_tags, group_mappings
from _regsync.sync.once import gather
from _regsync.sync.report import MappingSelection, Outcome, Report
from _regsync.sync.work import Scheduler
from _regsync.tags import compile_glob

if TYPE_CHECKING:
    from _regsync.pins import Lock
    from _regsync.sync.dry_run import DryRun

# Seconds for which copies under way may continue after a signal (docs/specification.md section
# 1.6).
DRAIN_SECONDS = 25.0

# Seconds between two savings of image layouts. Each replaces `index.json`, which is slow and wears
# the disk out.
_SAVE_SECONDS = 10.0

# A listing of a target repository costs at least one request, so it must save more than one.
_MIN_SAVED_REQUESTS = 2

# Concurrent look-ups at one source. With a round trip of 100 ms they look up 160 tags a second.
_WORKERS_PER_SOURCE = 16

# A look-up at a source. It starts copies, or queues further look-ups.
_Lookup = Callable[[], Awaitable[None]]


class _Selected(NamedTuple):
    """A selected tag, and the tag or digest at each of its targets."""

    wanted: WantedTag
    tags: list[TargetTag]


class Run:
    """One run over the mappings of a configuration, or over one image.

    An image passes through these methods, while other images are at other stages:

        _list_mappings   select the tags of mappings
        _look_up         resolve a tag at its source and its targets
        _start_copy      hand the image to the scheduler for a target that lacks it
        _end_copy        report the outcome after the scheduler has copied the image
    """

    def __init__(
        self,
        transport: Transport,
        config: Config,
        emit: Callable[[Outcome], None],
        report: Report,
        kind: Literal["sync", "copy", "plan"] = "sync",
        *,
        state: StateFile,
        recheck: bool = False,
        verify: bool = False,
        lock: Lock | None = None,
        retry: Retry | None = None,
    ) -> None:
        """Prepare a run with a `state` that is loaded. `emit` is called with each outcome.

        A run of kind "copy" copies one image. A run of kind "plan" is a dry run, which changes
        nothing and finds out what a run would copy.

        With `recheck` the run searches for the artifacts of all images, whatever the state says.
        With `verify` it does so, and asks targets for every part of every image.
        With `lock` the tags and digests of sources are taken from the lock (`PinnedSource`).
        With `retry` only the images of the retry are copied.
        """
        recheck = recheck or verify
        is_dry_run = kind == "plan"
        self._transport = transport
        self._config = config
        self._emit = emit
        self._report = report
        self._report.is_dry_run = is_dry_run
        self._log = transport.machine.log
        self._recheck = recheck
        self._verify = verify
        self._retry = retry
        # Compiles each pattern of `immutable_tags` once.
        self._compiled_glob = cache(compile_glob)

        self._state = state
        wall = edge.current().wall
        self._knowledge = Knowledge(self._state, now=wall, ttl=config.cache_ttl)

        self._discovery = Discovery(
            transport, self._knowledge, recheck=recheck, reads_only=is_dry_run, lock=lock
        )
        if verify:
            from _regsync.sync.inspection import Inspector  # most runs do not need this module

            inspector = Inspector(transport, self._discovery)
            self._discovery.is_whole = partial(inspector.is_whole, self._knowledge)
        self._referrers = Referrers(
            self._discovery,
            self._knowledge,
            has_state=self._state.is_used,
            recheck=recheck,
            never_lists_tags=kind == "copy",
        )
        staging = None
        if config.cache_dir is not None and self._state.is_writer:
            staging = f"{config.cache_dir}/staged"
        # By source repository, the targets of all mappings from it.
        targets_of = defaultdict[object, set[str]](set)
        for mapping in config.mappings:
            targets_of[_source_key(mapping)].update(each.authority for each in mapping.targets)
        # With one target nothing is written to disk.
        self._may_stage = any(len(targets) > 1 for targets in targets_of.values())
        limit = config.staging_size_limit if self._may_stage else 0
        # By source repository and tag, the targets that get it. Empty unless the run may stage.
        self._targets_of = defaultdict[tuple[object, str], set[str]](set)
        self._staging = Staging(staging, limit)
        blobs: Blobs | DryRun = Blobs(transport, self._knowledge, self._staging)
        if is_dry_run:
            from _regsync.sync.dry_run import DryRun  # most runs do not need this module

            blobs = DryRun(self._knowledge)
        copied_to = defaultdict[str, list[str]](list)
        for mapping in config.mappings:
            copied_to[mapping.source_repository].append(mapping.target_repository)
        self.scheduler = Scheduler(
            blobs,
            self._knowledge,
            self._discovery,
            transport=transport,
            slots=config.max_concurrent_transfers,
            on_end=self._end_copy,
            lists=self._referrers.lists,
            copied_to=copied_to,
        )

        # By source (host:port), the look-ups that have not started, and how many workers run them.
        self._lookups = defaultdict[str, deque[_Lookup]](deque)
        self._workers = Counter[str]()
        # By index, the mappings whose tags have not been selected yet.
        self._unlisted = dict[int, MappingRule]()
        self._selected = list[_Selected]()
        self._lookup_tasks: anyio.abc.TaskGroup
        # The copies into layouts that a power cut can still lose. They are reported when it cannot.
        self._unsaved_copies = list[ImageCopy]()
        self._saving_layouts = anyio.Lock()

    # The run as a whole.

    async def sync(self, stop: anyio.Event) -> None:
        """Copy the images that the mappings select. If `stop` is set, the run drains and ends."""
        self._unlisted = {mapping.index: mapping for mapping in self._config.mappings}
        # All sources are opened before the first request, so that one token is for several of them;
        # and the targets that exist, for Quay makes a repository when push is asked for.
        for mapping in self._config.mappings:
            self._discovery.source_of(mapping)
            for target in mapping.targets:
                name = mapping.target_repository
                if RepositoryKey(target.authority, name) in self._state.old_places:
                    self._discovery.repository(target, name, Side.TARGET)
        # Mappings with a common target repository are listed together, so that the earlier mapping
        # wins a conflict (I10).
        groups = group_mappings(self._config.mappings)
        listings = [
            (group[0].source.authority, partial(self._list_mappings, group)) for group in groups
        ]
        await self._run_lookups_and_copies(listings, stop)

    async def copy(
        self, mapping: MappingRule, reference: str, target_reference: str, stop: anyio.Event
    ) -> None:
        """Copy one image. If `stop` is set, the run drains and ends.

        `reference` and `target_reference` are the tag or digest at the source and at the targets.
        """
        wanted = WantedTag(mapping, reference, mapping.targets)
        selected = self._new_selected(wanted, target_reference)
        self._select([selected])
        lookup = partial(self._look_up, selected)
        await self._run_lookups_and_copies([(mapping.source.authority, lookup)], stop)

    async def _run_lookups_and_copies(
        self, first: Sequence[tuple[str, _Lookup]], stop: anyio.Event
    ) -> None:
        """Run look-ups, each at a source, and everything that they start, then save the state.

        The report is complete afterwards.
        """
        for registry in self._config.registries_in_use:
            if registry.is_layout:
                self._discovery.layout(registry).read_receipts()

        # The look-ups and copies. A drain cancels them when its time is over.
        work = anyio.CancelScope()
        try:
            async with anyio.create_task_group() as watchers:
                # These tasks are cancelled when the work has ended.
                watchers.start_soon(self._drain_when, stop, work)
                watchers.start_soon(self._state.commit_regularly)
                watchers.start_soon(self._save_layouts_regularly)
                with work:
                    async with (
                        anyio.create_task_group() as self.scheduler.tasks,
                        anyio.create_task_group() as self._lookup_tasks,
                    ):
                        for source, lookup in first:
                            self._queue_lookup(source, lookup)
                await self._save_layouts()
                watchers.cancel_scope.cancel()
        finally:
            # The state is saved even after an error, and if a second signal cancels the run.
            self._complete_report()
            self._save()

        self._report.interrupted = work.cancelled_caught or bool(self._report.undone)

    def _complete_report(self) -> None:
        """Set the fields of the report that cover the whole run."""
        report, traffic = self._report, self.scheduler.traffic
        report.undone = self._find_undone() if self.scheduler.is_draining else []
        report.saved = {"present": traffic.present_bytes, "mounted": traffic.mounted_bytes}

    async def _drain_when(self, stop: anyio.Event, work: anyio.CancelScope) -> None:
        """When `stop` is set, start nothing new, and cancel the work after DRAIN_SECONDS."""
        await stop.wait()
        text = f"stopping: copies under way have {DRAIN_SECONDS:.0f} s to end; a second signal stops at once"
        self._log("warning", "stopping", text)
        self.scheduler.drain()
        self._lookup_tasks.cancel_scope.cancel()  # what they find would not be copied
        work.deadline = anyio.current_time() + DRAIN_SECONDS

    def _save(self) -> None:
        """Save the state for the next run, and delete temporary files."""
        self._staging.clear()
        for layout in self._discovery.layouts.values():
            layout.close()
        self._discovery.save_logins()
        self._knowledge.finish()
        self._state.close()

    def _find_undone(self) -> list[Outcome]:
        """Return the images without an outcome. A mapping that was not listed is named `REPO:*`; of a
        retry these are its tags.
        """
        selected = list(self._selected)
        for mapping in self._unlisted.values():
            tags = [ALL_TAGS] if self._retry is None else self._retry.tags_of(mapping)
            all_of_it = [WantedTag(mapping, tag, mapping.targets) for tag in tags]
            selected += map(self._new_selected, self._filter_by_retry(all_of_it))
        ended = {(outcome.source, outcome.target) for outcome in self._report.outcomes}
        names = [pair for each in selected for pair in self._names(each)]
        return [Outcome(*pair, "undone") for pair in names if pair not in ended]

    def _names(self, selected: _Selected) -> list[tuple[str, str]]:
        """Return the full references of a selected tag: at the source, and at each target."""
        wanted, tags = selected
        source_name = self._discovery.source_of(wanted.mapping).name_of(wanted.tag)
        return [(source_name, tag.target.name_of(tag.reference)) for tag in tags]

    # Look-ups and tasks.

    def _queue_lookup(self, source: str, lookup: _Lookup) -> None:
        """Queue a look-up for the workers of a source (host:port)."""
        self._lookups[source].append(lookup)
        if self._workers[source] < _WORKERS_PER_SOURCE:
            self._workers[source] += 1
            self._lookup_tasks.start_soon(self._run_lookups, source)

    async def _run_lookups(self, source: str) -> None:
        """Run queued look-ups of a source until the queue is empty."""
        queue = self._lookups[source]
        while queue:
            lookup = queue.popleft()
            await lookup()
            await self.scheduler.wait_for_room()
        self._workers[source] -= 1

    # Selecting tags.

    async def _list_mappings(self, group: list[MappingRule]) -> None:
        """Select the tags of mappings with a common target repository, and queue their look-ups."""
        selections = await gather(partial(self._select_tags, mapping) for mapping in group)
        assigned, conflicts = assign_tags(zip(group, selections, strict=True))

        for wanted, error in conflicts:
            self._report_failure(wanted, error)

        all_selected = [self._new_selected(wanted) for wanted in self._filter_by_retry(assigned)]
        self._select(all_selected)
        for mapping in group:
            del self._unlisted[mapping.index]
        await self._list_targets(all_selected)
        for selected in all_selected:
            source = selected.wanted.mapping.source.authority
            self._queue_lookup(source, partial(self._look_up, selected))

    def _select(self, all_selected: Sequence[_Selected]) -> None:
        """Count selected tags."""
        self._selected += all_selected
        for (mapping, tag, targets), _ in all_selected if self._may_stage else ():
            self._targets_of[_source_key(mapping), tag].update(each.authority for each in targets)
        self.scheduler.images_known += sum(len(tags) for _, tags in all_selected)

    async def _select_tags(self, mapping: MappingRule) -> tuple[str, ...]:
        """Return the tags that a mapping selects.

        If the source cannot be listed, returns no tags and reports one failed image for each
        target.
        """
        try:
            selection = await self._discovery.select_tags(mapping)
        except SyncError as error:
            self._report_failure(WantedTag(mapping, ALL_TAGS, mapping.targets), error)
            return ()

        reasons = Counter(selection.dropped.values())
        self._report.selections[mapping.index] = MappingSelection(
            str(self._discovery.source_of(mapping)),
            mapping.target_repository,
            selected=len(selection.kept),
            dropped=dict(sorted(reasons.items())),
        )
        return selection.kept

    def _filter_by_retry(self, tags: list[WantedTag]) -> list[WantedTag]:
        """Return the tags that are copied: all of `tags`, or the tags of the retry."""
        return tags if self._retry is None else self._retry.filter_tags(tags)

    async def _list_targets(self, all_selected: Sequence[_Selected]) -> None:
        """List each target repository of tags if that may save requests.

        A listing saves the request for an immutable tag that is there, and for a tag that is absent
        (docs/design.md section 6, rule 6).
        """
        # By target, how many requests its listing may save.
        saved_requests = Counter[Repository]()
        for wanted, tags in all_selected:
            is_immutable = self._is_immutable(wanted.mapping, wanted.tag)
            for tag in tags:
                # An immutable tag that is there is not looked up at its source either.
                saved = 2 if is_immutable else self._discovery.is_probably_absent(tag)
                saved_requests[tag.target] += saved

        worth_listing = [
            target
            for target, count in saved_requests.items()
            if count >= _MIN_SAVED_REQUESTS or target.is_local  # which costs none
        ]
        # The discovery keeps the error of a listing, and raises it for each image of that target.
        with suppress(SyncError):
            await gather(
                partial(self._discovery.list_target_tags, target) for target in worth_listing
            )

    def _new_selected(self, wanted: WantedTag, target_reference: str | None = None) -> _Selected:
        """Create a TargetTag for each target of a tag, under the same tag or another reference."""
        mapping, discovery = wanted.mapping, self._discovery
        name = mapping.target_repository
        targets = [discovery.repository(registry, name, Side.TARGET) for registry in wanted.targets]
        reference = target_reference or wanted.tag
        tags = discovery.new_target_tags(targets, mapping, wanted.tag, reference)
        return _Selected(wanted, tags)

    # Looking up one image.

    async def _look_up(self, selected: _Selected) -> None:
        """Look up a tag at its source and its targets, and start the copies that are needed."""
        began = anyio.current_time()
        wanted, tags = selected
        mapping = wanted.mapping
        skipped = [tag for tag in tags if self._is_skipped_unasked(wanted, tag)]
        self._report_tags(wanted, skipped, status="skipped", reason="immutable_tag")
        tags = [tag for tag in tags if tag not in skipped]
        if not tags:
            return
        errors = [_stop_error_of(tag) for tag in tags]
        if all(errors) and not self._config.has_ages:  # the source would be asked in vain
            for tag, stop_error in zip(tags, errors, strict=True):
                self._report_tags(wanted, [tag], status="failed", error=stop_error)
            return
        try:
            lookup = await self._discovery.look_up(
                mapping, wanted.tag, tags, counts_age=self._config.has_ages
            )
        except SyncError as error:
            self._report_tags(wanted, tags, status="failed", error=error)
            return

        for tag in lookup.held_tags:
            self._report_tags(
                wanted,
                [tag],
                status="skipped",
                reason="min_age",
                until=lookup.held_until,
                digest=tag.digest,
                source_digest=lookup.source_digest,
            )
        # Where the target's listing did not tell, its answer does.
        kept = [tag for tag in lookup.targets if self._stays(mapping, lookup, tag)]
        self._report_tags(wanted, kept, status="skipped", reason="immutable_tag")
        lookup = lookup._replace(targets=tuple(tag for tag in lookup.targets if tag not in kept))
        if lookup.targets:
            all_targets = self._targets_of.get((_source_key(mapping), wanted.tag), ())
            copies = _copies_of(lookup, began, has_several_targets=len(all_targets) > 1)
            artifacts = await self._find_artifacts(mapping, lookup, copies)
            if self._report.is_dry_run:
                await self._foretell_stripped(mapping, lookup, copies)
            for copy, tag in zip(copies, lookup.targets, strict=True):
                self._start_copy(copy, lookup, tag, artifacts)
            self.scheduler.advance()

    def _is_immutable(self, mapping: MappingRule, tag: str) -> bool:
        """Report whether a tag matches `immutable_tags`."""
        pattern = mapping.tags.immutable_tags
        return pattern is not None and self._compiled_glob(pattern)(tag)

    def _stays(self, mapping: MappingRule, lookup: TagLookup, tag: TargetTag) -> bool:
        """Report whether an immutable tag names another image at its target."""
        is_another = tag.digest not in (None, lookup.digest)
        return is_another and self._is_immutable(mapping, tag.reference)

    def _is_skipped_unasked(self, wanted: WantedTag, tag: TargetTag) -> bool:
        """Report whether a tag is skipped without a request: it is immutable, in the listing of the
        target, and has no new artifacts.

        This is skip tier 1 in docs/specification.md section 3.
        """
        mapping = wanted.mapping
        has_artifacts = mapping.artifacts.enabled
        is_asked = self._verify or (self._recheck and has_artifacts)
        if is_asked or not self._is_immutable(mapping, tag.reference):
            return False
        if tag.reference not in (self._discovery.known_listing(tag.target) or ()):
            return False
        snapshot = tag.snapshot
        # Without a snapshot the tag's digest is not known, and so neither are its artifacts.
        if not has_artifacts or snapshot is None:
            return True
        # Recorded again, because the snapshot would expire while the tag is skipped, or while its
        # look-ups fail in run after run.
        self._knowledge.record_snapshot(tag.snapshot_key, snapshot)
        source = self._discovery.source_of(mapping)
        return not self._referrers.may_have_new_artifacts(mapping, source, tag, snapshot)

    async def _find_artifacts(
        self, mapping: MappingRule, lookup: TagLookup, copies: Sequence[ImageCopy]
    ) -> list[Artifact]:
        """Search for the artifacts of an image, if a search is due (docs/design.md section 8).

        After an error the result is empty, and the error is set in the copies.
        """
        # In the repository of the source all artifacts are there.
        copies_to_serve = [
            copy for copy in copies if copy.error is None and copy.target.key != copy.source.key
        ]
        if not mapping.artifacts.enabled or not copies_to_serve:
            return []
        try:
            return await self._referrers.find_if_due(mapping, lookup, copies_to_serve)
        except SyncError as error:
            explain_refusal(error)
            for copy in copies:
                copy.error = copy.error or error
            return []

    async def _foretell_stripped(
        self, mapping: MappingRule, lookup: TagLookup, copies: Sequence[ImageCopy]
    ) -> None:
        """Say in the copies of a dry run which artifacts a run would not copy. An error fails none of
        them, because the run would not ask.
        """
        try:
            left_behind = await self._referrers.find_left_behind(mapping, lookup)
        except SyncError as error:
            self._log("warning", "left_behind", f"what stays behind is not known: {error}")
            return
        for copy in copies:
            copy.artifacts_stripped = len(left_behind)
            copy.planned = [f"strip {artifact}" for artifact in left_behind]

    def _start_copy(
        self, copy: ImageCopy, lookup: TagLookup, tag: TargetTag, artifacts: Sequence[Artifact]
    ) -> None:
        """Hand an image and its artifacts to the scheduler, for one target that lacks them. The
        caller calls `Scheduler.advance` after the last one.
        """
        if copy.already_at_target:
            snapshot = Snapshot(copy.source_digest, copy.digest)
            self._knowledge.record_snapshot(tag.snapshot_key, snapshot)

        artifact_images = self._plan_artifacts(copy, artifacts) if copy.error is None else []
        if artifact_images:
            # If this run is killed before the artifacts are copied, the next run must search again.
            check = copy.check_after(is_complete=False)
            self._knowledge.record_artifact_check(copy.check_key, check)

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

    def _plan_artifacts(self, copy: ImageCopy, artifacts: Sequence[Artifact]) -> list[Image]:
        """Return an Image for each artifact that the target lacks.

        All artifacts are counted in `copy`, as unfinished or skipped. If one could not be looked up
        at the target, its error is set in `copy`, and all have failed.

        Each artifact follows its subject in `artifacts`. A missing artifact of a missing artifact
        is not returned, but added to the dependents of its subject, so that it is put after its
        subject (I2).
        """
        # None if no look-up was made, because the target is known to have the artifact.
        tags = [each.lookup.tag_at(copy.target) if each.lookup else None for each in artifacts]
        errors = [tag.error for tag in tags if tag is not None and tag.error is not None]
        if errors:
            copy.error = errors[0]
            copy.artifacts = {artifact.reference: "failed" for artifact in artifacts}
            return []

        missing_images = list[Image]()
        # The missing artifacts, by the digests that may be the subjects of later ones.
        image_of_digest = dict[str, Image]()
        for artifact, tag in zip(artifacts, tags, strict=True):
            if artifact.entry is not None:
                copy.listing.setdefault(artifact.subject, []).append(artifact.entry)
            lookup = artifact.lookup
            if not tag or not lookup or not lookup.tree or tag.digest == lookup.digest:
                copy.artifacts[artifact.reference] = "skipped"
                continue
            reference, key = artifact.reference, tag.snapshot_key
            image = Image(copy, lookup.tree, reference, key, [], str(artifact))

            copy.unfinished_images += 1
            if artifact.subject in image_of_digest:
                image_of_digest[artifact.subject].dependents.append(image)
            else:
                missing_images.append(image)
            for digest in artifact.subjects:
                image_of_digest.setdefault(digest, image)
        return missing_images

    # Outcomes.

    def _end_copy(self, copy: ImageCopy) -> None:
        """Report how a copy ended. A copy into a layout is reported after the layout was saved."""
        has_put = copy.is_copied or copy.has_put_artifacts
        if copy.error is None and has_put and copy.target.is_local:
            self._unsaved_copies.append(copy)
        else:
            self._report_copy(copy)

    async def _save_layouts_regularly(self) -> None:
        while True:
            await anyio.sleep(_SAVE_SECONDS)
            await self._save_layouts()

    async def _save_layouts(self) -> None:
        """Save the layouts, then report the copies into them."""
        async with self._saving_layouts:
            copies, self._unsaved_copies = self._unsaved_copies, []
            layouts = self._discovery.layouts
            for layout in layouts.values():
                await layout.save()
            for copy in copies:
                error = layouts[copy.target.host.key].error
                if error is not None:
                    copy.error = error.copy_without_context()
                    copy.error.add_context(Side.TARGET, "write", str(copy.target))
                self._report_copy(copy)

    def _report_copy(self, copy: ImageCopy) -> None:
        """Record the search for a copy's artifacts in the state, and report how the copy ended."""
        is_complete = copy.error is None
        if is_complete or copy.check.is_complete:  # else the record says so, or that there was none
            check = copy.check_after(is_complete=is_complete)
            self._knowledge.record_artifact_check(copy.check_key, check)
        duration = anyio.current_time() - copy.began
        self._report_outcome(copy.outcome(duration, is_dry_run=self._report.is_dry_run))

    def _report_failure(self, wanted: WantedTag, error: SyncError) -> None:
        """Report a tag that was not selected as failed at each of its targets.

        With a retry only the targets of the retry are reported.
        """
        for each in self._filter_by_retry([wanted]):
            _, tags = self._new_selected(each)
            self.scheduler.images_known += len(tags)
            self._report_tags(each, tags, status="failed", error=error)

    def _report_tags(self, wanted: WantedTag, tags: list[TargetTag], **fields: Any) -> None:
        """Report how a tag ended at targets to which nothing is copied. `fields` are those of Outcome
        that are the same at them.
        """
        for source, target in self._names(_Selected(wanted, tags)):
            self._report_outcome(Outcome(source, target, **fields))

    def _report_outcome(self, outcome: Outcome) -> None:
        """Add an outcome to the report, count it, and emit it."""
        self.scheduler.images_done += 1
        if outcome.error is not None:
            outcome.error.drop_frames()  # the frames would keep buffers alive until the run ends
        self._report.outcomes.append(outcome)
        self._emit(outcome)


def _source_key(mapping: MappingRule) -> object:
    return mapping.source.repository_key(mapping.source_repository)


def _stop_error_of(tag: TargetTag) -> SyncError | None:
    """Return the error of a tag whose target is asked for nothing more in this run."""
    error, reference = tag.target.host.stop_error, tag.target.name_of(tag.reference)
    return error and error.copy_without_context().add_context(Side.TARGET, "look up", reference)


def _copies_of(
    lookup: TagLookup, lookup_began: float, *, has_several_targets: bool
) -> list[ImageCopy]:
    """Create the copies of an image, one for each target that was looked up."""
    copies = []
    for tag in lookup.targets:
        # If the target reference is a digest, it must be the digest of the manifest that is put.
        # That digest differs from the source's if the index was trimmed to `platforms`.
        if is_digest(tag.reference):
            tag.reference = lookup.digest
        copies.append(
            ImageCopy(
                source=lookup.source,
                target=tag.target,
                source_reference=lookup.reference,
                reference=tag.reference,
                digest=lookup.digest,
                source_digest=lookup.source_digest,
                began=lookup_began,
                already_at_target=tag.digest == lookup.digest,
                error=tag.error,
                has_several_targets=has_several_targets,
            )
        )
    return copies

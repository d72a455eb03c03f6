"""A new lock: sources are asked what the selected tags name, and what refers to it.

Owns: which requests a new lock costs, and which lines of the old one stay.
May not know: the lock's file, how a change is shown.
Invariants: no target is asked. A line whose digest its tag still names stays as it is, at the cost of
one HEAD. What could not be asked leaves the old lines, or no new lock is made.
Follows: docs/design.md section 12 ("Lock").
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

from _regsync.config.model import ArtifactRule, MappingRule
from _regsync.errors import ContentError, RegistryError, SyncError
from _regsync.registry.transport import Transport
from _regsync.state.seen import FirstSeen
from _regsync.sync.discovery import Discovery
from _regsync.sync.image import Traffic
from _regsync.sync.lockfile import (
    Lock,
    LockedArtifact,
    LockedImage,
    LockedMapping,
    SourceKey,
    artifact_rule,
    locked_mapping,
    source_key,
)
from _regsync.sync.mappings import grouped
from _regsync.sync.once import Once, gather
from _regsync.sync.referrers import Artifact, Referrers


class Failure(NamedTuple):
    """What could not be resolved."""

    # `HOST/REPOSITORY:TAG`, or `HOST/REPOSITORY` for a mapping.
    name: str
    error: SyncError
    # Whether the old lock has lines of this, which stay. Where a mapping has none, no lock is written.
    keeps_lines: bool


class NewLock(NamedTuple):
    """What a new lock would hold, and what failed on the way to it."""

    lock: Lock
    # How many images were resolved.
    resolved: int
    failed_mappings: tuple[Failure, ...]
    failed_images: tuple[Failure, ...]

    @property
    def failures(self) -> tuple[Failure, ...]:
        return (*self.failed_mappings, *self.failed_images)

    @property
    def is_writable(self) -> bool:
        """Whether the lock has lines for every mapping."""
        return all(failure.keeps_lines for failure in self.failed_mappings)


class _Content(NamedTuple):
    """What the line of a digest says, whichever tag names it."""

    digest: str
    pushed: str | None
    artifacts: tuple[LockedArtifact, ...]


class _Answer(NamedTuple):
    """What became of a tag that a mapping selects."""

    # Its line. Where the image itself is at fault: the old line, or None where it had none.
    image: LockedImage | None
    # What makes the whole mapping fail, because it says nothing about this image alone.
    error: SyncError | None = None


class _Outcome(NamedTuple):
    """What became of a mapping: either an error, or the lines of its images."""

    rule: MappingRule
    images: Sequence[LockedImage]
    error: SyncError | None = None


class Locking:
    """The making of one new lock."""

    # What the progress display asks of any work. Nothing is copied here, and a signal ends it at once.
    verb = "asking for"
    bytes_moved = 0
    traffic = Traffic()
    failures: Mapping[str, int] = MappingProxyType({})
    drain_ends = None

    def __init__(
        self,
        transport: Transport,
        discovery: Discovery,
        referrers: Referrers,
        old: Lock,
        mappings: Sequence[MappingRule],
        now: int,
        *,
        keeps_others: bool = False,
        recheck: bool = False,
        first_seen: FirstSeen | None = None,
    ) -> None:
        """Prepare to resolve `mappings`; `now` is in seconds since 1970. With `keeps_others` the lines
        of other repositories stay. With `recheck` the artifacts of images that have not moved are
        looked for too. `first_seen` knows when runs first saw a digest.
        """
        self.transport = transport
        self.images_known = 0
        self.images_done = 0
        self._under_way = dict[str, None]()

        self._discovery = discovery
        self._referrers = referrers
        self._old = old
        self._mappings = mappings
        self._now = now
        self._keeps_others = keeps_others
        self._recheck = recheck
        self._first_seen = first_seen
        self._resolved = 0
        self._failed_images = dict[str, Failure]()

        # By source and rule of artifacts: the first mapping that has them. Artifacts are looked for by
        # each of these rules, so that a line does not depend on the mapping that selects its tag.
        self._mappings_by_artifacts: dict[SourceKey, dict[ArtifactRule, MappingRule]] = defaultdict(
            dict
        )
        for rule in mappings:
            self._mappings_by_artifacts[source_key(rule)].setdefault(artifact_rule(rule), rule)

        # The old lock's line of each digest, under whichever tag, by source and digest.
        self._old_lines = dict[tuple[SourceKey, str], LockedImage]()
        for image in old:
            self._old_lines.setdefault((image.source, image.digest), image)
        self._old_times = old.first_seen_times()
        # Those of which mappings take the same artifacts as when the old lock was made.
        taken_before = _artifacts_taken(old.mappings)
        taken_now = _artifacts_taken(map(locked_mapping, mappings))
        self._unchanged_sources = {
            source for source in taken_now if taken_now[source] == taken_before[source]
        }

        # What digests name, for all their tags.
        self._contents: dict[tuple[SourceKey, str], Once[_Content]] = defaultdict(Once)

    def under_way(self) -> list[str]:
        """Return the references of the images that are asked for."""
        return list(self._under_way)

    async def resolve(self) -> NewLock:
        """Ask sources, and return the new lock."""
        groups = grouped(self._mappings, lambda rule: [rule.source.authority])
        outcomes = [
            outcome
            for group in await gather(partial(self._resolve_group, group) for group in groups)
            for outcome in group
        ]
        self._discovery.warn_of_missing_platforms()
        return self._assemble(outcomes)

    # Questions.

    async def _resolve_group(self, group: Sequence[MappingRule]) -> list[_Outcome]:
        """Resolve the mappings of one source registry."""
        # All listings come before the first tag, because a listing that one mapping needs may show
        # signatures of another mapping's images.
        selections = await gather(partial(self._select, rule) for rule in group)
        selected = [
            (rule, tag)
            for rule, tags in zip(group, selections, strict=True)
            if not isinstance(tags, SyncError)
            for tag in tags
        ]
        answers = await gather(partial(self._resolve_tag, rule, tag) for rule, tag in selected)

        answers_of = defaultdict[int, list[_Answer]](list)
        for (rule, _), answer in zip(selected, answers, strict=True):
            answers_of[rule.index].append(answer)
        outcomes = list[_Outcome]()
        for rule, tags in zip(group, selections, strict=True):
            if isinstance(tags, SyncError):
                outcomes.append(_Outcome(rule, (), tags))
            else:
                outcomes.append(_outcome_of(rule, answers_of[rule.index]))
        return outcomes

    async def _select(self, rule: MappingRule) -> Sequence[str] | SyncError:
        """Return the tags that a mapping selects, or why its source cannot be listed."""
        try:
            selection = await self._discovery.select_tags(rule)
        except SyncError as error:
            return error
        source = self._discovery.source_of(rule)
        for event, text in selection.warnings(str(source)):
            self._discovery.log_once("warning", event, text)
        self.images_known += len(selection.kept)
        return selection.kept

    async def _resolve_tag(self, rule: MappingRule, tag: str) -> _Answer:
        """Make the line of a tag. Where the image itself is at fault, its old line stays."""
        name = self._discovery.source_of(rule).reference(tag)
        self._under_way[name] = None
        try:
            line = await self._make_line(rule, tag)
        except SyncError as error:
            is_absent = isinstance(error, RegistryError) and error.status == 404
            is_own_fault = is_absent or isinstance(error, ContentError)
            if not is_own_fault:
                # The next tag of the source would fail of the same.
                return _Answer(None, error)
            old = self._old.images_of(source_key(rule)).get(tag)
            self._failed_images[name] = Failure(name, error, keeps_lines=old is not None)
            return _Answer(old)
        finally:
            self._under_way.pop(name, None)
            self.images_done += 1
        self._resolved += 1
        return _Answer(line)

    async def _make_line(self, rule: MappingRule, tag: str) -> LockedImage:
        """Return the line of a tag. It costs one HEAD where the old lock has the digest."""
        source = source_key(rule)
        old = self._old.images_of(source).get(tag)

        # A tag that the lock has usually names the same digest still, whose content is in the lock.
        needs_manifest = old is None and self._needs_manifest(rule)
        digest = await self._discovery.resolve_digest(
            self._discovery.source_of(rule), tag, by_head=not needs_manifest
        )

        # A line of the old lock says what the digest holds: this tag's, or else another tag's.
        is_unmoved = old is not None and old.digest == digest
        same_digest = old if is_unmoved else self._old_lines.get((source, digest))
        if same_digest is not None and self._holds_still(rule, same_digest):
            content = _Content(digest, pushed=same_digest.pushed, artifacts=same_digest.artifacts)
        else:
            ask = partial(self._ask_content, rule, tag, digest)
            content = await self._contents[source, digest].get(ask)

        # The tag may have moved since the first answer: the content says of which digest it is.
        if old is not None and old.digest == content.digest:
            first_seen = old.first_seen  # unchanged, so that the line has the same bytes
        else:
            first_seen = self._first_seen_at(source, content.digest)
        return LockedImage(
            source,
            tag,
            digest=content.digest,
            pushed=content.pushed,
            artifacts=content.artifacts,
            first_seen=first_seen,
        )

    def _first_seen_at(self, source: SourceKey, digest: str) -> int:
        """Return when a digest was first seen in a repository, under whichever tag."""
        key = source.seen_key(digest)
        times = [self._now, self._old_times.get(key)]
        if self._first_seen is not None:
            times.append(self._first_seen.time_of(key))
        return min(time for time in times if time is not None)

    def _needs_manifest(self, rule: MappingRule) -> bool:
        """Say whether the line of a new digest says more than the digest."""
        artifact_rules = self._mappings_by_artifacts[source_key(rule)]
        return rule.platforms is not None or any(each.enabled for each in artifact_rules)

    def _holds_still(self, rule: MappingRule, line: LockedImage) -> bool:
        """Say whether an old line is still all that there is of its digest, as far as is known without a
        request.
        """
        if self._recheck or line.source not in self._unchanged_sources:
            return False

        # A listing that was made anyway may show that a signature has come. It is asked about only if
        # it would be taken: no artifact of a trimmed image's own index is, and with filters only its
        # manifest would tell.
        is_trimmed = line.pushed is not None
        has_unfiltered_rule = any(
            artifacts.enabled and not (artifacts.include or artifacts.exclude)
            for artifacts in self._mappings_by_artifacts[line.source]
        )
        if is_trimmed or not has_unfiltered_rule:
            return True
        known_tags = {artifact.tag for artifact in line.artifacts}
        listed = self._referrers.listed_cosign_tags(self._discovery.source_of(rule), line.digest)
        return known_tags.issuperset(listed)

    async def _ask_content(self, rule: MappingRule, tag: str, digest: str) -> _Content:
        """Ask what the line of a digest says."""
        if not self._needs_manifest(rule):
            return _Content(digest, pushed=None, artifacts=())

        lookup = await self._discovery.look_up_at_source(rule, tag, digest)
        artifacts = dict[str, LockedArtifact]()
        for mapping in self._mappings_by_artifacts[source_key(rule)].values():
            if mapping.artifacts.enabled:
                for artifact in await self._referrers.list_all(mapping, lookup):
                    artifacts.setdefault(artifact.reference, _locked(artifact))
        pushed = lookup.digest if lookup.digest != lookup.source_digest else None
        return _Content(lookup.source_digest, pushed, tuple(artifacts.values()))

    # What comes of the answers.

    def _assemble(self, outcomes: Sequence[_Outcome]) -> NewLock:
        """Make the new lock. A mapping that failed keeps its old lines, if it has any."""
        mappings = set[LockedMapping]()
        images = list[LockedImage]()
        failures = list[Failure]()
        # Sources of which old lines stay.
        kept = set[SourceKey]()
        for outcome in outcomes:
            mapping = locked_mapping(outcome.rule)
            if outcome.error is None:
                mappings.add(mapping)
                images += outcome.images
                continue
            has_old_lines = mapping in self._old.mappings
            name = str(mapping.source)
            failures.append(Failure(name, outcome.error, keeps_lines=has_old_lines))
            if has_old_lines:
                mappings.add(mapping)
                kept.add(mapping.source)

        if self._keeps_others:
            others = self._mappings_of_others()
            mappings.update(others)
            kept.update(mapping.source for mapping in others)

        old_images = [image for source in kept for image in self._old.images_of(source).values()]
        # Another mapping of the same source may have a new line for an image: the later one counts.
        lock = Lock(mappings, [*old_images, *images])
        return NewLock(lock, self._resolved, tuple(failures), tuple(self._failed_images.values()))

    def _mappings_of_others(self) -> list[LockedMapping]:
        """Return the old lock's mappings from repositories that are not resolved now."""
        repositories = {source.repository for source in self._mappings_by_artifacts}
        return [
            mapping
            for mapping in self._old.mappings
            if mapping.source.repository not in repositories
        ]


def _outcome_of(rule: MappingRule, answers: Sequence[_Answer]) -> _Outcome:
    """Return what became of a mapping whose tags have these answers; one error fails all of it."""
    images = [answer.image for answer in answers if answer.image is not None]
    errors = [answer.error for answer in answers if answer.error is not None]
    return _Outcome(rule, images, errors[0] if errors else None)


def _artifacts_taken(mappings: Iterable[LockedMapping]) -> defaultdict[SourceKey, set[str | None]]:
    """Return the hashes of what the mappings of each source take of its artifacts."""
    taken = defaultdict[SourceKey, set[str | None]](set)
    for mapping in mappings:
        taken[mapping.source].add(mapping.artifacts)
    return taken


def _locked(artifact: Artifact) -> LockedArtifact:
    """Return an artifact as a lock has it."""
    return LockedArtifact(
        digest=artifact.source_digest,
        subject=artifact.subject,
        types=tuple(sorted(artifact.types)),
        tag=artifact.reference if artifact.entry is None else None,
    )

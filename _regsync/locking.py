"""Make a new lock: resolve the selected tags at their sources, and find their artifacts.

Invariants: no request is sent to a target. The line of a tag whose digest is unchanged stays as it is,
and costs one HEAD. What could not be looked up keeps its old lines, so that it is never gone.
Follows: docs/design.md section 12 ("Lock").
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import partial

from _regsync.config import ArtifactRule, MappingRule
from _regsync.errors import SyncError
from _regsync.pins import (
    Lock,
    LockedArtifact,
    LockedImage,
    LockedMapping,
    SourceKey,
    artifact_rule,
    locked_mapping,
    source_key,
)
from _regsync.registry.runs import Transport
from _regsync.sync.artifacts import Referrers
from _regsync.sync.discovery import Discovery
from _regsync.sync.image import Traffic
from _regsync.sync.once import Once, gather


class Locking:
    """The work of making one new lock, and its result."""

    # The progress line reads these attributes of any work. A lock copies nothing.
    bytes_moved = 0
    traffic = Traffic()

    def __init__(
        self,
        transport: Transport,
        discovery: Discovery,
        referrers: Referrers,
        old_lock: Lock,
        mappings: Sequence[MappingRule],
        *,
        keeps_others: bool,
        recheck: bool,
    ) -> None:
        """Prepare to resolve `mappings`.

        With `keeps_others` the new lock keeps the old lines of repositories outside `mappings`.
        With `recheck` artifacts are searched for even if the digest of a tag is unchanged.
        """
        self.transport = transport
        # How many tags are selected so far, and how many of them have a result.
        self.images_known = 0
        self.images_done = 0
        # The result: the new lock, which has not been written, and the errors of what could not be
        # looked up. A tag is named `HOST/REPOSITORY:TAG`, and a mapping `HOST/REPOSITORY`.
        self.lock = Lock()
        self.failures = dict[str, SyncError]()

        self._discovery = discovery
        self._referrers = referrers
        self._old_lock = old_lock
        self._mappings = mappings
        self._keeps_others = keeps_others
        self._recheck = recheck

        # The new lines of the tags that were resolved.
        self.lines = list[LockedImage]()

        # By source and artifact rule, the first mapping with this rule. Artifacts are searched for
        # with every rule of a source, so that a line does not depend on which mapping selects its
        # tag.
        self._rules: dict[SourceKey, dict[ArtifactRule, MappingRule]] = defaultdict(dict)
        for rule in mappings:
            self._rules[source_key(rule)].setdefault(artifact_rule(rule), rule)
        # The sources whose artifact rules are the same as when the old lock was made.
        old_rules = _artifact_rules(old_lock.mappings)
        new_rules = _artifact_rules(map(locked_mapping, mappings))
        self._unchanged_sources = {
            source for source in new_rules if new_rules[source] == old_rules[source]
        }

        # By source and digest, a line of the old lock, whatever its tag.
        self._old_images = {(image.source, image.digest): image for image in old_lock}
        # By source and digest, the request for a new line. All tags of a digest share it.
        self._new_images: dict[tuple[SourceKey, str], Once[LockedImage]] = defaultdict(Once)

    @property
    def have_rules_changed(self) -> bool:
        """Whether the lock is for other mappings, or for other rules, than the old one."""
        return self.lock.mappings != self._old_lock.mappings

    async def resolve(self) -> None:
        """Resolve all mappings, and set the new lock and the failures."""
        # All listings are made before the first tag is resolved, because a listing for one mapping
        # may contain cosign tags of another mapping's images.
        selected = await gather(partial(self._select_tags, rule) for rule in self._mappings)
        await gather(
            partial(self._resolve_tag, rule, tag)
            for rule, tags in zip(self._mappings, selected, strict=True)
            for tag in tags
        )
        self.lock = self._new_lock()

    async def _select_tags(self, rule: MappingRule) -> Sequence[str]:
        """Return the tags that a mapping selects. If they cannot be listed, the mapping fails."""
        try:
            tags = (await self._discovery.select_tags(rule)).kept
        except SyncError as error:
            self.failures[source_key(rule).repository] = error
            return ()
        self.images_known += len(tags)
        return tags

    async def _resolve_tag(self, rule: MappingRule, tag: str) -> None:
        """Resolve a tag, and keep its new line or its error."""
        source = source_key(rule)
        old_image = self._old_lock.images_of(source).get(tag)
        try:
            self.lines.append(await self._resolve_image(rule, tag, old_image))
        except SyncError as error:
            # A line that was made for other artifact rules must not be taken for one of the new
            # rules. So then the whole repository fails, and its mappings keep their lines too.
            is_stale = old_image is not None and source not in self._unchanged_sources
            name = source.repository if is_stale else f"{source.repository}:{tag}"
            self.failures[name] = error
        self.images_done += 1

    async def _resolve_image(
        self, rule: MappingRule, tag: str, old_image: LockedImage | None
    ) -> LockedImage:
        """Return the new line of a tag. This costs one HEAD if the old lock has the digest."""
        source = source_key(rule)
        # If the old lock has the tag, the digest is usually unchanged, and no manifest is needed.
        by_head = old_image is not None or not self._needs_manifest(rule)
        repository = self._discovery.source_of(rule)
        digest = await self._discovery.resolve_digest(repository, tag, by_head=by_head)

        # A line of the old lock with the same digest has the same content, even under another tag.
        is_unmoved = old_image is not None and old_image.digest == digest
        image = old_image if is_unmoved else self._old_images.get((source, digest))
        if image is None or not self._can_reuse(rule, image):
            fetch = partial(self._fetch_image, rule, tag, digest)
            image = await self._new_images[source, digest].get(fetch)

        return image._replace(tag=tag)

    def _needs_manifest(self, rule: MappingRule) -> bool:
        """Report whether a new line has platforms or artifacts, so that the manifest is needed."""
        rules = self._rules[source_key(rule)]
        return rule.platforms is not None or any(each.enabled for each in rules)

    def _can_reuse(self, rule: MappingRule, old_image: LockedImage) -> bool:
        """Report whether the content of an old line is still complete.

        It is complete if no artifact was added since. That is judged without a request, by what
        this run already knows of the source.
        """
        if self._recheck or old_image.source not in self._unchanged_sources:
            return False

        # A listing may show that the image has a new cosign tag. Two kinds of lines need no look at
        # it. Of a trimmed index, artifacts of the whole index are not copied. And if every rule has
        # filters, only the artifact's manifest would show whether it passes one.
        has_unfiltered_rule = any(
            artifacts.enabled and not (artifacts.include or artifacts.exclude)
            for artifacts in self._rules[old_image.source]
        )
        if old_image.pushed or not has_unfiltered_rule:
            return True
        known_tags = {artifact.tag for artifact in old_image.artifacts}
        source = self._discovery.source_of(rule)
        return known_tags.issuperset(self._referrers.listed_cosign_tags(source, old_image.digest))

    async def _fetch_image(self, rule: MappingRule, tag: str, digest: str) -> LockedImage:
        """Fetch what a line of `tag` says about a digest: that at targets, and the artifacts."""
        source = source_key(rule)
        if not self._needs_manifest(rule):
            return LockedImage(source, tag, digest)

        lookup = await self._discovery.look_up_at_source(rule, tag, digest)
        artifacts = dict[str, LockedArtifact]()
        for mapping in self._rules[source].values():
            if mapping.artifacts.enabled:
                for each in await self._referrers.find_at_source(mapping, lookup):
                    types = tuple(sorted(each.types))
                    artifact = LockedArtifact(each.digest, each.subject, types, each.tag or "")
                    artifacts.setdefault(each.reference, artifact)
        return LockedImage(
            source,
            tag,
            digest=lookup.source_digest,
            pushed=lookup.digest if lookup.is_trimmed else "",
            artifacts=tuple(artifacts.values()),
        )

    def _new_lock(self) -> Lock:
        """Build the new lock from new lines, and from the old lines that are kept.

        Old lines are kept of a repository or tag that has failed. Of a repository there are only
        old ones then, because they and its mappings' rules belong together. With `keeps_others`
        those of repositories that no mapping of this lock names are kept too.
        """
        kept = {*self.failures}
        if self._keeps_others:
            looked_at = {source.repository for source in self._rules}
            kept |= {each.source.repository for each in self._old_lock.mappings} - looked_at

        mappings = [
            mapping
            for mapping in map(locked_mapping, self._mappings)
            if mapping.source.repository not in self.failures
        ]
        mappings += [each for each in self._old_lock.mappings if each.source.repository in kept]
        old_images = [
            image
            for image in self._old_lock
            if image.source.repository in kept or image.name in kept
        ]
        new_images = [each for each in self.lines if each.source.repository not in self.failures]
        return Lock(mappings, [*old_images, *new_images])


def _artifact_rules(mappings: Iterable[LockedMapping]) -> defaultdict[SourceKey, set[str]]:
    """Return the hashes of the artifact rules of each source, as LockedMapping has them."""
    rules = defaultdict[SourceKey, set[str]](set)
    for mapping in mappings:
        rules[mapping.source].add(mapping.artifacts_hash)
    return rules

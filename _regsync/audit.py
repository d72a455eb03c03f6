"""Check that targets hold the images that a configuration selects, with their artifacts.

Owns: which digest and which artifacts are expected at a target, the report, the lines of a receipt.
What is looked at of a manifest is in `sync/inspection`.
Invariants: nothing is written anywhere. An image that could not be checked completely is never
counted as whole.
Follows: docs/design.md section 12 ("Audit").
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import anyio

from _regsync.config import Config, MappingRule
from _regsync.errors import Side, SyncError
from _regsync.oci import Manifest, full_name
from _regsync.pins import Lock
from _regsync.registry.repository import Repository
from _regsync.registry.runs import Transport
from _regsync.state import Knowledge, RepositoryKey
from _regsync.sync.artifacts import Artifact, Referrers, unless_absent
from _regsync.sync.discovery import Discovery, TagLookup
from _regsync.sync.inspection import Finding, Inspection, Inspector
from _regsync.sync.mappings import ALL_TAGS, WantedTag, assign_tags
from _regsync.sync.once import gather
from _regsync.sync.report import Outcome, error_json
from _regsync.text import duration_text, size_text


class _Image(Inspection):
    """A tag of a mapping at one target, and what was found out about it."""

    def __init__(
        self, mapping: MappingRule, tag: str, source: Repository, target: Repository
    ) -> None:
        super().__init__(source.name_of(tag), target, tag)
        self.mapping = mapping
        self.tag = tag
        self.source = source


class Audit:
    """One audit of a configuration's targets, and its result so far."""

    def __init__(
        self,
        transport: Transport,
        config: Config,
        knowledge: Knowledge,
        emit: Callable[[Finding | Outcome], None],
        *,
        reads_blobs: bool,
        lock: Lock | None,
    ) -> None:
        """Prepare to check all images that `config` selects.

        `knowledge` has the digests of trimmed indexes, when digests were first seen, and how hosts
        log in. It is not believed about the content of targets, because that is what an audit
        checks. `emit` is called with each finding, and with each image that could not be checked.
        With `reads_blobs` all blobs at targets are downloaded and verified. With a lock, tags and
        digests are those of the lock, and sources are not asked.
        """
        self.transport = transport
        self._config = config
        self._emit = emit

        self._knowledge = knowledge
        self._discovery = Discovery(
            transport, knowledge, reads_only=True, layouts_exist=True, lock=lock
        )
        self._referrers = Referrers(self._discovery, knowledge)
        # What the targets hold, and which of its manifests are artifacts.
        self._found = Inspector(transport, self._discovery, reads_blobs=reads_blobs)
        self._artifacts = set[tuple[str, RepositoryKey]]()
        self.traffic = self._found.traffic  # for the line of progress
        # By target and digest, a lock that is held while a tag is fetched that probably names this
        # digest.
        self._tag_reads = WeakValueDictionary[tuple[RepositoryKey, str], anyio.Lock]()

        self.findings = list[Finding]()
        # Images that could not be checked completely, each with its error.
        self.failures = list[Outcome]()
        # How many images are selected so far, and how many have which result. An image counts once
        # for each target.
        self.images_known = 0
        self._results = Counter(whole=0, flawed=0, failed=0)
        # True until the audit has ended regularly.
        self.interrupted = True

    # Selecting.

    async def run(self) -> None:
        """Check all images, and keep the findings and failures."""
        # Each target host has its own queue, so that a host that does not respond does not delay the
        # checks at other hosts.
        by_host = defaultdict[str, list[_Image]](list)
        for image in await self._select_images():
            by_host[image.target.host.key].append(image)
        await gather(
            partial(gather, [partial(self._check, image) for image in queue])
            for queue in by_host.values()
        )
        self.interrupted = False

    async def _select_images(self) -> list[_Image]:
        """Return the images that the mappings select, one for each target."""
        mappings = self._config.mappings
        selected = await gather(partial(self._select_tags, mapping) for mapping in mappings)
        tags, conflicts = assign_tags(zip(mappings, selected, strict=True))
        for wanted, error in conflicts:
            self._fail_tag(wanted, error)
        return [image for wanted in tags for image in self._images_of(wanted)]

    async def _select_tags(self, mapping: MappingRule) -> tuple[str, ...]:
        """Return the tags that a mapping selects.

        If its source cannot be listed, reports one failed image for each target, with the tag `*`.
        """
        try:
            selection = await self._discovery.select_tags(mapping)
        except SyncError as error:
            self._fail_tag(WantedTag(mapping, ALL_TAGS, mapping.targets), error)
            return ()
        return selection.kept

    def _images_of(self, wanted: WantedTag) -> list[_Image]:
        """Return the images of a tag, one for each target."""
        mapping, tag, targets = wanted
        source = self._discovery.source_of(mapping)
        self.images_known += len(targets)
        name = mapping.target_repository
        repositories = (self._discovery.repository(each, name, Side.TARGET) for each in targets)
        return [_Image(mapping, tag, source, repository) for repository in repositories]

    def _fail_tag(self, wanted: WantedTag, error: SyncError) -> None:
        """Report a tag as failed at all its targets."""
        for image in self._images_of(wanted):
            image.fail(error)
            self._end(image)

    # Checking one image.

    async def _check(self, image: _Image) -> None:
        """Check one image with its artifacts, and report the result."""
        try:
            await self._inspect(image, *await self._find_expected(image))
        except SyncError as error:  # the source cannot be asked
            image.fail(error)
        self._end(image)

    def _end(self, image: _Image) -> None:
        """Report what was found, and whether the image could be checked completely. An image with
        both findings and an error has failed.
        """
        if image.error is not None:
            self._results["failed"] += 1
        elif image.findings:
            self._results["flawed"] += 1
        else:
            self._results["whole"] += 1
        for finding in image.findings:
            self.findings.append(finding)
            self._emit(finding)
        if image.error is not None:
            image.error.drop_frames()
            outcome = Outcome(image.source_name, image.target_name, "failed", error=image.error)
            self.failures.append(outcome)
            self._emit(outcome)

    async def _find_expected(self, image: _Image) -> tuple[str, str]:
        """Find out which digest a tag has at its source, and which it should have at the target.

        The latter is "" if `min_age` holds the image back: then any digest is right, and so is an
        absent tag. Sends the fewest requests. Raises SyncError if a request to the source fails.
        """
        mapping, tag, source = image.mapping, image.tag, image.source
        at_source = await self._discovery.resolve_at_source(mapping, tag, by_head=True)
        digest = at_source.digest
        if mapping.min_age:
            held_until = self._knowledge.record_sighting(source.key, digest, mapping.min_age)
            if held_until is not None:
                return digest, ""
        # It is known without the index if it is from a lock, or if no platforms are filtered.
        if at_source.digest_at_target is not None:
            return digest, at_source.digest_at_target

        # If the index is trimmed, the state may have the digest that a run has put for it.
        (at_target,) = self._discovery.new_target_tags([image.target], mapping, tag, tag)
        snapshot = at_target.snapshot
        if snapshot is not None and snapshot.source == digest:
            return digest, snapshot.pushed
        lookup = await self._discovery.look_up_at_source(mapping, tag, digest)
        return lookup.source_digest, lookup.digest

    async def _inspect(self, image: _Image, source_digest: str, expected: str) -> None:
        """Look at an image at one of its targets. `_find_expected` has the digests."""
        likely_digest = expected or source_digest
        top: Manifest | None = None
        with image.looking_at("manifest", likely_digest):
            top = await self._manifest_of_tag(image.target, image.tag, likely_digest)
            if top is None and expected:
                image.add("missing", f"expected {expected}", None, expected=expected)
        if top is None:
            return  # the tag is absent, or its manifest could not be read

        if expected and top.digest != expected:
            text = f"found {top.digest}, expected {expected}"
            image.add("differs", text, top.digest, expected=expected)
        # The contents are looked at even if the digest is wrong, because clients can pull the image.
        tree = await self._found.look_below(image, top)
        # If the digest is wrong, the source may not have this image, and so no artifacts of it.
        if not image.mapping.artifacts.enabled or top.digest != likely_digest:
            return
        lookup = TagLookup(image.source, image.tag, tree, top.digest, source_digest, targets=())
        await self._look_at_artifacts(image, lookup)

    async def _manifest_of_tag(
        self, target: Repository, tag: str, likely_digest: str
    ) -> Manifest | None:
        """Return the manifest under a tag. Returns None if the tag is absent.

        `likely_digest` is the digest that the tag probably names. Of several tags with the same
        likely digest, the first costs a GET. Its manifest is then cached, so each later tag costs
        only a HEAD.
        """
        # Tags with the same likely digest wait until the first tag's manifest is cached.
        async with self._tag_reads.setdefault((target.key, likely_digest), anyio.Lock()):
            if self._discovery.cached_manifest(target, likely_digest) is None:
                return await unless_absent(self._discovery.fetch_manifest_of_tag(target, tag))

        digest = await self._discovery.find_digest(target, tag)
        if digest is None:
            return None
        return await unless_absent(self._discovery.fetch_manifest(target, digest))

    # Artifacts.

    async def _look_at_artifacts(self, image: _Image, lookup: TagLookup) -> None:
        """Look at all artifacts that the source has of an image."""
        artifacts = await self._referrers.find_at_source(image.mapping, lookup)
        # Clients find an artifact without a cosign tag only by the list of its subject.
        subjects = sorted({artifact.subject for artifact in artifacts if artifact.tag is None})
        lists = await gather(
            partial(self._referrers.lists.read, image.target, subject) for subject in subjects
        )
        listed = {entry.digest for entries in lists for entry in entries}
        await gather(
            partial(self._look_at_artifact, image, artifact, listed) for artifact in artifacts
        )

    async def _look_at_artifact(
        self, image: _Image, artifact: Artifact, listed: Collection[str]
    ) -> None:
        """Look at one artifact that the source has. `listed` are the digests of those that clients
        find at the target.
        """
        digest = artifact.digest
        with image.looking_at("manifest", digest):
            if artifact.tag is not None:
                manifest = await self._manifest_of_tag(image.target, artifact.tag, digest)
            else:
                manifest = await unless_absent(
                    self._discovery.fetch_manifest(image.target, digest, artifact.entry)
                )
            if manifest is None:
                # What the source lists but does not hold, no run can copy.
                if artifact.tag or await image.source.head_manifest(digest) is not None:
                    image.add("artifact_missing", f"{artifact} is missing", digest)
                return

            self._artifacts.add((manifest.digest, image.target.key))
            await self._found.look_below(image, manifest)
            if manifest.digest != digest:
                text = f"artifact {artifact.reference}: found {manifest.digest}, expected {digest}"
                image.add("differs", text, manifest.digest, expected=digest)
            elif artifact.tag is None and digest not in listed:
                text = f"{artifact} exists, but the target does not list it"
                image.add("artifact_missing", text, digest)

    # The result.

    def exit_status(self) -> int:
        """Return 0, 1 or 2 (docs/design.md section 2). The caller handles 3 and signals."""
        if self.failures:
            return 2
        return 1 if self.findings else 0

    @property
    def has_something_to_report(self) -> bool:
        """Whether there is anything to report."""
        return bool(self.findings or self.failures)

    @property
    def images_done(self) -> int:
        return self._results.total()

    @property
    def bytes_moved(self) -> int:
        return self.transport.blob_bytes

    def undone_text(self) -> str:
        """Return the message for an interrupted audit."""
        return f"interrupted, images not checked: {self.images_known - self.images_done}"

    def totals(self) -> dict[str, Any]:
        """Return the counts for `totals` of the JSON document, except those of requests."""
        images = dict(self._results)
        if self.images_known > self.images_done:
            images["undone"] = self.images_known - self.images_done
        found = self._found
        return {
            "images": images,
            "manifests": len(found.manifests),
            "blobs": len(found.blobs),
            "artifacts": len(self._artifacts),
            "read": {"blobs": found.blobs_read, "bytes": found.bytes_read},
        }

    def summary(self, elapsed: float) -> list[str]:
        """Return the lines of the summary. `elapsed` is in seconds."""
        totals = self.totals()
        images = totals["images"]
        read = totals["read"]
        return [
            f"Images: {images['whole']} whole, {images['flawed']} with findings, "
            f"{images['failed']} not checked completely",
            f"Present: {totals['manifests']} manifests, {totals['blobs']} blobs, "
            f"{totals['artifacts']} artifacts",
            f"Data: {size_text(read['bytes'])} of {read['blobs']} blobs read back",
            f"Time: {duration_text(elapsed)} elapsed",
        ]

    def as_json(self) -> dict[str, Any]:
        """Return the fields of the JSON document that only an audit has."""
        return {
            "findings": [finding._asdict() for finding in self.findings],
            "failures": [
                {"source": each.source, "target": each.target, "error": error_json(each.error)}
                for each in self.failures
            ],
        }

    def receipt(self) -> list[str]:
        """Return a line `DIGEST HOST/REPOSITORY` for each manifest and blob at targets, sorted.

        Blobs that were left out of a layout are there too: the next layout need not have them.
        """
        present = self._found.manifests | self._found.blobs | self._found.left_out
        return sorted(f"{digest} {full_name(host, name)}" for digest, (host, name) in present)

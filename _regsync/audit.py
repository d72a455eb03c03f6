"""Check that targets hold the images that a configuration selects.

Owns: which digest is expected at a target, the report of an audit, the lines of a receipt. What is
looked at there is in `inspection`.
Invariants: nothing is written anywhere. An image that could not be checked completely is never
counted as whole.
Follows: docs/design.md section 12 ("Audit").
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from _regsync.config import Config, MappingRule
from _regsync.errors import MappingConflict, Side, SyncError
from _regsync.inspection import Expected, Finding, Inspector
from _regsync.oci import full_name
from _regsync.pins import Lock
from _regsync.registry.repository import Repository
from _regsync.registry.runs import Transport
from _regsync.state import FirstSeen, Knowledge, StateFile
from _regsync.sync.artifacts import Referrers
from _regsync.sync.discovery import Discovery
from _regsync.sync.image import Traffic
from _regsync.sync.mappings import ALL_TAGS, WantedTag, assign_tags
from _regsync.sync.once import gather
from _regsync.sync.report import Outcome, error_json, sorted_requests
from _regsync.text import duration_text, size_text


class _Image(NamedTuple):
    """A tag of a mapping at one target."""

    mapping: MappingRule
    tag: str
    target: Repository


class AuditReport:
    """The result of one audit so far."""

    def __init__(self, inspector: Inspector) -> None:
        # What the targets hold.
        self.found = inspector
        self.findings = list[Finding]()
        # Images that could not be checked completely, each with its error.
        self.failures = list[Outcome]()
        # How many images are selected so far, and how many have a result. An image counts once for
        # each target.
        self.images_known = 0
        self.images_done = 0
        # True until the audit has ended regularly.
        self.interrupted = True

    def exit_status(self) -> int:
        """Return 0, 1 or 2 (docs/design.md section 2). The caller handles 3 and signals."""
        if self.failures:
            return 2
        return 1 if self.findings else 0

    @property
    def has_something_to_report(self) -> bool:
        """Whether there is anything to report."""
        return bool(self.findings or self.failures)

    def undone_text(self) -> str:
        """Return the message for an interrupted audit."""
        return f"interrupted, images not checked: {self.images_known - self.images_done}"

    def totals(self) -> dict[str, Any]:
        """Return the counts for `totals` of the JSON document, except those of requests.

        Each image is whole, flawed or failed. An image with both findings and an error has failed.
        """
        failed = {(outcome.source, outcome.target) for outcome in self.failures}
        flawed = {(finding.source, finding.target) for finding in self.findings} - failed
        images = {
            "whole": self.images_done - len(flawed) - len(failed),
            "flawed": len(flawed),
            "failed": len(failed),
        }
        if self.images_known > self.images_done:
            images["undone"] = self.images_known - self.images_done
        found = self.found
        return {
            "images": images,
            "manifests": len(found.manifests),
            "blobs": len(found.blobs),
            "artifacts": len(found.artifacts),
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

    def as_json(
        self,
        run_id: str,
        started_at: str,
        elapsed: float,
        requests: Mapping[str, Mapping[str, int]],
        throttled: Mapping[str, int],
    ) -> dict[str, Any]:
        """Return the JSON document.

        `elapsed` is in seconds. `requests` are counts by host and action, `throttled` counts by
        host.
        """
        findings = sorted(self.findings, key=lambda each: (each.target, each.kind, each.text))
        failures = sorted(self.failures, key=lambda each: (each.target, each.source))
        return {
            "schema": 1,
            "run_id": run_id,
            "started_at": started_at,
            "duration_s": round(elapsed, 3),
            "interrupted": self.interrupted,
            "findings": [finding.as_json() for finding in findings],
            "failures": [
                {"source": each.source, "target": each.target, "error": error_json(each.error)}
                for each in failures
            ],
            "totals": {
                **self.totals(),
                "requests": sorted_requests(requests),
                "throttled": dict(sorted(throttled.items())),
            },
        }

    def receipt(self) -> list[str]:
        """Return a line `DIGEST HOST/REPOSITORY` for each manifest and blob at targets, sorted.

        Blobs that were left out of a layout are there too: the next layout need not have them.
        """
        present = self.found.manifests | self.found.blobs | self.found.left_out
        return sorted(f"{digest} {full_name(host, name)}" for digest, (host, name) in present)


class Audit:
    """One audit of a configuration's targets."""

    # When a drain after a signal ends. Always None, because a signal ends an audit at once.
    drain_deadline = None

    def __init__(
        self,
        transport: Transport,
        config: Config,
        emit: Callable[[Finding | Outcome], None],
        state: StateFile,
        *,
        reads_blobs: bool = False,
        first_seen: FirstSeen | None = None,
        lock: Lock | None = None,
    ) -> None:
        """Prepare to check all images that `config` selects.

        `emit` is called with each finding, and with each image that could not be checked.
        With `reads_blobs` all blobs at targets are downloaded and verified. `first_seen` has the
        times for `min_age`. With a lock, tags and digests are those of the lock, and sources are
        not asked.
        """
        self.transport = transport
        self._config = config
        self._emit = emit
        self._first_seen = first_seen

        # The state is used for the digests of trimmed indexes and for the login methods of hosts.
        # It is not trusted about the content of targets, because that is what an audit checks.
        self._state = state
        self._state.load(may_write=False)
        wall = transport.machine.wall
        self._knowledge = Knowledge(self._state, now=wall, ttl=config.cache_ttl)
        self._discovery = Discovery(transport, self._knowledge, reads_only=True, lock=lock)
        referrers = Referrers(self._discovery, self._knowledge, wall, has_state=self._state.is_used)
        inspector = Inspector(transport, self._discovery, referrers, reads_blobs=reads_blobs)
        self.report = AuditReport(inspector)

    # The progress line reads these attributes of any work.

    @property
    def images_known(self) -> int:
        return self.report.images_known

    @property
    def images_done(self) -> int:
        return self.report.images_done

    @property
    def bytes_moved(self) -> int:
        return self.transport.blob_bytes

    @property
    def traffic(self) -> Traffic:
        traffic = Traffic()
        traffic.expected_bytes = self.report.found.bytes_to_read
        return traffic

    async def run(self) -> None:
        """Check all images, and add findings and failures to the report."""
        for registry in self._config.registries_in_use:
            # Raises ConfigError for an unreadable file before any request is sent.
            self.transport.dialer.prepare(registry)
        try:
            # Each target host has its own queue, so that a host that does not respond does not
            # delay the checks at other hosts.
            by_host = defaultdict[str, list[_Image]](list)
            for image in await self._select_images():
                by_host[image.target.host.key].append(image)
            await gather(
                partial(gather, [partial(self._check, image) for image in queue])
                for queue in by_host.values()
            )
            self.report.interrupted = False
        finally:
            self._state.close()

    async def _select_images(self) -> list[_Image]:
        """Return the images that the mappings select, one for each target."""
        mappings = self._config.mappings
        selected = await gather(partial(self._select_tags, mapping) for mapping in mappings)
        tags, conflicts = assign_tags(zip(mappings, selected, strict=True))
        for conflict in conflicts:
            text = f"mappings[{conflict.owner.index}] writes this tag too, from another source"
            self._fail_tag(conflict.wanted, MappingConflict(text))
        images = [image for wanted in tags for image in self._images_of(wanted)]
        self.report.images_known += len(images)
        return images

    async def _select_tags(self, mapping: MappingRule) -> tuple[str, ...]:
        """Return the tags that a mapping selects.

        If its source cannot be listed, reports one failed image for each target, with the tag `*`.
        """
        try:
            selection = await self._discovery.select_tags(mapping)
        except SyncError as error:
            self._fail_tag(WantedTag(mapping, ALL_TAGS, mapping.targets), error)
            return ()
        for event, text in selection.warnings(str(self._discovery.source_of(mapping))):
            self.transport.machine.log("warning", event, text)
        return selection.kept

    def _images_of(self, wanted: WantedTag) -> list[_Image]:
        """Return the images of a tag, one for each target."""
        mapping, tag, targets = wanted
        name = mapping.target_repository
        repositories = (self._discovery.repository(each, name, Side.TARGET) for each in targets)
        return [_Image(mapping, tag, repository) for repository in repositories]

    async def _check(self, image: _Image) -> None:
        """Check one image with its artifacts, and report the result."""
        mapping, tag, target = image
        error: SyncError | None = None
        try:
            expected = await self._find_expected(image)
            inspection = await self.report.found.inspect(mapping, tag, target, expected)
        except SyncError as failure:  # the source cannot be asked
            error = failure
        else:
            error = inspection.error
            for finding in inspection.findings:
                self.report.findings.append(finding)
                self._emit(finding)
        self.report.images_done += 1
        if error is not None:
            self._fail(image, error)

    async def _find_expected(self, image: _Image) -> Expected:
        """Find out which digest the tag should name at the target, with the fewest requests.

        Raises SyncError if a request to the source fails.
        """
        mapping, tag, target = image
        source = self._discovery.source_of(mapping)
        at_source = await self._discovery.resolve_at_source(mapping, tag, by_head=True)
        held_until: int | None = None
        if mapping.min_age and self._first_seen is not None:
            held_until = self._first_seen.record_sighting(
                source.key, at_source.digest, mapping.min_age
            )
        is_held_back = held_until is not None

        # It is known without the index if it is from a lock, or if no platforms are filtered.
        digest = at_source.digest_at_target
        if digest is None:
            key = self._discovery.snapshot_key(mapping, source, target, tag, tag)
            digest = self._digest_put_for(key, at_source.digest)
        if digest or is_held_back:  # if it is held back, any digest at the target is right
            return Expected(digest, at_source.digest, is_held_back)
        lookup = await self._discovery.look_up_at_source(mapping, tag, at_source.digest)
        return Expected(lookup.digest, lookup.source_digest)

    def _digest_put_for(self, snapshot_key: bytes, source_digest: str) -> str:
        """Return the digest that a run has put for a digest of the source, by the state.

        It is another digest if the run has trimmed the index. It is empty if no run has put one.
        """
        entry = self._knowledge.snapshot(snapshot_key)
        if entry is None or entry.snapshot.source != source_digest:
            return ""
        return entry.snapshot.pushed

    def _fail_tag(self, wanted: WantedTag, error: SyncError) -> None:
        """Report a tag as failed at all its targets."""
        for image in self._images_of(wanted):
            self.report.images_known += 1
            self.report.images_done += 1
            self._fail(image, error)

    def _fail(self, image: _Image, error: SyncError) -> None:
        """Report an image that could not be checked completely."""
        error.drop_frames()
        source_name = self._discovery.source_of(image.mapping).name_of(image.tag)
        target_name = image.target.name_of(image.tag)
        outcome = Outcome(source_name, target_name, "failed", error=error)
        self.report.failures.append(outcome)
        self._emit(outcome)

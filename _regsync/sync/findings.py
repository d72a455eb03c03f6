"""The result of an audit: findings, totals and the exit status.

Owns: the text of a finding, the JSON document of an audit, the lines of a receipt.
May not know: terminals, files, clocks, how requests are sent.
Invariants: an image that could not be checked completely is never counted as whole.
Follows: docs/design.md section 12.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from _regsync.oci import Descriptor, full_name
from _regsync.state import RepositoryKey
from _regsync.sync.report import Outcome, SharedCause, error_json, shared_causes, sorted_requests
from _regsync.text import duration_text, size_text

Kind = Literal["missing", "differs", "incomplete", "artifact_missing", "corrupt"]


class Flaw(NamedTuple):
    """A defect at a target. Several tags may have the same flaw."""

    kind: Kind
    # The description for users.
    text: str
    # The digest of the missing or corrupt blob or manifest. If `kind` is "differs", the digest at
    # the target.
    digest: str | None = None
    # The digest that the target should have. None unless `kind` is "missing" or "differs".
    expected: str | None = None
    # Bytes of the missing part. None unless `kind` is "incomplete".
    size: int | None = None

    @classmethod
    def missing(cls, expected: str) -> Flaw:
        """Return the flaw of a tag that does not exist."""
        return cls("missing", f"expected {expected}", expected=expected)

    @classmethod
    def differs(cls, prefix: str, digest: str, expected: str) -> Flaw:
        """Return the flaw of a tag with another digest.

        `prefix` begins the text. It names the tag if the tag is an artifact's, and else it is
        empty.
        """
        text = f"{prefix}found {digest}, expected {expected}"
        return cls("differs", text, digest=digest, expected=expected)

    @classmethod
    def incomplete(cls, part_type: str, part: Descriptor) -> Flaw:
        """Return the flaw of an image that lacks a part. `part_type` is "blob" or "manifest"."""
        text = f"{part_type} {part.digest} ({size_text(part.size)}) is missing"
        return cls("incomplete", text, digest=part.digest, size=part.size)

    @classmethod
    def corrupt(cls, part_type: str, digest: str, cause: str) -> Flaw:
        """Return the flaw of a part whose content has another digest or size.

        `part_type` is "blob" or "manifest".
        """
        return cls("corrupt", f"{part_type} {digest}: {cause}", digest=digest)


class Finding(NamedTuple):
    """A flaw of one image at one target."""

    # Full references with host.
    source: str
    target: str
    flaw: Flaw

    def line(self) -> str:
        """Return the line for users."""
        return f"{self.flaw.kind} {self.source} -> {self.target}: {self.flaw.text}"

    def as_json(self) -> dict[str, Any]:
        """Return the entry for `findings` of the JSON document."""
        return {
            "finding": self.flaw.kind,
            "source": self.source,
            "target": self.target,
            "digest": self.flaw.digest,
            "expected": self.flaw.expected,
            "size": self.flaw.size,
            "message": self.flaw.text,
        }


class AuditReport:
    """The result of one audit so far."""

    def __init__(self) -> None:
        self.findings = list[Finding]()
        # Images that could not be checked completely, each with its error.
        self.failures = list[Outcome]()

        # How many images have a result. An image counts once for each target.
        self.images_done = 0
        # How many images were left when the audit was interrupted.
        self.images_undone = 0
        # How many blobs were read back from targets, and their bytes.
        self.blobs_read = 0
        self.bytes_read = 0

        # The manifests and blobs that targets have, by digest and repository.
        self.manifests_present = set[tuple[str, RepositoryKey]]()
        self.blobs_present = set[tuple[str, RepositoryKey]]()
        # The blobs that are left out of layouts, by digest and repository at the far side.
        self.blobs_left_out = set[tuple[str, RepositoryKey]]()
        # The subset of `manifests_present` that are artifacts.
        self.artifacts_present = set[tuple[str, RepositoryKey]]()

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

    def causes(self) -> list[SharedCause]:
        """Return the causes that several failures share, the most frequent first."""
        return shared_causes(self.failures)

    def undone_text(self) -> str:
        """Return the message for an interrupted audit."""
        return f"interrupted, images not checked: {self.images_undone}"

    def totals(self) -> dict[str, Any]:
        """Return the counts for `totals` of the JSON document, except those of requests.

        Each image is whole, flawed or failed. An image with both findings and an error has failed.
        """
        failed_images = {(outcome.source, outcome.target) for outcome in self.failures}
        images_with_findings = {(finding.source, finding.target) for finding in self.findings}
        flawed_images = images_with_findings - failed_images
        images = {
            "whole": self.images_done - len(flawed_images) - len(failed_images),
            "flawed": len(flawed_images),
            "failed": len(failed_images),
        }
        if self.images_undone:
            images["undone"] = self.images_undone
        return {
            "images": images,
            "manifests": len(self.manifests_present),
            "blobs": len(self.blobs_present),
            "artifacts": len(self.artifacts_present),
            "read": {"blobs": self.blobs_read, "bytes": self.bytes_read},
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

    def receipt(self) -> list[str]:
        """Return a line `DIGEST HOST/REPOSITORY` for each manifest and blob at targets, sorted.

        Blobs that were left out of a layout are there too: the next layout need not have them.
        """
        present = self.manifests_present | self.blobs_present | self.blobs_left_out
        return sorted(f"{digest} {full_name(host, name)}" for digest, (host, name) in present)

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

        def order(finding: Finding) -> tuple[str, str, str]:
            return finding.target, finding.flaw.kind, finding.flaw.text

        findings = sorted(self.findings, key=order)
        failures = sorted(self.failures, key=lambda outcome: (outcome.target, outcome.source))
        return {
            "schema": 1,
            "run_id": run_id,
            "started_at": started_at,
            "duration_s": round(elapsed, 3),
            "interrupted": self.interrupted,
            "findings": [finding.as_json() for finding in findings],
            "failures": [
                {
                    "source": outcome.source,
                    "target": outcome.target,
                    "error": error_json(outcome.error),
                }
                for outcome in failures
            ],
            "totals": {
                **self.totals(),
                "requests": sorted_requests(requests),
                "throttled": dict(sorted(throttled.items())),
            },
        }

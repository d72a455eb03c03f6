"""What an audit found: findings, totals and the exit status.

Owns: the words of a finding, the JSON document of an audit, the lines of a receipt.
May not know: terminals, files, clocks, how anything is asked.
Invariants: an image that could not be looked at whole is never counted as whole.
Follows: docs/design.md section 12.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from _regsync.oci.manifest import Descriptor
from _regsync.oci.reference import full_name
from _regsync.state.archive import RepositoryKey
from _regsync.sync.report import Outcome, error_json, shared_causes, sorted_requests
from _regsync.text import duration_text, size_text

Kind = Literal["missing", "differs", "incomplete", "artifact_missing", "corrupt"]


class Flaw(NamedTuple):
    """One thing that is wrong at a target, whichever tags lead to it."""

    kind: Kind
    # What is wrong, in words.
    text: str
    # The digest of what is missing or corrupt; of `differs`, what the target holds.
    digest: str | None = None
    # The digest that the target is to hold.
    expected: str | None = None
    # The bytes of what an incomplete image lacks.
    size: int | None = None


def missing(expected: str) -> Flaw:
    """Return the flaw of a tag that names nothing."""
    return Flaw("missing", f"expected {expected}", expected=expected)


def differs(prefix: str, digest: str, expected: str) -> Flaw:
    """Return the flaw of a tag that names another digest; `prefix` says which tag, where the tag is
    not that of the image.
    """
    text = f"{prefix}found {digest}, expected {expected}"
    return Flaw("differs", text, digest=digest, expected=expected)


def incomplete(what: str, part: Descriptor) -> Flaw:
    """Return the flaw of an image without one of its parts; `what` is "blob" or "manifest"."""
    text = f"{what} {part.digest} ({size_text(part.size)}) is missing"
    return Flaw("incomplete", text, digest=part.digest, size=part.size)


def corrupt(what: str, digest: str, cause: str) -> Flaw:
    """Return the flaw of a blob or manifest with other bytes than its digest promises, or another
    length than its descriptor says; `what` names the kind.
    """
    return Flaw("corrupt", f"{what} {digest}: {cause}", digest=digest)


class Finding(NamedTuple):
    """A flaw of one image at one target."""

    # Full references with host.
    source: str
    target: str
    flaw: Flaw

    def line(self) -> str:
        """Return the line that a user sees."""
        return f"{self.flaw.kind} {self.source} -> {self.target}: {self.flaw.text}"

    def as_json(self) -> dict[str, Any]:
        """Return the entry in `findings` of the document."""
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
    """What one audit has found so far."""

    def __init__(self) -> None:
        self.findings = list[Finding]()
        # Images of which not all could be checked, each with its error.
        self.failures = list[Outcome]()

        # Images that were checked, or failed; and those that an interrupted audit did not come to.
        self.images_done = 0
        self.images_undone = 0
        # Blobs that were read back, and their bytes.
        self.blobs_read = 0
        self.bytes_read = 0

        # What the targets hold, as digest and repository.
        self.manifests_present = set[tuple[str, RepositoryKey]]()
        self.blobs_present = set[tuple[str, RepositoryKey]]()
        # Those of the manifests that are artifacts.
        self.artifacts_present = set[tuple[str, RepositoryKey]]()

        # True until the audit has come to its end.
        self.interrupted = True

    def exit_status(self) -> int:
        """Return 0, 1 or 2 by docs/design.md section 2. The caller decides on 3, and on signals."""
        if self.failures:
            return 2
        return 1 if self.findings else 0

    @property
    def did_something(self) -> bool:
        """Whether there is anything to tell."""
        return bool(self.findings or self.failures)

    def causes(self) -> list[tuple[int, str]]:
        """Return (count, cause) of each cause that several failures share."""
        return shared_causes(self.failures)

    def undone_text(self) -> str:
        """Return what a user reads of an interrupted audit."""
        return f"interrupted, images not checked: {self.images_undone}"

    def totals(self) -> dict[str, Any]:
        """Return how many images are whole, and what was looked at."""
        # An image may have findings and an error: it counts as failed.
        failed = {(outcome.source, outcome.target) for outcome in self.failures}
        flawed = {(finding.source, finding.target) for finding in self.findings} - failed
        images = {
            "whole": self.images_done - len(flawed) - len(failed),
            "flawed": len(flawed),
            "failed": len(failed),
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
        """Return the summary; `elapsed` in seconds."""
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
        """Return a line `DIGEST HOST/REPOSITORY` for each manifest and blob that is there, sorted."""
        present = self.manifests_present | self.blobs_present
        return sorted(f"{digest} {full_name(host, name)}" for digest, (host, name) in present)

    def as_json(
        self,
        run_id: str,
        started_at: str,
        elapsed: float,
        requests: Mapping[str, Mapping[str, int]],
        throttled: Mapping[str, int],
    ) -> dict[str, Any]:
        """Return the JSON document. `elapsed` is in seconds; `requests` are counted by host and action,
        `throttled` by host.
        """
        findings = sorted(self.findings, key=lambda finding: (finding.target, *finding.flaw[:2]))
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

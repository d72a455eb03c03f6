"""Record the outcomes of a run, and derive its report, totals and exit status.

Owns: the report, the exit statuses. tests/report.schema.json has all documents of `--json`.
May not know: terminals, files, clocks.
Invariants: every selected image has exactly one outcome.
Follows: docs/specification.md sections 3, 6 and 7, docs/design.md sections 2 and 10.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from _regsync.errors import AuthError, RegsyncError
from _regsync.text import duration_text, size_text, time_text

# How many artifacts ended in which way.
_NO_ARTIFACTS: Mapping[str, int] = dict.fromkeys(("synced", "skipped", "failed", "stripped"), 0)


class Outcome(NamedTuple):
    """How one image ended at one target."""

    source: str  # full references, with hosts
    target: str
    # synced, skipped or failed; in a dry run would_sync instead of synced; undone after a signal
    status: str
    digest: str | None = None  # what the target has; None if the image has failed
    source_digest: str | None = None
    reason: str | None = None  # why the image was skipped
    until: int | None = None  # when `min_age` no longer holds it, in seconds since 1970
    error: RegsyncError | None = None
    bytes: int = 0  # sent to the target for the image and its artifacts
    duration: float = 0.0  # seconds
    transferred: tuple[str, ...] = ()  # the digests of the blobs that were uploaded
    mounted: int = 0  # how many blobs were mounted
    skipped: int = 0  # how many blobs were at the target already
    artifacts: Mapping[str, int] = _NO_ARTIFACTS  # how many ended in which way
    planned: tuple[str, ...] = ()  # the artifacts that a run would copy, for a dry run

    def line(self) -> str:
        """Format the line for a copied or failed image (docs/specification.md section 6)."""
        what = f"{self.source} -> {self.target}"
        if self.error is not None:
            return f"failed {what}: {self.error.code}: {self.error}"
        return f"synced {what} ({size_text(self.bytes)}, {duration_text(self.duration)})"

    def plan_lines(self) -> list[str]:
        """Format the lines of a dry run about the image and its artifacts.

        A failed image has no line here, because its error has been logged already.
        """
        if self.status == "failed":
            return []
        what = f"{self.source} -> {self.target}"
        artifact_lines = [f"- would {text}" for text in self.planned]
        if self.status == "skipped":
            until = f", until {time_text(self.until)}" if self.until is not None else ""
            return [f"would skip {what} ({self.reason}{until})", *artifact_lines]

        blobs = f"{len(self.transferred)} blobs, {size_text(self.bytes)}"
        detail = f"{blobs}, {self.mounted} mounted, {self.skipped} there"
        return [f"would sync {what} ({detail})", *artifact_lines]

    def as_json(self) -> dict[str, Any]:
        """Return the image's entry in the field `images` of the report."""
        return {
            "source": self.source,
            "target": self.target,
            "digest": self.digest,
            "source_digest": self.source_digest,
            "status": self.status,
            "reason": self.reason,
            **({"until": time_text(self.until)} if self.until is not None else {}),
            "error": error_json(self.error),
            "bytes": self.bytes,
            "duration_s": round(self.duration, 3),
            "blobs": {
                "transferred": len(self.transferred),
                "mounted": self.mounted,
                "skipped": self.skipped,
            },
            "artifacts": dict(self.artifacts),
        }


def error_json(error: RegsyncError | None) -> dict[str, Any] | None:
    """Return the fields of an error in the report, or None if there is no error.

    Only a SyncError has a side and a number of retries. The `status` is that of a registry's answer, if
    one is the error.
    """
    if error is None:
        return None
    side = getattr(error, "side", None)
    return {
        "code": error.code,
        "message": str(error),
        "hint": error.hint,
        "status": getattr(error, "status", None),
        "side": side.value if side is not None else None,
        "retries": getattr(error, "retries", 0),
    }


def exit_status_for(codes: Collection[str], *, has_all_failed: bool) -> int:
    """Return the exit status of a command with errors of these codes (docs/design.md section 2).

    The status is 0 without errors, 4 if all parts of the command failed because of their logins, 2
    if all failed for any other reason or there was an internal error, and 1 if some parts failed.
    """
    if not codes:
        return 0
    if has_all_failed:
        return 4 if set(codes) == {AuthError.code} else 2
    has_internal_error = RegsyncError.code in codes
    return 2 if has_internal_error else 1


class MappingSelection(NamedTuple):
    """How many tags a mapping selected, and how many it dropped for which reason."""

    source: str  # repositories, with hosts
    target: str
    selected: int = 0  # the number of selected tags
    dropped: Mapping[str, int] = {}  # the number of dropped tags by reason

    def line(self) -> str:
        """Format the line of a dry run about the mapping."""
        line = f"select {self.source} -> {self.target}: {self.selected} tags"
        dropped = ", ".join(f"{count} {reason}" for reason, count in self.dropped.items())
        return f"{line} (dropped: {dropped})" if dropped else line

    def as_json(self) -> dict[str, Any]:
        """Return the mapping's entry in the field `mappings` of the report."""
        return {
            "from": self.source,
            "to": self.target,
            "selected": self.selected,
            "dropped": dict(self.dropped),
        }


class Report:
    """The outcomes of one run, in the order in which images ended."""

    def __init__(self) -> None:
        self.outcomes = list[Outcome]()
        # Bytes that were not sent, because the target repository had the blob or could mount it. A
        # blob counts once for each target repository.
        self.saved = {"present": 0, "mounted": 0}
        self.is_dry_run = False
        # By the mapping's index in the configuration, without those that could not be listed.
        self.selections = dict[int, MappingSelection]()

        # Whether the run has not ended by itself. It is True while the run is under way.
        self.interrupted = True
        # Images that an interrupted run has not finished. One for each target, with the tag `*`, stands
        # for all images of a mapping whose tags were not listed.
        self.undone = list[Outcome]()

    @property
    def has_something_to_report(self) -> bool:
        """Whether any image was copied or has failed."""
        return any(outcome.status != "skipped" for outcome in self.outcomes)

    def hold_ends(self) -> list[int]:
        """Return when each held image is no longer held, in seconds since 1970."""
        return [outcome.until for outcome in self.outcomes if outcome.until is not None]

    def totals(self) -> dict[str, Any]:
        """Return the field `totals` of the report.

        `images` counts images by status. `layers` counts blobs: `transferred` counts uploads,
        `unique` counts their distinct digests, and `skipped` counts blobs that were at their target
        already. `bytes` were sent to targets, and `saved` bytes were not.
        """
        statuses = Counter(outcome.status for outcome in self.outcomes)
        images = {status: statuses[status] for status in ("synced", "skipped", "failed")}
        if self.is_dry_run:
            images["would_sync"] = statuses["would_sync"]
        hold_ends = self.hold_ends()
        if hold_ends:
            images["held"] = len(hold_ends)
        if self.undone:
            images["undone"] = len(self.undone)

        uploads = [digest for outcome in self.outcomes for digest in outcome.transferred]
        return {
            "images": images,
            "layers": {
                "transferred": len(uploads),
                "unique": len(set(uploads)),
                "mounted": sum(outcome.mounted for outcome in self.outcomes),
                "skipped": sum(outcome.skipped for outcome in self.outcomes),
            },
            "bytes": sum(outcome.bytes for outcome in self.outcomes),
            "saved": dict(self.saved),
        }

    def exit_status(self) -> int:
        """Return 0, 1, 2 or 4 (docs/design.md section 2). The caller handles 3 and signals."""
        codes = [outcome.error.code for outcome in self.outcomes if outcome.error is not None]
        return exit_status_for(codes, has_all_failed=len(codes) == len(self.outcomes))

    def undone_text(self) -> str:
        """Format the message for an interrupted run."""
        return f"interrupted, images left undone: {len(self.undone)}"

    def summary(self, elapsed: float) -> list[str]:
        """Return the lines of the summary (docs/specification.md section 6).

        `elapsed` is the duration of the run in seconds.
        """
        totals = self.totals()
        layers = totals["layers"]
        return [
            *self._image_lines("synced", "synced"),
            f"Layers: {layers['transferred']} transferred ({layers['unique']} unique references), "
            f"{layers['mounted']} mounted",
            f"Data: {size_text(totals['bytes'])} transferred",
            f"Time: {duration_text(elapsed)} elapsed",
        ]

    def _image_lines(self, status: str, words: str) -> list[str]:
        """Return the lines that count images: of one status, skipped, failed and held."""
        counts = Counter(outcome.status for outcome in self.outcomes)
        line = f"Images: {counts[status]} {words}, {counts['skipped']} skipped, {counts['failed']} failed"
        ends = self.hold_ends()
        return [line, *([f"Held: {len(ends)} (next {time_text(min(ends))})"] if ends else [])]

    def plan(self) -> list[str]:
        """Return the lines of a dry run: the selection of each mapping, each image, the totals."""
        lines = [selection.line() for _, selection in sorted(self.selections.items())]
        for outcome in sorted(self.outcomes, key=lambda outcome: (outcome.source, outcome.target)):
            lines += outcome.plan_lines()

        totals = self.totals()
        layers = totals["layers"]
        # All blobs of the images that would be synced, each once for each target repository.
        total_bytes = totals["bytes"] + sum(totals["saved"].values())
        return [
            *lines,
            *self._image_lines("would_sync", "would be synced"),
            f"Layers: {layers['transferred']} to transfer, {layers['mounted']} to mount",
            f"Data: {size_text(totals['bytes'])} of {size_text(total_bytes)} to transfer",
        ]

    def as_json(self) -> dict[str, Any]:
        """Return the fields of the JSON report, schema 1, that only a run has."""
        return {
            "dry_run": self.is_dry_run,
            "images": [outcome.as_json() for outcome in self.outcomes],
            **({"undone": [image.as_json() for image in self.undone]} if self.undone else {}),
            "mappings": [selection.as_json() for _, selection in sorted(self.selections.items())],
        }

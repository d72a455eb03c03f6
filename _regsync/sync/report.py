"""What happened in a run: outcomes, totals and the exit status.

Owns: the report of docs/design.md section 10, the JSON Schema of all documents on standard output, the
exit statuses of docs/design.md section 2.
May not know: terminals, files, clocks.
Invariants: every image that was selected has exactly one outcome.
Follows: docs/specification.md sections 3, 6 and 7.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from _regsync.errors import AuthError, RegsyncError
from _regsync.oci.reference import split_full_name
from _regsync.text import duration_text, size_text, time_text

_NO_ARTIFACTS: Mapping[str, int] = dict.fromkeys(("synced", "skipped", "failed", "stripped"), 0)

# What `--json` writes, as a JSON Schema; it lies beside this module.
_SCHEMA_FILE = "report.schema.json"


class Outcome(NamedTuple):
    """How one image ended on one target."""

    # full references with host
    source: str
    target: str
    # synced, skipped or failed; in a dry run would_sync in place of synced
    status: str
    # what the target holds
    digest: str | None = None
    # what the source holds
    source_digest: str | None = None
    # why it was skipped
    reason: str | None = None
    # when it is no longer held back (reason `min_age`), in seconds since 1970
    until: int | None = None
    error: RegsyncError | None = None
    # sent to the target for the image and its artifacts
    bytes: int = 0
    # seconds since the run's start
    started: float = 0.0
    # seconds
    duration: float = 0.0
    # digests of the blobs that were uploaded
    transferred: tuple[str, ...] = ()
    # how many blobs were mounted
    mounted: int = 0
    # how many blobs were at the target already
    skipped: int = 0
    # how many artifacts ended in which way
    artifacts: Mapping[str, int] = _NO_ARTIFACTS
    # what a dry run says of artifacts
    planned: tuple[str, ...] = ()

    def line(self, *, with_hosts: bool = True) -> str:
        """Return the line that a user sees for an image that was copied or has failed
        (docs/specification.md section 6). `with_hosts`: without it, repositories and tags alone.
        """
        if self.error is not None:
            return f"failed {self.source} -> {self.target}: {self.error.code}: {self.error}"

        source = self.source
        target = self.target
        if not with_hosts:
            _, source = split_full_name(source)
            _, target = split_full_name(target)
        cost = f"{size_text(self.bytes)}, {duration_text(self.duration)}"
        return f"synced {source} -> {target} ({cost})"

    def plan_lines(self) -> list[str]:
        """Return what a dry run says: of the image, unless it failed, then of its artifacts.

        A failure has been told already.
        """
        what = f"{self.source} -> {self.target}"
        artifact_lines = [f"- would {text}" for text in self.planned]

        if self.status == "failed":
            return artifact_lines
        if self.status == "skipped":
            until = f", until {time_text(self.until)}" if self.until is not None else ""
            return [f"would skip {what} ({self.reason}{until})", *artifact_lines]

        blobs = f"{len(self.transferred)} blobs, {size_text(self.bytes)}"
        detail = f"{blobs}, {self.mounted} mounted, {self.skipped} there"
        return [f"would sync {what} ({detail})", *artifact_lines]

    def as_json(self) -> dict[str, Any]:
        """Return the image's entry in `images` of the report."""
        differs_at_target = self.source_digest not in (None, self.digest)
        return {
            "source": self.source,
            "target": self.target,
            "digest": self.digest,
            **({"source_digest": self.source_digest} if differs_at_target else {}),
            "status": self.status,
            "reason": self.reason,
            **({"until": time_text(self.until)} if self.until is not None else {}),
            "error": error_json(self.error),
            "bytes": self.bytes,
            "started_s": round(self.started, 3),
            "duration_s": round(self.duration, 3),
            "blobs": {
                "transferred": len(self.transferred),
                "mounted": self.mounted,
                "skipped": self.skipped,
            },
            "artifacts": dict(self.artifacts),
        }


def error_json(error: RegsyncError | None) -> dict[str, Any] | None:
    """Return an error as the report has it, its status None where no registry has answered."""
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


def status_of(codes: Collection[str], *, all_failed: bool) -> int:
    """Return the exit status after errors with these codes (docs/design.md section 2): 4 where all
    failed for their logins, 2 where all failed, 1 where some did. `all_failed`: nothing went well.
    """
    if not codes:
        return 0
    if all_failed:
        return 4 if set(codes) == {AuthError.code} else 2
    has_defect = RegsyncError.code in codes  # INTERNAL_ERROR: not the registries' fault, but ours
    return 2 if has_defect else 1


class Undone(NamedTuple):
    """An image that an interrupted run left undone; `REPO:*` stands for a mapping that was not listed."""

    # full references with host
    source: str
    target: str

    def as_json(self) -> dict[str, str]:
        """Return the entry in `undone` of the report."""
        return {"source": self.source, "target": self.target, "status": "undone"}


class MappingSelection(NamedTuple):
    """How many tags a mapping selected, and how many it dropped for which reason."""

    source: str
    target: str
    selected: int = 0
    # by reason
    dropped: Mapping[str, int] = MappingProxyType({})
    # why the source's tags are not known
    error: RegsyncError | None = None

    def line(self) -> str:
        """Return what a dry run says of the mapping, if there is no error."""
        line = f"select {self.source} -> {self.target}: {self.selected} tags"
        dropped = ", ".join(f"{count} {reason}" for reason, count in self.dropped.items())
        return f"{line} (dropped: {dropped})" if dropped else line

    def as_json(self) -> dict[str, Any]:
        """Return the mapping's entry in `mappings` of the report."""
        return {
            "from": self.source,
            "to": self.target,
            "selected": self.selected,
            "dropped": dict(self.dropped),
            **({"error": error_json(self.error)} if self.error is not None else {}),
        }


class Room(NamedTuple):
    """What a dry run says of an image layout as target, in bytes."""

    target: str
    to_write: int
    # Of blobs that the far side is assumed to hold.
    left_out: int
    # On the layout's device.
    free: int

    @property
    def is_enough(self) -> bool:
        return self.to_write <= self.free

    def line(self) -> str:
        """Return what a dry run says."""
        text = f"{size_text(self.to_write)} to write, {size_text(self.left_out)} left out"
        lack = "" if self.is_enough else ": too little"
        return f"Layout {self.target}: {text}, {size_text(self.free)} free{lack}"


class Report:
    """The outcomes of one run, in the order in which images ended."""

    def __init__(self) -> None:
        self.outcomes = list[Outcome]()
        # Bytes that were not sent, because the target had the blob or could mount it. A blob counts once
        # for each target repository.
        self.saved = {"present": 0, "mounted": 0}
        self.is_dry_run = False
        # Of a dry run, for each image layout that is a target.
        self.rooms = list[Room]()
        # By the mapping's index in the configuration.
        self.selections = dict[int, MappingSelection]()

        # True until the run has come to its end.
        self.interrupted = True
        # Selected images of an interrupted run that have no outcome, and mappings that were not listed.
        self.undone = list[Undone]()
        # Mappings of an interrupted run that were not listed.
        self.mappings_undone = 0

    @property
    def images_undone(self) -> int:
        """How many selected images an interrupted run left undone."""
        return sum(1 for undone in self.undone if not undone.source.endswith(":*"))

    @property
    def did_something(self) -> bool:
        """Whether any image was not skipped."""
        return any(outcome.status != "skipped" for outcome in self.outcomes)

    def _held_until(self) -> list[int]:
        """Return for each image that `min_age` holds back until when, in seconds since 1970."""
        return [outcome.until for outcome in self.outcomes if outcome.until is not None]

    def _held_lines(self) -> list[str]:
        held = self._held_until()
        return [f"Held: {len(held)} (next {time_text(min(held))})"] if held else []

    def totals(self) -> dict[str, Any]:
        """Return how images ended, what became of their blobs (`layers`), the bytes that were sent to
        targets and those that were saved. A plan tells the image layouts that are targets, too.

        Of the blobs that were transferred, `unique` counts the distinct digests. The skipped ones were
        at their target.
        """
        statuses = Counter(outcome.status for outcome in self.outcomes)
        images = {status: statuses[status] for status in ("synced", "skipped", "failed")}
        if self.is_dry_run:
            images["would_sync"] = statuses["would_sync"]
        held_times = self._held_until()
        if held_times:
            images["held"] = len(held_times)
        if self.images_undone:
            images["undone"] = self.images_undone

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
            **({"layouts": [room._asdict() for room in self.rooms]} if self.rooms else {}),
        }

    def exit_status(self) -> int:
        """Return 0, 1, 2 or 4 by docs/design.md section 2. The caller decides on 3, and on signals."""
        codes = [outcome.error.code for outcome in self.outcomes if outcome.error is not None]
        lacks_room = any(not room.is_enough for room in self.rooms)
        if not codes and lacks_room:
            return 1
        return status_of(codes, all_failed=len(codes) == len(self.outcomes))

    def causes(self) -> list[tuple[int, str]]:
        """Return (count, cause) of each cause that several images share, the most frequent first."""
        return shared_causes(self.outcomes)

    def undone_text(self) -> str:
        """Return what a user reads of an interrupted run."""
        text = f"interrupted, images left undone: {self.images_undone}"
        if self.mappings_undone:
            text += f"; mappings not listed: {self.mappings_undone}"
        return text

    def summary(self, elapsed: float) -> list[str]:
        """Return the summary block of docs/specification.md section 6; `elapsed` in seconds."""
        totals = self.totals()
        images = totals["images"]
        layers = totals["layers"]
        return [
            f"Images: {images['synced']} synced, {images['skipped']} skipped, {images['failed']} failed",
            *self._held_lines(),
            f"Layers: {layers['transferred']} transferred ({layers['unique']} unique references), "
            f"{layers['mounted']} mounted",
            f"Data: {size_text(totals['bytes'])} transferred",
            f"Time: {duration_text(elapsed)} elapsed",
        ]

    def plan(self) -> list[str]:
        """Return what a dry run says: the selection of each mapping, each image, the totals."""
        lines = [
            selection.line()
            for _, selection in sorted(self.selections.items())
            if selection.error is None
        ]
        for outcome in sorted(self.outcomes, key=lambda outcome: (outcome.source, outcome.target)):
            lines += outcome.plan_lines()

        totals = self.totals()
        images = totals["images"]
        layers = totals["layers"]
        return [
            *lines,
            f"Images: {images['would_sync']} would be synced, {images['skipped']} skipped, {images['failed']} failed",
            *self._held_lines(),
            f"Layers: {layers['transferred']} to transfer, {layers['mounted']} to mount",
            f"Data: {size_text(totals['bytes'])} to transfer",
            *(room.line() for room in self.rooms),
        ]

    def as_json(
        self,
        run_id: str,
        started_at: str,
        elapsed: float,
        requests: Mapping[str, Mapping[str, int]],
        throttled: Mapping[str, int],
    ) -> dict[str, Any]:
        """Return the JSON report, schema 1 of docs/design.md section 10.

        `elapsed` is in seconds; `requests` counts by host and action, `throttled` by host. In what is
        returned `images` is an iterator: as a list, the entries would take three times the memory of
        the outcomes.
        """
        return {
            "schema": 1,
            "run_id": run_id,
            "started_at": started_at,
            "duration_s": round(elapsed, 3),
            "interrupted": self.interrupted,
            "dry_run": self.is_dry_run,
            "images": (outcome.as_json() for outcome in self.outcomes),
            **({"undone": [image.as_json() for image in self.undone]} if self.undone else {}),
            "mappings": [selection.as_json() for _, selection in sorted(self.selections.items())],
            "totals": {
                **self.totals(),
                "requests": sorted_requests(requests),
                "throttled": dict(sorted(throttled.items())),
            },
        }


def sorted_requests(requests: Mapping[str, Mapping[str, int]]) -> dict[str, dict[str, int]]:
    """Return counts of requests with hosts and actions in order."""
    return {host: dict(sorted(actions.items())) for host, actions in sorted(requests.items())}


def shared_causes(outcomes: Iterable[Outcome]) -> list[tuple[int, str]]:
    """Return (count, cause) of each cause that several outcomes share, the most frequent first."""
    counts = Counter(_cause_of(outcome.error) for outcome in outcomes if outcome.error is not None)
    return [(count, cause) for cause, count in counts.most_common() if count > 1]


def _cause_of(error: RegsyncError) -> str:
    """Return code, host and message of an error, the same for all images that it has met."""
    reference = getattr(error, "reference", None) or ""
    host, _ = split_full_name(reference)
    cause = general_message(error.message, reference)
    return f"{error.code} {host}: {cause}" if host else f"{error.code}: {cause}"


def general_message(message: str, *references: str) -> str:
    """Return an error's message with `...` in place of the repositories, tags and digests of these
    references, so that one cause gives the same text for all images. Hosts stay.
    """
    message = re.sub(r"sha(?:256|512):[0-9a-f]{12,}", "sha256:...", message)
    for reference in references:
        host, name = split_full_name(reference)
        repository = re.split("[@:]", name)[0]
        if not repository:
            continue
        # The name may stand behind its host, which stays, and before its tag or digest, which goes
        # too. A longer name that contains it is another one.
        before = rf"(?<![\w/.-])({re.escape(host)}/+)?"
        after = r"(?:[:@][\w.:-]*[\w.])?(?![\w/-])"
        message = re.sub(f"{before}{re.escape(repository)}{after}", r"\1...", message)
    return message


def schema() -> dict[str, Any]:
    """Return the JSON Schema of what `--json` writes.

    Fields may be added within schema 1; none changes its meaning.
    """
    import pkgutil  # no other command needs it

    data = pkgutil.get_data("_regsync.sync", _SCHEMA_FILE)
    assert data is not None
    document: dict[str, Any] = json.loads(data)
    return document


def analysis_lines(analysis: Mapping[str, Any]) -> list[str]:
    """Return the text of `analyze` for what `analyze --json` writes (`DryRun.analysis`)."""
    blobs = analysis["blobs"]
    one_by_one = analysis["bytes"]["image_by_image"]
    once = analysis["bytes"]["each_blob_once"]
    unique = f"{blobs['unique']} unique ({size_text(blobs['unique_bytes'])})"
    shared = f"{blobs['shared']} of them shared ({size_text(blobs['shared_bytes'])})"
    lines = [
        f"Images: {analysis['images']}",
        f"Blobs: {unique}, {shared}",
        f"Data: {size_text(one_by_one)} image by image, {size_text(once)} with each blob once, "
        f"{size_text(one_by_one - once)} saved",
    ]

    for host, target in analysis["targets"].items():
        moved = f"{size_text(target['to_move'])} to move of {size_text(target['bytes'])}"
        lines.append(f"Target {host}: {moved}, {target['mounts_possible']} mounts possible")

    for host, actions in analysis["requests"].items():
        counts = ", ".join(f"{count} {action}" for action, count in actions.items())
        lines.append(f"Requests {host}: {sum(actions.values())} ({counts})")

    for image in analysis["largest_images"]:
        lines.append(f"Image {size_text(image['bytes']):>10} {image['image']}")
    for layer in analysis["largest_layers"]:
        size = size_text(layer["bytes"])
        lines.append(f"Layer {size:>10} {layer['digest']} in {layer['images']} images")
    return lines

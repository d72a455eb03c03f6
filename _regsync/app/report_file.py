"""Read the JSON report of a run back.

Owns: which documents are reports of a run; what is wrong with one that is not.
May not know: registries, how a report is shown.
Invariants: a report may come from elsewhere. Every value is checked, and every text of it is one line
without control characters.
Follows: docs/design.md sections 10 and 15.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from _regsync.errors import ConfigError
from _regsync.oci.reference import split_full_name
from _regsync.sync.report import general_message
from _regsync.text import printable

# Bytes. A report of 100,000 images has 70 million.
LARGEST_REPORT = 256 * 1024 * 1024

# Characters of one text.
_LONGEST_TEXT = 2000

# Larger numbers would not be exact as JSON.
_LARGEST_NUMBER = 2**53

_STATUSES = ("synced", "skipped", "failed", "would_sync")

_HINT = "use what `regsync sync --json` or `regsync copy --json` wrote"


class Failure(NamedTuple):
    """Why an image or mapping failed."""

    code: str
    message: str
    hint: str | None
    side: str | None


class ReportedImage(NamedTuple):
    """How one image ended on one target."""

    # Full references with host.
    source: str
    target: str
    # synced, skipped, failed, would_sync; undone for what an interrupted run has left.
    status: str
    reason: str | None = None
    # Until when `min_age` holds it back, in RFC 3339.
    until: str | None = None
    failure: Failure | None = None
    bytes: int = 0
    # Seconds since the run's start; None in reports of earlier versions.
    started: float | None = None
    # Seconds.
    duration: float = 0.0
    blobs_transferred: int = 0
    blobs_mounted: int = 0
    blobs_present: int = 0

    @property
    def registry(self) -> str:
        """Return the target's host, or the layout that it is in."""
        host, _ = split_full_name(self.target)
        return host


class ReportedMapping(NamedTuple):
    """What a mapping selected."""

    source: str
    target: str
    selected: int
    # By reason, how many tags were not selected.
    dropped: Mapping[str, int]
    failure: Failure | None


class ReportedRun(NamedTuple):
    """One run, as its report tells it."""

    run_id: str
    started_at: str
    # Seconds.
    duration: float
    is_interrupted: bool
    is_dry_run: bool
    images: tuple[ReportedImage, ...]
    mappings: tuple[ReportedMapping, ...]
    # By status, how many images.
    counts: Mapping[str, int]
    blobs_transferred: int
    blobs_unique: int
    blobs_mounted: int
    bytes: int
    # Bytes that were not sent; None in reports of earlier versions.
    bytes_present: int | None
    bytes_mounted: int | None
    # By host and action.
    requests: Mapping[str, Mapping[str, int]]
    # By host, how many answers were 429.
    throttled: Mapping[str, int]

    def with_status(self, *statuses: str) -> list[ReportedImage]:
        """Return the images that ended in one of these ways, in the report's order."""
        return [image for image in self.images if image.status in statuses]

    def causes(self) -> list[Cause]:
        """Return why images failed, the most frequent cause first."""
        images_of = defaultdict[tuple[str, str, str | None], list[ReportedImage]](list)
        for image in self.images:
            failure = image.failure
            if failure is not None:
                message = general_message(failure.message, image.source, image.target)
                images_of[failure.code, message, failure.hint].append(image)
        causes = [Cause(*key, tuple(images)) for key, images in images_of.items()]
        return sorted(causes, key=lambda cause: -len(cause.images))


class Cause(NamedTuple):
    """What several images failed of."""

    code: str
    # Without the names of the images.
    message: str
    hint: str | None
    images: tuple[ReportedImage, ...]


def read_report(data: bytes, name: str) -> ReportedRun:
    """Read the report of a run from a file called `name`; ConfigError says what is wrong with it."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{name} is not a JSON document: {_why_not_json(data, error)}", hint=_HINT
        ) from error

    report = _Value(document, name)
    schema = report["schema"].value
    if schema != 1:
        shown = printable(repr(schema), 40)
        raise ConfigError(
            f"{name} is not a report of a run: its `schema` is {shown}, and only 1 can be read",
            hint=_HINT,
        )
    if "error" in report:
        error_text = report["error"]["message"].text()
        raise ConfigError(
            f"{name} has no images: its command ended before it tried any: {error_text}", hint=_HINT
        )
    return _read_run(report)


def _why_not_json(data: bytes, error: Exception) -> str:
    """Say why a file is not one JSON document."""
    lines = data.strip().split(b"\n")
    if len(lines) > 1 and all(line.startswith(b"{") for line in lines[:2]):
        return "it has a document on each line, as `watch` writes them; use one of the lines"
    return printable(str(error), 100) if data.strip() else "it is empty"


class _Value:
    """A value of the document and the path to it, for errors."""

    def __init__(self, value: object, path: str) -> None:
        self.value = value
        self._path = path

    def wrong(self, kind: str) -> ConfigError:
        return ConfigError(f"{self._path} is not {kind}", hint=_HINT)

    def __contains__(self, key: str) -> bool:
        """Whether an object has a field that is not null."""
        return self._fields().get(key) is not None

    def __getitem__(self, key: str) -> _Value:
        """Return a field of an object, null where it has none."""
        return _Value(self._fields().get(key), f"{self._path}: {key}")

    def _fields(self) -> dict[str, object]:
        if not isinstance(self.value, dict):
            raise self.wrong("an object")
        return self.value

    def items(self) -> Iterator[tuple[str, _Value]]:
        for key in self._fields():
            yield _Value(key, self._path).text(), self[key]

    def elements(self) -> Iterator[_Value]:
        if not isinstance(self.value, list):
            raise self.wrong("a list")
        for number, element in enumerate(self.value):
            yield _Value(element, f"{self._path}[{number}]")

    def text(self) -> str:
        if not isinstance(self.value, str):
            raise self.wrong("text")
        # JSON may have half a surrogate pair, which no encoding has.
        encodable = self.value.encode("utf-8", "replace").decode()
        return printable(encodable, _LONGEST_TEXT)

    def optional_text(self) -> str | None:
        return None if self.value is None else self.text()

    def flag(self) -> bool:
        if not isinstance(self.value, bool):
            raise self.wrong("true or false")
        return self.value

    def seconds(self) -> float:
        value = self.value
        # A bool is an int to Python.
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong("a number")
        if not 0 <= value < _LARGEST_NUMBER:  # `json` reads NaN, of which this is false too
            raise self.wrong("a number of seconds")
        return float(value)

    def count(self) -> int:
        value = self.value
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong("a whole number")
        if not 0 <= value < _LARGEST_NUMBER:
            raise self.wrong("a count")
        return value

    def counts(self) -> dict[str, int]:
        return {key: value.count() for key, value in self.items()}


def _read_run(report: _Value) -> ReportedRun:
    totals = report["totals"]
    layers = totals["layers"]
    saved = totals["saved"]
    images = [_read_image(image) for image in report["images"].elements()]
    if "undone" in report:
        images += [_read_undone(image) for image in report["undone"].elements()]
    return ReportedRun(
        run_id=report["run_id"].text(),
        started_at=report["started_at"].text(),
        duration=report["duration_s"].seconds(),
        is_interrupted=report["interrupted"].flag(),
        is_dry_run=report["dry_run"].flag(),
        images=tuple(images),
        mappings=tuple(_read_mapping(mapping) for mapping in report["mappings"].elements()),
        counts=totals["images"].counts(),
        blobs_transferred=layers["transferred"].count(),
        blobs_unique=layers["unique"].count(),
        blobs_mounted=layers["mounted"].count(),
        bytes=totals["bytes"].count(),
        bytes_present=saved["present"].count() if "saved" in totals else None,
        bytes_mounted=saved["mounted"].count() if "saved" in totals else None,
        requests={host: actions.counts() for host, actions in totals["requests"].items()},
        throttled=totals["throttled"].counts(),
    )


def _read_image(image: _Value) -> ReportedImage:
    status = image["status"].text()
    if status not in _STATUSES:
        raise image["status"].wrong("a status that this version knows")
    blobs = image["blobs"]
    return ReportedImage(
        source=image["source"].text(),
        target=image["target"].text(),
        status=status,
        reason=image["reason"].optional_text(),
        until=image["until"].optional_text(),
        failure=_read_failure(image["error"]),
        bytes=image["bytes"].count(),
        started=image["started_s"].seconds() if "started_s" in image else None,
        duration=image["duration_s"].seconds(),
        blobs_transferred=blobs["transferred"].count(),
        blobs_mounted=blobs["mounted"].count(),
        blobs_present=blobs["skipped"].count(),
    )


def _read_undone(image: _Value) -> ReportedImage:
    return ReportedImage(
        source=image["source"].text(), target=image["target"].text(), status="undone"
    )


def _read_mapping(mapping: _Value) -> ReportedMapping:
    return ReportedMapping(
        source=mapping["from"].text(),
        target=mapping["to"].text(),
        selected=mapping["selected"].count(),
        dropped=mapping["dropped"].counts(),
        failure=_read_failure(mapping["error"]),
    )


def _read_failure(error: _Value) -> Failure | None:
    if error.value is None:
        return None
    return Failure(
        code=error["code"].text(),
        message=error["message"].text(),
        hint=error["hint"].optional_text(),
        side=error["side"].optional_text(),
    )

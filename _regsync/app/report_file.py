"""Read and check the JSON report of a run.

Owns: which documents are reports of a run, and the errors about other documents.
May not know: registries, how a report is shown.
Invariants: a report is untrusted. The type of every value is checked, and every text becomes one line
without control characters.
Follows: docs/design.md sections 10 and 15.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from _regsync.errors import ConfigError
from _regsync.oci import split_full_name
from _regsync.sync.report import general_message
from _regsync.text import printable

LARGEST_REPORT = 256 * 1024 * 1024  # bytes; 100,000 images take 70 MB

_LONGEST_TEXT = 2000  # characters; a longer text is cut

_LARGEST_NUMBER = 2**53  # the largest that every JSON reader represents exactly

_STATUSES = ("synced", "skipped", "failed", "would_sync")

_HINT = "use what `regsync sync --json` or `regsync copy --json` wrote"


class Failure(NamedTuple):
    """The error of an image or a mapping."""

    code: str
    message: str
    hint: str | None
    side: str | None  # "source" or "target"; None if neither side caused the error


class ReportedImage(NamedTuple):
    """The result of one image on one target."""

    source: str  # full reference with host
    target: str  # full reference with host
    status: str  # one of _STATUSES, or "undone" if the run was interrupted before
    reason: str | None = None  # why the image was skipped
    until: str | None = None  # when `min_age` will no longer hold the image back, in RFC 3339
    failure: Failure | None = None
    bytes: int = 0  # sent to the target
    started: float | None = None  # seconds since the run's start; None in reports of old versions
    duration: float = 0.0  # seconds
    blobs_transferred: int = 0
    blobs_mounted: int = 0
    blobs_present: int = 0

    @property
    def registry(self) -> str:
        """The host of the target, or the image layout that the target is in."""
        host, _ = split_full_name(self.target)
        return host


class ReportedMapping(NamedTuple):
    """The selection of a mapping."""

    source: str  # repository with host
    target: str  # repository
    selected: int  # tags
    dropped: Mapping[str, int]  # the number of tags that were not selected, by reason
    failure: Failure | None  # why the tags could not be listed


class ReportedRun(NamedTuple):
    """The report of one run."""

    run_id: str
    started_at: str
    duration: float  # seconds
    is_interrupted: bool
    is_dry_run: bool
    images: tuple[ReportedImage, ...]
    mappings: tuple[ReportedMapping, ...]
    counts: Mapping[str, int]  # the number of images by status
    blobs_transferred: int
    blobs_unique: int  # different blobs among the transferred ones
    blobs_mounted: int
    bytes: int  # sent to targets
    # Bytes that were not sent, because targets had the blobs already or mounted them.
    bytes_present: int
    bytes_mounted: int
    requests: Mapping[str, Mapping[str, int]]  # the number of requests by host and action
    throttled: Mapping[str, int]  # the number of 429 responses by host

    def with_status(self, *statuses: str) -> list[ReportedImage]:
        """Return the images with one of the statuses, in the order of the report."""
        return [image for image in self.images if image.status in statuses]

    def causes(self) -> list[Cause]:
        """Group the failed images by the cause of their failure, the most frequent cause first."""
        # The key is (code, message, hint).
        images_by_cause = defaultdict[tuple[str, str, str | None], list[ReportedImage]](list)
        for image in self.images:
            failure = image.failure
            if failure is not None:
                # Remove the names of images, in which failures with the same cause differ.
                message = general_message(failure.message, image.source, image.target)
                images_by_cause[failure.code, message, failure.hint].append(image)
        causes = [
            Cause(code, message, hint, tuple(images))
            for (code, message, hint), images in images_by_cause.items()
        ]
        return sorted(causes, key=lambda cause: -len(cause.images))


class Cause(NamedTuple):
    """The common cause of failures, and the images that failed because of it."""

    code: str
    message: str  # without the names of the images
    hint: str | None
    images: tuple[ReportedImage, ...]


def read_report(data: bytes, name: str) -> ReportedRun:
    """Parse the report of a run. Raises ConfigError if `data` is not such a report.

    `name` is the name of the file, for errors.
    """
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{name} is not a JSON document: {_why_not_json(data, error)}", hint=_HINT
        ) from error

    report = _Unchecked(document, name)
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
    """Describe why a file is not a JSON document, given the parser's error."""
    if not data.strip():
        return "it is empty"
    first_lines = data.strip().split(b"\n", 2)[:2]
    if len(first_lines) == 2 and all(line.startswith(b"{") for line in first_lines):
        return "it has a document on each line, as `watch` writes them; use one of the lines"
    return printable(str(error), 100)


class _Unchecked:
    """An unchecked value of the document.

    Each method returns the value as one type, and raises ConfigError if it has another type.
    """

    def __init__(self, value: object, path: str) -> None:
        self.value = value  # as the JSON parser returned it; None for null and for a missing field
        self._path = path  # the file's name and the place of the value in it, for errors

    def mismatch_error(self, expected: str) -> ConfigError:
        """Return the error that says that the value is not the `expected` one, such as "a list"."""
        return ConfigError(f"{self._path} is not {expected}", hint=_HINT)

    def __contains__(self, key: str) -> bool:
        """Report whether an object has this field and the field is not null."""
        return self._fields().get(key) is not None

    def __getitem__(self, key: str) -> _Unchecked:
        """Return a field of an object. A missing field is returned as null."""
        return _Unchecked(self._fields().get(key), f"{self._path}: {key}")

    def _fields(self) -> dict[str, object]:
        if not isinstance(self.value, dict):
            raise self.mismatch_error("an object")
        return self.value

    def items(self) -> Iterator[tuple[str, _Unchecked]]:
        for key in self._fields():
            printable_key = _Unchecked(key, self._path).text()
            yield printable_key, self[key]

    def elements(self) -> Iterator[_Unchecked]:
        if not isinstance(self.value, list):
            raise self.mismatch_error("a list")
        for number, element in enumerate(self.value):
            yield _Unchecked(element, f"{self._path}[{number}]")

    def text(self) -> str:
        if not isinstance(self.value, str):
            raise self.mismatch_error("text")
        # JSON can contain half of a surrogate pair, which cannot be encoded.
        encodable = self.value.encode("utf-8", "replace").decode()
        return printable(encodable, _LONGEST_TEXT)

    def optional_text(self) -> str | None:
        return None if self.value is None else self.text()

    def flag(self) -> bool:
        if not isinstance(self.value, bool):
            raise self.mismatch_error("true or false")
        return self.value

    def seconds(self) -> float:
        value = self.value
        # In Python, a bool is an int.
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.mismatch_error("a number")
        # This rejects NaN too, which `json` accepts.
        if not 0 <= value < _LARGEST_NUMBER:
            raise self.mismatch_error("a number of seconds")
        return float(value)

    def count(self) -> int:
        value = self.value
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.mismatch_error("a whole number")
        if not 0 <= value < _LARGEST_NUMBER:
            raise self.mismatch_error("a count")
        return value

    def counts(self) -> dict[str, int]:
        return {key: value.count() for key, value in self.items()}


def _read_run(report: _Unchecked) -> ReportedRun:
    # A missing field is like null, so that all methods but `optional_text` raise ConfigError.
    totals = report["totals"]
    layers = totals["layers"]
    saved = totals["saved"]
    has_saved = "saved" in totals  # false in reports of old versions
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
        bytes_present=saved["present"].count() if has_saved else 0,
        bytes_mounted=saved["mounted"].count() if has_saved else 0,
        requests={host: actions.counts() for host, actions in totals["requests"].items()},
        throttled=totals["throttled"].counts(),
    )


def _read_image(image: _Unchecked) -> ReportedImage:
    status = image["status"].text()
    if status not in _STATUSES:
        raise image["status"].mismatch_error("a status that this version knows")
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
        blobs_present=blobs["skipped"].count(),  # skipped because the target has them
    )


def _read_undone(image: _Unchecked) -> ReportedImage:
    return ReportedImage(
        source=image["source"].text(), target=image["target"].text(), status="undone"
    )


def _read_mapping(mapping: _Unchecked) -> ReportedMapping:
    return ReportedMapping(
        source=mapping["from"].text(),
        target=mapping["to"].text(),
        selected=mapping["selected"].count(),
        dropped=mapping["dropped"].counts(),
        failure=_read_failure(mapping["error"]),
    )


def _read_failure(error: _Unchecked) -> Failure | None:
    if error.value is None:
        return None
    return Failure(
        code=error["code"].text(),
        message=error["message"].text(),
        hint=error["hint"].optional_text(),
        side=error["side"].optional_text(),
    )

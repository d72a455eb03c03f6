"""What a registry was asked, held against what that should be.

By default each kind of request has its exact number, and bytes are equal. With pytest's option
`--as-budget` neither may be more, so that a program that asks for less passes too.
"""

from __future__ import annotations

from collections.abc import Mapping

from conformance.http import Endpoint
from conformance.journal import Entry
from tests.least import Tally

__all__ = ["BYTES", "asked", "costs"]

BYTES = "bytes"  # what they are called in an allowance

# Set by conftest.
as_budget = False


def kind_of(entry: Entry) -> str:
    """Say as what a request counts.

    A POST that begins an upload is a `mount` where it took one, and `there` where it was about its own
    repository and has told that the blob is there.
    """
    if entry.kind == "tag_list":
        return "list"
    if entry.kind != "upload_start":
        return f"{entry.method} {entry.kind}"
    if entry.status != 201 or "mount" not in entry.query:
        return "POST upload"
    return "there" if entry.query.get("from") == entry.repository else "mount"


def asked(place: Endpoint) -> Tally:
    """Count what a registry was asked, and the bytes of manifests and blobs that it gave and took."""
    tally = Tally()
    for entry in place.journal.entries:
        tally.requests[kind_of(entry)] += 1
        if entry.method != "GET":
            tally.bytes += entry.request_bytes
        elif entry.kind in ("manifest", "blob") and entry.status in (200, 206):
            tally.bytes += entry.response_bytes
    return tally


def costs(
    place: Endpoint,
    expected: Tally,
    more: Mapping[str, int] | None = None,
    at_most: Mapping[str, int] | None = None,
) -> None:
    """Assert that a registry was asked for what is expected.

    `more` is spent besides, `at_most` may be.
    """
    spent, bound, limit = asked(place), dict(expected.requests), dict(at_most or {})
    bound[BYTES] = expected.bytes
    for kind, number in (more or {}).items():
        bound[kind] = bound.get(kind, 0) + number
    counted = {**spent.requests, BYTES: spent.bytes}
    wrong = []
    for kind in sorted({*bound, *counted}):
        number, least = counted.get(kind, 0), bound.get(kind, 0)
        most = least + limit.get(kind, 0)
        if number > most or (number < least and not as_budget):
            wrong.append(f"{number} {kind}, not {least}" + (f" to {most}" if most > least else ""))
    assert not wrong, f"{place.address}: {'; '.join(wrong)}\n{place.journal}"

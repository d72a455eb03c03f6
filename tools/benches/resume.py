"""Measure what a connection that breaks late in a large layer costs: bytes that are moved again.

The layer breaks at 90 %: at its source by an end of file or a reset, at a target that keeps what
has come (distribution 3), and at one that forgets it (2.8.2). The target verifies what it gets and
drops it.

Owns: the breaks and their goals.
May not know: anything of the program but its command line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

from conformance.content.images import Seed
from conformance.content.streams import Stream
from conformance.faults.rules import Rule
from conformance.registry.measuring import MeasuringApp
from tools.benches.place import Place, app_of, started_place
from tools.benches.runner import MIB, BenchError, Figure

__all__ = ["figures"]

LAYER = 1 << 30  # bytes
CHECKPOINT = 16.0  # MiB between two states of a hash that the program keeps
UNDER_WAY = 8.0  # MiB that a piece and the sockets hold


class Break(NamedTuple):
    """What breaks, and how many MiB may be read again at the source and sent again to the target."""

    name: str
    side: Literal["source", "target"]
    strike: Callable[[Rule, int], Rule]
    is_resumable: bool
    read_again: float
    sent_again: float


def end(rule: Rule, place: int) -> Rule:
    """End an answer as if it were complete."""
    return rule.drop(after=place, of="response")


def reset_answer(rule: Rule, place: int) -> Rule:
    """Reset the connection: the source counts as sent what was still in its kernel, and is lost."""
    return rule.drop(after=place, of="response", reset=True)


def reset_upload(rule: Rule, place: int) -> Rule:
    """Reset the connection before the body has come."""
    return rule.drop(after=place, of="request", reset=True)


FORGOTTEN = 0.9 * LAYER / MIB
BREAKS = (
    Break("source ends", "source", end, True, 0, 0),
    Break("source resets", "source", reset_answer, True, UNDER_WAY, 0),
    Break("target keeps", "target", reset_upload, True, CHECKPOINT + UNDER_WAY, 0),
    Break("target forgets", "target", reset_upload, False, FORGOTTEN + UNDER_WAY, FORGOTTEN),
)


def figures() -> Iterator[Figure]:
    """Break a copy in each way."""
    for case in BREAKS:
        yield from broken_copy(case)


def broken_copy(case: Break) -> Iterator[Figure]:
    """Copy one image whose layer breaks once."""
    with started_place(target=lambda: MeasuringApp(resumable=case.is_resumable)) as place:
        layer = Stream(10, 1, LAYER)
        digest = layer.digest()
        Seed(10).image(layers=[layer]).load_into(app_of(place.source), "app", "v1")
        if case.side == "source":
            rule = app_of(place.source).faults.on("GET", "blob", reference=digest)
        else:
            faults = app_of(place.targets[0]).faults
            rule = faults.on("PUT", "upload", query={"digest": digest})
        case.strike(rule.first(), LAYER * 9 // 10)

        spent, images = place.sync(["app"])
        if images["synced"] != 1 or not rule.struck:
            raise BenchError(f"{case.name}: {images}, {len(rule.struck)} struck")
        reads = place.source.journal.matching("GET", "blob", reference=digest)
        ranges = ", ".join(entry.header("range") or "all" for entry in reads)
        read_again = (reads.bytes_out() - LAYER) / MIB
        sent_again = (bytes_sent(place, digest) - LAYER) / MIB
    yield Figure(
        f"{case.name}: source",
        read_again,
        "MiB read again",
        case.read_again,
        detail=f"GET {ranges}",
    )
    yield Figure(
        f"{case.name}: target", sent_again, "MiB sent again", case.sent_again, detail=str(spent)
    )


def bytes_sent(place: Place, digest: str) -> int:
    """Return how many bytes of a blob came to the target."""
    uploads = place.targets[0].journal.matching("PUT", "upload", query={"digest": digest})
    return uploads.bytes_in()

"""What `compare` measured: kept as JSON, shown line by line, written as Markdown tables.

Owns: how runs are shown beside each other.
May not know: how they were measured.
Invariants: a run that did not do its work is never shown as if it had, and never the best. In each
table the rows in which this program compares worst come first.
"""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from tools.benches.runner import MB, BenchError

__all__ = ["Measured", "Outcome", "Side", "print_outcome", "tables"]

OURS = "this"
PHASES = {
    "cold": "first run",
    "unchanged": "unchanged",
    "lost": "unchanged, nothing remembered",
    "changed": "second run",
}
WAITING = ("errors", "throttled")  # scenes of counts in which time is that of waits


class Side(NamedTuple):
    """What one side was asked, by class; bytes of manifests and blobs, None where nobody counted."""

    requests: Mapping[str, int]
    bytes: int | None


@dataclass(frozen=True)
class Outcome:
    """One run of one program."""

    scene: str
    phase: str
    peer: str
    status: int  # negative: it was killed, because it took too long
    wrong: str  # what the targets do not hold as they should, "": nothing
    said: str  # the last line of a program that failed
    mistakes: int  # requests that no correct client sends
    source: Side
    target: Side
    wall: float  # seconds
    cpu: float  # seconds
    peak: int  # bytes

    @property
    def is_right(self) -> bool:
        """Whether the work was done; a status other than 0 says that the program does not think so."""
        return not self.wrong and not self.status

    @property
    def requests(self) -> int:
        """Requests to both sides."""
        return sum(self.source.requests.values()) + sum(self.target.requests.values())

    @property
    def bytes(self) -> int | None:
        """Bytes from and to both sides."""
        if self.source.bytes is None or self.target.bytes is None:
            return None
        return self.source.bytes + self.target.bytes


@dataclass
class Measured:
    """All runs of one call, and what has to be known to read them."""

    conditions: dict[str, str]  # counts or times -> when and where
    versions: dict[str, str]
    settings: dict[str, str]
    scenes: dict[str, str]  # name -> what is done
    outcomes: list[Outcome] = field(default_factory=list)
    least: dict[str, tuple[int, int]] = field(
        default_factory=dict
    )  # "scene, phase" -> requests, bytes

    def take_over(self, kept: Measured, *, but: Container[str]) -> None:
        """Add the runs of another call, except for those of some scenes.

        BenchError when another version of a program was measured there.
        """
        for name, version in kept.versions.items():
            if self.versions.get(name, version) != version:
                raise BenchError(f"{name} was {version} there, and is {self.versions[name]} now")
        self.conditions = {**kept.conditions, **self.conditions}
        self.versions = {**self.versions, **kept.versions}
        self.settings = {**kept.settings, **self.settings}
        self.scenes = {**kept.scenes, **self.scenes}
        self.least = {**kept.least, **self.least}
        self.outcomes = [run for run in kept.outcomes if run.scene not in but]

    def document(self) -> dict[str, Any]:
        """Return what json can write."""
        return asdict(self)

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> Measured:
        """Read what `document` gave."""
        outcomes = []
        for entry in document["outcomes"]:
            sides = {name: Side(*entry[name]) for name in ("source", "target")}
            outcomes.append(Outcome(**{**entry, **sides}))
        least = {name: (requests, size) for name, (requests, size) in document["least"].items()}
        return cls(**{**document, "outcomes": outcomes, "least": least})


def print_outcome(outcome: Outcome) -> None:
    """Print one run on one line, and on another one what was wrong with it."""
    source = sum(outcome.source.requests.values())
    target = sum(outcome.target.requests.values())
    size = "" if outcome.bytes is None else f", {outcome.bytes / MB:.2f} MB"
    print(
        f"  {outcome.phase:<10} {outcome.peer:<10} {source} + {target} requests{size}; "
        f"{outcome.wall:.2f} s, {outcome.cpu:.2f} s of CPU, {outcome.peak / MB:.0f} MB",
        flush=True,
    )
    trouble = trouble_of(outcome)
    if trouble:
        print(f"    {trouble}", flush=True)


def trouble_of(outcome: Outcome) -> str:
    """Say what was wrong with a run."""
    said = []
    if outcome.status < 0:
        said.append("not done in time")
    elif outcome.status:
        said.append(f"status {outcome.status} ({outcome.said})")
    if outcome.wrong:
        said.append(outcome.wrong)
    if outcome.mistakes:
        said.append(f"{outcome.mistakes} requests that no correct client sends")
    return "; ".join(said)


# ---------------------------------------------------------------- Markdown


class Quantity(NamedTuple):
    """One thing that is compared in a table of its own; None where it was not counted."""

    title: str
    of: Callable[[Outcome], float | None]
    is_counted: bool  # by the harness, and has a least; else it was measured
    digits: int


QUANTITIES = (
    Quantity("Requests", lambda run: run.requests, True, 0),
    Quantity("Manifests and blobs, both sides, MB", lambda run: in_mb(run.bytes), True, 2),
    Quantity("Time, s", lambda run: run.wall, False, 2),
    Quantity("CPU of the client, s", lambda run: run.cpu, False, 2),
    Quantity("Peak memory, MB", lambda run: run.peak / MB, False, 0),
)


class Row(NamedTuple):
    """One phase of one scene: the runs of each program."""

    scene: str
    phase: str
    runs: Mapping[str, Sequence[Outcome]]

    def middle(self, peer: str, quantity: Quantity) -> float | None:
        """Return the median of a program's runs."""
        values = [quantity.of(run) for run in self.runs.get(peer, ())]
        counted = [value for value in values if value is not None]
        return statistics.median(counted) if counted else None

    def is_right(self, peer: str) -> bool:
        """Tell whether a program did all its work in every round."""
        runs = self.runs.get(peer, ())
        return bool(runs) and all(run.is_right for run in runs)

    def best(self, peers: Iterable[str], quantity: Quantity) -> float | None:
        """Return the lowest median of these programs, of those that were right."""
        middles = [self.middle(peer, quantity) for peer in peers if self.is_right(peer)]
        known = [middle for middle in middles if middle is not None]
        return min(known) if known else None

    def standing(self, quantity: Quantity) -> float:
        """Return what we take as a multiple of what the best of the others takes."""
        others = [peer for peer in self.runs if peer != OURS]
        best = self.best(others, quantity)
        own = self.middle(OURS, quantity)
        if best is None or own is None:
            return 0.0
        return own / best if self.is_right(OURS) and best else math.inf


def tables(measured: Measured) -> str:
    """Write everything as Markdown."""
    lines = [item(f"{kind}: {text}") for kind, text in measured.conditions.items()]
    for name, version in measured.versions.items():
        lines.append(item(f"**{name}**: {version}; {measured.settings[name]}"))
    rows = list(rows_of(measured))
    for quantity in QUANTITIES:
        shown = [row for row in rows if is_shown(row, quantity)]
        if shown:
            lines += ["", *table(measured, quantity, shown)]
    return "\n".join([*lines, "", *troubles(measured, rows)])


def item(text: str) -> str:
    """Write an item of a list in lines of 120 columns."""
    return textwrap.fill(
        f"- {text}", 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def rows_of(measured: Measured) -> Iterator[Row]:
    """Bring the runs of one phase together."""
    places = dict.fromkeys((run.scene, run.phase) for run in measured.outcomes)
    for scene, phase in places:
        here = [run for run in measured.outcomes if (run.scene, run.phase) == (scene, phase)]
        runs = {peer: [run for run in here if run.peer == peer] for peer in measured.versions}
        yield Row(scene, phase, runs)


def table(measured: Measured, quantity: Quantity, rows: Sequence[Row]) -> Iterator[str]:
    """Write one table."""
    peers = list(measured.versions)
    columns = [quantity.title, *(["least"] if quantity.is_counted else []), *peers]
    yield f"| {' | '.join(columns)} |"
    yield f"|{'---|' * len(columns)}"
    for row in sorted(rows, key=lambda row: row.standing(quantity), reverse=True):
        cells = [f"{measured.scenes[row.scene]}: {PHASES[row.phase]}"]
        if quantity.is_counted:
            cells.append(least_cell(measured, quantity, row))
        best = row.best(peers, quantity)
        cells += [cell(row, peer, quantity, best) for peer in peers]
        yield f"| {' | '.join(cells)} |"


def is_shown(row: Row, quantity: Quantity) -> bool:
    """Tell whether a scene says anything about a quantity.

    Scenes of counts are timed only where the time is that of waits.
    """
    [first, *_] = [run for runs in row.runs.values() for run in runs]
    is_counted = first.bytes is not None
    if quantity.is_counted:
        return is_counted
    return not is_counted or (quantity.title.startswith("Time") and row.scene in WAITING)


def cell(row: Row, peer: str, quantity: Quantity, best: float | None) -> str:
    """Write what one program took; the best are bold, those that were not right have a cross."""
    middle = row.middle(peer, quantity)
    if middle is None:
        return "-"
    text = number(middle, quantity)
    if not row.is_right(peer):
        return f"{text} ✗"
    is_best = best is not None and text == number(best, quantity)
    return f"**{text}**" if is_best else text


def least_cell(measured: Measured, quantity: Quantity, row: Row) -> str:
    """Write the least that the work could take."""
    known = measured.least.get(f"{row.scene}, {row.phase}")
    if known is None:
        return ""
    requests, size = known
    return number(requests if quantity is QUANTITIES[0] else size / MB, quantity)


def number(value: float, quantity: Quantity) -> str:
    """Write a number as its table has them."""
    return f"{value:,.{quantity.digits}f}"


def in_mb(size: int | None) -> float | None:
    """Return megabytes."""
    return None if size is None else size / MB


def troubles(measured: Measured, rows: Sequence[Row]) -> Iterator[str]:
    """Say behind the tables what was not right."""
    yield "What was not right (✗), or is no request that a correct client sends:"
    yield ""
    for row in rows:
        for peer, runs in row.runs.items():
            said = [trouble for trouble in map(trouble_of, runs) if trouble]
            times = f" (in {len(said)} of {len(runs)} runs)" if len(runs) > 1 else ""
            for trouble in dict.fromkeys(said):
                place = f"{measured.scenes[row.scene]}, {PHASES[row.phase]}"
                yield item(f"{place}: {peer}{times}: {trouble}")

"""What happened in a run: outcomes, totals, exit status, and the words for sizes and times.

Owns: the fold of outcomes into the report of design.md section 10 and the exit statuses of its section
2. May not know: terminals, files, clocks. Invariant: every image that was selected has exactly one
outcome. Follows specification sections 3, 6 and 7.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from _regsync.errors import RegistryError, RegsyncError, SyncError

__all__ = ["Outcome", "Report", "duration_text", "size_text"]


def size_text(count: int) -> str:
    """Return a size in SI units: `0 B`, `512 B`, `31.5 MB`."""
    if count < 1000:
        return f"{count} B"
    value = float(count)
    for unit in ("KB", "MB", "GB"):
        value /= 1000
        # 999.95 and more would be shown as 1000.0.
        if value < 999.95:
            return f"{value:.1f} {unit}"
    return f"{value / 1000:.1f} TB"


def duration_text(seconds: float) -> str:
    """Return a duration: `0.3s`, `47s`, `2m13s`, `1h30m`."""
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The end of one image on one target; `source` and `target` are full references with host."""

    source: str
    target: str
    status: str  # synced, skipped, failed
    digest: str | None = None
    source_digest: str | None = None
    reason: str | None = None
    error: RegsyncError | None = None
    bytes: int = 0
    duration: float = 0.0
    # Blobs of this image: uploaded digests, and how many were mounted or already there.
    transferred: tuple[str, ...] = ()
    mounted: int = 0
    skipped: int = 0

    def line(self) -> str:
        """Return the one line that a user sees for it (specification section 6)."""
        if self.status == "failed":
            assert self.error is not None
            return f"failed {self.source} -> {self.target}: {self.error.code}: {self.error}"
        moved = f"{size_text(self.bytes)}, {duration_text(self.duration)}"
        return f"{self.status} {self.source} -> {self.target} ({moved})"

    def as_json(self) -> dict[str, Any]:
        """Return its object in the JSON report."""
        found: dict[str, Any] = {
            "source": self.source,
            "target": self.target,
            "digest": self.digest,
            "status": self.status,
            "reason": self.reason,
            "error": None,
            "bytes": self.bytes,
            "duration_s": round(self.duration, 3),
            "blobs": {"transferred": len(self.transferred), "mounted": self.mounted, "skipped": self.skipped},
        }
        if self.source_digest is not None and self.source_digest != self.digest:
            found["source_digest"] = self.source_digest
        if self.error is not None:
            side = self.error.side if isinstance(self.error, SyncError) else None
            found["error"] = {
                "code": self.error.code,
                "message": str(self.error),
                "status": self.error.status if isinstance(self.error, RegistryError) else None,
                "side": side.value if side else None,
                "retries": self.error.retries if isinstance(self.error, SyncError) else 0,
            }
        return found


@dataclass(slots=True)
class Report:
    """The fold over a run's outcomes."""

    outcomes: list[Outcome] = field(default_factory=list)
    # Per mapping: from, to, selected, dropped reasons.
    mappings: list[dict[str, Any]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=lambda: {"synced": 0, "skipped": 0, "failed": 0})
    interrupted: bool = False
    broken: bool = False
    _uploads: int = 0
    _unique: set[str] = field(default_factory=set)
    _mounted: int = 0
    _skipped: int = 0
    _bytes: int = 0

    def add(self, outcome: Outcome) -> None:
        """Take in one outcome."""
        self.outcomes.append(outcome)
        self.counts[outcome.status] += 1
        self._uploads += len(outcome.transferred)
        self._unique.update(outcome.transferred)
        self._mounted += outcome.mounted
        self._skipped += outcome.skipped
        self._bytes += outcome.bytes

    def exit_status(self) -> int:
        """Return 0 to 4 as design.md section 2 orders them; signals are the caller's."""
        failed = [outcome for outcome in self.outcomes if outcome.status == "failed"]
        if not failed:
            return 2 if self.broken else 0
        if len(failed) < len(self.outcomes):
            return 2 if self.broken else 1
        refused = all(outcome.error is not None and outcome.error.code == "AUTH_ERROR" for outcome in failed)
        return 4 if refused and not self.broken else 2

    def summary(self, elapsed: float) -> list[str]:
        """Return the summary block of specification section 6."""
        counts = self.counts
        return [
            f"Images: {counts['synced']} synced, {counts['skipped']} skipped, {counts['failed']} failed",
            f"Layers: {self._uploads} transferred ({len(self._unique)} unique references), "
            f"{self._mounted} mounted",
            f"Data: {size_text(self._bytes)} transferred",
            f"Time: {duration_text(elapsed)} elapsed",
        ]

    def as_json(
        self,
        *,
        run_id: str,
        started_at: str,
        elapsed: float,
        requests: Mapping[str, Mapping[str, int]],
        throttled: Mapping[str, int],
    ) -> dict[str, Any]:
        """Return the JSON report, schema 1 of design.md section 10."""
        return {
            "schema": 1,
            "run_id": run_id,
            "started_at": started_at,
            "duration_s": round(elapsed, 3),
            "interrupted": self.interrupted,
            "dry_run": False,
            "images": [outcome.as_json() for outcome in self.outcomes],
            "mappings": self.mappings,
            "totals": {
                "images": dict(self.counts),
                "layers": {
                    "transferred": self._uploads,
                    "unique": len(self._unique),
                    "mounted": self._mounted,
                    "skipped": self._skipped,
                },
                "bytes": self._bytes,
                "requests": {
                    host: dict(sorted(counted.items())) for host, counted in sorted(requests.items())
                },
                "throttled": dict(sorted(throttled.items())),
            },
        }

"""What happened in a run: outcomes, totals, exit status, and the words for sizes and times. Owns:
the fold of outcomes into the report of docs/design.md section 10, the JSON Schema of all documents
on standard output, the exit statuses of docs/design.md section 2. May not know: terminals, files,
clocks. Invariant: every image that was selected has exactly one outcome. Follows
docs/specification.md sections 3, 6, 7."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from _regsync.errors import RegsyncError
from _regsync.text import duration_text, size_text

_NO_ARTIFACTS: Mapping[str, int] = dict.fromkeys(("synced", "skipped", "failed", "stripped"), 0)


class Outcome(NamedTuple):
    """The end of one image on one target; `source` and `target` are full references with host."""

    source: str
    target: str
    status: str  # synced, skipped, failed, would_sync
    digest: str | None = None
    source_digest: str | None = None
    reason: str | None = None
    error: RegsyncError | None = None
    bytes: int = 0
    duration: float = 0.0
    transferred: tuple[
        str, ...
    ] = ()  # digests of uploaded blobs; the others were mounted or already there
    mounted: int = 0
    skipped: int = 0
    artifacts: Mapping[str, int] = _NO_ARTIFACTS
    planned: tuple[str, ...] = ()  # what a dry run says of artifacts

    def line(self) -> str:
        """Return the one line that a user sees for it (docs/specification.md section 6)."""
        if self.error is not None:
            return f"failed {self.source} -> {self.target}: {self.error.code}: {self.error}"
        return f"synced {self.source} -> {self.target} ({size_text(self.bytes)}, {duration_text(self.duration)})"

    def as_json(self) -> dict[str, Any]:
        differs = self.source_digest not in (None, self.digest)
        error = self.error
        side = getattr(error, "side", None)
        cause = error and {
            "code": error.code,
            "message": str(error),
            "status": getattr(error, "status", None),
            "side": side and side.value,
            "retries": getattr(error, "retries", 0),
        }
        return {
            "source": self.source,
            "target": self.target,
            "digest": self.digest,
            **({"source_digest": self.source_digest} if differs else {}),
            "status": self.status,
            "reason": self.reason,
            "error": cause,
            "bytes": self.bytes,
            "duration_s": round(self.duration, 3),
            "blobs": {
                "transferred": len(self.transferred),
                "mounted": self.mounted,
                "skipped": self.skipped,
            },
            "artifacts": dict(self.artifacts),
        }


class Report:
    def __init__(self) -> None:
        # until it ends otherwise
        self.outcomes = list[Outcome]()
        self.interrupted = True
        self.mappings = dict[
            int, dict[str, Any]
        ]()  # by number: from, to, selected, dropped reasons

    def totals(self) -> dict[str, Any]:
        """Return how images ended, what became of blobs (`unique`: distinct digests), and the bytes
        sent to targets.
        """
        ends = Counter(outcome.status.replace("would_sync", "synced") for outcome in self.outcomes)
        uploads = [digest for outcome in self.outcomes for digest in outcome.transferred]
        counts = {
            name: sum(getattr(outcome, name) for outcome in self.outcomes)
            for name in ("mounted", "skipped")
        }
        return {
            "images": {status: ends[status] for status in ("synced", "skipped", "failed")},
            "layers": {"transferred": len(uploads), "unique": len(set(uploads)), **counts},
            "bytes": sum(outcome.bytes for outcome in self.outcomes),
        }

    def exit_status(self) -> int:
        """Return 0, 1, 2 or 4 as docs/design.md section 2 orders them; 3 and signals are the
        caller's.
        """
        codes = [outcome.error.code for outcome in self.outcomes if outcome.error is not None]
        if codes and len(codes) == len(self.outcomes):
            return 4 if set(codes) == {"AUTH_ERROR"} else 2
        return 2 if RegsyncError.code in codes else 1 if codes else 0

    def causes(self) -> list[tuple[int, str]]:
        """Return the causes that several images share, the most frequent first: how many, code and
        cause.
        """
        found: Counter[str] = Counter()
        for error in filter(None, (outcome.error for outcome in self.outcomes)):
            # Some registries name the repository: that does not tell causes apart.
            host, _, rest = (getattr(error, "reference", None) or "").partition("/")
            name = re.escape(re.split("[@:]", rest)[0])
            cause = (
                re.sub(rf"(?<![\w/.-]){name}(?![\w/-])", "...", error.message)
                if name
                else error.message
            )
            found[f"{error.code} {host}: {cause}" if host else f"{error.code}: {cause}"] += 1
        return [(count, cause) for cause, count in found.most_common() if count > 1]

    def summary(self, elapsed: float) -> list[str]:
        """Return the summary block of docs/specification.md section 6."""
        images, layers, size = self.totals().values()
        return [
            f"Images: {images['synced']} synced, {images['skipped']} skipped, {images['failed']} failed",
            f"Layers: {layers['transferred']} transferred ({layers['unique']} unique references), "
            f"{layers['mounted']} mounted",
            f"Data: {size_text(size)} transferred",
            f"Time: {duration_text(elapsed)} elapsed",
        ]

    def plan(self) -> list[str]:
        """Return what a dry run says: each mapping's selection, what each image would come to, the
        sum.
        """
        told: list[str] = []
        for _, mapping in sorted(self.mappings.items()):
            why = ", ".join(f"{count} {reason}" for reason, count in mapping["dropped"].items())
            line = f"select {mapping['from']} -> {mapping['to']}: {mapping['selected']} tags"
            told.append(f"{line} (dropped: {why})" if why else line)
        for each in sorted(self.outcomes, key=lambda outcome: outcome[:2]):
            moved = (
                f"{len(each.transferred)} blobs, {size_text(each.bytes)}, {each.mounted} mounted"
            )
            verb, detail = (
                ("skip", each.reason)
                if each.status == "skipped"
                else ("sync", f"{moved}, {each.skipped} there")
            )
            if each.status != "failed":
                told.append(f"would {verb} {each.source} -> {each.target} ({detail})")
            told += [f"- would {text}" for text in each.planned]
        images, layers, size = self.totals().values()
        return [
            *told,
            f"Images: {images['synced']} would be synced, {images['skipped']} skipped, {images['failed']} failed",
            f"Layers: {layers['transferred']} to transfer, {layers['mounted']} to mount",
            f"Data: {size_text(size)} to transfer",
        ]

    def as_json(
        self,
        run_id: str,
        started_at: str,
        elapsed: float,
        requests: Mapping[str, Mapping[str, int]],
        throttled: Mapping[str, int],
    ) -> dict[str, Any]:
        """Return the JSON report, schema 1 of docs/design.md section 10."""
        asked = {host: dict(sorted(actions.items())) for host, actions in sorted(requests.items())}
        return {
            "schema": 1,
            "run_id": run_id,
            "started_at": started_at,
            "duration_s": round(elapsed, 3),
            "interrupted": self.interrupted,
            "dry_run": False,
            "images": [outcome.as_json() for outcome in self.outcomes],
            "mappings": [found for _, found in sorted(self.mappings.items())],
            "totals": {
                **self.totals(),
                "requests": asked,
                "throttled": dict(sorted(throttled.items())),
            },
        }


# What `--json` writes, one shape by name: `name name: type`, `?` where it may be absent; a type is
# a JSON type, another shape, `=value|value`, `type|type`, `[items]`, or `{values}` under any name.
_CODE = (
    "=CONFIG_ERROR|AUTH_ERROR|SOURCE_ERROR|TARGET_ERROR|NETWORK_ERROR|CONTENT_ERROR|INTERNAL_ERROR"
)


_SHAPES = {
    "report": "schema: =1; run_id started_at: string; duration_s: number; interrupted dry_run: boolean; "
    "images: [image]; mappings: [mapping]; totals: totals",
    "error": "schema: =1; error: failure; problems: [problem]",
    "analysis": "schema: =1; images: integer; blobs: sharing; bytes: sums; targets: {place}; requests: {{integer}}; "
    "largest_images: [large_image]; largest_layers: [large_layer]",
    "auth": "schema: =1; access: [access]",
    "tags": "repository: string; tags: [string]; dropped: {string}",
    "access": "registry repository rights method: string; source expires: string|null; "
    "upload: =null|opened|absent; error: null|cause",
    "provider": "name version: string",
    "version": "version build python openssl gate: string; gate_holds: boolean; provider: null|provider",
    "image": "source target: string; digest: string|null; source_digest?: string; error: null|cause; "
    "status: =synced|skipped|failed|would_sync; reason: =null|unchanged|immutable_tag|tag_immutable_exists; "
    "bytes: integer; duration_s: number; blobs: blobs; artifacts: artifacts",
    "cause": f"code: {_CODE}; message: string; status: integer|null; side: =null|source|target; retries: integer",
    "blobs": "transferred mounted skipped: integer",
    "artifacts": "synced skipped failed stripped: integer",
    "mapping": "from to: string; selected: integer; dropped: {integer}",
    "totals": "images: images; layers: layers; bytes: integer; requests: {{integer}}; throttled: {integer}",
    "images": "synced skipped failed: integer",
    "layers": "transferred unique mounted skipped: integer",
    "failure": f"code: {_CODE}; message: string; hint: string|null",
    "sharing": "unique unique_bytes shared shared_bytes: integer",
    "sums": "image_by_image each_blob_once: integer",
    "place": "bytes to_move mounts_possible: integer",
    "large_image": "image: string; bytes: integer",
    "large_layer": "digest: string; bytes images: integer",
    "problem": "file path message: string; line column: integer",
}


def schema() -> dict[str, Any]:
    """Return the JSON Schema of what `--json` writes; fields may be added within schema 1, none
    changes its meaning.
    """
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "what regsync --json writes to standard output",
        "anyOf": [
            _type(name) for name in ("report", "error", "analysis", "auth", "tags", "version")
        ],
        "$defs": {name: _object(text) for name, text in _SHAPES.items()},
    }


def _object(text: str) -> dict[str, Any]:
    kinds = {
        name: _type(kind)
        for names, kind in re.findall("([^:;]+): ([^;]+)", text)
        for name in names.split()
    }
    properties = {name.rstrip("?"): kind for name, kind in kinds.items()}
    return {
        "type": "object",
        "properties": properties,
        "required": [name for name in kinds if name[-1] != "?"],
    }


def _type(kind: str) -> dict[str, Any]:
    if kind.startswith("="):
        return {"enum": [{"null": None, "1": 1}.get(word, word) for word in kind[1:].split("|")]}
    if "|" in kind:
        return {"anyOf": [_type(word) for word in kind.split("|")]}
    if kind[0] == "[":
        return {"type": "array", "items": _type(kind[1:-1])}
    if kind[0] == "{":
        return {"type": "object", "additionalProperties": _type(kind[1:-1])}
    return {"$ref": f"#/$defs/{kind}"} if kind in _SHAPES else {"type": kind}


def analysis_lines(found: Mapping[str, Any]) -> list[str]:
    """Return an analysis as text."""
    blobs = found["blobs"]
    (plain, once) = found["bytes"].values()
    every = size_text(blobs["unique_bytes"])
    shared = size_text(blobs["shared_bytes"])
    told = [
        f"Images: {found['images']}",
        f"Blobs: {blobs['unique']} unique ({every}), {blobs['shared']} of them shared ({shared})",
        f"Data: {size_text(plain)} image by image, {size_text(once)} with each blob once, "
        f"{size_text(plain - once)} saved",
    ]
    for host, target in found["targets"].items():
        moved = f"{size_text(target['to_move'])} to move of {size_text(target['bytes'])}"
        told.append(f"Target {host}: {moved}, {target['mounts_possible']} mounts possible")
    for host, actions in found["requests"].items():
        counts = ", ".join(f"{count} {action}" for action, count in actions.items())
        told.append(f"Requests {host}: {sum(actions.values())} ({counts})")
    told += [
        f"Image {size_text(each['bytes']):>10} {each['image']}" for each in found["largest_images"]
    ]
    return told + [
        f"Layer {size_text(each['bytes']):>10} {each['digest']} in {each['images']} images"
        for each in found["largest_layers"]
    ]

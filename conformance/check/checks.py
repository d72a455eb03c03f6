"""The specification as a table of checks of any registry: API x kind of data -> pass, fail or skip.

Owns: what a check is, the order in which checks run, their outcomes and how these are shown. May
not know: what any single check asks (the modules beside this one), sockets. Invariants:
a check passes only when the registry did what the cited sentence says. It is skipped, with the
reason, when the registry says that it lacks an optional feature, or when the check's set-up failed.
Follows: the OCI distribution specification 1.1.1, cited by section with the word that binds (MUST,
SHOULD, MAY).
"""

from __future__ import annotations

import importlib
import json
import re
import secrets
import ssl
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple
from urllib.parse import urljoin, urlsplit

from ..client.http import Client, NoAnswer, Reply, Send, Wire, with_query
from ..content.images import EMPTY_CONFIG, Image, Seed
from ..messages import digest_of, is_name
from ..registry.storage import DOCKER_LIST, DOCKER_MANIFEST, OCI_INDEX, OCI_MANIFEST

__all__ = [
    "ACCEPT",
    "CHECKS",
    "NOWHERE",
    "WORKFLOWS",
    "Check",
    "Failed",
    "Row",
    "Run",
    "Skipped",
    "Unusable",
    "as_json",
    "begin",
    "check",
    "check_registry",
    "chosen",
    "codes",
    "count",
    "count_outcomes",
    "line",
    "matrix",
    "run_checks",
]

Workflow = Literal["pull", "push", "discovery", "management"]
Outcome = Literal["pass", "fail", "skip"]
WORKFLOWS: tuple[Workflow, ...] = ("pull", "push", "discovery", "management")

ACCEPT = {"Accept": ", ".join((OCI_INDEX, OCI_MANIFEST, DOCKER_LIST, DOCKER_MANIFEST))}
NOWHERE = "sha256:" + "0" * 63 + "1"
OCTETS = {"Content-Type": "application/octet-stream"}

# The table of the specification, and the two codes that it knows as old ("Legacy Docker support").
CODES = frozenset(
    {
        "BLOB_UNKNOWN",
        "BLOB_UPLOAD_INVALID",
        "BLOB_UPLOAD_UNKNOWN",
        "DIGEST_INVALID",
        "MANIFEST_BLOB_UNKNOWN",
        "MANIFEST_INVALID",
        "MANIFEST_UNKNOWN",
        "NAME_INVALID",
        "NAME_UNKNOWN",
        "SIZE_INVALID",
        "UNAUTHORIZED",
        "DENIED",
        "UNSUPPORTED",
        "TOOMANYREQUESTS",
        "TAG_INVALID",
        "MANIFEST_UNVERIFIED",
    }
)


# Several lines are joined by commas; the text is a quoted string.
_WARNINGS = re.compile(r'299 - "(?:[^"\\]|\\.)*"(?:, 299 - "(?:[^"\\]|\\.)*")*\Z')


class Failed(Exception):
    """The registry did not do what the specification says."""


class Skipped(Exception):
    """An optional feature is absent, or the set-up of the check failed."""


class Unusable(Exception):
    """The registry cannot be checked: it cannot be reached, or it lets nobody in."""


@dataclass(frozen=True)
class Check:
    """One row: `api` and `data` are its place in the table, `cites` its sentence."""

    workflow: Workflow
    api: str
    what: str
    data: str
    cites: str
    act: Callable[[Run], None]
    needs: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.api}: {self.what}" + (f" ({self.data})" if self.data else "")


class Row(NamedTuple):
    """The outcome of a check."""

    check: Check
    outcome: Outcome
    reason: str


CHECKS: list[Check] = []


def check(
    workflow: Workflow,
    api: str,
    what: str,
    cites: str,
    data: str | Sequence[str] = "",
    needs: str | Sequence[str] = (),
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Enter a function into the table: once, or once for each kind of data, its argument then."""

    def enter(act: Callable[..., None]) -> Callable[..., None]:
        required = (needs,) if isinstance(needs, str) else tuple(needs)
        if isinstance(data, str):
            CHECKS.append(Check(workflow, api, what, data, cites, act, required))
        else:
            for kind in data:
                bound = _bind(act, kind)
                CHECKS.append(Check(workflow, api, what, kind, cites, bound, required))
        return act

    return enter


def _bind(act: Callable[..., None], kind: str) -> Callable[[Run], None]:
    return lambda run: act(run, kind)


# Kinds of data. Every run builds its own, so that no content of an earlier run is in its way.

BLOBS: Mapping[str, Callable[[Seed], bytes]] = {
    "blob": lambda seed: seed.blob(1000),
    "empty blob": lambda seed: b"",
    "large blob": lambda seed: seed.blob(3 << 20),
    "sha512 blob": lambda seed: seed.blob(700),
}

MANIFESTS: Mapping[str, Callable[[Seed], Image]] = {
    "image": lambda seed: seed.image(
        spacing="odd", inline_config=True, extra={"x-unknown": ["kept", 1]}
    ),
    "docker image": lambda seed: seed.image(format="docker", spacing="indent"),
    "index": lambda seed: seed.index(
        platforms=("linux/amd64", "linux/arm64/v8"), attestations=True
    ),
    "docker list": lambda seed: seed.index(
        format="docker", platforms=("linux/amd64", "linux/arm64")
    ),
    "nested index": lambda seed: seed.index(
        [seed.index(platforms=("linux/amd64",)), seed.image()], with_platforms=False
    ),
    "artifact": lambda seed: seed.artifact(annotations={"org.example": "artifact"}),
}


_EVERYBODYS = frozenset(digest_of(data) for data in (b"", EMPTY_CONFIG))


@dataclass
class Run:
    """One run against one repository: the client, the content, what was noticed on the way."""

    client: Client
    repository: str
    mounting: str  # the repository into which blobs are mounted
    seed: Seed
    identity: str  # begins every tag of this run
    # Error bodies that are not in the specification's form.
    refusals: list[str] = field(default_factory=list)
    refused: int = 0  # error bodies that are JSON
    # Warning headers that are not in the specification's form.
    warnings: list[str] = field(default_factory=list)
    _blobs: dict[str, bytes] = field(default_factory=dict)
    _images: dict[str, Image] = field(default_factory=dict)
    _facts: dict[str, Any] = field(default_factory=dict)
    _put: list[tuple[str, str]] = field(default_factory=list)  # repository, path below it

    # Asking.

    def ask(
        self,
        method: str,
        target: str,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        *,
        repository: str | None = None,
    ) -> Reply:
        """Ask for a path below /v2/<name>/, or for a URL or path from the root."""
        if not target.startswith(("/", "http:", "https:")):
            target = f"/v2/{repository or self.repository}/{target}"

        reply = self.client.ask(method, target, headers, body)
        if 400 <= reply.status < 500 and method != "HEAD":
            self._look_at(reply)

        warning = reply.header("Warning")
        if warning and (not _WARNINGS.match(warning) or len(warning) > 4096):
            self.warnings.append(f"{reply} with Warning: {warning[:60]}")
        if reply.status >= 500:
            raise Failed(f"{reply}: an error of the registry's own")
        return reply

    def _look_at(self, refusal: Reply) -> None:
        """Note an error body that is called JSON and is not in the specification's form."""
        if (
            not refusal.header("Content-Type").lower().startswith("application/json")
            or not refusal.body
        ):
            return
        self.refused += 1
        listed = codes(refusal)
        if not listed:
            self.refusals.append(f'{refusal} without {{"errors": [{{"code": ...}}]}}')
        self.refusals += [f"{refusal} with code {code}" for code in listed if code not in CODES]

    def need(self, reply: Reply, *statuses: int) -> Reply:
        """Fail unless the answer has one of these statuses."""
        if reply.status not in statuses:
            listed = ", ".join(codes(reply))
            raise Failed(
                f"{reply}{f' ({listed})' if listed else ''}, not {' or '.join(map(str, statuses))}"
            )
        return reply

    def nowhere(self, reply: Reply) -> Reply:
        """Fail unless the answer is 404; skip when the registry refuses to show that nothing is
        there.
        """
        if reply.status in (401, 403):
            raise Skipped(f"outside the specification: {reply} for a repository that is not")
        return self.need(reply, 404)

    def optional(self, reply: Reply, *absent: int) -> Reply:
        """Skip the check when the answer says that the registry has not this at all."""
        if reply.status in absent:
            raise Skipped(f"optional and not here: {reply}")
        return reply

    def location(self, reply: Reply) -> str:
        """Return the Location, made absolute."""
        if not reply.header("Location"):
            raise Failed(f"{reply} without Location")
        return urljoin(reply.url, reply.header("Location"))

    # Content.

    def blob(self, kind: str) -> tuple[str, bytes]:
        """Return the digest and bytes of this run's blob of a kind, which may not be there yet."""
        if kind not in self._blobs:
            self._blobs[kind] = BLOBS[kind](self.seed)
        data = self._blobs[kind]
        return digest_of(data, "sha512" if kind == "sha512 blob" else "sha256"), data

    def image(self, kind: str) -> Image:
        """Return this run's image of a kind; it may not be at the registry yet."""
        if kind not in self._images:
            self._images[kind] = MANIFESTS[kind](self.seed)
        return self._images[kind]

    def tag(self, kind: str) -> str:
        return f"{self.identity}-{kind.replace(' ', '-')}"

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """Set something up once for several checks; when that fails, all of them are skipped."""
        if name not in self._facts:
            try:
                self._facts[name] = make()
            except (Failed, Skipped, NoAnswer) as problem:
                self._facts[name] = Skipped(f"cannot be set up: {problem}")
        fact = self._facts[name]
        if isinstance(fact, Skipped):
            raise Skipped(str(fact))
        return fact

    def upload(self, digest: str, data: bytes, repository: str | None = None) -> None:
        """Put a blob by POST and PUT."""
        start = self.need(self.ask("POST", "blobs/uploads/", None, b"", repository=repository), 202)
        where = with_query(self.location(start), digest=digest)
        self.need(self.ask("PUT", where, OCTETS, data), 201)
        self.put_here(f"blobs/{digest}", repository)

    def put(self, reference: str, media_type: str, body: bytes) -> Reply:
        """Put a manifest, whatever the answer."""
        reply = self.ask("PUT", f"manifests/{reference}", {"Content-Type": media_type}, body)
        if reply.status == 201:
            self.put_here(f"manifests/{digest_of(body)}")
        return reply

    def put_here(self, path: str, repository: str | None = None) -> None:
        """Note content to be deleted at the end, except blobs that other images may use as well."""
        if path.partition("/")[2] not in _EVERYBODYS:
            self._put.append((repository or self.repository, path))

    def upload_parts(self, image: Image) -> None:
        """Put everything below the top manifest."""
        for digest, data in image.blobs.items():
            self.upload(digest, data)
        for digest, (media_type, body) in image.manifests.items():
            if digest != image.top:
                self.need(self.put(digest, media_type, body), 201)

    def push(self, image: Image, *tags: str) -> Image:
        """Put a whole graph, under its digest or tags."""
        self.upload_parts(image)
        for reference in tags or (image.top,):
            self.need(self.put(reference, image.media_type, image.body), 201)
        return image

    def stored_image(self, kind: str) -> Image:
        """Return this run's manifest of a kind, which is at the registry under `tag(kind)`."""
        image: Image = self.once(
            f"held {kind}", lambda: self.push(self.image(kind), self.tag(kind))
        )
        return image

    def stored_blob(self, kind: str) -> tuple[str, bytes]:
        """Return this run's blob of a kind, which is at the registry."""
        digest, data = self.blob(kind)
        self.once(f"held {kind}", lambda: self.upload(digest, data))
        return digest, data

    def clean(self) -> None:
        """Delete the content of the run, where the registry deletes."""
        for repository, path in reversed(dict.fromkeys(self._put)):
            with suppress(Failed, NoAnswer):
                self.ask("DELETE", path, repository=repository)


def codes(reply: Reply) -> list[str]:
    """Return the codes of an error body, none when it is not in the specification's form."""
    try:
        listed = json.loads(reply.body)["errors"]
        texts = [entry["code"] for entry in listed]
    except (ValueError, TypeError, KeyError):
        return []
    return texts if all(isinstance(code, str) for code in texts) else []


# Running.


def run_checks(
    run: Run, checks: Iterable[Check], progress: Callable[[Row], None] | None = None
) -> list[Row]:
    """Run the checks in order; a check whose needs did not pass before it is skipped."""
    rows: list[Row] = []
    by_name: dict[str, Row] = {}
    for entry in checks:
        lacking = [
            by_name[name]
            for name in entry.needs
            if name in by_name and by_name[name].outcome != "pass"
        ]
        if lacking:
            row = Row(entry, "skip", f"rests on {lacking[0].check.name!r} ({lacking[0].outcome})")
        else:
            row = _carry_out(run, entry)
        by_name[entry.name] = row
        rows.append(row)
        if progress is not None:
            progress(row)

    return rows


def _carry_out(run: Run, entry: Check) -> Row:
    try:
        entry.act(run)
    except Skipped as reason:
        return Row(entry, "skip", str(reason))
    except Failed as reason:
        return Row(entry, "fail", str(reason))
    except NoAnswer as reason:
        return Row(entry, "fail", f"no answer: {reason}")
    return Row(entry, "pass", "")


def begin(
    url: str,
    send: Send,
    *,
    credentials: tuple[str, str] | None = None,
    mounting: str | None = None,
    seed: int | None = None,
) -> Run:
    """Read http(s)://HOST[:PORT]/REPOSITORY and see that it can be pushed to; else Unusable."""
    parts = urlsplit(url)
    repository = parts.path.strip("/")
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise Unusable(f"{url!r} is not http(s)://HOST[:PORT]/REPOSITORY")
    if not is_name(repository) or parts.query or parts.fragment:
        raise Unusable(f"{repository!r} is not the name of a repository")

    origin = f"{parts.scheme}://{parts.netloc}"
    client = Client(origin, send, credentials)
    hint = "are these the credentials?" if credentials else "it wants credentials (--user)"
    try:
        ping = client.ask("GET", "/v2/")
        if ping.status in (401, 403):
            raise Unusable(f"{ping}: {hint}")
        pushed = client.ask("POST", f"/v2/{repository}/blobs/uploads/", None, b"")
    except NoAnswer as problem:
        raise Unusable(f"no answer: {problem}") from None

    if pushed.status in (401, 403):
        raise Unusable(f"{pushed}, so nothing can be pushed there: {hint}")
    if pushed.status in (404, 405):
        raise Unusable(f"{pushed}, so nothing can be pushed there")

    number = secrets.randbits(48) if seed is None else seed
    identity = f"check-{number:012x}"
    return Run(client, repository, mounting or f"{repository}-mount", Seed(number), identity)


def chosen(workflows: Sequence[str] = (), names: Sequence[str] = ()) -> list[Check]:
    """Return checks in order: those of some workflows (none: all), only some by name (none: all).

    Checks that a named one needs are chosen as well.
    """
    for subject in ("pull", "push_blobs", "push_manifests", "discovery", "management"):
        importlib.import_module(f".{subject}", __package__)
    ordered = [entry for workflow in WORKFLOWS for entry in CHECKS if entry.workflow == workflow]
    selected = [entry for entry in ordered if not workflows or entry.workflow in workflows]
    if not names:
        return selected
    named = set(names)
    waiting = list(names)
    by_name = {entry.name: entry for entry in ordered}
    while waiting:
        more = set(by_name[waiting.pop()].needs) - named
        named |= more
        waiting += more
    return [entry for entry in selected if entry.name in named]


def check_registry(
    url: str,
    *,
    credentials: tuple[str, str] | None = None,
    workflows: Sequence[str] = (),
    context: ssl.SSLContext | None = None,
    mounting: str | None = None,
    keep: bool = False,
    progress: Callable[[Row], None] | None = None,
) -> list[Row]:
    """Check a registry by URL; Unusable when it cannot be reached or lets nobody in."""
    wire = Wire(context)
    try:
        run = begin(url, wire, credentials=credentials, mounting=mounting)
        try:
            return run_checks(run, chosen(workflows), progress)
        finally:
            if not keep:
                run.clean()
    finally:
        wire.close()


# Showing.


def line(row: Row) -> str:
    """Write one row: outcome, workflow, name; then the reason, if any, with the cited sentence."""
    text = f"{row.outcome:4}  {row.check.workflow:10}  {row.check.name}"
    return f"{text} -- {row.reason} -- spec: {row.check.cites}" if row.reason else text


def count(rows: Sequence[Row]) -> dict[Outcome, int]:
    """Count the rows by outcome."""
    outcomes: tuple[Outcome, ...] = ("pass", "fail", "skip")
    return {outcome: sum(1 for row in rows if row.outcome == outcome) for outcome in outcomes}


def count_outcomes(rows: Sequence[Row]) -> str:
    """Write how many there are of each outcome."""
    numbers = count(rows)
    return f"{len(rows)} checks: {numbers['pass']} passed, {numbers['fail']} failed, {numbers['skip']} skipped"


def matrix(rows: Sequence[Row]) -> str:
    """Write the table API x data of each workflow; a cell has the worst outcome and its number."""
    tables = [
        _table(workflow, [row for row in rows if row.check.workflow == workflow])
        for workflow in WORKFLOWS
    ]
    return "\n\n".join(filter(None, tables))


def _table(workflow: str, rows: Sequence[Row]) -> str:
    if not rows:
        return ""

    kinds = list(dict.fromkeys(row.check.data for row in rows))
    table = [[workflow, *(kind or "any" for kind in kinds)]]
    for api in dict.fromkeys(row.check.api for row in rows):
        cells = [api]
        for kind in kinds:
            here = [row.outcome for row in rows if (row.check.api, row.check.data) == (api, kind)]
            counts = Counter[str](here)
            worst = next((outcome for outcome in ("fail", "skip", "pass") if counts[outcome]), "-")
            if worst in ("pass", "-"):
                cells.append(worst)
            else:
                cells.append(f"{worst} {counts[worst]}/{len(here)}")
        table.append(cells)

    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join("  ".join(map(str.ljust, cells, widths)).rstrip() for cells in table)


def as_json(url: str, rows: Sequence[Row]) -> str:
    """Write the rows for programs."""
    listed = [
        {
            "name": row.check.name,
            "workflow": row.check.workflow,
            "api": row.check.api,
            "data": row.check.data or "any",
            "cites": row.check.cites,
            "outcome": row.outcome,
            "reason": row.reason,
        }
        for row in rows
    ]
    return json.dumps({"url": url, "count": count(rows), "checks": listed}, indent=2)

"""A check of a registry: one row of the table API x kind of data, which passes, fails or is skipped.

Owns: what a check is, the table of all checks, and what a check may use: a client, content, ways to
judge answers.
May not know: what any check asks (the modules of the workflows), which checks run (`suite`).
Invariants: a check passes only when the registry did what the cited sentence says. It is skipped,
with the reason, when the registry says that it lacks an optional feature, or when the check could
not be set up.
Follows: the OCI distribution specification 1.1.1, cited by section with the word that binds (MUST,
SHOULD, MAY).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NamedTuple, TypeVar, cast
from urllib.parse import urljoin

from ..client.http import Client, NoAnswer, Reply, with_query
from ..content.images import EMPTY_CONFIG, Image, Seed
from ..messages import digest_of
from ..registry.storage import DOCKER_LIST, DOCKER_MANIFEST, OCI_INDEX, OCI_MANIFEST

__all__ = [
    "ACCEPT",
    "BLOBS",
    "CHECKS",
    "CODES",
    "MANIFESTS",
    "NOWHERE",
    "OCTETS",
    "WORKFLOWS",
    "Check",
    "Failed",
    "Outcome",
    "Row",
    "Run",
    "Skipped",
    "check",
    "codes",
    "expect",
    "expect_body",
    "expect_code",
    "expect_digest_header",
    "expect_length_header",
    "expect_manifest",
    "expect_no_repository",
    "location_of",
    "skip_if",
]

Made = TypeVar("Made")
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


@dataclass(frozen=True)
class Check:
    """One row: `api` and `data` are its place in the table of its workflow."""

    workflow: Workflow
    api: str
    what: str  # what is expected
    data: str  # the kind of data; empty where it does not matter
    cites: str  # the sentence of the specification
    act: Callable[[Run], None]
    needs: tuple[str, ...] = ()  # names of checks that have to pass first

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
    """Enter a function into the table.

    It is entered once and called with the run; or, where `data` is several kinds, once for each
    kind and called with the run and the kind.
    """

    def enter(act: Callable[..., None]) -> Callable[..., None]:
        required = (needs,) if isinstance(needs, str) else tuple(needs)
        if isinstance(data, str):
            CHECKS.append(Check(workflow, api, what, data, cites, act, required))
        else:
            for kind in data:
                of_kind = partial(act, kind=kind)
                CHECKS.append(Check(workflow, api, what, kind, cites, of_kind, required))
        return act

    return enter


# Kinds of data. Each run builds its own content, so that what an earlier run left does not matter.

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


# Blobs that images of others may use as well: they are never deleted.
_SHARED_BLOBS = frozenset(digest_of(data) for data in (b"", EMPTY_CONFIG))


@dataclass
class Run:
    """One run against one repository: the client, the content, what was noticed on the way."""

    client: Client
    repository: str
    mounting: str  # the repository into which blobs are mounted
    seed: Seed
    identity: str  # begins every tag of this run
    # Error bodies that are not in the specification's form.
    malformed_errors: list[str] = field(default_factory=list)
    json_errors: int = 0  # error bodies that are JSON
    # Warning headers that are not in the specification's form.
    malformed_warnings: list[str] = field(default_factory=list)
    _blobs: dict[str, bytes] = field(default_factory=dict)
    _images: dict[str, Image] = field(default_factory=dict)
    _set_up: dict[str, object] = field(default_factory=dict)
    _pushed: list[tuple[str, str]] = field(default_factory=list)  # repository, path below it

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
            self._judge_form(reply)

        warning = reply.header("Warning")
        if warning and (not _WARNINGS.match(warning) or len(warning) > 4096):
            self.malformed_warnings.append(f"{reply} with Warning: {warning[:60]}")
        if reply.status >= 500:
            raise Failed(f"{reply}: an error of the registry's own")
        return reply

    def _judge_form(self, refusal: Reply) -> None:
        """Note an error body that is called JSON and is not in the specification's form."""
        if (
            not refusal.header("Content-Type").lower().startswith("application/json")
            or not refusal.body
        ):
            return
        self.json_errors += 1
        listed = codes(refusal)
        if not listed:
            self.malformed_errors.append(f'{refusal} without {{"errors": [{{"code": ...}}]}}')
        self.malformed_errors += [
            f"{refusal} with code {code}" for code in listed if code not in CODES
        ]

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
        """Return the tag of this run's image of a kind."""
        return f"{self.identity}-{kind.replace(' ', '-')}"

    def set_up_once(self, name: str, make: Callable[[], Made]) -> Made:
        """Set something up once for several checks; when that fails, all of them are skipped."""
        if name not in self._set_up:
            try:
                self._set_up[name] = make()
            except (Failed, Skipped, NoAnswer) as problem:
                self._set_up[name] = Skipped(f"cannot be set up: {problem}")
        made = self._set_up[name]
        if isinstance(made, Skipped):
            raise Skipped(str(made))
        return cast(Made, made)

    def push_blob(self, digest: str, data: bytes, repository: str | None = None) -> None:
        """Put a blob by POST and PUT."""
        start = expect(self.ask("POST", "blobs/uploads/", None, b"", repository=repository), 202)
        where = with_query(location_of(start), digest=digest)
        expect(self.ask("PUT", where, OCTETS, data), 201)
        self.delete_later(f"blobs/{digest}", repository)

    def put_manifest(self, reference: str, media_type: str, body: bytes) -> Reply:
        """Put a manifest, whatever the answer."""
        reply = self.ask("PUT", f"manifests/{reference}", {"Content-Type": media_type}, body)
        if reply.status == 201:
            self.delete_later(f"manifests/{digest_of(body)}")
        return reply

    def put_image(self, image: Image, reference: str | None = None) -> Reply:
        """Put an image's top manifest, under its digest without a reference, whatever the answer."""
        return self.put_manifest(reference or image.top, image.media_type, image.body)

    def delete_later(self, path: str, repository: str | None = None) -> None:
        """Note content to be deleted at the end, unless others may use it as well."""
        if path.partition("/")[2] not in _SHARED_BLOBS:
            self._pushed.append((repository or self.repository, path))

    def push_parts(self, image: Image) -> None:
        """Put everything below the top manifest."""
        for digest, data in image.blobs.items():
            self.push_blob(digest, data)
        for digest, (media_type, body) in image.manifests.items():
            if digest != image.top:
                expect(self.put_manifest(digest, media_type, body), 201)

    def push_image(self, image: Image, *tags: str) -> Image:
        """Put a whole graph, under its digest or tags."""
        self.push_parts(image)
        for reference in tags or (image.top,):
            expect(self.put_image(image, reference), 201)
        return image

    def stored_image(self, kind: str) -> Image:
        """Return this run's manifest of a kind, which is at the registry under `tag(kind)`."""
        return self.set_up_once(
            f"held {kind}", lambda: self.push_image(self.image(kind), self.tag(kind))
        )

    def stored_blob(self, kind: str) -> tuple[str, bytes]:
        """Return this run's blob of a kind, which is at the registry."""
        digest, data = self.blob(kind)
        self.set_up_once(f"held {kind}", lambda: self.push_blob(digest, data))
        return digest, data

    def delete_pushed(self) -> None:
        """Delete the content of the run, where the registry deletes."""
        for repository, path in reversed(dict.fromkeys(self._pushed)):
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


# Judging answers.


def expect(reply: Reply, *statuses: int) -> Reply:
    """Fail unless the answer has one of these statuses."""
    if reply.status not in statuses:
        listed = ", ".join(codes(reply))
        said = f"{reply} ({listed})" if listed else str(reply)
        raise Failed(f"{said}, not {' or '.join(map(str, statuses))}")
    return reply


def expect_no_repository(reply: Reply) -> Reply:
    """Fail unless the answer is 404; skip when the registry hides which repositories there are."""
    if reply.status in (401, 403):
        raise Skipped(f"outside the specification: {reply} for a repository that is not")
    return expect(reply, 404)


def skip_if(reply: Reply, *absent: int) -> Reply:
    """Skip the check when the answer's status says that the registry has no such feature."""
    if reply.status in absent:
        raise Skipped(f"optional and not here: {reply}")
    return reply


def location_of(reply: Reply) -> str:
    """Return the Location, made absolute; fail without one."""
    if not reply.header("Location"):
        raise Failed(f"{reply} without Location")
    return urljoin(reply.url, reply.header("Location"))


def expect_body(reply: Reply, data: bytes) -> None:
    """Fail unless the body is `data`."""
    if reply.body != data:
        raise Failed(f"{reply} with other bytes: {len(reply.body)} of them, not {len(data)}")


def expect_digest_header(reply: Reply, digest: str) -> None:
    """Fail when Docker-Content-Digest is another digest; skip without the header."""
    header = reply.header("Docker-Content-Digest")
    if not header:
        raise Skipped(f"optional and not here: {reply} without Docker-Content-Digest")
    if header != digest:
        raise Failed(f"{reply} with Docker-Content-Digest {header}, not {digest}")


def expect_length_header(reply: Reply, size: int) -> None:
    """Fail when Content-Length is another size; skip without the header."""
    header = reply.header("Content-Length")
    if not header:
        raise Skipped(f"optional and not here: {reply} without Content-Length")
    if header != str(size):
        raise Failed(f"{reply} with Content-Length {header}, not {size}")


def expect_code(reply: Reply, *expected: str) -> None:
    """Fail when an error body in the specification's form has none of these codes."""
    listed = codes(reply)
    if listed and not set(listed) & set(expected):
        raise Failed(f"{reply} with code {', '.join(listed)}, not {' or '.join(expected)}")


def expect_manifest(run: Run, reference: str, body: bytes) -> None:
    """Fail unless the manifest under a tag or digest is `body`."""
    expect_body(expect(run.ask("GET", f"manifests/{reference}", ACCEPT), 200), body)

"""The table of all checks, and the tools that checks use: a client, content, assertions on answers.

Owns: the form of a check and its outcome: pass, fail or skip.
May not know: the requests of any check (the modules of the workflows), which checks run (`suite`).
Invariants: a check passes only if the registry did what the cited sentence requires. It is skipped,
with the reason, if the registry lacks an optional feature or if the check could not be set up.
Follows: the OCI distribution specification 1.1.1, cited by section and keyword (MUST, SHOULD, MAY).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NamedTuple, TypeVar, cast

from ..client import copies
from ..client.http import Client, NoAnswer, Reply, resolve, with_query
from ..content.images import EMPTY_CONFIG, Image, Seed
from ..messages import digest_of

__all__ = [
    "ACCEPT",
    "BLOBS",
    "CHECKS",
    "CODES",
    "MANIFESTS",
    "NOWHERE",
    "OCTETS",
    "WORKFLOWS",
    "Absent",
    "Check",
    "Failed",
    "Outcome",
    "Row",
    "Run",
    "Skipped",
    "check",
    "codes",
    "expect",
    "expect_blob",
    "expect_body",
    "expect_code",
    "expect_header",
    "expect_manifest",
    "expect_no_repository",
    "expect_optional_header",
    "location_of",
    "set_up",
    "skip_if",
]

Made = TypeVar("Made")
Workflow = Literal["pull", "push", "discovery", "management"]
Outcome = Literal["pass", "fail", "skip"]
WORKFLOWS: tuple[Workflow, ...] = ("pull", "push", "discovery", "management")

ACCEPT = {"Accept": copies.ACCEPT}
# A digest that no registry has.
NOWHERE = "sha256:" + "0" * 63 + "1"
OCTETS = {"Content-Type": "application/octet-stream"}

# The codes of the specification's table, and its two old codes ("Legacy Docker support").
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


# The form of Warning headers, whose values are joined by commas.
_WARNINGS = re.compile(r'299 - "(?:[^"\\]|\\.)*"(?:, 299 - "(?:[^"\\]|\\.)*")*\Z')


class Failed(Exception):
    """The registry did not do what the specification requires."""


class Skipped(Exception):
    """An optional feature is absent, or the check could not be set up."""


class Absent(Skipped):
    """An optional feature is absent."""

    def __init__(self, what: object) -> None:
        super().__init__(f"optional and not here: {what}")


@dataclass(frozen=True)
class Check:
    """One check."""

    workflow: Workflow
    api: str  # row in the table of the workflow
    what: str  # the expected answer
    data: str  # the kind of data, column in the table; empty if it does not matter
    cites: str  # the sentence of the specification
    act: Callable[[Run], None]
    needs: Sequence[Callable[[Run], None]] = ()  # functions of the checks that must pass first

    @property
    def name(self) -> str:
        return f"{self.api}: {self.what}" + (f" ({self.data})" if self.data else "")


class Row(NamedTuple):
    """The outcome of a check."""

    check: Check
    outcome: Outcome
    reason: str


# All checks. Importing a module of checks adds its checks.
CHECKS: list[Check] = []


def check(
    workflow: Workflow,
    api: str,
    what: str,
    cites: str,
    data: str | Sequence[str] = "",
    needs: Sequence[Callable[..., None]] = (),
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add a function to the table.

    If `data` is a sequence of kinds, the function is added once for each kind. It is then called
    with the run and the kind, otherwise with the run alone. `needs` has functions of the latter
    form.
    """

    def add(act: Callable[..., None]) -> Callable[..., None]:
        if isinstance(data, str):
            CHECKS.append(Check(workflow, api, what, data, cites, act, needs))
        else:
            for kind in data:
                of_kind = partial(act, kind=kind)
                CHECKS.append(Check(workflow, api, what, kind, cites, of_kind, needs))
        return act

    return add


# Functions that build content, by kind of data. Each run has its own content, so that content of
# earlier runs does not matter.

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


# Blobs that are never deleted, because images of other users may use them too.
_SHARED_BLOBS = frozenset(digest_of(data) for data in (b"", EMPTY_CONFIG))


@contextmanager
def set_up() -> Iterator[None]:
    """Skip the check if the block fails, which only prepares it."""
    try:
        yield
    except (Failed, Skipped, NoAnswer) as problem:
        raise Skipped(f"cannot be set up: {problem}") from None


@dataclass
class Run:
    """One run against one repository."""

    client: Client
    repository: str
    mounting: str  # the repository into which blobs are mounted
    seed: Seed
    identity: str  # prefix of every tag of this run
    # Descriptions of error bodies that do not have the specification's form.
    malformed_errors: list[str] = field(default_factory=list)
    json_errors: int = 0  # number of error bodies with the type of JSON
    # Descriptions of Warning headers that do not have the specification's form.
    malformed_warnings: list[str] = field(default_factory=list)
    _blobs: dict[str, bytes] = field(default_factory=dict)  # by kind
    _images: dict[str, Image] = field(default_factory=dict)  # by kind
    # Results of `set_up_once` by name: the made object, or a Skipped if it could not be made.
    _set_up: dict[str, object] = field(default_factory=dict)
    # Content to delete at the end: repository, and path below it.
    _pushed: list[tuple[str, str]] = field(default_factory=list)

    # Requests.

    def ask(
        self,
        method: str,
        target: str,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        *,
        repository: str | None = None,
    ) -> Reply:
        """Send a request. `target` is a path below /v2/<name>/, an absolute path, or a URL.

        Raises Failed if the registry answers with a status of 500 or more.
        """
        if not target.startswith(("/", "http:", "https:")):
            target = f"/v2/{repository or self.repository}/{target}"

        reply = self.client.ask(method, target, headers, body)
        if 400 <= reply.status < 500 and method != "HEAD":
            self._check_error_body(reply)

        warning = reply.header("Warning")
        if warning and (not _WARNINGS.match(warning) or len(warning) > 4096):
            self.malformed_warnings.append(f"{reply} with Warning: {warning[:60]}")
        if reply.status >= 500:
            raise Failed(f"{reply}: an error of the registry's own")
        return reply

    def _check_error_body(self, refusal: Reply) -> None:
        """Record a JSON error body that does not have the specification's form."""
        if (
            not refusal.header("Content-Type").lower().startswith("application/json")
            or not refusal.body
        ):
            return
        self.json_errors += 1
        body_codes = codes(refusal)
        if not body_codes:
            self.malformed_errors.append(f'{refusal} without {{"errors": [{{"code": ...}}]}}')
        self.malformed_errors += [
            f"{refusal} with code {code}" for code in body_codes if code not in CODES
        ]

    # Content.

    def blob(self, kind: str) -> tuple[str, bytes]:
        """Return the digest and bytes of this run's blob of a kind. It may not have been pushed."""
        if kind not in self._blobs:
            self._blobs[kind] = BLOBS[kind](self.seed)
        data = self._blobs[kind]
        return digest_of(data, "sha512" if kind == "sha512 blob" else "sha256"), data

    def image(self, kind: str) -> Image:
        """Return this run's image of a kind. It may not have been pushed."""
        if kind not in self._images:
            self._images[kind] = MANIFESTS[kind](self.seed)
        return self._images[kind]

    def tag(self, kind: str) -> str:
        """Return the tag of this run's image of a kind."""
        return f"{self.identity}-{kind.replace(' ', '-')}"

    def set_up_once(self, name: str, make: Callable[[], Made]) -> Made:
        """Return the result of `make`, which is called once for each name.

        Raises Skipped if `make` has failed, also for later checks.
        """
        if name not in self._set_up:
            try:
                with set_up():
                    self._set_up[name] = make()
            except Skipped as reason:
                self._set_up[name] = reason

        result = self._set_up[name]
        if isinstance(result, Skipped):
            raise result
        return cast(Made, result)

    def push_blob(self, digest: str, data: bytes) -> None:
        """Push a blob by POST and PUT."""
        start = expect(self.ask("POST", "blobs/uploads/", None, b""), 202)
        where = with_query(location_of(start), digest=digest)
        expect(self.ask("PUT", where, OCTETS, data), 201)
        self.delete_later(f"blobs/{digest}")

    def put_manifest(self, reference: str, media_type: str, body: bytes) -> Reply:
        """Put a manifest. Returns the answer with any status."""
        reply = self.ask("PUT", f"manifests/{reference}", {"Content-Type": media_type}, body)
        if reply.status == 201:
            self.delete_later(f"manifests/{digest_of(body)}")
        return reply

    def put_image(self, image: Image, reference: str | None = None) -> Reply:
        """Put an image's top manifest under `reference`, or under its digest.

        Returns the answer with any status.
        """
        return self.put_manifest(reference or image.top, image.media_type, image.body)

    def delete_later(self, path: str, repository: str | None = None) -> None:
        """Register content that `delete_pushed` deletes, unless other users may use it too."""
        if path.partition("/")[2] not in _SHARED_BLOBS:
            self._pushed.append((repository or self.repository, path))

    def push_parts(self, image: Image) -> None:
        """Push all blobs and manifests below the top manifest."""
        for digest, data in image.blobs.items():
            self.push_blob(digest, data)
        for digest, (media_type, body) in image.manifests.items():
            if digest != image.top:
                expect(self.put_manifest(digest, media_type, body), 201)

    def push_image(self, image: Image, *tags: str) -> Image:
        """Push a whole graph, under tags or under its digest."""
        self.push_parts(image)
        for reference in tags or (image.top,):
            expect(self.put_image(image, reference), 201)
        return image

    def stored_image(self, kind: str) -> Image:
        """Return this run's image of a kind, after pushing it under `tag(kind)`."""
        return self.set_up_once(
            f"held {kind}", lambda: self.push_image(self.image(kind), self.tag(kind))
        )

    def stored_blob(self, kind: str) -> tuple[str, bytes]:
        """Return the digest and bytes of this run's blob of a kind, after pushing it."""
        digest, data = self.blob(kind)
        self.set_up_once(f"held {kind}", lambda: self.push_blob(digest, data))
        return digest, data

    def delete_pushed(self) -> None:
        """Delete the content of the run, the newest first, as it names older. Refusals are ignored."""
        for repository, path in reversed(dict.fromkeys(self._pushed)):
            with suppress(Failed, NoAnswer):
                self.ask("DELETE", path, repository=repository)


def codes(reply: Reply) -> list[str]:
    """Return the codes of an error body, or no codes if its form is not the specification's."""
    try:
        entries = json.loads(reply.body)["errors"]
        texts = [entry["code"] for entry in entries]
    except (ValueError, TypeError, KeyError):
        return []
    return texts if all(isinstance(code, str) for code in texts) else []


# Assertions on answers.


def expect(reply: Reply, *statuses: int) -> Reply:
    """Fail unless the answer has one of these statuses."""
    if reply.status not in statuses:
        body_codes = ", ".join(codes(reply))
        answer = f"{reply} ({body_codes})" if body_codes else str(reply)
        raise Failed(f"{answer}, not {' or '.join(map(str, statuses))}")
    return reply


def expect_no_repository(reply: Reply) -> Reply:
    """Fail unless the answer is 404. Skip if the registry hides whether a repository exists."""
    if reply.status in (401, 403):
        raise Skipped(f"outside the specification: {reply} for a repository that is not")
    return expect(reply, 404)


def skip_if(reply: Reply, *absent: int) -> Reply:
    """Skip the check if the answer's status shows that the registry lacks the feature."""
    if reply.status in absent:
        raise Absent(reply)
    return reply


def location_of(reply: Reply) -> str:
    """Return the Location as an absolute URL. Fail if there is none."""
    if not reply.header("Location"):
        raise Failed(f"{reply} without Location")
    return resolve(reply, reply.header("Location"))


def expect_body(reply: Reply, data: bytes) -> None:
    """Fail unless the body is `data`."""
    if reply.body != data:
        raise Failed(f"{reply} with other bytes: {len(reply.body)} of them, not {len(data)}")


def expect_header(reply: Reply, name: str, value: str) -> None:
    """Fail unless a header has this value."""
    if reply.header(name) != value:
        raise Failed(f"{reply} with {name} {reply.header(name)!r}, not {value!r}")


def expect_optional_header(reply: Reply, name: str, value: str) -> None:
    """Fail if a header has another value. Skip if it is absent."""
    if not reply.header(name):
        raise Absent(f"{reply} without {name}")
    expect_header(reply, name, value)


def expect_code(reply: Reply, *expected: str) -> None:
    """Fail if an error body in the specification's form has other codes than `expected`."""
    body_codes = codes(reply)
    if body_codes and not set(body_codes) & set(expected):
        raise Failed(f"{reply} with code {', '.join(body_codes)}, not {' or '.join(expected)}")


def expect_blob(run: Run, digest: str, data: bytes, repository: str | None = None) -> None:
    """Fail unless the blob with this digest is `data`."""
    expect_body(expect(run.ask("GET", f"blobs/{digest}", repository=repository), 200), data)


def expect_manifest(run: Run, reference: str, body: bytes) -> None:
    """Fail unless the manifest with this tag or digest is `body`."""
    expect_body(expect(run.ask("GET", f"manifests/{reference}", ACCEPT), 200), body)

"""Headers and fields on which completeness rests, each absent, malformed, repeated and contradictory:
the scenes and the cells of tests/test_found.py.

A scene is a mirror in which one header of some answers matters. A cell makes other values of the
right one. Whatever they are, a run that ends with 0 has copied everything.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import anyio

from conformance.client.attachments import referrers_tag
from conformance.content.images import OCI_INDEX, Image
from conformance.messages import Answer, Request, Response
from conformance.registry.tokens import TokenService
from tests.ends import Ran, Virtual, tags
from tests.mirrors import Mirror

__all__ = ["CASES", "READ", "SCENES", "run_cell"]

MIB = 1 << 20
MAPPING = {"from": "app", "tags": tags("v*")}
NOWHERE = "sha256:" + "0" * 64

# The values of a header, made of the right one and of another that would be right elsewhere.
Change: TypeAlias = Callable[[str, str], Sequence[str]]


class Headed(Mirror):
    """A mirror whose images are those that the source has now."""

    def is_whole(self) -> bool:
        """Whether the target has all images under their tags, and all artifacts where they can be
        found.
        """
        source, target = self.source.app.repositories["app"], self.target.app.repositories["app"]
        images = {tag: digest for tag, digest in source.tags.items() if tag.startswith("v")}
        return (
            images.items() <= target.tags.items()
            and source.manifests.keys() <= target.manifests.keys()
            and source.blobs.keys() <= target.blobs.keys()
            and all(self.is_listed(artifact) for artifact in self.attached)
        )

    def other_digest(self, digest: str) -> str:
        """Return what the tag v1 names at the other end, or else the digest of nothing."""
        named = [place.app.tags("app").get("v1", digest) for place in (self.source, self.target)]
        return next((each for each in named if each != digest), NOWHERE)

    def is_listed(self, artifact: Image) -> bool:
        """Whether a client finds an artifact at the target."""
        app, subject = self.target.app, artifact.document["subject"]["digest"]
        listed = app.request("GET", f"/v2/app/referrers/{subject}").data
        fallback = app.manifest("app", referrers_tag(subject))
        return artifact.top.encode() in listed + (fallback.body if fallback else b"")


@dataclass(frozen=True)
class Scene:
    """Which header of which answers, of which registry, and what makes it matter."""

    header: str
    side: str
    method: str
    kind: str
    status: int = 200
    # Options of the source.
    options: dict[str, Any] | None = None
    prepare: Callable[[Headed], Any] = lambda mirror: None
    # Whether a run may fail without it.
    is_needed: bool = False

    def concerns(self, request: Request, answer: Response) -> bool:
        kind = "token" if request.path == "/token" else request.kind
        return (request.method, kind, answer.status) == (self.method, self.kind, self.status)


async def run_cell(world: Virtual, directory: Path, scene: Scene, change: Change) -> Ran:
    """Sync a mirror whose answers have these values, and assert that it is whole or has failed."""
    mirror = Headed(world, directory, of={"source": scene.options or {}})
    prepared = scene.prepare(mirror)
    if inspect.isawaitable(prepared):
        await prepared
    changed = list[str]()

    def amend(request: Request, answer: Answer) -> Answer:
        if not isinstance(answer, Response) or not scene.concerns(request, answer):
            return answer
        changed.append(request.target)
        return retell(answer, scene.header, change, mirror.other_digest)

    app = {"source": mirror.source, "target": mirror.target}[scene.side].app
    app.amend = amend
    ran = await mirror.sync(MAPPING)
    app.amend = None
    violations = [each for end in (mirror.source, mirror.target) for each in end.journal.violations]
    mirror.clear()
    assert not violations
    assert changed, "no answer has this header"
    assert "INTERNAL_ERROR" not in ran.err
    if ran.status:
        assert ran.failed
    else:
        assert mirror.is_whole(), "success with a part"
    return ran


def retell(answer: Response, header: str, change: Change, other: Callable[[str], str]) -> Answer:
    """Give an answer other values of a header, or of a field of its JSON (in lower case)."""
    if header.islower():
        fields = {name: json.dumps(value) for name, value in answer.json().items()}
        values = change(fields.pop(header), "[]")
        members = [*fields.items(), *((header, value) for value in values)]
        body = ",".join(f'"{name}":{value}' for name, value in members)
        return replace(answer, body=f"{{{body}}}".encode())
    right = answer.header(header) or str(answer.size) * (header == "Content-Length")
    rest = [pair for pair in answer.headers if pair[0].lower() != header.lower()]
    if not right and header == "Link":
        return answer  # the last page
    headers = [*rest, *((header, value) for value in change(right, other(right)))]
    if header == "Content-Length":
        return as_bytes(answer, headers)
    return replace(answer, headers=headers)


def as_bytes(answer: Response, headers: list[tuple[str, str]]) -> bytes:
    """Write an answer by hand, whatever its headers say."""
    lines = [f"HTTP/1.1 {answer.status} Told", *(f"{name}: {value}" for name, value in headers)]
    return "\r\n".join([*lines, "Connection: close", "", ""]).encode() + answer.data


# What makes a header matter.


def push_nine(mirror: Headed) -> None:
    for number in range(9):
        mirror.push(f"v{number}")


def sign_six_times(mirror: Headed) -> None:
    image = mirror.push("v1")
    for _ in range(6):
        mirror.attach(image)


def sign(mirror: Headed) -> None:
    mirror.attach(mirror.push("v1"))


def sign_where_nothing_is_listed(mirror: Headed) -> None:
    sign(mirror)
    body = json.dumps({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": []}).encode()

    def list_nothing(request: Request) -> Answer | None:
        nothing = Response(200, [("Content-Type", OCI_INDEX)], body)
        return nothing if request.kind == "referrers" else None

    mirror.target.app.intercept = list_nothing


def list_half(mirror: Headed) -> None:
    """Let the source list three of six signatures."""
    sign_six_times(mirror)
    half = mirror.seed.fallback_index(mirror.attached[:3]).body

    def list_them(request: Request) -> Answer | None:
        listing = Response(200, [("Content-Type", OCI_INDEX)], half)
        return listing if request.kind == "referrers" else None

    mirror.source.app.intercept = list_them


def push_one(mirror: Headed) -> None:
    mirror.push("v1", mirror.seed.image(sizes=(70_000,)))


def push_large(mirror: Headed) -> str:
    image = mirror.push("v1", mirror.seed.image(layers=[mirror.seed.blob(3 * MIB)]))
    return max(image.blobs, key=lambda digest: len(image.blobs[digest]))


def break_source(mirror: Headed) -> None:
    blobs = mirror.source.app.faults.on("GET", "blob", reference=push_large(mirror))
    blobs.first().drop(after=MIB)


def break_target(mirror: Headed) -> None:
    uploads = mirror.target.app.faults.on("PUT", "upload", query={"digest": push_large(mirror)})
    uploads.first().drop(after=MIB)


def hold_another(mirror: Headed) -> None:
    """Let the target's tag name another image."""
    mirror.push("v1")
    mirror.seed.image().load_into(mirror.target.app, "app", "v1")


async def move_at_source(mirror: Headed) -> None:
    """Move the tag after a first run, so that the next one asks by HEAD."""
    mirror.push("v1")
    assert (await mirror.sync(MAPPING)).status == 0
    mirror.push("v1")


def redirect_blobs(mirror: Headed) -> None:
    push_one(mirror)

    def redirect(request: Request) -> Answer | None:
        if request.kind != "blob" or request.query:
            return None
        return Response(307, [("Location", f"{request.origin}{request.target}?stored")])

    mirror.source.app.intercept = redirect


def throttle(mirror: Headed) -> None:
    push_one(mirror)
    mirror.source.app.faults.on("GET", "manifest").first().status(429, retry_after=2)


def outlive_tokens(mirror: Headed) -> None:
    push_one(mirror)
    mirror.source.app.auth = TokenService(expires_in=60, lifetime=20, now=anyio.current_time)
    mirror.source.app.faults.on("GET", "manifest").delay(30, at="answer")


SCENES = {
    "Link of tags": Scene("Link", "source", "GET", "tag_list", 200, {"page_size": 3}, push_nine),
    "Link of referrers": Scene(
        "Link", "source", "GET", "referrers", 200, {"referrers_page": 2}, sign_six_times
    ),
    "tags": Scene("tags", "source", "GET", "tag_list", prepare=push_nine, is_needed=True),
    "referrers": Scene(
        "manifests", "source", "GET", "referrers", prepare=sign_six_times, is_needed=True
    ),
    "type of referrers": Scene(
        "Content-Type", "source", "GET", "referrers", prepare=sign, is_needed=True
    ),
    "filters": Scene("OCI-Filters-Applied", "source", "GET", "referrers", prepare=list_half),
    "subject": Scene("OCI-Subject", "target", "PUT", "manifest", 201, prepare=sign),
    "subject, and nothing is listed": Scene(
        "OCI-Subject",
        "target",
        "PUT",
        "manifest",
        201,
        prepare=sign_where_nothing_is_listed,
        is_needed=True,
    ),
    "rest of a blob": Scene("Content-Range", "source", "GET", "blob", 206, prepare=break_source),
    "rest of an upload": Scene("Range", "target", "GET", "upload", 204, prepare=break_target),
    "length of tags": Scene("Content-Length", "source", "GET", "tag_list", prepare=push_nine),
    "length of a manifest": Scene("Content-Length", "source", "GET", "manifest", prepare=push_one),
    "length of a blob": Scene("Content-Length", "source", "GET", "blob", prepare=push_one),
    "digest": Scene("Docker-Content-Digest", "source", "GET", "manifest", prepare=push_one),
    "digest by HEAD": Scene(
        "Docker-Content-Digest", "source", "HEAD", "manifest", prepare=move_at_source
    ),
    "digest at the target": Scene(
        "Docker-Content-Digest", "target", "HEAD", "manifest", prepare=hold_another
    ),
    "digest that is stored": Scene(
        "Docker-Content-Digest", "target", "PUT", "manifest", 201, prepare=push_one
    ),
    "place of an upload": Scene(
        "Location", "target", "POST", "upload_start", 202, prepare=push_one, is_needed=True
    ),
    "place of a blob": Scene(
        "Location", "source", "GET", "blob", 307, prepare=redirect_blobs, is_needed=True
    ),
    "pause": Scene("Retry-After", "source", "GET", "manifest", 429, prepare=throttle),
    "life of a token": Scene("expires_in", "source", "GET", "token", prepare=outlive_tokens),
}


# The values.


def values(*them: str) -> Change:
    return lambda right, other: them


def absent(right: str, other: str) -> Sequence[str]:
    return ()


def repeated(right: str, other: str) -> Sequence[str]:
    return (right, right)


def right_first(right: str, other: str) -> Sequence[str]:
    return (right, other)


def right_last(right: str, other: str) -> Sequence[str]:
    return (other, right)


ANY = {"absent": absent, "repeated": repeated}
# Without `absent`: nobody can tell a short page that lacks its Link from the last one.
LINKS: dict[str, Change] = {
    "repeated": repeated,
    "absolute": lambda link, _: [link.replace("</", "<http://source.test/")],
    "relative": lambda link, _: [re.sub(r"<[^?]*", "<", link)],
    "in capitals": lambda link, _: [link.replace("rel", "REL")],
    "without quotes": lambda link, _: [link.replace('"', "")],
    "behind another": lambda link, _: [f'</v2/>; rel="first", {link}'],
    "in a second line": lambda link, _: ['</v2/>; rel="first"', link],
    "without brackets": lambda link, _: [link.replace("<", "").replace(">", "")],
    "without a bracket": lambda link, _: [link.replace(">", "")],
    "without rel": lambda link, _: [link.partition(";")[0]],
    "with an empty rel": lambda link, _: [link.replace("next", "")],
    "in single quotes": lambda link, _: [link.replace('"', "'")],
    "a path alone": lambda link, _: [link[1:].partition(">")[0]],
    "a word": values("next"),
    "to nothing": values('<>; rel="next"'),
    "to another host": values('<http://other.test/v2/app/tags/list?last=v1>; rel="next"'),
    "to two pages": lambda link, _: [f"{link}, {second_page(link)}"],
    "to two pages, the later first": lambda link, _: [f"{second_page(link)}, {link}"],
}


def second_page(link: str) -> str:
    """Return a link to a page that leaves something out."""
    return link.replace("last=v2", "last=v5").replace("last=sha256%3A", "last=sha256%3Af")


DIGESTS = {
    **ANY,
    "empty": values(""),
    "no digest": values("sha256:xyz"),
    "of another algorithm": values("md5:0"),
    "right first": right_first,
    "right last": right_last,
}
LENGTHS = {
    **ANY,
    "no number": values("x"),
    "negative": values("-1"),
    "right first": lambda right, _: [right, f"{right}0"],
    "right last": lambda right, _: [f"{right}0", right],
    "too short": lambda right, _: [str(int(right) - 1)],
    "too long": lambda right, _: [str(int(right) + 1)],
}
LISTS = {
    **ANY,
    "right first": right_first,
    "right last": right_last,
    "a part first": lambda right, _: [json.dumps(json.loads(right)[:1]), right],
    "a part last": lambda right, _: [right, json.dumps(json.loads(right)[:1])],
    "no list": values('"v1"'),
    "an object": values("{}"),
    "a list in a list": lambda right, _: [f"[{right}]"],
}
PLACES = {
    **ANY,
    "empty": values(""),
    "no address": values("http://["),
    "of another scheme": values("ftp://target.test/x"),
    "elsewhere": values("/v2/elsewhere/blobs/uploads/1"),
    "right first": lambda right, _: [right, "/v2/app/blobs/uploads/other?_state=1"],
    "right last": lambda right, _: ["/v2/app/blobs/uploads/other?_state=1", right],
}
CASES: dict[str, dict[str, Change]] = {
    "Link of tags": LINKS,
    "Link of referrers": LINKS,
    "tags": LISTS,
    "referrers": LISTS,
    "type of referrers": {
        **ANY,
        "empty": values(""),
        "of any JSON": values("application/json"),
        "of a page": values("text/html"),
        "right first": lambda right, _: [right, "text/html"],
        "right last": lambda right, _: ["text/html", right],
    },
    "filters": {
        "unasked": values("artifactType"),
        "unknown": values("color"),
        "repeated": values("artifactType", "artifactType"),
        "several": values("artifactType", "annotations"),
    },
    "subject": DIGESTS,
    "subject, and nothing is listed": {
        name: case for name, case in DIGESTS.items() if name != "repeated"
    },
    "rest of a blob": {
        **ANY,
        "no numbers": values("bytes x-y/z"),
        "without a unit": lambda right, _: [right.removeprefix("bytes ")],
        "of another unit": lambda right, _: [right.replace("bytes", "pieces")],
        "from the beginning": lambda right, _: [f"bytes 0-{3 * MIB - MIB - 1}/{3 * MIB}"],
        "of another size": lambda right, _: [right.replace(f"/{3 * MIB}", "/9")],
        "of unknown size": lambda right, _: [right.replace(f"/{3 * MIB}", "/*")],
        "right first": lambda right, _: [right, "bytes 0-9/10"],
        "right last": lambda right, _: ["bytes 0-9/10", right],
    },
    "rest of an upload": {
        **ANY,
        "empty": values(""),
        "in another form": lambda right, _: [f"bytes={right}"],
        "without an end": values("0-"),
        "without a beginning": lambda right, _: [right.removeprefix("0-")],
        "too short": values("0-99"),
        "too long": values("0-99999999"),
        "right first": lambda right, _: [right, "0-99"],
        "right last": lambda right, _: ["0-99", right],
    },
    "length of tags": LENGTHS,
    "length of a manifest": LENGTHS,
    "length of a blob": LENGTHS,
    "digest": DIGESTS,
    "digest by HEAD": DIGESTS,
    "digest at the target": DIGESTS,
    "digest that is stored": {**DIGESTS, "another": values(NOWHERE)},
    "place of an upload": PLACES,
    "place of a blob": PLACES,
    "pause": {
        **ANY,
        "a word": values("soon"),
        "negative": values("-5"),
        "a fraction": values("2.5"),
        "in the past": values("Thu, 01 Jan 1970 00:00:00 GMT"),
        "short first": values("2", "7200"),
        "long first": values("7200", "2"),
    },
    "life of a token": {
        **ANY,
        "a word": values('"soon"'),
        "in quotes": values('"60"'),
        "null": values("null"),
        "negative": values("-1"),
        "endless": values("1e999"),
        "a list": values("[60]"),
        "too long": values("99999"),
        "right first": values("60", "99999"),
        "right last": values("99999", "60"),
    },
}

# The cells that are right, or that every reader has to bear: all of it arrives.
_LINKS = ["absolute", "relative", "in capitals", "without quotes", "behind another"]
READ: dict[str, Sequence[str]] = {
    "Link of tags": [*_LINKS, "repeated", "in a second line"],
    "Link of referrers": [*_LINKS, "repeated", "in a second line"],
    **{
        scene: ["absent", "repeated"]
        for scene, cases in CASES.items()
        if "absent" in cases and not SCENES[scene].is_needed
    },
}

"""Faults that public reports about other tools and registries led to, by kind.

A test knows only what a user or a registry sees. Where more than one behaviour is right, it asks
for a bound: all of it arrived, or the run failed and said so.
"""

from __future__ import annotations

import base64
import gzip
import inspect
import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import anyio
import pytest

from conformance.audit import RULES
from conformance.images import OCI_INDEX, Image, Seed
from conformance.memory import Link
from conformance.messages import Answer, Request, Response
from conformance.registry import App
from conformance.tokens import BasicAuth, TokenService
from conformance.walks import referrers_tag
from tests.ends import Ran, held, only, stopped_at, tags, virtual
from tests.mirrors import SBOM, SIGNATURE, WRITES, Mirror

pytestmark = [pytest.mark.anyio, pytest.mark.virtual_time]

# Registries that answer so may be asked more than once.
CLUMSY = pytest.mark.provokes(*(name for name, each in RULES.items() if each.kind == "discipline"))

MIB = 1 << 20
V1 = {"from": "app", "tags": tags("v1")}
ALL = {"from": "app", "tags": tags("v*")}
WITHOUT_API = {"referrers_api": False}
NOWHERE = "sha256:" + "0" * 64


# Headers and fields on which completeness rests: absent, malformed, repeated and contradictory.
# Whatever they are, a run that ends with 0 has copied everything.

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

    def is_listed(self, artifact: Image) -> bool:
        """Whether a client finds an artifact at the target."""
        app, subject = self.target.app, artifact.document["subject"]["digest"]
        answer = app.request("GET", f"/v2/app/referrers/{subject}").data
        fallback = app.manifest("app", referrers_tag(subject))
        return artifact.top.encode() in answer + (fallback.body if fallback else b"")

    def other_digest(self, digest: str) -> str:
        """Return what the tag v1 names at the other end, or else the digest of nothing."""
        named = [place.app.tags("app").get("v1", digest) for place in (self.source, self.target)]
        return next((each for each in named if each != digest), NOWHERE)


def push_nine(mirror: Headed) -> None:
    for number in range(9):
        mirror.push(f"v{number}")


def sign(mirror: Headed, times: int = 1) -> None:
    image = mirror.push("v1")
    for _ in range(times):
        mirror.attach(image)


def sign_six_times(mirror: Headed) -> None:
    sign(mirror, 6)


def give_list(app: App, listing: bytes) -> None:
    """Let a registry answer every question for referrers so."""
    answer = Response(200, [("Content-Type", OCI_INDEX)], listing)
    app.intercept = lambda request: answer if request.kind == "referrers" else None


def sign_where_nothing_is_listed(mirror: Headed) -> None:
    sign(mirror)
    nothing = {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": []}
    give_list(mirror.target.app, json.dumps(nothing).encode())


def list_half(mirror: Headed) -> None:
    """Let the source list three of six signatures."""
    sign_six_times(mirror)
    give_list(mirror.source.app, mirror.seed.fallback_index(mirror.attached[:3]).body)


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
    assert (await mirror.sync(ALL)).status == 0
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


@dataclass(frozen=True)
class Scene:
    """Which header of which answers, of which registry, and what makes it matter.

    A header in lower case is a field of JSON; `options` are the source's.
    """

    header: str
    side: str
    method: str
    kind: str
    status: int
    prepare: Callable[[Headed], Any]
    options: dict[str, Any] | None = None


SCENES = {
    "tags' Link": Scene("Link", "source", "GET", "tag_list", 200, push_nine, {"page_size": 3}),
    "list's Link": Scene(
        "Link", "source", "GET", "referrers", 200, sign_six_times, {"referrers_page": 2}
    ),
    "tags": Scene("tags", "source", "GET", "tag_list", 200, push_nine),
    "list": Scene("manifests", "source", "GET", "referrers", 200, sign_six_times),
    "list's type": Scene("Content-Type", "source", "GET", "referrers", 200, sign),
    "filters": Scene("OCI-Filters-Applied", "source", "GET", "referrers", 200, list_half),
    "subject": Scene("OCI-Subject", "target", "PUT", "manifest", 201, sign),
    "subject of no list": Scene(
        "OCI-Subject", "target", "PUT", "manifest", 201, sign_where_nothing_is_listed
    ),
    "blob's rest": Scene("Content-Range", "source", "GET", "blob", 206, break_source),
    "upload's rest": Scene("Range", "target", "GET", "upload", 204, break_target),
    "tags' length": Scene("Content-Length", "source", "GET", "tag_list", 200, push_nine),
    "manifest's length": Scene("Content-Length", "source", "GET", "manifest", 200, push_one),
    "blob's length": Scene("Content-Length", "source", "GET", "blob", 200, push_one),
    "digest": Scene("Docker-Content-Digest", "source", "GET", "manifest", 200, push_one),
    "HEAD's digest": Scene(
        "Docker-Content-Digest", "source", "HEAD", "manifest", 200, move_at_source
    ),
    "target's digest": Scene(
        "Docker-Content-Digest", "target", "HEAD", "manifest", 200, hold_another
    ),
    "stored digest": Scene("Docker-Content-Digest", "target", "PUT", "manifest", 201, push_one),
    "upload's place": Scene("Location", "target", "POST", "upload_start", 202, push_one),
    "blob's place": Scene("Location", "source", "GET", "blob", 307, redirect_blobs),
    "pause": Scene("Retry-After", "source", "GET", "manifest", 429, throttle),
    "token's life": Scene("expires_in", "source", "GET", "token", 200, outlive_tokens),
}


def values(*them: str) -> Change:
    return lambda right, other: them


def both(first: bool) -> Change:
    """Give the right value and another one, and which is first."""
    return lambda right, other: (right, other) if first else (other, right)


def changed(change: Callable[[str], str]) -> Change:
    return lambda right, other: [change(right)]


ABSENT = values()
REPEATED: Change = lambda right, other: (right, right)  # noqa: E731


def of_a_later_page(link: str) -> str:
    """Return a link to a page that leaves something out."""
    return link.replace("last=v2", "last=v5").replace("last=sha256%3A", "last=sha256%3Af")


# What is right, or what every reader has to bear: all of it arrives.
READ: list[tuple[str, str, Change]] = [
    ("tags' Link", "repeated", REPEATED),
    ("tags' Link", "absolute", changed(lambda link: link.replace("</", "<http://source.test/"))),
    ("tags' Link", "relative", changed(lambda link: re.sub(r"<[^?]*", "<", link))),
    ("tags' Link", "in capitals", changed(lambda link: link.replace("rel", "REL"))),
    ("tags' Link", "without quotes", changed(lambda link: link.replace('"', ""))),
    ("tags' Link", "behind another", changed(lambda link: f'</v2/>; rel="first", {link}')),
    ("tags' Link", "in a second line", lambda link, _: ['</v2/>; rel="first"', link]),
    ("list's Link", "relative", changed(lambda link: re.sub(r"<[^?]*", "<", link))),
    ("subject", "absent", ABSENT),
    ("blob's rest", "absent", ABSENT),
    ("upload's rest", "absent", ABSENT),
    ("upload's rest", "repeated", REPEATED),
    *((f"{what}'s length", "absent", ABSENT) for what in ("manifest", "blob")),
    ("tags' length", "absent", ABSENT),
    *(
        (what, "absent", ABSENT)
        for what in ("digest", "HEAD's digest", "target's digest", "stored digest")
    ),
    ("HEAD's digest", "repeated", REPEATED),
    ("pause", "absent", ABSENT),
    ("pause", "repeated", REPEATED),
    ("token's life", "absent", ABSENT),
    ("token's life", "repeated", REPEATED),
]
# What may fail the run. (That a short page lacks its Link nobody can tell.)
MAY_FAIL: list[tuple[str, str, Change]] = [
    *(
        (scene, name, change)
        for scene in ("tags' Link", "list's Link")
        for name, change in {
            "without brackets": changed(lambda link: re.sub("[<>]", "", link)),
            "to two pages": changed(lambda link: f"{link}, {of_a_later_page(link)}"),
        }.items()
    ),
    ("tags' Link", "without a bracket", changed(lambda link: link.replace(">", ""))),
    ("tags' Link", "without rel", changed(lambda link: link.partition(";")[0])),
    ("tags' Link", "with an empty rel", changed(lambda link: link.replace("next", ""))),
    ("tags' Link", "in single quotes", changed(lambda link: link.replace('"', "'"))),
    ("tags' Link", "a path alone", changed(lambda link: link[1:].partition(">")[0])),
    ("tags' Link", "a word", values("next")),
    ("tags' Link", "to nothing", values('<>; rel="next"')),
    ("tags' Link", "elsewhere", values('<http://other.test/v2/app/tags/list?last=v1>; rel="next"')),
    ("tags", "absent", ABSENT),
    ("tags", "repeated", REPEATED),
    ("tags", "a part first", lambda right, _: [json.dumps(json.loads(right)[:1]), right]),
    ("tags", "a part last", lambda right, _: [right, json.dumps(json.loads(right)[:1])]),
    ("tags", "no list", values('"v1"')),
    ("tags", "a list in a list", changed(lambda right: f"[{right}]")),
    ("list", "absent", ABSENT),
    ("list", "a part last", lambda right, _: [right, json.dumps(json.loads(right)[:1])]),
    ("list", "an object", values("{}")),
    ("list's type", "absent", ABSENT),
    ("list's type", "of a page", values("text/html")),
    ("list's type", "of any JSON", values("application/json")),
    ("list's type", "right last", lambda right, _: ["text/html", right]),
    ("filters", "unasked", values("artifactType")),
    ("filters", "several", values("artifactType", "annotations")),
    ("subject", "of another algorithm", values("md5:0")),
    ("subject", "right last", both(first=False)),
    ("subject of no list", "absent", ABSENT),
    ("subject of no list", "right last", both(first=False)),
    ("blob's rest", "without a unit", changed(lambda right: right.removeprefix("bytes "))),
    ("blob's rest", "of another size", changed(lambda right: right.replace(f"/{3 * MIB}", "/9"))),
    ("blob's rest", "right last", lambda right, _: ["bytes 0-9/10", right]),
    ("upload's rest", "without an end", values("0-")),
    ("upload's rest", "right last", lambda right, _: ["0-99", right]),
    *(
        (scene, name, change)
        for scene in ("tags' length", "manifest's length", "blob's length")
        for name, change in {
            "too short": changed(lambda right: str(int(right) - 1)),
            "too long": changed(lambda right: str(int(right) + 1)),
        }.items()
    ),
    ("digest", "no digest", values("sha256:xyz")),
    ("digest", "right last", both(first=False)),
    ("HEAD's digest", "empty", values("")),
    ("HEAD's digest", "right first", both(first=True)),
    ("target's digest", "right last", both(first=False)),
    ("stored digest", "another", values(NOWHERE)),
    ("upload's place", "absent", ABSENT),
    ("upload's place", "empty", values("")),
    ("upload's place", "no address", values("http://[")),
    ("upload's place", "of another scheme", values("ftp://target.test/x")),
    ("upload's place", "elsewhere", values("/v2/elsewhere/blobs/uploads/1")),
    ("upload's place", "two", lambda right, _: ["/v2/app/blobs/uploads/1?_state=1", right]),
    ("blob's place", "absent", ABSENT),
    ("blob's place", "no address", values("http://[")),
    ("blob's place", "two", lambda right, _: [right, "/v2/app/blobs/other"]),
    ("pause", "a word", values("soon")),
    ("pause", "negative", values("-5")),
    ("pause", "a fraction", values("2.5")),
    ("pause", "in the past", values("Thu, 01 Jan 1970 00:00:00 GMT")),
    ("pause", "two", values("2", "7200")),
    ("token's life", "a word", values('"soon"')),
    ("token's life", "endless", values("1e999")),
    ("token's life", "a list", values("[60]")),
    ("token's life", "too long", values("99999")),
]


def retell(answer: Response, header: str, change: Change, other: Callable[[str], str]) -> Answer:
    """Give an answer other values of a header, or of a field of its JSON."""
    if header.islower():
        fields = {name: json.dumps(value) for name, value in answer.json().items()}
        told = change(fields.pop(header), "[]")
        members = [*fields.items(), *((header, value) for value in told)]
        body = ",".join(f'"{name}":{value}' for name, value in members)
        return replace(answer, body=f"{{{body}}}".encode())
    right = answer.header(header) or str(answer.size) * (header == "Content-Length")
    if not right and header == "Link":
        return answer  # the last page
    rest = [pair for pair in answer.headers if pair[0].lower() != header.lower()]
    headers = [*rest, *((header, value) for value in change(right, other(right)))]
    if header != "Content-Length":
        return replace(answer, headers=headers)
    lines = [f"HTTP/1.1 {answer.status} Told", *(f"{name}: {value}" for name, value in headers)]
    return "\r\n".join([*lines, "Connection: close", "", ""]).encode() + answer.data


@CLUMSY
@pytest.mark.provokes(
    "body_without_digest", "location_not_given", "page_not_linked", "path_unknown"
)
@pytest.mark.parametrize(
    ("scene", "change", "may_fail"),
    [
        pytest.param(scene, change, rows is MAY_FAIL, id=f"{scene} {name}")
        for rows in (READ, MAY_FAIL)
        for scene, name, change in rows
    ],
)
async def test_a_header_is_read_or_fails_the_run(world, tmp_path, scene, change, may_fail):
    scene = SCENES[scene]
    mirror = Headed(world, tmp_path, of={"source": scene.options or {}})
    prepared = scene.prepare(mirror)
    if inspect.isawaitable(prepared):
        await prepared
    changes = list[str]()

    def amend(request: Request, answer: Answer) -> Answer:
        kind = "token" if request.path == "/token" else request.kind
        concerned = (scene.method, scene.kind, scene.status)
        if not isinstance(answer, Response) or (request.method, kind, answer.status) != concerned:
            return answer
        changes.append(request.target)
        return retell(answer, scene.header, change, mirror.other_digest)

    app = {"source": mirror.source, "target": mirror.target}[scene.side].app
    app.amend = amend
    ran = await mirror.sync(ALL)
    app.amend = None
    assert changes, "no answer has this header"
    assert not mirror.source.journal.violations
    assert not mirror.target.journal.violations
    mirror.clear()
    assert "INTERNAL_ERROR" not in ran.err
    if ran.status:
        assert may_fail
        assert ran.failed
    else:
        assert mirror.is_whole(), "success with a part"


# A negative answer to a HEAD is final (crazy-max/diun#1614).


@CLUMSY
@pytest.mark.parametrize("status", [404, 405, 403, 400])
async def test_a_tag_that_only_a_get_finds_is_found_in_every_run(mirror, status):
    mirror.source.app.faults.on("HEAD", "manifest").status(status).optional()
    mirror.push("v1")
    assert (await mirror.sync(V1)).statuses() == ["synced"]
    ran = await mirror.run("sync")
    assert (ran.status, ran.statuses(), ran.err) == (0, ["skipped"], "")
    moved = mirror.push("v1")
    ran = await mirror.run("sync")
    assert (ran.status, ran.statuses()) == (0, ["synced"])
    assert mirror.target.app.tags("app") == {"v1": moved.top}


async def test_a_tag_that_is_gone_is_asked_for_twice_at_most(mirror):
    mirror.push("v1")
    assert (await mirror.sync(V1)).statuses() == ["synced"]
    mirror.source.app.repositories["app"].tags.clear()
    ran = await mirror.run("sync")
    assert ran.statuses() == ["failed"]
    assert "app:v1" in only(ran.failed)
    mirror.source.journal.matching("HEAD GET", "manifest").at_most(2)


async def test_a_tag_that_is_not_there_is_asked_for_once_by_all_that_want_it(mirror):
    mirror.push("other")
    ran = await mirror.sync(*({**V1, "to": f"to{number}"} for number in range(3)))
    assert ran.statuses() == ["failed"] * 3
    mirror.source.journal.matching("HEAD GET", "manifest").exactly(1)


@CLUMSY
async def test_a_lock_finds_a_tag_that_only_a_get_finds(mirror):
    mirror.push("v1")
    mirror.write(V1)
    for _ in range(2):
        ran = await mirror.world.run("lock", "-q", "-c", str(mirror.file))
        assert (ran.status, ran.err) == (0, "")
        mirror.source.app.faults.on("HEAD", "manifest").status(404).optional()
    assert ran.out == ""


@CLUMSY
@pytest.mark.parametrize("kind", ["manifest", "blob"])
async def test_an_audit_misses_only_what_a_get_does_not_find(mirror, kind):
    mirror.push("v1")
    assert (await mirror.sync(V1)).statuses() == ["synced"]
    mirror.target.app.faults.on("HEAD", kind).status(404).optional()
    ran = await mirror.run("audit")
    assert (ran.status, ran.report["findings"]) == (0, [])


# Answers in a form that nobody asked for.


@CLUMSY
@pytest.mark.parametrize("kind", ["manifest", "tag_list", "blob"])
async def test_what_is_coded_although_nobody_asked_for_it_is_an_error(mirror, kind):
    mirror.push("v1", mirror.seed.image(sizes=(70_000, 300_000)))

    def amend(request: Request, answer: Answer) -> Answer:
        if (request.kind, request.method) != (kind, "GET") or not isinstance(answer, Response):
            return answer
        headers = [pair for pair in answer.headers if pair[0].lower() != "content-length"]
        return Response(200, [*headers, ("Content-Encoding", "gzip")], gzip.compress(answer.data))

    mirror.source.app.amend = amend
    ran = await mirror.sync(ALL)
    assert ran.status != 0
    assert mirror.target.app.tags("app") == {}
    assert "CONTENT_ERROR" in only(ran.failed)
    assert "https" not in ran.err


# What is said, and when.


@pytest.mark.parametrize("kind", ["blob", "upload"])
async def test_an_unreachable_address_of_a_location_is_said_to_be_one(mirror, kind):
    mirror.push("v1")
    if kind == "blob":
        mirror.source.app.faults.on("GET", "blob").redirect("http://storage.test")
    else:
        mirror.target.app.faults.on("POST", "upload_start").lie(
            headers={"Location": "http://storage.test/up?x=1"}
        )
    ran = await mirror.sync(V1)
    assert ran.status == 2
    assert "storage.test" in only(ran.failed)
    assert re.search("(?i)location|redirect", only(ran.failed) + str(only(ran.images)["error"]))


SUBJECT_TAG = "sha256-" + "?" * 64
LOOKUPS = {
    "fallback tag": ("GET HEAD", "manifest", SUBJECT_TAG),
    "cosign tag": ("GET HEAD", "manifest", f"{SUBJECT_TAG}.*"),
    "api": ("GET", "referrers", "*"),
}


@pytest.mark.parametrize("lookup", LOOKUPS)
@pytest.mark.parametrize("command", ["sync", "copy"])
async def test_a_look_up_that_is_refused_says_what_it_was_for(world, tmp_path, lookup, command):
    """Which look-up, why it matters, and the ways out."""
    methods, kind, reference = LOOKUPS[lookup]
    mirror = Mirror(world, tmp_path, referrers_api=lookup == "api")
    image = mirror.push("v1")
    faults = mirror.source.app.faults
    faults.on(methods, kind, reference=reference).status(403, "DENIED")
    # Nor does a listing show which tags exist.
    faults.on("GET", "tag_list").status(403, "DENIED").optional()
    if command == "sync":
        ran = await mirror.sync(V1)
    else:
        ran = await world.run("copy", "http://source.test/app:v1", "http://target.test/app:v1")
    assert ran.status != 0
    assert referrers_tag(image.top) in ran.err or image.top in ran.err
    assert re.search("signature|artifact", ran.err)
    assert "log in" not in ran.err
    assert re.search("--no-artifacts|enabled: false|pattern|glob|listing", ran.err)


async def test_a_listing_spares_the_look_up_that_is_refused(world, tmp_path):
    mirror = Mirror(world, tmp_path, **WITHOUT_API)
    mirror.push("v1")
    asked = mirror.source.app.faults.on("GET HEAD", "manifest", reference=SUBJECT_TAG + "*")
    asked.status(403).optional()
    ran = await mirror.sync(ALL)
    assert (ran.status, ran.statuses(), ran.err) == (0, ["synced"], "")


@pytest.mark.parametrize(
    ("key", "ending"),
    [("source.test", "\r\n"), ("source.test/", ""), ("https://source.test/v1/", "")],
)
async def test_a_docker_file_is_read_as_people_write_it(world, tmp_path, key, ending):
    """`base64` ends with a line break, and a key is often a URL."""
    mirror = Mirror(world, tmp_path, of={"source": {"auth": BasicAuth({"captain": "secret"})}})
    image = mirror.push("v1")
    auth = base64.b64encode(b"captain:secret").decode() + ending
    (tmp_path / "config.json").write_text(json.dumps({"auths": {key: {"auth": auth}}}))
    mirror.write(V1)
    environment = {"DOCKER_CONFIG": str(tmp_path)}
    ran = await world.run("sync", "-q", "-c", str(mirror.file), env=environment)
    assert (ran.status, ran.err) == (0, "")
    assert held(mirror.target, "app", image)


# A dry run knows less than its run.


async def rehearse(mirror: Mirror) -> tuple[Ran, Ran]:
    return await mirror.run("sync", "--dry-run"), await mirror.run("sync")


@CLUMSY
@pytest.mark.parametrize("refused", ["list", "signature", "tag"])
@pytest.mark.parametrize("heals", [True, False])
async def test_a_dry_run_after_a_refusal_shows_what_is_left_to_do(world, tmp_path, refused, heals):
    """Of a list of referrers it says nothing, for it does not ask for any."""
    mirror = Mirror(world, tmp_path, **WITHOUT_API)
    image = mirror.push("v1")
    signature = mirror.attach(image)
    name = {"list": referrers_tag(image.top), "signature": signature.top, "tag": "v1"}[refused]
    mirror.target.app.faults.on("PUT", "manifest", reference=name).status(400)
    assert (await mirror.sync(V1)).statuses() == ["failed"]
    if heals:
        mirror.target.app.faults.clear()
    dry, ran = await rehearse(mirror)
    would, does = ("skipped", "skipped") if refused == "list" else ("would_sync", "synced")
    assert ran.statuses() == [does if heals else "failed"]
    assert dry.statuses()[0] in ([would] if heals else [would, "failed"])
    assert not heals or refused != "list" or name in mirror.target.app.repositories["app"].tags
    if heals:
        assert only(dry.images)["artifacts"] == only(ran.images)["artifacts"]


def interrupted(mirror: Mirror, dice: random.Random) -> dict[str, Any]:
    """Hold images with artifacts at the source, behind slow lines, and have some requests refused.
    Return a mapping.
    """
    for number in range(dice.randint(1, 3)):
        image = mirror.push(f"v{number}", dice.choice([mirror.seed.image, mirror.seed.index])())
        for _ in range(dice.randint(1, 3)):
            signature = mirror.attach(image, dice.choice([SIGNATURE, SBOM]))
            if dice.random() < 0.3:
                mirror.attach(signature)
    for place in (mirror.source, mirror.target):
        place.change_links(up=Link(latency=0.05))
        place.app.faults.seed = dice.randrange(1000)
    refusals = [
        (mirror.source, "GET", "manifest", "*"),
        (mirror.source, "GET", "referrers", "*"),
        (mirror.source, "GET", "blob", "*"),
        (mirror.target, "POST", "upload_start", "*"),
        (mirror.target, "PUT", "manifest", "*"),
        (mirror.target, "PUT", "manifest", "sha256-*"),
    ]
    for place, method, kind, reference in dice.sample(refusals, dice.choice([1, 1, 2])):
        refused = place.app.faults.on(method, kind, reference=reference).chance(0.6)
        refused.status(dice.choice([400, 403])).optional()
    rule = dice.choice([{}, {}, {"exclude": [SBOM]}, {"require_artifacts": True}])
    return {"from": "app", "tags": tags(dice.choice(["v*", "v*", "v0"])), "artifacts": rule}


def outcomes(ran: Ran) -> dict[str, Any]:
    """Return what a dry run shows as its run does, by image."""
    return {
        each["source"]: (
            each["status"].replace("would_sync", "synced"),
            each["reason"],
            (each["error"] or {}).get("code"),
            each["artifacts"] and each["artifacts"]["synced"],
        )
        for each in ran.images
    }


@CLUMSY
async def test_a_dry_run_after_an_interruption_shows_what_the_run_then_does(
    virtual_clock, tmp_path
):
    differing = dict[int, tuple[Any, Any]]()
    for number in range(9):
        dice = random.Random(number)
        options = {name: {"referrers_api": dice.random() < 0.3} for name in ("source", "target")}
        directory = tmp_path / str(number)
        directory.mkdir()
        async with virtual() as world:
            mirror = Mirror(world, directory, of=options)
            mapping = interrupted(mirror, dice)
            end = dice.choice([0.1, 0.3, 0.5, 99, 99, 99])
            async with stopped_at(end, end):
                await mirror.sync(mapping)
            for place in (mirror.source, mirror.target):
                place.app.faults.clear()
            await anyio.sleep(dice.choice([1, 1, 400, 4000]))
            dry, ran = await rehearse(mirror)
        if outcomes(dry) != outcomes(ran):
            differing[number] = outcomes(dry), outcomes(ran)
    assert differing == {}


# An answer is taken for a list of referrers.


def take_dashes_for_digests(app: App, *, always: bool = False) -> None:
    """Let the registry resolve `sha256-HEX` as the digest `sha256:HEX`, as GitLab's does
    (oras-project/oras-go#1396): where no such tag is, or `always`.
    """

    def intercept(request: Request) -> Answer | None:
        if request.kind != "manifest" or request.method not in ("GET", "HEAD"):
            return None
        tagged = app.manifest("app", request.reference)
        named = app.manifest("app", request.reference.replace("sha256-", "sha256:"))
        if named is None or (tagged is not None and not always):
            return None
        headers = [("Content-Type", named.media_type), ("Docker-Content-Digest", named.digest)]
        return Response(200, headers, named.body)

    app.intercept = intercept


def listed(app: App, subject: Image) -> set[str]:
    """Return what the list under the fallback tag of an image names."""
    found = app.manifest("app", app.tags("app").get(referrers_tag(subject.top), ""))
    return {each["digest"] for each in json.loads(found.body)["manifests"]} if found else set()


@CLUMSY
@pytest.mark.parametrize("make", [Seed.image, Seed.index])
async def test_a_target_that_takes_a_fallback_tag_for_a_digest_gets_a_true_list(
    world, tmp_path, make
):
    mirror = Mirror(world, tmp_path, of={"target": WITHOUT_API})
    take_dashes_for_digests(mirror.target.app)
    image = mirror.push("v1", make(mirror.seed))
    signature = mirror.attach(image)
    ran = await mirror.sync(V1)
    assert (ran.status, ran.statuses(), ran.err) == (0, ["synced"], "")
    assert listed(mirror.target.app, image) == {signature.top}
    ran = await mirror.run("sync", "--recheck")
    assert (ran.status, ran.statuses()) == (0, ["skipped"])
    mirror.target.journal.matching(WRITES).none()


@CLUMSY
@pytest.mark.parametrize("make", [Seed.image, Seed.index])
async def test_a_target_that_never_shows_a_fallback_tag_is_said_to_keep_no_list(
    world, tmp_path, make
):
    mirror = Mirror(world, tmp_path, of={"target": WITHOUT_API})
    take_dashes_for_digests(mirror.target.app, always=True)
    image = mirror.push("v1", make(mirror.seed))
    signature = mirror.attach(image)
    ran = await mirror.sync(V1)
    assert ran.status != 0
    assert "another client" not in ran.err
    assert re.search(
        r"registry\b.*\b(cannot|does not)\b.*\b(keep|hold|store|show)", only(ran.failed)
    )
    assert "list" in only(ran.failed)
    assert held(mirror.target, "app", image)
    assert held(mirror.target, "app", signature)
    assert listed(mirror.target.app, image) <= {signature.top}


@CLUMSY
@pytest.mark.parametrize("place", ["fallback tag", "api"])
@pytest.mark.parametrize("what", ["the subject", "another image"])
async def test_an_index_of_platforms_at_a_source_is_no_list_of_artifacts(
    world, tmp_path, place, what
):
    mirror = Mirror(world, tmp_path, **WITHOUT_API)
    image, other = mirror.push("v1", mirror.seed.index()), mirror.seed.index()
    given = image if what == "the subject" else other
    mirror.load(other)
    if place == "fallback tag":
        mirror.load(given, referrers_tag(image.top))
    else:
        give_list(mirror.source.app, given.body)
    ran = await mirror.sync({**V1, "artifacts": {"require_artifacts": True}})
    assert ran.statuses() == ["failed"]
    assert mirror.target.app.tags("app") == {}

    ran = await mirror.sync(V1)
    assert ran.statuses() == ["synced"]
    assert only(ran.images)["artifacts"]["synced"] == 0
    assert listed(mirror.target.app, image) == set()
    assert not mirror.holds(other)


@CLUMSY
async def test_a_list_is_not_mixed_with_another_image_under_its_tag(world, tmp_path):
    """The tag stays that image's, and the run fails; or it names a list of artifacts alone."""
    mirror = Mirror(world, tmp_path, of={"target": WITHOUT_API})
    image = mirror.push("v1")
    signature = mirror.attach(image)
    other = mirror.seed.index().load_into(mirror.target.app, "app", referrers_tag(image.top))
    ran = await mirror.sync(V1)
    children = {each["digest"] for each in other.document["manifests"]}
    assert (ran.status, listed(mirror.target.app, image)) in [(0, {signature.top}), (2, children)]

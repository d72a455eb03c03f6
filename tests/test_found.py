"""Faults that public reports about other tools and registries led to, by kind.

A test knows only what a user or a registry sees. Where more than one behaviour is right, it asks
for a bound: all of it arrived, or the run failed and said so.
"""

from __future__ import annotations

import base64
import gzip
import json
import os
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from conformance.audit.rules import RULES
from conformance.client.attachments import referrers_tag
from conformance.content.images import OCI_INDEX, Image, Seed
from conformance.messages import Answer, Request, Response
from conformance.registry.app import App
from conformance.registry.storage import Stored
from conformance.registry.tokens import BasicAuth, TokenService
from conformance.server.memory import Link, Place
from tests.ends import Ran, Virtual, held, only, stopped_at, tags, virtual
from tests.found_headers import CASES, READ, SCENES, run_cell
from tests.mirrors import SBOM, SIGNATURE, WRITES, Mirror

pytestmark = [pytest.mark.anyio, pytest.mark.virtual_time]

# Registries that answer so may be asked more than once.
CLUMSY = pytest.mark.provokes(*(name for name, each in RULES.items() if each.kind == "discipline"))

V1 = {"from": "app", "tags": tags("v1")}
WITHOUT_API = {"referrers_api": False}


def listed(app: App, subject: Image) -> set[str]:
    """Return what the list under the fallback tag of an image names."""
    found = app.manifest("app", app.tags("app").get(referrers_tag(subject.top), ""))
    return (
        set() if found is None else {each["digest"] for each in json.loads(found.body)["manifests"]}
    )


# 1. An answer is taken for a list of referrers.


def answer_with(stored: Stored) -> Response:
    headers = [("Content-Type", stored.media_type), ("Docker-Content-Digest", stored.digest)]
    return Response(200, headers, stored.body)


def take_dashes_for_digests(app: App, *, always: bool = False) -> None:
    """Let the registry resolve `sha256-HEX` as the digest `sha256:HEX`, as GitLab's does
    (oras-project/oras-go#1396): where no such tag is, or `always`.
    """

    def intercept(request: Request) -> Answer | None:
        if request.kind != "manifest" or request.method not in ("GET", "HEAD"):
            return None
        tagged = app.manifest("app", request.reference)
        named = app.manifest("app", request.reference.replace("sha256-", "sha256:"))
        return answer_with(named) if named and (always or tagged is None) else None

    app.intercept = intercept


def made(seed: Seed, what: str) -> Image:
    return seed.index() if what == "an index" else seed.image()


WHAT = ["an image", "an index"]


@CLUMSY
@pytest.mark.parametrize("what", WHAT)
async def test_a_target_that_takes_a_fallback_tag_for_a_digest_gets_a_true_list(
    world, tmp_path, what
):
    mirror = Mirror(world, tmp_path, of={"target": WITHOUT_API})
    take_dashes_for_digests(mirror.target.app)
    image = mirror.push("v1", made(mirror.seed, what))
    signature = mirror.attach(image)
    ran = await mirror.sync(V1)
    assert (ran.status, ran.statuses(), ran.err) == (0, ["synced"], "")
    assert listed(mirror.target.app, image) == {signature.top}
    ran = await mirror.run("sync", "--recheck")
    assert (ran.status, ran.statuses()) == (0, ["skipped"])
    mirror.target.journal.matching(WRITES).none()


@CLUMSY
@pytest.mark.parametrize("what", WHAT)
async def test_a_target_that_never_shows_a_fallback_tag_is_said_to_keep_no_list(
    world, tmp_path, what
):
    mirror = Mirror(world, tmp_path, of={"target": WITHOUT_API})
    take_dashes_for_digests(mirror.target.app, always=True)
    image = mirror.push("v1", made(mirror.seed, what))
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
        listing = Response(200, [("Content-Type", OCI_INDEX)], given.body)
        mirror.source.app.intercept = lambda request: (
            listing if request.kind == "referrers" else None
        )
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


# 2. What cannot be read counts as absent.


CELLS = [pytest.param(scene, case) for scene, cases in CASES.items() for case in cases]


@CLUMSY
@pytest.mark.provokes(
    "body_without_digest", "location_not_given", "page_not_linked", "path_unknown"
)
@pytest.mark.parametrize(("scene", "case"), CELLS)
async def test_a_header_is_read_or_fails_the_run(world, tmp_path, scene, case):
    ran = await run_cell(world, tmp_path, SCENES[scene], CASES[scene][case])
    assert ran.status == 0 or case not in READ.get(scene, ())


# 3. A negative answer to a HEAD is final (crazy-max/diun#1614).


@CLUMSY
@pytest.mark.parametrize("status", [404, 405, 403, 400])
async def test_a_tag_that_only_a_get_finds_is_found_in_every_run(world, tmp_path, status):
    mirror = Mirror(world, tmp_path)
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


@CLUMSY
async def test_a_lock_finds_a_tag_that_only_a_get_finds(mirror):
    mirror.push("v1")
    mirror.write(V1)
    assert (await mirror.world.run("lock", "-q", "-c", str(mirror.file))).status == 0
    mirror.source.app.faults.on("HEAD", "manifest").status(404).optional()
    ran = await mirror.world.run("lock", "-q", "-c", str(mirror.file))
    assert (ran.status, ran.out, ran.err) == (0, "", "")


@CLUMSY
@pytest.mark.parametrize("kind", ["manifest", "blob"])
async def test_an_audit_misses_only_what_a_get_does_not_find(mirror, kind):
    mirror.push("v1")
    assert (await mirror.sync(V1)).statuses() == ["synced"]
    mirror.target.app.faults.on("HEAD", kind).status(404).optional()
    ran = await mirror.run("audit")
    assert (ran.status, ran.report["findings"]) == (0, [])


# 4. A dry run knows less than its run.


async def rehearse(mirror: Mirror) -> tuple[Ran, Ran]:
    return await mirror.run("sync", "--dry-run"), await mirror.run("sync")


@CLUMSY
@pytest.mark.parametrize("refused", ["list", "signature", "tag"])
@pytest.mark.parametrize("heals", [True, False])
async def test_a_dry_run_after_a_refusal_shows_what_is_left_to_do(world, tmp_path, refused, heals):
    mirror = Mirror(world, tmp_path, **WITHOUT_API)
    image = mirror.push("v1")
    signature = mirror.attach(image)
    name = {"list": referrers_tag(image.top), "signature": signature.top, "tag": "v1"}[refused]
    mirror.target.app.faults.on("PUT", "manifest", reference=name).status(400)
    assert (await mirror.sync(V1)).statuses() == ["failed"]
    if heals:
        mirror.target.app.faults.clear()
    dry, ran = await rehearse(mirror)
    assert ran.statuses() == ["synced" if heals else "failed"]
    assert dry.statuses()[0] in (["would_sync"] if heals else ["would_sync", "failed"])
    if heals:
        assert only(dry.images)["artifacts"] == only(ran.images)["artifacts"]


def interrupted(mirror: Mirror, dice: random.Random) -> dict[str, Any]:
    """Hold images with artifacts at the source, behind slow lines, and have some requests refused.
    Return a mapping.
    """
    for number in range(dice.randint(1, 3)):
        image = mirror.push(f"v{number}", made(mirror.seed, dice.choice(WHAT)))
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


@pytest.mark.slow
@CLUMSY
async def test_a_dry_run_after_an_interruption_shows_what_the_run_then_does(
    virtual_clock, tmp_path
):
    differing = dict[int, tuple[Any, Any]]()
    for number in range(60):
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


async def test_a_dry_run_knows_of_a_full_disk_what_its_run_does(world, tmp_path, monkeypatch):
    def free(path: Any, measure: Any = os.statvfs) -> os.statvfs_result:
        fields = list(measure(path))
        fields[0:2], fields[2:5] = (1, 1), (2_000_000, 1_000_000, 1_000_000)
        return os.statvfs_result(fields)

    monkeypatch.setattr(os, "statvfs", free)
    mirror = Mirror(world, tmp_path)
    mirror.push("v1", mirror.seed.image(sizes=(900_000, 900_000)))
    mirror.write(V1, registries={"target": {"url": f"oci-layout:{tmp_path / 'disk'}"}})
    dry, ran = await rehearse(mirror)
    assert (ran.status, ran.statuses()) == (2, ["failed"])
    assert (dry.status, dry.statuses()) == (2, ["failed"])


# 5. An optional look-up is refused.


SUBJECT_TAG = "sha256-" + "?" * 64
# Whose answer, to which request.
LOOKUPS = {
    "fallback tag": ("source", "GET HEAD", "manifest", SUBJECT_TAG),
    "cosign tag": ("source", "GET HEAD", "manifest", f"{SUBJECT_TAG}.*"),
    "api": ("source", "GET", "referrers", "*"),
    "list at the target": ("target", "GET HEAD", "manifest", SUBJECT_TAG),
}


@pytest.mark.parametrize("lookup", LOOKUPS)
@pytest.mark.parametrize("command", ["sync", "copy"])
async def test_a_look_up_that_is_refused_says_what_it_was_for(world, tmp_path, lookup, command):
    """Which look-up, why it matters, and the ways out."""
    side, methods, kind, reference = LOOKUPS[lookup]
    mirror = Mirror(world, tmp_path, referrers_api=lookup == "api")
    image = mirror.push("v1")
    if side == "target":
        mirror.attach(image)
    app = {"source": mirror.source, "target": mirror.target}[side].app
    app.faults.on(methods, kind, reference=reference).status(403, "DENIED")
    if side == "source":  # nor does a listing show which tags exist
        app.faults.on("GET", "tag_list").status(403, "DENIED").optional()
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
    mirror.source.app.faults.on("GET HEAD", "manifest", reference=SUBJECT_TAG + "*").status(
        403
    ).optional()
    ran = await mirror.sync({"from": "app", "tags": tags("v*")})
    assert (ran.status, ran.statuses(), ran.err) == (0, ["synced"], "")


# 6. Answers in a form that nobody asked for.


def packed(answer: Response, coding: str, body: bytes | None = None) -> Response:
    """Label an answer, and give it other bytes."""
    headers = [pair for pair in answer.headers if pair[0].lower() != "content-length"]
    data = answer.data if body is None else body
    return Response(answer.status, [*headers, ("Content-Encoding", coding)], data)


def pack(place: Place, kind: str, change: Callable[[Response], Response]) -> None:
    def amend(request: Request, answer: Answer) -> Answer:
        asked = "token" if request.path == "/token" else request.kind
        is_it = asked == kind and request.method == "GET" and isinstance(answer, Response)
        return change(answer) if is_it and answer.status == 200 else answer

    place.app.amend = amend


JSON_KINDS = ["manifest", "tag_list", "referrers", "token"]
ALL = {"from": "app", "tags": tags("v*")}


def coded(
    world: Virtual, directory: Path, kind: str, change: Callable[[Response], Response]
) -> tuple[Mirror, Image]:
    service = {"auth": TokenService(now=anyio.current_time)} if kind == "token" else {}
    mirror = Mirror(world, directory, of={"source": service})
    image = mirror.push("v1", mirror.seed.image(sizes=(70_000, 300_000)))
    mirror.attach(image)
    pack(mirror.source, kind, change)
    return mirror, image


@CLUMSY
@pytest.mark.parametrize("coding", ["gzip", "x-gzip", "GZIP"])
@pytest.mark.parametrize("kind", [*JSON_KINDS, "blob"])
async def test_what_comes_in_gzip_is_read(world, tmp_path, kind, coding):
    mirror, image = coded(
        world, tmp_path, kind, lambda answer: packed(answer, coding, gzip.compress(answer.data))
    )
    ran = await mirror.sync(ALL)
    assert (ran.status, ran.statuses(), ran.err) == (0, ["synced"], "")
    assert held(mirror.target, "app", image)
    assert held(mirror.target, "app", only(mirror.attached))


@CLUMSY
@pytest.mark.parametrize("coding", ["gzip", "br", "identity, gzip"])
@pytest.mark.parametrize("kind", ["manifest", "blob"])
async def test_bytes_that_have_their_digest_are_right_whatever_their_label(
    world, tmp_path, kind, coding
):
    mirror, image = coded(world, tmp_path, kind, lambda answer: packed(answer, coding))
    ran = await mirror.sync(ALL)
    assert (ran.status, ran.statuses(), ran.err) == (0, ["synced"], "")
    assert held(mirror.target, "app", image)


# What is wrong: the coding, the bytes, and the words that say it.
WRONG: dict[str, tuple[str, Callable[[bytes], bytes], str]] = {
    "an unknown coding": ("br", lambda data: data[::-1], r"\bbr\b"),
    "gzip that breaks off": ("gzip", lambda data: gzip.compress(data)[:-9], "gzip"),
    "gzip without end": ("gzip", lambda data: gzip.compress(bytes(20_000_000)), "gzip|longer"),
}


@CLUMSY
@pytest.mark.parametrize("kind", ["manifest", "tag_list", "blob"])
@pytest.mark.parametrize("wrong", WRONG)
async def test_what_cannot_be_decoded_is_an_error_that_names_the_coding(
    world, tmp_path, kind, wrong
):
    coding, change, words = WRONG[wrong]
    mirror, _ = coded(
        world, tmp_path, kind, lambda answer: packed(answer, coding, change(answer.data))
    )
    ran = await mirror.sync(ALL)
    assert ran.status != 0
    assert mirror.target.app.tags("app") == {}
    assert "CONTENT_ERROR" in only(ran.failed)
    assert re.search(words, only(ran.failed))
    assert "https" not in ran.err


# 7. What is said, and when.


@pytest.mark.parametrize(
    ("whole", "most"),
    [pytest.param(True, 240, id="and all behind it"), pytest.param(False, 450, id="alone")],
)
async def test_a_manifest_put_into_silence_ends_as_promised(mirror, whole, most):
    """docs/operations.md promises two minutes where a registry stops answering; what it takes to
    notice the silence comes on top. Where the registry answers others, a slow PUT has more time.
    """
    mirror.push("v1")

    async def fall_silent(request: Request) -> Answer | None:
        if (request.method, request.kind) != ("PUT", "manifest"):
            return None
        if whole:
            mirror.target.fail("silent")
        await anyio.sleep_forever()
        return None

    mirror.target.app.intercept = fall_silent
    ran = await mirror.sync(V1)
    assert ran.status == 2
    assert ran.seconds <= most


@pytest.mark.parametrize("kind", ["blob", "upload"])
async def test_an_unreachable_address_of_a_location_is_said_to_be_one(world, tmp_path, kind):
    mirror = Mirror(world, tmp_path)
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


@pytest.mark.parametrize(
    ("key", "ending"),
    [
        ("source.test", ""),
        ("source.test", "\n"),
        ("source.test", "\r\n"),
        ("source.test/", ""),
        ("http://source.test/", ""),
        ("https://source.test/", ""),
        ("https://source.test/v1/", ""),
        ("https://source.test/v2/", ""),
    ],
)
async def test_a_docker_file_is_read_as_people_write_it(world, tmp_path, key, ending):
    """`base64` ends with a line break, and a key is often a URL."""
    mirror = Mirror(world, tmp_path, of={"source": {"auth": BasicAuth({"captain": "secret"})}})
    image = mirror.push("v1")
    auth = base64.b64encode(b"captain:secret").decode() + ending
    (tmp_path / "config.json").write_text(json.dumps({"auths": {key: {"auth": auth}}}))
    mirror.write(V1)
    ran = await world.run(
        "sync", "-q", "-c", str(mirror.file), env={"DOCKER_CONFIG": str(tmp_path)}
    )
    assert (ran.status, ran.err) == (0, "")
    assert held(mirror.target, "app", image)


async def test_a_missing_attestation_is_called_one_with_its_image(world, tmp_path):
    mirror = Mirror(world, tmp_path)
    index = mirror.push("v1", mirror.seed.index(platforms=["linux/amd64"], attestations=True))
    image, attestation = (each["digest"] for each in index.document["manifests"])
    del mirror.source.app.repositories["app"].manifests[attestation]
    ran = await mirror.sync(V1)
    assert ran.status == 2
    told = only(ran.images)["error"]["message"]
    assert attestation in told
    assert "attestation" in told
    assert any(name in told for name in (image, index.top, "app:v1", "linux/amd64"))

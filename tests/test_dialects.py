"""Each registry's way to take a blob, counted on the wire: docs/design.md section 9,
docs/protocol-facts.md section 7.9.

Personas refuse what their provider refuses. Paths that a dialect avoids are counted too: zero.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from conformance.content.images import Image, Seed
from conformance.faults.rules import Rule
from conformance.journal import Entry
from conformance.messages import Answer, Content, Request, Response, error
from conformance.providers.ecr import LAG
from conformance.providers.personas import Provider
from conformance.registry.app import App
from conformance.registry.tokens import TokenService
from conformance.server.exchange import Reception
from conformance.server.memory import Link, Place
from tests.ends import Ran, Virtual, document, held, only, tags

MIB = 1 << 20
CHUNK = 16 * MIB
BIG = 35 * MIB + 7
SPANS = [f"0-{CHUNK - 1}", f"{CHUNK}-{2 * CHUNK - 1}", f"{2 * CHUNK}-{BIG - 1}"]
ACR = "team.azurecr.io"

# Made once: the bytes of the images of all tests.
_BLOBS = {
    size: Seed(size).blob(min(size, 64_000)) * (size // 64_000 + 1)
    for size in (BIG, 10 * MIB, 3 * MIB)
}


def blob(size: int) -> bytes:
    return _BLOBS[size][:size] if size in _BLOBS else Seed(size).blob(size)


def load(place: Place, *sizes: int, tag: str = "v1") -> Image:
    return (
        Seed(5)
        .image(layers=[blob(size) for size in sizes])
        .load_into(place.app, "team/app", tag=tag)
    )


def digest_of(image: Image, size: int) -> str:
    return next(digest for digest, body in image.blobs.items() if len(body) == size)


async def mirror(
    world: Virtual, source: Place, *targets: str | Place, home: Path | None = None, **top: Any
) -> Ran:
    """Copy team/app to cloud hosts by their names, without a login, or to registries of the
    network.

    With a `home` there is state, and one image goes after the other.
    """
    ends: dict[str, Any] = {"source": source}
    for number, each in enumerate(targets):
        ends[f"t{number}"] = (
            {"url": each, "auth_type": "anonymous"} if isinstance(each, str) else each
        )
    ends |= top.pop("ends", {})
    if home is not None:
        top["global"] = {"max_concurrent_transfers": 1}
    text = document(ends, {"from": "team/app", "tags": tags("*")}, **top)
    if home is not None:
        (home / "mirror.yaml").write_text(text)
    file = "-" if home is None else str(home / "mirror.yaml")
    return await world.run(
        "sync", "--json", "-q", "-c", file, stdin=text, env={"GITHUB_TOKEN": "unused"}
    )


def bodies(provider: App, method: str) -> list[Entry]:
    return [
        each
        for each in provider.journal.matching(method, "upload")
        if each.header("content-length") != "0"
    ]


def finishes(provider: App) -> list[Entry]:
    return [
        each
        for each in provider.journal.matching("PUT", "upload")
        if each.header("content-length") == "0"
    ]


def patches(provider: App) -> list[tuple[str, int, int | None]]:
    return [
        (each.header("content-range"), each.request_bytes, each.status)
        for each in bodies(provider, "PATCH")
    ]


# ACR: POST + PUT up to 16 MiB, above it chunks.


async def test_acr_gets_chunks_above_16_mib_and_whole_bodies_below(world):
    source, target = world.registry("source.test"), world.persona("acr")
    image = load(source, BIG, 10 * MIB, 3 * MIB)
    ran = await mirror(world, source, ACR)
    assert (ran.status, ran.statuses()) == (0, ["synced"]), ran.err
    assert all(target.blob("team/app", digest) == body for digest, body in image.blobs.items())
    assert patches(target) == [
        (span, n, 202) for span, n in zip(SPANS, (CHUNK, CHUNK, 3 * MIB + 7), strict=True)
    ]
    assert only(finishes(target)).query["digest"] == digest_of(image, BIG)
    assert sorted(each.request_bytes for each in bodies(target, "PUT"))[-2:] == [3 * MIB, 10 * MIB]
    assert not [each for each in bodies(target, "PUT") if each.header("content-range")]
    target.journal.matching("POST", "upload_start").exactly(4)
    target.journal.matching("GET", "upload").none()
    source.journal.matching("GET", "blob").exactly(4)
    requests = ran.totals["requests"][ACR]
    # The config is small; a PUT with a body is counted as a body.
    assert (requests["upload_start"], requests["upload_body"], requests["upload_finish"]) == (
        4,
        3 + 3,
        1,
    )


async def test_what_fits_in_one_request_is_verified_before_its_first_byte(world):
    source, target = world.registry("source.test"), world.persona("acr")
    image = load(source, 10 * MIB)
    source.app.faults.on("GET", "blob", reference=digest_of(image, 10 * MIB)).corrupt(-1)
    ran = await mirror(world, source, ACR)
    assert "CONTENT_ERROR" in only(ran.failed)
    assert [
        each for each in bodies(target, "PUT") if each.header("content-length") == str(10 * MIB)
    ] == []
    assert not target.tags("team/app")


async def test_a_blob_in_chunks_is_verified_before_it_is_closed(world):
    source, target = world.registry("source.test"), world.persona("acr")
    image = load(source, BIG)
    source.app.faults.on("GET", "blob", reference=digest_of(image, BIG)).corrupt(-1)
    ran = await mirror(world, source, ACR)
    assert "CONTENT_ERROR" in only(ran.failed)
    assert finishes(target) == []
    assert [status for _, _, status in patches(target)] == [202, 202] * 2, "it was read twice"


async def test_no_more_than_three_blobs_are_in_chunks_at_once_and_all_arrive(world):
    source = world.registry("source.test")
    target = world.persona("acr")
    world.network.listen(target, ACR, scheme="https", up=Link(bandwidth=4 * MIB))
    seed, most = Seed(6), [0]
    layers = [seed.blob(100) + bytes(17 * MIB) for _ in range(6)]
    image = seed.image(layers=layers).load_into(source.app, "team/app", tag="v1")

    def intercept(request: Request) -> Answer | None:
        most.append(target.uploads())
        return None

    target.intercept = intercept
    ran = await mirror(world, source, ACR)
    assert (ran.status, ran.statuses()) == (0, ["synced"]), ran.err
    assert held_by(target, image)
    # The others wait before they open a session, and hold nothing; the config goes whole.
    assert max(most) <= 3 + 1
    assert len(patches(target)) == 2 * 6


def held_by(provider: App, image: Image) -> bool:
    return all(provider.blob("team/app", digest) == body for digest, body in image.blobs.items())


BROKEN = 5 * MIB


class _Atomic(App):
    """A registry that keeps all of a chunk or nothing, and whose Location is good until a chunk is
    there.
    """

    def _receive(self, request: Request, digest: str | None) -> Response | Reception:
        made = super()._receive(request, digest)
        if isinstance(made, Response) or digest is not None:
            return made
        upload, came = self.repositories[request.repository].uploads[request.reference], Content()

        def finish(received: int) -> Any:
            upload.content.feed(bytes(came))
            return made.finish(received)

        def abort() -> None:
            upload.is_busy = False

        return Reception(came, finish, abort)


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("answers", ["all that came", "what is kept", "405"])
async def test_a_chunk_that_broke_goes_again_from_memory(world, answers, number):
    """From where the registry says that it has it; else all of it, to where it went."""
    source = world.registry("source.test")
    target = App() if answers == "all that came" else _Atomic()
    world.listen(target, ACR, scheme="https")
    image = load(source, BIG)
    target.faults.on("PATCH", "upload").nth(number).drop(after=BROKEN, reset=True)
    if answers == "405":
        target.faults.on("GET", "upload").status(405, "UNSUPPORTED")
    ran = await mirror(world, source, ACR)
    assert (ran.status, ran.statuses()) == (0, ["synced"]), ran.err
    assert held_by(target, image)
    sent = patches(target)
    if answers == "all that came":
        start, end = (number - 1) * CHUNK + BROKEN, number * CHUNK - 1
        assert sent.pop(number) == (f"{start}-{end}", CHUNK - BROKEN, 202)
    else:
        # Of the first chunk `0-0` is said: nothing, or one byte.
        assert sent.pop(number) == (SPANS[number - 1], CHUNK, 202)
    assert [span for span, _, _ in sent] == SPANS
    target.journal.matching("GET", "upload").exactly(1)
    target.journal.matching("POST", "upload_start").exactly(2)
    # What broke was in memory: the source is read once.
    assert [each.response_bytes for each in reads(source, image)] == [BIG]


async def test_a_registry_that_claims_more_than_was_sent_is_not_believed(world):
    """Else a chunk that it never got would be left out, or the session closed over bytes that
    nobody has verified.
    """

    def claim(request: Request, answer: Answer) -> Answer:
        asked = (
            isinstance(answer, Response) and request.method == "GET" and request.kind == "upload"
        )
        if asked and isinstance(answer, Response):
            others = [pair for pair in answer.headers if pair[0].lower() != "range"]
            return Response(answer.status, [*others, ("Range", f"0-{BIG - 1}")], b"")
        return answer

    source = world.registry("source.test")
    target = _Atomic()
    target.amend = claim
    world.listen(target, ACR, scheme="https")
    image = load(source, BIG)
    target.faults.on("PATCH", "upload").nth(1).drop(after=BROKEN, reset=True)
    ran = await mirror(world, source, ACR)
    assert (ran.status, ran.statuses()) == (0, ["synced"]), ran.err
    assert held_by(target, image)
    assert [span for span, _, _ in patches(target)] == [SPANS[0], *SPANS]


def reads(source: Place, image: Image) -> list[Entry]:
    return list(source.journal.matching("GET", "blob", reference=digest_of(image, BIG)))


async def test_a_session_that_is_gone_lets_the_blob_begin_again_at_most_twice(world):
    source, target = world.registry("source.test"), world.persona("acr")
    image = load(source, BIG)
    gone = target.faults.on("PATCH", "upload", header={"Content-Range": SPANS[1]})
    gone.first().drop(after=BROKEN, reset=True)
    ran = await mirror(world, source, ACR)
    assert ran.status == 0, ran.err
    assert held_by(target, image)
    assert [span for span, _, _ in patches(target)] == [*SPANS[:2], *SPANS]
    target.journal.matching("GET", "upload", status=404).exactly(1)
    target.journal.matching("POST", "upload_start").exactly(3)


async def test_a_registry_that_always_loses_the_second_chunk_is_given_up(world):
    source, target = world.registry("source.test"), world.persona("acr")
    load(source, BIG)
    target.faults.on("PATCH", "upload", header={"Content-Range": SPANS[1]}).forget()
    ran = await mirror(world, source, ACR)
    assert "BLOB_UPLOAD_UNKNOWN" in only(ran.failed)
    assert [span for span, _, _ in patches(target)] == SPANS[:2] * 5
    assert finishes(target) == []


async def test_a_chunk_that_is_too_large_is_refused_and_the_image_fails(world):
    source, target = world.registry("source.test"), world.persona("acr")
    load(source, BIG)
    target.faults.on("PATCH", "upload").status(413, early=True)
    ran = await mirror(world, source, ACR)
    assert "TARGET_ERROR" in only(ran.failed)
    assert "413" in only(ran.failed)
    assert len(patches(target)) == 1
    assert bodies(target, "PUT") == [] or BIG not in [
        each.request_bytes for each in bodies(target, "PUT")
    ]


async def test_a_429_between_chunks_is_waited_out_and_nothing_is_sent_twice(world):
    source, target = world.registry("source.test"), world.persona("acr")
    image = load(source, BIG)
    target.faults.on("PATCH", "upload").nth(2).status(429, retry_after=90, early=True)
    ran = await mirror(world, source, ACR)
    assert ran.status == 0, ran.err
    assert held_by(target, image)
    assert 90 <= ran.seconds < 120
    assert [(span, status) for span, _, status in patches(target)] == [
        (SPANS[0], 202), (SPANS[1], 429), (SPANS[1], 202), (SPANS[2], 202)
    ]  # fmt: skip
    target.journal.matching("POST", "upload_start").exactly(2)
    # For so long the source is not kept waiting: what follows is read behind the chunk that has
    # arrived.
    first, rest = reads(source, image)
    assert first.response_bytes < BIG
    assert rest.header("range").startswith("bytes=")
    assert int(rest.header("range")[6:-1]) <= CHUNK


async def test_a_body_that_a_limit_refuses_goes_again_to_the_same_session(world):
    source, target = world.registry("source.test"), world.registry("target.test")
    image = load(source, 70_000)
    body = target.app.faults.on("PUT", "upload", where=lambda asked: asked.length() == 70_000)
    body.first(3).status(429)
    ran = await mirror(world, source, target)
    assert ran.status == 0, ran.err
    assert held_by(target.app, image)
    sent = [each.status for each in bodies(target.app, "PUT") if each.request_bytes == 70_000]
    assert sent == [429, 429, 429, 201]
    target.journal.matching("POST", "upload_start").exactly(2)
    target.journal.matching("DELETE").exactly(0)


@pytest.mark.parametrize("status", [400, 404, 416])
async def test_an_upload_that_has_ended_with_a_429_begins_again(world, status):
    source, target = world.registry("source.test"), world.registry("target.test")
    image = load(source, 70_000)
    refusals = [429, status]
    for refusal in refusals:
        rule = target.app.faults.on("PUT", "upload", where=lambda asked: asked.length() == 70_000)
        rule.first().status(refusal)
    ran = await mirror(world, source, target)
    assert ran.status == 0, ran.err
    assert held_by(target.app, image)
    sent = [each.status for each in bodies(target.app, "PUT") if each.request_bytes == 70_000]
    assert sent == [*refusals, 201]
    target.journal.matching("POST", "upload_start").exactly(3)


@pytest.mark.parametrize("status", [400, 404, 416])
async def test_an_upload_that_a_429_ends_each_time_fails_by_what_the_registry_said(
    world: Virtual, status: int
) -> None:
    source, target = world.registry("source.test"), world.registry("target.test")
    load(source, 70_000)
    refusals = [429, status] * 5

    def refuse(request: Request) -> Answer | None:
        if request.method != "PUT" or request.length() != 70_000:
            return None
        return error(refusals.pop(0), "BLOB_UPLOAD_INVALID", "no such upload")

    target.app.intercept = refuse
    ran = await mirror(world, source, target)
    assert ran.status == 2
    assert not refusals
    assert (
        f"status {status}: BLOB_UPLOAD_INVALID no such upload"
        in only(ran.images)["error"]["message"]
    )
    target.journal.matching("PATCH").none()  # the way of the body was not at fault


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("bandwidth", [None, 100_000])
async def test_a_small_blob_that_was_refused_is_read_once(
    world: Virtual, status: int, bandwidth: int | None
) -> None:
    """Whether it came in one piece or in many."""
    link = Link(latency=0.02) if bandwidth is None else Link(latency=0.02, bandwidth=bandwidth)
    source, target = world.registry("source.test", down=link), world.registry("target.test")
    image = load(source, 70_000)
    refused = target.app.faults.on("PUT", "upload", where=lambda asked: asked.length() == 70_000)
    refused.first(2).status(status, early=False)
    ran = await mirror(world, source, target)
    assert ran.status == 0, ran.err
    assert held_by(target.app, image)
    source.journal.matching("GET", "blob", reference=digest_of(image, 70_000)).exactly(1)
    sent = [each.status for each in bodies(target.app, "PUT") if each.request_bytes == 70_000]
    assert sent == [status, status, 201]


async def test_a_small_blob_that_was_refused_at_once_is_read_once(world: Virtual) -> None:
    """The refusals come with the first bytes of the body."""
    source = world.registry("source.test", down=Link(latency=0.02, bandwidth=100_000))
    target = world.registry("target.test")
    image = load(source, 70_000)
    refused = target.app.faults.on("PUT", "upload", where=lambda asked: asked.length() == 70_000)
    refused.first(3).status(429, early=True)
    ran = await mirror(world, source, target)
    assert ran.status == 0, ran.err
    assert held_by(target.app, image)
    source.journal.matching("GET", "blob", reference=digest_of(image, 70_000)).exactly(1)


async def test_a_large_blob_that_was_refused_takes_no_memory(world: Virtual) -> None:
    source, target = world.registry("source.test"), world.registry("target.test")
    image = load(source, 3 * MIB)
    refused = target.app.faults.on("PUT", "upload", where=lambda asked: asked.length() == 3 * MIB)
    refused.first().status(429)
    ran = await mirror(world, source, target)
    assert ran.status == 0, ran.err
    source.journal.matching("GET", "blob", reference=digest_of(image, 3 * MIB)).exactly(2)


def closing(request: Request, answer: Answer) -> Answer:
    if isinstance(answer, Response):
        answer.close = True
    return answer


@pytest.mark.parametrize("arrived", [True, False])
async def test_a_lost_last_answer_is_asked_for_before_anything_is_sent(world, arrived):
    source, target = world.registry("source.test"), world.persona("acr")
    image = load(source, BIG)
    digest = digest_of(image, BIG)
    # On connections of their own: one that was idle may have died before its request came,
    # which is sent anew.
    target.amend = closing
    target.faults.on("PUT", "upload", query={"digest": digest}).first().drop(
        at="answer" if arrived else "request"
    )
    ran = await mirror(world, source, ACR)
    assert ran.status == 0, ran.err
    assert held_by(target, image)
    assert [span for span, _, _ in patches(target)] == SPANS
    assert [each.query["digest"] for each in finishes(target)] == [digest] * (1 if arrived else 2)
    assert len(target.journal.matching("HEAD", "blob", reference=digest)) == (1 if arrived else 3)
    target.journal.matching("GET", "upload").exactly(0 if arrived else 1)
    target.journal.matching("DELETE", "upload").none()
    assert len(reads(source, image)) == 1


@pytest.mark.parametrize("times", [1, 2, 3])
async def test_a_login_that_expires_between_chunks_is_renewed_until_fresh_ones_fail(world, times):
    source = world.registry("source.test")
    target = world.registry(ACR, auth=TokenService({"u": "p"}))
    image = load(source, BIG)
    expired = target.app.faults.on("PATCH", "upload", header={"Content-Range": SPANS[1]}).first(
        times
    )
    expired.challenge(realm=f"http://{ACR}/token", service="registry.test", error="invalid_token")
    who = {
        "url": target.url,
        "auth_type": "basic",
        "credentials": {"username": "u", "password": "p"},
    }
    ran = await mirror(world, source, ends={"t": who})
    spans = [each.header("content-range") for each in bodies(target.app, "PATCH")]
    if times < 3:
        assert ran.status == 0, ran.err
        assert held_by(target.app, image)
        assert spans == [SPANS[0], *[SPANS[1]] * (times + 1), SPANS[2]]
        assert len(reads(source, image)) == 1
    else:
        assert ran.status == 4
        assert spans == [SPANS[0], *[SPANS[1]] * 3]
    target.journal.matching("POST", "upload_start").exactly(2)


@pytest.mark.parametrize("where", ["POST upload_start", "PATCH upload"])
async def test_acr_leads_no_upload_to_another_host(world, where):
    """docs/specification.md section 8.2.2: neither a chunk nor the token goes there."""
    source, target = world.registry("source.test"), world.persona("acr")
    other = world.listen(App(), "other.test", scheme="https")
    load(source, BIG)
    rule = target.faults.on(*where.split(), query={} if "PATCH" in where else None)
    rule.lie(headers={"Location": "https://other.test/v2/team/app/blobs/uploads/1?_state=1"})
    ran = await mirror(world, source, ACR)
    assert ran.status == 2
    assert "another host (other.test)" in only(ran.failed)
    assert other.journal.entries == []
    assert len(patches(target)) == (1 if "PATCH" in where else 0)
    assert finishes(target) == []


@pytest.mark.parametrize("broken", [False, True])
async def test_a_staged_blob_goes_in_chunks_from_its_file(world, broken):
    source, other = world.registry("source.test"), world.registry("other.test")
    target = world.persona("acr", resumable=True)
    image = load(source, BIG, 3 * MIB)
    if broken:
        target.faults.on("PATCH", "upload").nth(2).drop(after=BROKEN, reset=True)
    ran = await mirror(world, source, ACR, other)
    assert ran.statuses() == ["synced", "synced"], ran.err
    assert held_by(target, image)
    assert held(other, "team/app", image)
    rest = f"{CHUNK + BROKEN}-{2 * CHUNK - 1}"
    assert [span for span, _, _ in patches(target)] == (
        [*SPANS[:2], rest, SPANS[2]] if broken else SPANS
    )
    other.journal.matching("PATCH", "upload").none()
    assert [each.response_bytes for each in reads(source, image)] == [BIG]


# GHCR and others: POST + PUT, and one PATCH where that is refused.


async def test_ghcr_gets_whole_bodies(world):
    source, target = world.registry("source.test"), world.persona("ghcr")
    image = load(source, BIG, 3 * MIB)
    ran = await mirror(world, source, "ghcr.io")
    assert ran.status == 0, ran.err
    assert held_by(target, image)
    target.journal.matching("PATCH", "upload").none()
    assert [len(bodies(target, "PUT")), len(finishes(target))] == [3, 0]
    target.journal.matching("POST", "upload_start").exactly(3)


REFUSALS = ["ghcr_405", "ghcr_416"]


@pytest.mark.parametrize("name", REFUSALS)
async def test_a_refused_put_is_followed_by_one_patch_and_never_tried_again(world, name, tmp_path):
    source, target = world.registry("source.test"), world.persona(name)
    image = load(source, 3 * MIB)
    ends = {"t": {"url": target.row.hosts["registry"], "auth_type": "ghcr"}}
    ran = await mirror(world, source, ends=ends, home=tmp_path)
    assert ran.status == 0, ran.err
    assert held_by(target, image)
    refused = [each.header("content-length") for each in bodies(target, "PUT")]
    assert sorted(refused) == sorted({*refused}), "each size once"
    assert {span for span, _, _ in patches(target)} == {""}
    assert sorted(count for _, count, _ in patches(target)) == sorted(
        map(len, image.blobs.values())
    )
    assert len(finishes(target)) == 2
    target.journal.matching("POST", "upload_start").exactly(2 + len(refused))
    target.journal.clear()
    # Of the next run too, and of another repository.
    more = Seed(9).image(layers=[blob(3 * MIB + 1)]).load_into(source.app, "team/app", tag="v2")
    again = await mirror(world, source, ends=ends, home=tmp_path)
    assert sorted(again.statuses()) == ["skipped", "synced"]
    assert held_by(target, more)
    big = [
        each for each in bodies(target, "PUT") if each.header("content-length") == str(3 * MIB + 1)
    ]
    assert big == []
    if name == "ghcr_405":
        assert bodies(target, "PUT") == []
        target.journal.matching("POST", "upload_start", status=202).exactly(2)


async def test_a_limit_of_size_says_nothing_of_smaller_bodies(world, tmp_path):
    """What is too long goes by one PATCH, and what is longer, in this run and the next; the rest by
    PUT.
    """
    source, target = (world.registry("source.test"), world.registry("target.test"))
    load(source, 3 * MIB, 70_000)
    large = target.app.faults.on(
        "PUT", "upload", where=lambda asked: (asked.length() or 0) > 2 * MIB
    )
    large.status(413, early=True)
    ran = await mirror(world, source, target, home=tmp_path)
    assert (ran.status, len(large.struck)) == (0, 1), ran.err
    assert [count for _, count, _ in patches(target.app)] == [3 * MIB]
    image = (
        Seed(9)
        .image(layers=[blob(3 * MIB + 1), blob(80_000)])
        .load_into(source.app, "team/app", tag="v2")
    )
    target.journal.clear()
    again = await mirror(world, source, target, home=tmp_path)
    assert (again.status, len(large.struck)) == (0, 1), again.err
    assert held(target, "team/app", image)
    assert [count for _, count, _ in patches(target.app)] == [3 * MIB + 1]
    assert [
        each.request_bytes for each in bodies(target.app, "PUT") if each.request_bytes > 1000
    ] == [80_000]


@pytest.mark.parametrize("often", [2, 3])
async def test_a_put_that_breaks_whenever_it_is_tried_is_followed_by_one_patch(world, often):
    source, target = world.registry("source.test"), world.persona("ghcr")
    image = load(source, 3 * MIB)
    for method in ("PUT", "PATCH")[: often - 1]:
        rule = target.faults.on(method, "upload", header={"Content-Length": str(3 * MIB)})
        rule.drop(after=MIB, reset=True)
    ran = await mirror(world, source, "ghcr.io")
    sizes = [each.header("content-length") for each in bodies(target, "PUT")]
    assert sizes.count(str(3 * MIB)) == 2
    # Once for all that was learnt of it, or as often as a body is tried.
    sent = [count for span, count, _ in patches(target) if count]
    assert sent == [3 * MIB] if often == 2 else {*sent} == {MIB}
    assert (ran.status == 0) == (often == 2)
    assert held_by(target, image) == (often == 2)


async def test_a_registry_that_takes_no_start_is_not_tried_by_other_ways(world):
    source, target = (world.registry("source.test"), world.registry("target.test"))
    load(source, 3 * MIB)
    target.app.faults.on("POST", "upload_start").status(405)
    ran = await mirror(world, source, target)
    assert "read-only" in ran.err
    # Each blob by the POST that asks and starts, then by a plain one.
    target.journal.matching("POST", "upload_start").at_most(4)
    target.journal.matching("PATCH", "upload").none()
    source.journal.matching("GET", "blob").none()


# Google: whole bodies, never PATCH.


@pytest.mark.parametrize("name", ["gar_open", "gcr_open"])
async def test_google_gets_whole_bodies_at_the_locations_that_it_gives(world, name):
    source, target = world.registry("source.test"), world.persona(name)
    image = load(source, BIG, 3 * MIB)
    ran = await mirror(world, source, target.row.hosts["registry"])
    assert ran.status == 0, ran.err
    assert held_by(target, image)
    sent = target.journal.matching("PUT", "upload")
    assert [each.target.startswith("/artifacts-uploads/namespaces/team/") for each in sent] == [
        True
    ] * 3
    assert sorted(each.request_bytes for each in sent)[1:] == [3 * MIB, BIG]
    target.journal.matching("PATCH", "upload").none()
    target.journal.matching("POST", "upload_start").exactly(3)


async def test_a_refused_put_at_google_is_no_reason_for_a_patch(world):
    source, target = world.registry("source.test"), world.persona("gar_open")
    load(source, 3 * MIB)
    rule = target.faults.on("PUT", where=lambda asked: asked.length() == 3 * MIB)
    rule.status(413, early=True)
    ran = await mirror(world, source, target.row.hosts["registry"])
    assert "413" in only(ran.failed)
    target.journal.matching("PATCH").none()


# ECR: tags that never move, mounts, blobs that are seen late, repositories that are not there.

ECR = "123456789012.dkr.ecr.eu-west-1.amazonaws.com"
MOUNTING = "210987654321.dkr.ecr.eu-west-1.amazonaws.com"


def created(provider: Provider, *names: str) -> Provider:
    for name in names:
        assert provider.repositories[name].tags == {}
    return provider


@pytest.fixture(params=["TAG_INVALID", "ImageTagAlreadyExistsException"])
def says(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def saying(site: App, code: str) -> None:
    def amend(request: Request, answer: Answer) -> Answer:
        refused = (
            isinstance(answer, Response) and answer.status == 400 and request.kind == "manifest"
        )
        if refused and code != "TAG_INVALID":
            return Response(
                400, [], b'{"errors": [{"code": "%s", "message": "it exists"}]}' % code.encode()
            )
        return answer

    site.amend = amend


def put_there(site: App, image: Image, tag: str) -> Rule:
    """Let the tag appear between the look at the target and the push: another run is faster."""
    late = site.faults.on("HEAD", "manifest", reference=tag).first()
    late.status(404, "MANIFEST_UNKNOWN")
    image.load_into(site, "team/app", tag=tag)
    return late


@pytest.mark.provokes("manifest_refused", "refused_as_wrong")
async def test_ecr_with_another_image_under_a_tag_that_never_moves_is_skipped(world, says):
    source, target = world.registry("source.test"), world.persona("ecr", immutable_tags=True)
    load(source, 3 * MIB)
    other = Seed(8).image().load_into(target, "team/app", tag="v1")
    saying(target, says)
    ran = await mirror(world, source, ECR)
    assert (ran.status, ran.statuses(), ran.err) == (0, ["skipped"], "")
    assert only(ran.images)["reason"] == "tag_immutable_exists"
    assert only(ran.images)["digest"] == other.top
    assert target.tags("team/app") == {"v1": other.top}
    target.journal.matching("PUT", "manifest").exactly(1)
    target.journal.matching("HEAD", "manifest", reference="v1").exactly(2)


@pytest.mark.provokes("manifest_refused", "refused_as_wrong")
@pytest.mark.parametrize("host", [ECR, "target.test"])
async def test_the_same_image_under_a_tag_that_never_moves_is_skipped_everywhere(world, host, says):
    source = world.registry("source.test")
    site = world.persona("ecr", immutable_tags=True) if host == ECR else App(immutable_tags=True)
    target: str | Place = host if host == ECR else world.listen(site, host)
    image = load(source, 3 * MIB)
    put_there(site, image, "v1")
    saying(site, says)
    ran = await mirror(world, source, target)
    assert (ran.status, ran.statuses(), ran.err) == (0, ["skipped"], "")
    assert only(ran.images)["reason"] == "tag_immutable_exists"
    assert only(ran.images)["digest"] == image.top
    site.journal.matching("PUT", "manifest").exactly(1)
    again = await mirror(world, source, target)
    assert only(again.images)["reason"] == "unchanged"


@pytest.mark.provokes("manifest_refused", "refused_as_wrong")
async def test_another_image_under_a_tag_that_never_moves_is_an_error_elsewhere(world, says):
    source = world.registry("source.test")
    target = world.registry("target.test", immutable_tags=True)
    load(source, 3 * MIB)
    other = Seed(8).image().load_into(target.app, "team/app", tag="v1")
    saying(target.app, says)
    ran = await mirror(world, source, target)
    assert ran.statuses() == ["failed"]
    assert "TARGET_ERROR" in only(ran.failed)
    assert target.app.tags("team/app") == {"v1": other.top}


async def test_a_tag_that_this_run_has_put_is_synced_though_its_answer_was_lost(world):
    source, target = world.registry("source.test"), world.persona("ecr", immutable_tags=True)
    load(source, 3 * MIB)
    created(target, "team/app")
    target.faults.on("PUT", "manifest", reference="v1").first().status(504, at="answer")
    ran = await mirror(world, source, ECR)
    assert (ran.status, ran.statuses(), ran.err) == (0, ["synced"], "")
    target.journal.matching("PUT", "manifest").exactly(2)


@pytest.mark.provokes("manifest_refused", "refused_as_wrong")
async def test_nothing_is_hung_on_an_image_that_a_tag_does_not_name(world):
    source, target = world.registry("source.test"), world.persona("ecr", immutable_tags=True)
    image = load(source, 3 * MIB)
    Seed(7).artifact(image).load_into(source.app, "team/app")
    Seed(8).image().load_into(target, "team/app", tag="v1")
    ran = await mirror(world, source, ECR, defaults={"artifacts": {"enabled": True}})
    assert (ran.status, ran.statuses(), ran.err) == (0, ["skipped"], "")
    assert only(ran.images)["artifacts"]["failed"] == 0
    target.journal.matching("PUT", "manifest").exactly(1)


@pytest.mark.provokes("manifest_refused", "refused_as_wrong")
async def test_who_waits_for_an_image_that_was_not_put_puts_it(world):
    """Two tags of one image, one of them taken by another: the other is put, and the index that
    names it too.
    """
    source, target = world.registry("source.test"), world.persona("ecr", immutable_tags=True)
    seed = Seed(5)
    image = seed.image(layers=[blob(3 * MIB)])
    for tag in ("v1", "v2"):
        image.load_into(source.app, "team/app", tag=tag)
    index = seed.index([image, seed.image(architecture="arm64")]).load_into(
        source.app, "team/app", tag="v3"
    )
    other = Seed(8).image().load_into(target, "team/app", tag="v1")
    ran = await mirror(world, source, ECR)
    assert (ran.status, ran.statuses(), ran.err) == (0, ["skipped", "synced", "synced"], "")
    assert target.tags("team/app") == {"v1": other.top, "v2": image.top, "v3": index.top}


@pytest.mark.parametrize(("host", "mounts"), [(ECR, False), (MOUNTING, True)])
async def test_ecr_mounts_where_the_account_says_so_and_else_takes_the_session(world, host, mounts):
    source = world.registry("source.test")
    target = created(world.persona("ecr_mounting" if mounts else "ecr"), "one", "two")
    image = Seed(5).image(layers=[blob(3 * MIB)])
    for name in ("one", "two"):
        image.load_into(source.app, name, tag="v1")
    ends = {"source": source, "t": {"url": host, "auth_type": "anonymous"}}
    text = document(ends, {"from": "one", "tags": tags("v1")}, {"from": "two", "tags": tags("v1")})
    ran = await world.run("sync", "--json", "-v", "-c", "-", stdin=text)
    assert ran.statuses() == ["synced", "synced"], ran.err
    assert ran.err.count("BLOB_MOUNTING") == (0 if mounts else 1)
    asked = [
        each for each in target.journal.matching("POST", "upload_start") if each.query.get("mount")
    ]
    assert [each.status for each in asked] == ([201, 201] if mounts else [202])
    # A refused mount is the session: no other is opened for that blob.
    assert len(target.journal.matching("POST", "upload_start")) == 4
    assert len(target.journal.matching("PUT", "upload")) == (2 if mounts else 4)
    assert sum(each["blobs"]["mounted"] for each in ran.images) == (2 if mounts else 0)


@pytest.mark.provokes("manifest_names_absent")
@pytest.mark.parametrize(("lag", "puts"), [(0.4, 2), (3.0, 4)])
async def test_ecr_may_see_a_blob_late(world, lag, puts):
    """The manifest is put again after 0.5, 1 and 2 s (I5); no blob is asked for, or sent again."""
    source, target = world.registry("source.test"), created(world.persona("ecr"), "team/app")
    image = load(source, 3 * MIB)
    target.notes[LAG] = lag
    ran = await mirror(world, source, ECR)
    assert (ran.status, ran.statuses()) == (0, ["synced"]), ran.err
    assert held_by(target, image)
    target.journal.matching("PUT", "manifest").exactly(puts)
    target.journal.matching("PUT", "upload").exactly(2)


@pytest.mark.parametrize("code", ["NAME_UNKNOWN", "RepositoryNotFoundException"])
async def test_a_missing_ecr_repository_is_told_with_the_command_that_creates_it(world, code):
    source, target = world.registry("source.test"), world.persona("ecr")
    load(source, 3 * MIB)
    if code != "NAME_UNKNOWN":
        target.faults.on("POST", "upload_start").status(404, code)
    ran = await mirror(world, source, ECR)
    assert (ran.status, ran.statuses()) == (2, ["failed"])
    assert "TARGET_ERROR" in only(ran.failed)
    assert "--repository-name team/app" in ran.err
    # One upload start finds out; no source blob is opened, and nobody else asks.
    target.journal.matching("POST", "upload_start").at_most(2)
    source.journal.matching("GET", "blob").none()

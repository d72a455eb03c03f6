"""What breaks in the middle of a blob goes on where it broke: docs/design.md section 6, rule 16,
counted on the wire.

Registries and the program share one loop on a clock that jumps (`ends.virtual`). The target is
strict, which keeps what came of a broken body as distribution 3 does, or one that forgets, as 2.8.2
does.
"""

from __future__ import annotations

import anyio
import pytest

from conformance.content.images import Image, Seed
from conformance.journal import Entry
from conformance.messages import Answer, Request, Response
from conformance.registry.app import App
from conformance.registry.tokens import TokenService
from conformance.server.exchange import Reception
from conformance.server.memory import Link, Place
from tests.ends import Ran, held, only, tags

MIB = 1 << 20
SIZE = 3 * MIB + 5


def load(place: Place, *sizes: int, number: int = 71) -> tuple[Image, str]:
    """Load an image with layers of these sizes; return it and the digest of its largest blob."""
    image = Seed(number).image(layers=[Seed(number + n).blob(size) for n, size in enumerate(sizes)])
    image.load_into(place.app, "app", tag="v1")
    return image, max(image.blobs, key=lambda digest: len(image.blobs[digest]))


def pulls(place: Place, digest: str) -> list[Entry]:
    return list(place.journal.matching("GET", "blob", reference=digest))


def sends(place: Place, digest: str) -> list[Entry]:
    return [
        each
        for each in place.journal.matching("PUT", "upload")
        if each.query.get("digest") == digest
    ]


def arrived(image: Image, target: Place, ran: Ran) -> None:
    """The image is there, byte for byte, and that is what the run says."""
    assert (ran.status, ran.failed) == (0, []), ran.err
    assert held(target, "app", image)


# A source that breaks.


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("after", [1, 300_000, SIZE - 1])
async def test_a_broken_source_body_goes_on_while_the_put_stays_open(world, after, reset):
    source, target = world.registry("source.test"), world.registry("target.test")
    image, digest = load(source, SIZE)
    source.app.faults.on("GET", "blob", reference=digest).first().drop(
        after=after, of="response", reset=reset
    )
    arrived(image, target, await world.copy(source, target))
    first, rest = pulls(source, digest)
    assert first.header("range") == ""
    # A reset may take with it what was under way.
    began = int(rest.header("range").removeprefix("bytes=").removesuffix("-") or 0)
    assert began == after if not reset else began <= after
    assert rest.response_bytes == SIZE - began
    assert only(sends(target, digest)).request_bytes == SIZE
    target.journal.matching("POST", "upload_start").exactly(2)
    target.journal.matching("GET", "upload").none()


async def test_a_source_that_breaks_every_mebibyte_is_read_once(world):
    source, target = world.registry("source.test"), world.registry("target.test")
    image, digest = load(source, 12 * MIB)
    source.app.faults.on("GET", "blob", reference=digest).drop(after=MIB, of="response")
    arrived(image, target, await world.copy(source, target))
    assert [each.header("range") for each in pulls(source, digest)] == [
        "", *(f"bytes={n * MIB}-" for n in range(1, 12))
    ]  # fmt: skip
    assert sum(each.response_bytes for each in pulls(source, digest)) == 12 * MIB
    assert only(sends(target, digest)).request_bytes == 12 * MIB


@pytest.mark.parametrize(("resumable", "again"), [(False, 4), (True, 5)])
async def test_a_source_that_breaks_without_progress_is_given_up(world, resumable, again):
    """Five attempts without a mebibyte between them; then the blob begins again four times, or goes
    on five times.
    """
    source, target = (
        world.registry("source.test"),
        world.registry("target.test", resumable=resumable),
    )
    _, digest = load(source, SIZE)
    source.app.faults.on("GET", "blob", reference=digest, header={"Range": "*"}).drop(
        of="response", after=0
    )
    source.app.faults.on("GET", "blob", reference=digest).drop(of="response", after=MIB)
    ran = await world.copy(source, target)
    assert ran.status == 2
    assert "NETWORK_ERROR" in only(ran.failed)
    assert len(pulls(source, digest)) == 1 + 4 + again
    assert not target.app.tags("app")


class _Whole(App):
    """A registry without ranges: 200, and all of it."""

    def start(self, request: Request) -> Answer | Reception:
        request.headers = [
            (name, value) for name, value in request.headers if name.lower() != "range"
        ]
        return super().start(request)


def _elsewhere(request: Request, answer: Answer) -> Answer:
    if isinstance(answer, Response) and answer.status == 206:
        headers = dict(answer.headers)
        first, _, last = headers["Content-Range"].removeprefix("bytes ").partition("-")
        headers["Content-Range"] = f"bytes {int(first) + 1}-{last}"
        answer.headers = list(headers.items())
    return answer


@pytest.mark.parametrize("how", ["whole", "elsewhere", "unsaid", "refused"])
async def test_only_the_right_rest_is_taken_else_the_blob_is_read_again(world, how):
    """Behind the same request to the target, which gets what it lacks."""
    source = world.listen(_Whole() if how == "whole" else App(), "source.test")
    target = world.registry("target.test", resumable=False)
    image, digest = load(source, SIZE)
    source.app.faults.on("GET", "blob", reference=digest).first().drop(after=MIB, of="response")
    part = {"Range": "*"}
    if how == "elsewhere":
        source.app.amend = _elsewhere
    elif how == "unsaid":
        source.app.faults.on("GET", "blob", header=part).lie(headers={"Content-Range": None})
    elif how == "refused":
        source.app.faults.on("GET", "blob", header=part).status(416)
    arrived(image, target, await world.copy(source, target))
    assert [each.header("range") for each in pulls(source, digest)] == ["", f"bytes={MIB}-", ""]
    assert only(sends(target, digest)).request_bytes == SIZE
    target.journal.matching("GET", "upload").none()
    target.journal.matching("HEAD", "blob").none()


async def test_a_source_is_waited_for_no_longer_than_twenty_seconds(world):
    source, target = (world.registry("source.test"), world.registry("target.test", resumable=False))
    image, digest = load(source, SIZE)
    faults = source.app.faults
    faults.on("GET", "blob", reference=digest).first().drop(after=MIB, of="response")
    faults.on("GET", "blob", reference=digest, header={"Range": "*"}).first().status(
        503, retry_after=15
    )
    faults.on("GET", "blob", reference=digest, header={"Range": "*"}).first().status(
        503, retry_after=15
    )
    began = anyio.current_time()
    arrived(image, target, await world.copy(source, target))
    broken, _ = sends(target, digest)
    # The fourth begins anew, when the window opens again: the registry has asked for that of
    # everybody.
    assert [round(each.time - began) for each in pulls(source, digest)] == [0, 0, 15, 30]
    assert broken.status is None


async def test_the_rest_of_a_blob_behind_a_redirect_is_asked_for_at_the_registry(world):
    """A signed URL that was used is not used again (docs/protocol-facts.md section 1.13)."""
    provider, target = world.persona("redirecting"), world.registry("target.test")
    image = Seed(72).image(layers=[Seed(73).blob(SIZE)]).load_into(provider, "app", tag="v1")
    digest = max(image.blobs, key=lambda each: len(image.blobs[each]))
    storage = provider.sites["storage"]
    storage.faults.on("GET", path=f"*{digest[7:]}").first().drop(after=MIB, of="response")
    registries = {"source": f"https://{provider.row.hosts['registry']}", "target": target}
    ran = await world.sync(registries, {"from": "app", "tags": tags("v1")})
    assert ran.status == 0, ran.err
    assert held(target, "app", image)
    ranges = [f"bytes={MIB}-"]
    asked = provider.journal.matching("GET", "blob", reference=digest)
    assert [each.header("range") for each in asked] == ["", *ranges]
    given_out = [each for each in storage.journal.entries if digest[7:] in each.target]
    assert [each.header("range") for each in given_out] == ["", *ranges]
    assert len({each.target for each in given_out}) == 1 + (
        given_out[0].target != given_out[1].target
    )


@pytest.mark.parametrize("size", [2 * MIB, 500])
async def test_a_blob_for_several_targets_is_read_once_though_it_breaks(world, size):
    """On its way to disk, and into memory."""
    source = world.registry("source.test")
    targets = {name: world.registry(f"{name}.test") for name in ("one", "two")}
    image, digest = load(source, size)
    digest = next(each for each, body in image.blobs.items() if len(body) == size)
    source.app.faults.on("GET", "blob", reference=digest).first().drop(after=200, of="response")
    ran = await world.sync({"source": source, **targets}, {"from": "app", "tags": tags("v1")})
    assert ran.status == 0, ran.err
    assert all(held(target, "app", image) for target in targets.values())
    assert [each.header("range") for each in pulls(source, digest)] == ["", "bytes=200-"]
    assert sum(each.response_bytes for each in pulls(source, digest)) == size


async def test_a_corrupted_rest_is_never_committed(world):
    source, target = world.registry("source.test"), world.registry("target.test")
    _, digest = load(source, SIZE)
    source.app.faults.on("GET", "blob", reference=digest).first().drop(after=MIB, of="response")
    # The rest is wrong, and so is the whole blob when it is read once more.
    source.app.faults.on("GET", "blob", reference=digest).corrupt(7)
    ran = await world.copy(source, target)
    assert ran.status == 2
    assert "CONTENT_ERROR" in only(ran.failed)
    assert digest not in target.app.repositories["app"].blobs


# A target that breaks.


@pytest.mark.parametrize("committed", [True, False])
async def test_an_error_behind_the_last_byte_is_asked_about(world, committed):
    """By HEAD after 0, 1 and 3 s; its session got an answer, and is asked nothing."""
    source, target = world.registry("source.test"), world.registry("target.test")
    image, digest = load(source, SIZE)
    failing = target.app.faults.on("PUT", "upload", query={"digest": digest}).first()
    failing.status(503, at="answer") if committed else failing.status(503, early=False)
    arrived(image, target, await world.copy(source, target))
    assert [each.request_bytes for each in sends(target, digest)] == [SIZE] * (
        1 if committed else 2
    )
    heads = target.journal.matching("HEAD", "blob", reference=digest)
    assert [round(each.time - heads[0].time) for each in heads] == ([0] if committed else [0, 1, 4])
    target.journal.matching("GET", "upload").none()


async def test_a_blob_that_may_have_arrived_is_asked_for_before_it_is_sent_again(world):
    """By one more HEAD, because the three behind the lost answer were not answered either."""
    source, target = (world.registry("source.test"), world.registry("target.test", mounts=False))
    image, digest = load(source, SIZE)
    lost = target.app.faults.on("PUT", "upload", query={"digest": digest}).first()
    lost.status(503, at="answer")
    unanswered = target.app.faults.on("HEAD", "blob", reference=digest).first(3)
    unanswered.status(503, retry_after=1)
    arrived(image, target, await world.copy(source, target))
    assert [each.request_bytes for each in sends(target, digest)] == [SIZE]
    target.journal.matching("HEAD", "blob", reference=digest).exactly(4)


async def test_a_blob_that_may_have_arrived_is_asked_for_before_it_is_mounted_again(world):
    """The mount of a blob was refused, so its body was sent, and the answer to it was lost."""
    source, target = (world.registry("source.test"), world.registry("target.test", mounts=False))
    image, _ = load(source, SIZE)
    digest = min(image.blobs, key=lambda digest: len(image.blobs[digest]))  # mounted first
    image.load_into(source.app, "other", tag="v1")
    registries = {"source": source, "target": target}
    lost = target.app.faults.on("PUT", "upload", repository="other", query={"digest": digest})
    lost.first().status(503, at="answer")
    unanswered = target.app.faults.on("HEAD", "blob", repository="other", reference=digest)
    unanswered.first(3).status(503, retry_after=1)
    mappings = [{"from": name, "tags": tags("v1")} for name in ("app", "other")]
    ran = await world.sync(registries, *mappings)
    arrived(image, target, ran)
    assert held(target, "other", image)
    starts = target.journal.matching("POST", "upload_start", repository="other")
    assert [each.query["from"] for each in starts if each.query.get("mount") == digest] == ["app"]
    puts = [each for each in sends(target, digest) if each.repository == "other"]
    assert [each.request_bytes for each in puts] == [len(image.blobs[digest])]
    target.journal.matching("HEAD", "blob", repository="other", reference=digest).exactly(4)


async def test_a_target_that_forgot_is_asked_once_and_gets_the_blob_again(world):
    source, target = (world.registry("source.test"), world.registry("target.test", resumable=False))
    image, _ = load(source, SIZE, 2 * MIB)
    for digest, body in image.blobs.items():
        if len(body) > MIB:
            target.app.faults.on("PUT", "upload", query={"digest": digest}).first().drop(
                after=MIB, of="request"
            )
    registries = {"source": {"url": source.url}, "target": {"url": target.url, "max_concurrent": 3}}
    ran = await world.sync(registries, {"from": "app", "tags": tags("v1")})
    assert ran.status == 0, ran.err
    assert held(target, "app", image)
    # The other one may have been asked for before the first answer was there, not later.
    assert 1 <= target.journal.count("GET", "upload", status=404) <= 2
    target.journal.matching("HEAD", "blob").none()
    for digest, body in image.blobs.items():
        assert len(sends(target, digest)) == (2 if len(body) > MIB else 1)


async def test_a_blob_that_breaks_each_time_is_given_up(world):
    """After two requests for the whole it goes in chunks, and after five attempts no more."""
    source, target = (world.registry("source.test"), world.registry("target.test", resumable=False))
    _, digest = load(source, SIZE)
    for method in ("PUT", "PATCH"):
        target.app.faults.on(method, "upload", where=lambda asked: asked.length() == SIZE).drop(
            after=MIB
        )
    ran = await world.copy(source, target)
    assert ran.status == 2
    assert len(sends(target, digest)) == 2
    broken = [each for each in target.journal.matching("PATCH", "upload") if each.faults]
    assert len(broken) + len(sends(target, digest)) <= 5


@pytest.mark.parametrize(
    "said", ["0-0", "", "5-10", f"0-{10 * SIZE}", "0-99999999999999999999999999", "none"]
)
async def test_a_status_that_says_nothing_of_use_lets_the_blob_begin_again(world, said):
    source, target = world.registry("source.test"), world.registry("target.test")
    image, digest = load(source, SIZE)
    target.app.faults.on("PUT", "upload", query={"digest": digest}).first().drop(
        after=MIB, of="request"
    )
    target.app.faults.on("GET", "upload").lie(headers={"Range": said})
    arrived(image, target, await world.copy(source, target))
    assert [each.request_bytes for each in sends(target, digest)] == [MIB, SIZE]


async def test_a_session_with_more_than_was_sent_is_of_no_use(world):
    """In chunks too: what it holds is not known, so a new session gets the blob."""
    source, target = world.registry("source.test"), world.registry("target.test")
    image, _ = load(source, 20 * MIB)
    faults = target.app.faults
    faults.on("PUT", "upload", where=lambda asked: asked.length() == 20 * MIB).status(413)
    faults.on("PATCH", "upload").first().drop(after=2 * MIB, of="request")
    faults.on("GET", "upload").lie(headers={"Range": f"0-{18 * MIB - 1}"})
    arrived(image, target, await world.copy(source, target))
    asked = target.journal.matching("GET", "upload")
    assert len(asked) == 1
    again = [each for each in target.journal.matching("PATCH", "upload") if not each.faults]
    assert [each.request_bytes for each in again] == [16 * MIB, 4 * MIB]


@pytest.mark.parametrize("side", ["source", "target"])
async def test_a_registry_that_is_restarted_costs_three_seconds_and_no_byte(world, side):
    """It answered before: repetitions of one request do not make it unreachable for the run."""
    source, target = (
        world.registry("source.test", down=Link(bandwidth=MIB)),
        world.registry("target.test"),
    )
    image, digest = load(source, 12 * MIB)
    ran = list[Ran]()

    async def copy() -> None:
        ran.append(await world.copy(source, target))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(copy)
        await anyio.sleep(6)
        async with (source if side == "source" else target).outage("refused", 3):
            pass
    arrived(image, target, ran[0])
    puts = sends(target, digest)
    assert sum(each.request_bytes for each in puts) == 12 * MIB
    assert len(puts) == (1 if side == "source" else 2)
    assert ran[0].seconds < (12 if side == "source" else 18) + 5


# Answers that got lost, and logins.


async def test_a_body_whose_answer_was_lost_and_that_is_refused_as_too_many_goes_no_third_time(
    world,
):
    """The connection had served another request, so the body goes again at once: into a 429."""
    source, target = world.registry("source.test"), world.registry("target.test")
    image, digest = load(source, 70_000)
    lost = target.app.faults.on("PUT", "upload", query={"digest": digest})
    lost.first().drop(at="answer")
    busy = target.app.faults.on("PUT", "upload", query={"digest": digest})
    busy.first().status(429, retry_after=1)
    arrived(image, target, await world.copy(source, target))
    assert len(sends(target, digest)) == 2
    target.journal.matching("HEAD", "blob", reference=digest).exactly(1)


@pytest.mark.parametrize("times", [1, 5, 6])
async def test_a_login_that_expires_before_a_body_is_renewed_five_times_at_most(world, times):
    source = world.registry("source.test")
    target = world.registry("target.test", auth=TokenService({"u": "p"}))
    image, digest = load(source, SIZE)
    expired = target.app.faults.on("PUT", "upload", query={"digest": digest}).first(times)
    expired.challenge(
        realm="http://target.test/token", service="registry.test", error="invalid_token"
    )
    who = {"auth_type": "basic", "credentials": {"username": "u", "password": "p"}}
    ran = await world.sync(
        {"source": source, "target": {"url": target.url, **who}}, {"from": "app"}
    )
    assert len(expired.struck) == times
    assert len(sends(target, digest)) == min(times + 1, 6)
    if times < 6:
        assert ran.status == 0, ran.err
        assert held(target, "app", image)
    else:
        assert ran.status == 4
        assert "AUTH_ERROR" in only(ran.failed)


async def test_a_stray_basic_challenge_does_not_make_passwords_travel(world):
    source = world.registry("source.test")
    target = world.registry("target.test", auth=TokenService({"u": "p"}))
    image, digest = load(source, SIZE)
    stray = target.app.faults.on("PUT", "upload", query={"digest": digest}).first()
    stray.challenge('Basic realm="a proxy"')
    who = {"auth_type": "basic", "credentials": {"username": "u", "password": "p"}}
    ran = await world.sync(
        {"source": source, "target": {"url": target.url, **who}}, {"from": "app"}
    )
    assert ran.status == 0, ran.err
    assert held(target, "app", image)
    kinds = {each.kind for each in target.journal.entries if each.authorization[0] == "basic"}
    assert kinds == {"token"}


async def test_what_a_head_called_absent_is_not_asked_for_again_when_its_source_breaks(world):
    """Tried without the excuse that the audit of `test_fault_matrix` has for it."""
    source, target = (world.registry("source.test"), world.registry("target.test", resumable=False))
    image, digest = load(source, SIZE)
    Seed(76).image().load_into(target.app, "app", tag="old")
    source.app.faults.on("GET", "blob", reference=digest).first().drop(after=MIB, of="response")
    source.app.faults.on("GET", "blob", header={"Range": "*"}).status(416)
    registries = {"source": source, "target": target}
    ran = await world.sync(registries, {"from": "app", "tags": tags("v1", "old")})
    assert held(target, "app", image), ran.err
    target.journal.matching("HEAD", "blob", reference=digest).at_most(1)


# What has arrived and is not seen yet.


@pytest.mark.provokes("manifest_names_absent")
@pytest.mark.parametrize(
    ("times", "at"), [(1, [0, 0.5]), (3, [0, 0.5, 1.5, 3.5]), (4, [0, 0.5, 1.5, 3.5])]
)
async def test_a_registry_that_is_late_to_see_a_blob_gets_time(world, times, at):
    """All was confirmed in this run and is looked up: it is there. The manifest is put again after
    0.5, 1 and 2 s.
    """
    source, target = world.registry("source.test"), world.registry("target.test")
    image, _ = load(source, 900)
    target.app.faults.on("PUT", "manifest").first(times).status(400, "MANIFEST_BLOB_UNKNOWN")
    ran = await world.copy(source, target)
    puts = target.journal.matching("PUT", "manifest")
    assert [each.time - puts[0].time for each in puts] == pytest.approx(at)
    target.journal.matching("HEAD", "blob").exactly(len(image.blobs))
    assert held(target, "app", image) == (ran.status == 0) == (times < 4)
    assert times < 4 or "MANIFEST_BLOB_UNKNOWN" in only(ran.failed)


@pytest.mark.provokes("manifest_names_absent", "blob_uploaded_twice", "blob_pulled_twice")
async def test_a_blob_that_vanished_behind_its_upload_is_brought_again(world):
    source, target = world.registry("source.test"), world.registry("target.test")
    image, digest = load(source, 70_000, 900)
    lost = list[bytes]()

    def lose(request: Request) -> None:
        if (request.method, request.kind, lost) == ("PUT", "manifest", []):
            del target.app.repositories["app"].blobs[digest]
            lost.append(b"")

    target.app.intercept = lose
    arrived(image, target, await world.copy(source, target))
    target.journal.matching("PUT", "manifest").exactly(2)
    target.journal.matching("HEAD", "blob").exactly(len(image.blobs))
    assert len(pulls(source, digest)) == len(sends(target, digest)) == 2


@pytest.mark.parametrize("size", [2 * MIB, 500_000])
async def test_a_staged_blob_goes_on_from_where_it_was_staged(world, size):
    """One of two targets breaks: what it lacks comes from disk, or memory, not from the source."""
    source = world.registry("source.test")
    one, two = (world.registry(f"{name}.test") for name in ("one", "two"))
    image, digest = load(source, size)
    two.app.faults.on("PUT", "upload", query={"digest": digest}).first().drop(
        after=300_000, of="request"
    )
    ran = await world.sync(
        {"source": source, "one": one, "two": two}, {"from": "app", "tags": tags("v1")}
    )
    arrived(image, one, ran)
    arrived(image, two, ran)
    assert len(pulls(source, digest)) == 1
    assert [each.request_bytes for each in sends(two, digest)] == [300_000, size - 300_000]
    assert sends(two, digest)[-1].header("content-range") == f"300000-{size - 1}"

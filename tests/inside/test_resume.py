"""What breaks in the middle of a blob goes on where it broke: docs/design.md section 6, rule 16,
counted on the wire.

Registries and the program share one loop on a clock that jumps (`ends.virtual`). The target is
strict, which keeps what came of a broken body as distribution 3 does, or one that forgets, as 2.8.2
does.
"""

from __future__ import annotations

from typing import Any

import anyio
import pytest
import trio
from hypothesis import strategies as st

from _regsync.net.wire import PIECE
from conformance.content.images import Image, Seed
from conformance.journal import Entry
from conformance.server.memory import Place
from tests.ends import Ran, held, only, tags, virtual

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


# A target that breaks.


@pytest.fixture
def often() -> int:
    """How many bytes may be read twice."""
    return MIB // 2


async def test_a_target_that_kept_a_part_gets_the_rest(world, often):
    source, target = world.registry("source.test"), world.registry("target.test")
    image, digest = load(source, SIZE)
    kept = 2 * MIB + 1234
    target.app.faults.on("PUT", "upload", query={"digest": digest}).first().drop(
        after=kept, of="request"
    )
    arrived(image, target, await world.copy(source, target))
    broken, rest = sends(target, digest)
    assert rest.header("content-range") == f"{kept}-{SIZE - 1}"
    assert (broken.request_bytes, rest.request_bytes) == (kept, SIZE - kept)
    target.journal.matching("GET", "upload", status=204).exactly(1)
    target.journal.matching("POST", "upload_start").exactly(len(image.blobs))
    target.journal.matching("HEAD", "blob").none()
    # Read from the checkpoint before that, and hashed on from there.
    _, again = pulls(source, digest)
    began = int(again.header("range").removeprefix("bytes=").removesuffix("-"))
    assert kept - often - PIECE < began <= kept
    assert again.response_bytes == SIZE - began


@pytest.mark.parametrize("form", ["distribution3", "strict"])
async def test_a_whole_body_whose_answer_got_lost_is_not_sent_again(world, form, often):
    """I7: the registry died between the last byte and the commit: asked by HEAD, then closed by an
    empty PUT.
    """
    source = world.registry("source.test")
    provider = world.persona(form)
    image, digest = load(source, SIZE)
    provider.faults.on("PUT", "upload", query={"digest": digest}).first().drop(
        after=SIZE, of="request"
    )
    registries = {"source": source, "target": f"https://{provider.row.hosts['registry']}"}
    began = anyio.current_time()
    ran = await world.sync(registries, {"from": "app", "tags": tags("v1")})
    assert ran.status == 0, ran.err
    puts = [
        each
        for each in provider.journal.matching("PUT", "upload")
        if each.query.get("digest") == digest
    ]
    assert [each.request_bytes for each in puts] == [SIZE, 0]
    assert puts[1].header("content-range") == ""
    heads = provider.journal.matching("HEAD", "blob", reference=digest)
    assert [round(each.time - began) for each in heads] == [0, 1, 4]
    assert len(pulls(source, digest)) == 1
    assert provider.blob("app", digest) == image.blobs[digest]


async def test_a_target_that_is_away_for_a_while_is_asked_again_what_it_kept(world, often):
    source, target = world.registry("source.test"), world.registry("target.test")
    image, digest = load(source, SIZE)
    target.app.faults.on("PUT", "upload", query={"digest": digest}).first().drop(
        after=2 * MIB, of="request"
    )
    target.app.faults.on("GET", "upload").first(3).status(503, retry_after=2)
    arrived(image, target, await world.copy(source, target))
    assert [each.request_bytes for each in sends(target, digest)] == [2 * MIB, SIZE - 2 * MIB]
    target.journal.matching("GET", "upload").exactly(4)


async def test_a_target_that_breaks_again_and_again_gets_every_byte_once(world, often):
    source, target = world.registry("source.test"), world.registry("target.test")
    image, digest = load(source, SIZE)
    target.app.faults.on("PUT", "upload", query={"digest": digest}).first(4).drop(
        after=600_000, of="request"
    )
    arrived(image, target, await world.copy(source, target))
    assert [each.request_bytes for each in sends(target, digest)] == [600_000] * 4 + [
        SIZE - 2_400_000
    ]
    target.journal.matching("POST", "upload_start").exactly(len(image.blobs))


@pytest.mark.provokes("bytes_not_of_digest")
@pytest.mark.parametrize("form", ["strict", "distribution3"])
async def test_a_rest_that_does_not_fit_lets_the_blob_begin_again(world, form, often):
    """Too little is said (zot): a strict registry answers 416, distribution 3 finds another digest,
    400.
    """
    source, provider = world.registry("source.test"), world.persona(form)
    image, digest = load(source, SIZE)
    provider.faults.on("PUT", "upload", query={"digest": digest}).first().drop(
        after=2 * MIB, of="request"
    )
    provider.faults.on("GET", "upload").first().lie(headers={"Range": f"0-{MIB}"})
    registries = {"source": source, "target": f"https://{provider.row.hosts['registry']}"}
    ran = await world.sync(registries, {"from": "app", "tags": tags("v1")})
    assert ran.status == 0, ran.err
    assert provider.blob("app", digest) == image.blobs[digest]
    puts = [
        each
        for each in provider.journal.matching("PUT", "upload")
        if each.query.get("digest") == digest
    ]
    assert [each.status for each in puts] == [None, 416 if form == "strict" else 400, 201]
    assert puts[2].request_bytes == SIZE


async def test_source_and_target_break_and_both_go_on(world, often):
    """The source is away for longer than a PUT is kept open; what the target kept is not sent
    again.
    """
    source, target = world.registry("source.test"), world.registry("target.test")
    image, digest = load(source, SIZE)
    source.app.faults.on("GET", "blob", reference=digest).first().drop(after=2 * MIB, of="response")
    source.app.faults.on("GET", "blob", header={"Range": "*"}).first(8).status(503)
    arrived(image, target, await world.copy(source, target))
    assert sum(each.request_bytes for each in sends(target, digest)) == SIZE
    first, again = (each for each in pulls(source, digest) if each.status in (200, 206))
    # What was read and had not left for the target is read again.
    assert SIZE <= first.response_bytes + again.response_bytes < SIZE + often + 2 * PIECE


# Any instant.


def _broken(data: st.DataObject, place: Place, method: str, kind: str, size: int, of: Any) -> None:
    for number in range(1, data.draw(st.integers(0, 3), label=f"breaks of the {of}") + 1):
        after = data.draw(st.integers(0, size), label="after")
        rule = place.app.faults.on(method, kind).nth(number).optional()
        rule.drop(after=after, of=of, reset=data.draw(st.booleans(), label="reset"))


class _Steps(trio.abc.Instrument):
    """Counts the steps of all tasks, and cancels at one of them."""

    def __init__(self, scope: anyio.CancelScope, at: int) -> None:
        self.taken, self._scope, self._at = 0, scope, at

    def before_task_step(self, task: object) -> None:
        self.taken += 1
        if self.taken == self._at:
            self._scope.cancel()


async def _cancelled(at: int) -> bool:
    """Copy from a source that breaks to a target that breaks, cancelled at a step; False when there
    is none.
    """
    async with virtual() as world:
        source, target = world.registry("source.test"), world.registry("target.test")
        image, digest = load(source, MIB)
        source.app.faults.on("GET", "blob", reference=digest).first().drop(
            after=MIB // 2, of="response"
        ).optional()
        puts = target.app.faults.on("PUT", "upload", query={"digest": digest})
        puts.first().drop(after=MIB * 3 // 4, of="request").optional()
        with anyio.CancelScope() as scope:
            steps = _Steps(scope, at)
            trio.lowlevel.add_instrument(steps)
            try:
                await world.copy(source, target)
            finally:
                trio.lowlevel.remove_instrument(steps)
        await anyio.sleep(10)  # the registries have noticed by then what was closed
        assert source.open_connections() == target.open_connections() == 0
        arrived(image, target, await world.copy(source, target))
    return scope.cancelled_caught


@pytest.mark.virtual_time
async def test_a_cancelled_resumption_holds_nothing():
    """I9, at every third step of a run in which source and target break: connections are free."""
    at = 1
    while await _cancelled(at):
        at += 3
    assert at > 90


# A session that the target has forgotten.


@pytest.mark.parametrize(("often", "bodies"), [(1, 2), (9, 5)])
async def test_a_forgotten_session_is_opened_anew(world, often, bodies):
    """The blob begins again, at most twice; what was refused before its body is no resumption."""
    source, target = world.registry("source.test"), world.registry("target.test")
    image, digest = load(source, SIZE)
    gone = target.app.faults.on("PUT", "upload", query={"digest": digest}).first(often)
    gone.status(404, error="BLOB_UPLOAD_UNKNOWN")
    ran = await world.copy(source, target)
    if often == 1:
        arrived(image, target, ran)
    else:
        assert ran.status == 2
        assert "TARGET_ERROR" in only(ran.failed)
    assert len(sends(target, digest)) == bodies
    target.journal.matching("GET", "upload").none()

"""HTTP/1.1 by bytes and by a virtual clock: docs/design.md section 9 "Body path" and its time-outs."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Callable
from contextlib import ExitStack

import anyio
import anyio.lowlevel
import pytest

from _regsync.addresses import Origin
from _regsync.errors import (
    ContentError,
    Disconnected,
    LoginExpired,
    ProtocolBroken,
    Side,
    SyncError,
    TimedOut,
)
from _regsync.net.http1 import LARGE_PIECE, PIECE, Buffers, Connection, Request, Response, State
from _regsync.net.streams import WANT_READ, WANT_WRITE, Timeouts
from tests.inside.wires import (
    NEVER,
    ORIGIN,
    Blob,
    End,
    Item,
    Pause,
    Wire,
    answer,
    connection,
    pool_of,
)

pytestmark = [pytest.mark.anyio, pytest.mark.virtual_time]

GET = Request("GET", "/v2/app/blobs/x")
POST = Request("POST", "/v2/app/blobs/uploads/")
PUT = Request("PUT", "/v2/app/blobs/uploads/1?digest=x")
ACCEPTED, CREATED = answer(status=202), answer(status=201)
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.fixture
async def elapsed() -> Callable[[], float]:
    """Return the virtual seconds since the test began; tests of one function share a clock."""
    began = anyio.current_time()
    return lambda: anyio.current_time() - began


def head_size(length: int) -> int:
    """Return how long the head of `PUT` is."""
    head = f"PUT {PUT.target} HTTP/1.1\r\nHost: registry.test\r\nContent-Length: {length}\r\n\r\n"
    return len(head)


async def get(wire: Wire, request: Request = GET, *, timeouts: Timeouts | None = None) -> Response:
    return await connection(wire, timeouts).exchange(request, memoryview(request.body), None, 60)


async def put(wire: Wire, blob: Blob, *, seconds: float = 300) -> Response:
    return await connection(wire).exchange(PUT, await blob.next(), blob, seconds)


def breaking(error: SyncError, *pieces: bytes, after: int) -> Blob:
    """Return pieces of which no more come after so many."""

    def check() -> None:
        if blob.given == after:
            raise error

    blob = Blob(*pieces)
    blob.tick = check
    return blob


async def whole(response: Response, size: int = 64) -> bytes:
    """Read a body piece by piece, as a relay does."""
    read, buffer = bytearray(), memoryview(bytearray(size))
    while count := await response.read_into(buffer):
        read += buffer[:count]
    return bytes(read)


# Sending.


async def test_head_and_first_piece_leave_in_one_send() -> None:
    wire = Wire(answers=((CREATED,),))
    await put(wire, Blob(b"first", b"second"))
    assert [write.rpartition(b"\r\n\r\n")[2] for write in wire.writes] == [b"first", b"second"]
    assert wire.writes[0].startswith(
        b"PUT /v2/app/blobs/uploads/1?digest=x HTTP/1.1\r\nHost: registry.test\r\n"
    )


async def test_request_with_its_body_leaves_in_one_send() -> None:
    wire = Wire(answers=((CREATED,),))
    await get(wire, Request("PUT", "/v2/app/manifests/x", (("Content-Type", "a/b"),), b"{}"))
    assert len(wire.writes) == 1
    assert (wire.requests[0].body, wire.requests[0].whole) == (b"{}", True)


@pytest.mark.parametrize("size", [0, 1, PIECE, 5 * PIECE], ids=["empty", "byte", "piece", "pieces"])
async def test_no_expect_header_is_sent_and_the_length_is_declared(size: int) -> None:
    wire = Wire(answers=((CREATED,),))
    pieces = [bytes(min(PIECE, size - start)) for start in range(0, size, PIECE)] or [b""]
    await put(wire, Blob(*pieces))
    (seen,) = wire.requests
    assert seen.headers == {"host": "registry.test", "content-length": str(size)}
    assert len(seen.body) == size


@pytest.mark.parametrize(
    ("method", "length"), [("GET", None), ("HEAD", None), ("POST", "0"), ("PUT", "0")]
)
async def test_empty_body_is_declared_where_a_body_is_expected(
    method: str, length: str | None
) -> None:
    wire = Wire(answers=((answer(),),))
    await get(wire, Request(method, "/"))
    assert wire.requests[0].headers.get("content-length") == length


@pytest.mark.parametrize(
    ("origin", "host"),
    [
        (Origin("https", "a.test", 443), "a.test"),
        (Origin("http", "a.test", 443), "a.test:443"),
        (Origin("https", "a.test", 5000), "a.test:5000"),
        (Origin("http", "::1", 5000), "[::1]:5000"),
        (Origin("http", "::1", 80), "[::1]"),
    ],
    ids=str,
)
async def test_host_header_has_brackets_and_no_default_port(origin: Origin, host: str) -> None:
    wire = Wire(answers=((answer(),),))
    await Connection(origin, wire, Timeouts()).exchange(GET, memoryview(b""), None, 60)
    assert wire.requests[0].headers["host"] == host


async def test_every_request_over_a_connection_has_its_own_headers() -> None:
    """Those of the request before are never sent in place of others."""
    logins = ["Bearer one", "Bearer one", "Bearer two", None, "Bearer one"]
    wire = Wire(answers=((answer(),),) * len(logins))
    reused = connection(wire)
    for login in logins:
        headers = (("Authorization", login),) if login else ()
        sent = await reused.exchange(Request("GET", "/", headers), memoryview(b""), None, 60)
        await sent.read(10)
        assert await sent.finish()
    assert [seen.headers.get("authorization") for seen in wire.requests] == logins


@pytest.mark.parametrize("token", ["secret\r\nInjected: x", "secret\u00e9", "secret\x00"])
async def test_header_that_cannot_be_sent_is_one_error_without_its_value(token: str) -> None:
    wire = Wire()
    with pytest.raises(ProtocolBroken) as caught:
        await get(wire, Request("GET", "/", (("Authorization", f"Bearer {token}"),)))
    assert "secret" not in str(caught.value)
    assert wire.writes == []


@pytest.mark.parametrize(
    "request_",
    [
        Request("GET", "/a b"),
        Request("GET", "/\r\nInjected: x"),
        Request("GET", "/ HTTP/1.1\r\nInjected: x\r\nRest:"),
        Request("GET", "/\u00e9"),
        Request("GET", "/", (("Name: x\r\nInjected", "x"),)),
        Request("GET", "/", (("Name", "x\ny"),)),
        Request("GET", "/", (("Name", "x\ry"),)),
        Request("GET", "/", (("Name", "x\r\n y"),)),
        Request("GET", "/", (("Name", "x\x7f"),)),
    ],
    ids=lambda request: repr((request.method, request.target, *request.headers)),
)
async def test_no_line_of_a_head_is_more_than_it_says(request_: Request) -> None:
    wire = Wire()
    with pytest.raises(ProtocolBroken):
        await get(wire, request_)
    assert wire.writes == []


async def test_later_pieces_are_sent_from_the_callers_own_memory() -> None:
    wire = Wire(answers=((CREATED,),))
    blob = Blob(b"first", b"second", b"third")
    await put(wire, blob)
    assert [offer.obj for offer in wire.offers[1:]] == blob.buffers[1:]
    assert all(
        offer.obj is buffer for offer, buffer in zip(wire.offers[1:], blob.buffers[1:], strict=True)
    )


@pytest.mark.parametrize(
    "length", [2, 5, 7], ids=["first-too-long", "second-too-long", "too-short"]
)
async def test_body_that_is_not_as_long_as_declared_is_refused(length: int) -> None:
    wire = Wire()
    with pytest.raises(ContentError):
        await put(wire, Blob(b"abc", b"def", length=length))
    assert wire.taken <= head_size(length) + length


# The connection of an upload.


async def test_put_goes_on_the_connection_that_answered_its_post() -> None:
    wire = Wire(answers=((ACCEPTED,), (CREATED,)))
    pool = pool_of(wire, Wire())
    pool.keep(other := connection(Wire()))
    assert pool.reuse(ORIGIN) is other
    async with pool.lease(ORIGIN) as lease:
        await lease.exchange(POST)
        pool.keep(other)  # used more recently, and yet not taken
        assert (await lease.exchange(PUT, 300, Blob(b"a", b"b"))).status == 201
    assert [seen.method for seen in wire.requests] == ["POST", "PUT"]


async def test_head_of_a_put_waits_for_the_first_piece() -> None:
    class Late(Blob):
        async def next(self) -> memoryview:
            await anyio.sleep(1)
            assert len(wire.requests) == 1 or self.given
            return await super().next()

    wire = Wire(answers=((ACCEPTED,), (CREATED,)))
    async with pool_of(wire).lease(ORIGIN) as lease:
        await lease.exchange(POST)
        await lease.exchange(PUT, 300, Late(b"a", b"b"))
    assert wire.requests[1].whole


async def test_source_that_refuses_before_the_first_piece_costs_no_connection() -> None:
    wire = Wire(answers=((ACCEPTED,),))
    pool = pool_of(wire)
    async with pool.lease(ORIGIN) as lease:
        await lease.exchange(POST)
        with pytest.raises(ContentError):
            await lease.exchange(PUT, 300, breaking(ContentError("no"), b"a", after=0))
    assert len(wire.requests) == 1
    assert pool.reuse(ORIGIN) is not None


def reset_at_write(wire: Wire) -> None:
    wire.sends.append(End.RESET)
    wire.feed(End.RESET)


DEATHS: dict[str, Callable[[Wire], None]] = {
    "eof-after-write": lambda wire: wire.after(wire.taken + 1, End.EOF),
    "reset-after-write": lambda wire: wire.after(wire.taken + 1, End.RESET),
    "reset-at-write": reset_at_write,
    "reset-at-second-write": lambda wire: wire.sends.extend((WANT_WRITE, End.RESET)),
}


def dying(death: str) -> Wire:
    """Return a connection that answers a POST and is dead for what follows."""
    wire = Wire(answers=((ACCEPTED,),))
    parse = wire.on_sent

    def die(took: bytes) -> None:
        parse(took)
        if len(wire.requests) == 1 and wire.requests[0].whole:
            DEATHS[death](wire)
            wire.on_sent = parse

    wire.on_sent = die
    return wire


@pytest.mark.parametrize("death", DEATHS)
async def test_dead_connection_is_replaced_and_the_first_piece_sent_again(death: str) -> None:
    old, new = dying(death), Wire(answers=((CREATED,),))
    pool = pool_of(old, new)
    async with pool.lease(ORIGIN) as lease:
        await lease.exchange(POST)
        # The rest comes late enough for the connection's death to be noticed before.
        response = await lease.exchange(PUT, 300, Blob(b"first", b"second", pause=10))
        assert (response.status, response.is_early) == (201, False)
    assert [(seen.method, bytes(seen.body)) for seen in new.requests] == [("PUT", b"firstsecond")]
    assert old.closed


async def test_connection_that_dies_while_the_source_begins_is_not_written_to() -> None:
    blob = Blob(b"a", b"b")
    blob.tick = lambda: old.feed(End.EOF)
    old, new = Wire(answers=((ACCEPTED,),)), Wire(answers=((CREATED,),))
    async with pool_of(old, new).lease(ORIGIN) as lease:
        await lease.exchange(POST)
        assert (await lease.exchange(PUT, 300, blob)).status == 201
    assert [seen.method for seen in old.requests] == ["POST"]
    assert old.closed


def refuse() -> None:
    raise LoginExpired("refused meanwhile")


async def test_request_that_is_out_of_date_after_a_dial_is_not_sent_and_its_connection_kept() -> (
    None
):
    wire = Wire(answers=((answer(b"x"),),))
    pool = pool_of(wire)
    async with pool.lease(ORIGIN) as lease:
        with pytest.raises(LoginExpired):
            await lease.exchange(GET, check_may_send=refuse)
    assert (wire.requests, wire.closed) == ([], False)
    async with pool.lease(ORIGIN) as lease:
        assert await (await lease.exchange(GET)).read(10) == b"x"


async def test_request_that_is_out_of_date_after_a_lost_connection_is_not_sent_again() -> None:
    old, new = dying("eof-after-write"), Wire()
    async with pool_of(old, new).lease(ORIGIN) as lease:
        await lease.exchange(POST)
        with pytest.raises(LoginExpired):
            await lease.exchange(GET, check_may_send=refuse)
    assert new.requests == []


async def test_body_that_is_out_of_date_when_its_source_begins_is_not_sent() -> None:
    wire = Wire(answers=((ACCEPTED,),))
    async with pool_of(wire).lease(ORIGIN) as lease:
        await lease.exchange(POST)
        with pytest.raises(LoginExpired):
            await lease.exchange(PUT, 300, Blob(b"first"), check_may_send=refuse)
    assert [seen.method for seen in wire.requests] == ["POST"]


async def test_dead_connection_is_replaced_for_a_request_in_memory() -> None:
    old, new = dying("eof-after-write"), Wire(answers=((answer(b"x"),),))
    async with pool_of(old, new).lease(ORIGIN) as lease:
        await lease.exchange(POST)
        assert await (await lease.exchange(GET)).read(10) == b"x"


async def test_dead_connection_is_not_replaced_once_a_second_piece_was_read() -> None:
    old = Wire(answers=((ACCEPTED,),))
    async with pool_of(old).lease(ORIGIN) as lease:
        await lease.exchange(POST)
        old.sends.extend((1000, End.RESET))
        old.after(old.taken + 1000, End.RESET)
        with pytest.raises(Disconnected):
            await lease.exchange(PUT, 300, Blob(b"first", b"second"))
    assert old.closed


async def test_new_connection_that_dies_is_not_replaced() -> None:
    async with pool_of(Wire(End.EOF)).lease(ORIGIN) as lease:
        with pytest.raises(Disconnected):
            await lease.exchange(PUT, 300, Blob(b"first", b"second"))


async def test_replacement_that_dies_too_is_not_replaced() -> None:
    async with pool_of(dying("eof-after-write"), Wire(End.EOF)).lease(ORIGIN) as lease:
        await lease.exchange(POST)
        with pytest.raises(Disconnected):
            await lease.exchange(GET)


@pytest.mark.parametrize(
    "said", [b"HTTP/1.1 2", b"HTTP/1.1 100 Continue\r\n\r\n"], ids=["head", "interim"]
)
async def test_connection_that_began_to_answer_is_not_replaced(said: bytes) -> None:
    wire = Wire(answers=((ACCEPTED,), (said, End.EOF)))
    async with pool_of(wire).lease(ORIGIN) as lease:
        await lease.exchange(POST)
        with pytest.raises(Disconnected):
            await lease.exchange(GET)


async def test_sources_own_break_is_not_taken_for_a_dead_connection() -> None:
    error = Disconnected("source").add_context(Side.SOURCE, "fetch", "x")
    wire = Wire(answers=((ACCEPTED,),))
    async with pool_of(wire).lease(ORIGIN) as lease:
        await lease.exchange(POST)
        with pytest.raises(SyncError, match="source"):
            await lease.exchange(PUT, 300, breaking(error, b"a", b"b", after=1))
    assert wire.closed


async def test_session_unknown_after_a_repetition_means_that_the_answer_was_lost() -> None:
    """The first PUT may have closed the session: a 404 must lead to a HEAD, not to a failed image."""
    gone = answer(b'{"errors":[]}', status=404)
    async with pool_of(dying("eof-after-write"), Wire(answers=((gone,),))).lease(ORIGIN) as lease:
        await lease.exchange(POST)
        with pytest.raises(Disconnected):
            await lease.exchange(PUT, 300, Blob(b"all"))


# The answer that comes before the end of a body.


@pytest.mark.rule("R17")
@pytest.mark.parametrize("status", [201, 307, 401, 413, 500])
@pytest.mark.parametrize("where", ["waiting-for-source", "waiting-for-target"])
async def test_final_answer_in_the_middle_stops_the_sending(
    elapsed: Callable[[], float], status: int, where: str
) -> None:
    slow_target = where == "waiting-for-target"
    wire = Wire(sends=(1000, 4, NEVER) if slow_target else ())
    wire.after(head_size(172) + 100, Pause(5), answer(b"words", status=status))
    blob = Blob(b"x" * 100, *[b"abcdefgh"] * 9, pause=0 if slow_target else 100)
    pool = pool_of(wire)
    async with pool.lease(ORIGIN) as lease:
        response = await lease.exchange(PUT, 300, blob)
        assert (response.status, response.is_early) == (status, True)
        assert elapsed() == pytest.approx(5)
        assert await response.read(100) == b"words"
        closed_before_the_end = wire.closed
    assert blob.given <= 2
    assert (closed_before_the_end, wire.closed) == (0, 1)
    assert pool.reuse(ORIGIN) is None


async def test_final_answer_to_a_body_in_memory_is_heard_before_its_end() -> None:
    wire = Wire(sends=(200, NEVER))
    wire.after(200, answer(b"too large", status=413))
    response = await get(wire, Request("PUT", "/v2/app/manifests/x", (), bytes(100_000)))
    assert (response.status, response.is_early, await response.read(100)) == (
        413,
        True,
        b"too large",
    )
    assert not await response.finish()


INTERIM = (
    b"HTTP/1.1 100 Continue\r\n\r\n",
    b"HTTP/1.1 102 Processing\r\nX: y\r\n\r\n",
    b"HTTP/1.1 103 Hints\r\n\r\n",
)


async def test_interim_answers_say_nothing() -> None:
    wire = Wire(*INTERIM, answers=((*INTERIM, CREATED),))
    pool = pool_of(wire)
    async with pool.lease(ORIGIN) as lease:
        response = await lease.exchange(PUT, 300, Blob(b"a", b"b", b"c", pause=1))
        assert (response.status, response.is_early) == (201, False)
    assert wire.requests[0].body == b"abc"
    assert pool.reuse(ORIGIN) is not None


async def test_readable_without_bytes_is_not_an_answer() -> None:
    """TLS 1.3 tickets make a fresh connection readable; reading gives nothing."""
    wire = Wire(Pause(0), WANT_READ, Pause(1), WANT_READ, answers=((CREATED,),))
    response = await put(wire, Blob(b"a", b"b", b"c", pause=1))
    assert (response.status, response.is_early) == (201, False)


async def test_answer_after_the_last_byte_is_not_early_though_the_source_has_not_ended() -> None:
    class Endless(Blob):
        async def next(self) -> memoryview:
            if self.given == 2:
                await anyio.sleep_forever()
            return await super().next()

    response = await put(Wire(answers=((CREATED,),)), Endless(b"a", b"b"))
    assert (response.is_early, response.is_reusable) == (False, True)


@pytest.mark.parametrize("sends", [(End.RESET,), (1000, End.RESET)], ids=["first", "second"])
async def test_refusal_is_read_after_a_failed_write(sends: tuple[Item, ...]) -> None:
    wire = Wire(Pause(1.5), answer(b"denied", status=403), End.RESET, sends=sends)
    response = await put(wire, Blob(b"a", b"b"))
    assert (response.status, response.is_early, await response.read(100)) == (403, True, b"denied")
    assert not response.is_reusable


async def test_refusal_is_read_after_a_failed_write_of_a_body_in_memory() -> None:
    wire = Wire(answer(b"denied", status=403), End.RESET, sends=(100, End.RESET))
    response = await get(wire, Request("PUT", "/", (), bytes(1000)))
    assert (response.status, await response.read(100)) == (403, b"denied")


@pytest.mark.parametrize(
    ("incoming", "after"), [((), 2.0), ((End.RESET,), 0.0)], ids=["silent", "reset"]
)
async def test_failed_write_is_raised_when_the_peer_says_nothing(
    elapsed: Callable[[], float], incoming: tuple[Item, ...], after: float
) -> None:
    with pytest.raises(Disconnected):
        await put(Wire(*incoming, sends=(1000, End.RESET)), Blob(b"a", b"b"))
    assert elapsed() == pytest.approx(after)


async def test_source_that_refuses_the_last_piece_leaves_the_upload_open() -> None:
    """I3: a wrong digest closes the connection before the last piece."""
    blob = breaking(ContentError("a wrong digest"), b"a", b"b", b"c", after=2)
    wire = Wire()
    async with pool_of(wire).lease(ORIGIN) as lease:
        with pytest.raises(ContentError, match="digest"):
            await lease.exchange(PUT, 300, blob)
    assert (wire.requests[0].body, wire.requests[0].whole) == (b"ab", False)
    assert wire.closed


# A send that would block.


async def test_same_memory_is_offered_again_after_want_write() -> None:
    wire = Wire(sends=(1000, WANT_WRITE, 2, WANT_WRITE, WANT_WRITE), answers=((CREATED,),))
    await put(wire, Blob(b"a", b"abcdef"))
    offers = wire.offers[1:]
    assert [len(offer) for offer in offers] == [6, 6, 4, 4, 4]
    assert offers[0] is offers[1]
    assert offers[2] is offers[3] is offers[4]
    assert all(offer.obj is offers[0].obj for offer in offers)


async def test_first_send_is_offered_again_after_want_write() -> None:
    wire = Wire(sends=(WANT_WRITE, WANT_WRITE), answers=((CREATED,),))
    await put(wire, Blob(b"a", b"b"))
    assert len({(id(offer.obj), len(offer)) for offer in wire.offers[:3]}) == 1


async def test_piece_is_not_replaced_before_it_is_taken() -> None:
    def check() -> None:
        assert not wire.sends

    wire = Wire(answers=((CREATED,),))
    blob = Blob(b"a", b"abcdef", b"g")
    blob.tick = check
    first = await blob.next()
    wire.sends.extend((1000,))
    exchanged = connection(wire).exchange(PUT, first, blob, 300)
    wire.sends.extend((Pause(3), 2, Pause(3), 4))
    wire.sends.popleft()
    assert (await exchanged).status == 201


@pytest.mark.parametrize("sends", [(NEVER,), (1000, 2, NEVER)], ids=["first", "second"])
async def test_cancelled_send_closes_the_connection(sends: tuple[Item, ...]) -> None:
    wire = Wire(sends=sends)
    pool = pool_of(wire)
    with anyio.move_on_after(1) as scope:
        async with pool.lease(ORIGIN) as lease:
            await lease.exchange(PUT, 300, Blob(b"a", b"abcdef"))
    assert scope.cancelled_caught
    assert wire.closed
    assert pool.reuse(ORIGIN) is None


# Reading a body.


def framing(status: int, *headers: str) -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status} Words", *headers, "", ""]).encode()


LENGTH, CODED = "Content-Length: 3", "Transfer-Encoding: chunked"


@pytest.mark.parametrize(
    ("method", "head", "direct"),
    [
        ("GET", framing(200, LENGTH), True),
        ("GET", framing(206, LENGTH), True),
        ("GET", framing(200, "Content-Length: 3, 3"), True),
        ("POST", framing(200, LENGTH), True),
        ("GET", framing(201, LENGTH), False),
        ("GET", framing(301, LENGTH), False),
        ("GET", framing(404, LENGTH), False),
        ("HEAD", framing(200, LENGTH), False),
        ("GET", framing(200, CODED), False),
        ("GET", framing(200, LENGTH, CODED), False),
        ("GET", framing(200), False),
        ("GET", framing(204, LENGTH), False),
    ],
)
async def test_direct_read_only_under_its_conditions(
    method: str, head: bytes, direct: bool
) -> None:
    response = await get(Wire(head), Request(method, "/"))
    assert bool(response.bytes_left) is direct


async def test_direct_read_goes_into_the_callers_memory_and_never_past_the_body() -> None:
    wire = Wire(answer(bytes(10))[:-8], b"abcd", Pause(0), b"efgh")
    response = await get(wire)
    buffer = memoryview(bytearray(64))
    wire.reads.clear()
    counts = [await response.read_into(buffer) for _ in range(4)]
    assert counts == [2, 4, 4, 0]
    assert all(read.obj is buffer.obj for read in wire.reads)
    assert max(len(read) for read in wire.reads) == 8


async def test_piece_is_gathered_from_what_has_arrived() -> None:
    """SSL_read gives 16 KiB a call; a piece is hashed and sent once."""
    wire = Wire(answer(bytes(100))[:-100], *[bytes(10)] * 6, Pause(1), *[bytes(10)] * 4)
    response = await get(wire)
    buffer = memoryview(bytearray(64))
    assert [await response.read_into(buffer) for _ in range(3)] == [60, 40, 0]


@pytest.mark.parametrize(
    "body",
    [
        (answer(b"hello world"),),
        (*[bytes([letter]) for letter in answer(b"hello world")],),
        (answer(b"hello world")[:-5], Pause(1), b"world"),
        (CHUNKED, b"6\r\nhello \r\n", Pause(1), b"5;x=y\r\nworld\r\n0\r\nTrailer: x\r\n\r\n"),
        (*[bytes([letter]) for letter in CHUNKED + b"b\r\nhello world\r\n0\r\n\r\n"],),
        (b"HTTP/1.1 200 OK\r\n\r\nhello ", Pause(1), b"world", End.EOF),
        (b"HTTP/1.0 200 OK\r\n\r\nhello world", End.EOF),
        (framing(200, "Content-Length: 99", CODED), b"b\r\nhello world\r\n0\r\n\r\n"),
        (*INTERIM, answer(b"hello world")),
    ],
)
@pytest.mark.parametrize("size", [1, 4, 64])
async def test_body_is_read_whole_however_it_is_framed(body: tuple[Item, ...], size: int) -> None:
    assert await whole(await get(Wire(*body)), size) == b"hello world"
    assert await (await get(Wire(*body))).read(11) == b"hello world"


@pytest.mark.parametrize(
    "incoming",
    [
        (End.EOF,),
        (End.RESET,),
        (b"HTTP/1.1 200 O", End.EOF),
        (b"HTTP/1.1 200 O", End.RESET),
        (b"HTTP/1.1 100 Continue\r\n\r\n", End.EOF),
        (answer(b"hello")[:-2], End.EOF),
        (answer(b"hello")[:-2], End.RESET),
        (answer(b"hello")[:-5], End.EOF),
        (CHUNKED + b"6\r\nhel", End.EOF),
        (CHUNKED + b"3\r\nhel\r\n", End.EOF),
        (CHUNKED + b"3\r\nhel\r\n0\r\n", End.RESET),
    ],
)
async def test_answer_that_is_cut_short_is_a_broken_connection(incoming: tuple[Item, ...]) -> None:
    with pytest.raises(Disconnected) as caught:
        await whole(await get(Wire(*incoming)))
    assert caught.value.retryable


@pytest.mark.parametrize(
    ("incoming", "body"),
    [
        ((answer(b"denied", status=403)[:-2], End.EOF), b"deni"),
        ((answer(b"denied", status=403)[:-2], End.RESET), b"deni"),
        ((answer(b"denied", status=403)[:-6], End.RESET), b""),
        ((CHUNKED.replace(b"200", b"500") + b"6\r\nden", End.EOF), b"den"),
        ((CHUNKED.replace(b"200", b"500") + b"3\r\nden\r\nzz",), b"den"),
        ((answer(b"denied", status=403)[:-2], NEVER), b"deni"),
        ((answer(bytes(100_000), status=403),), bytes(100)),
        (
            (CHUNKED.replace(b"200", b"500"), *[b"8\r\n12345678\r\n"] * 30),
            b"12345678" * 12 + b"1234",
        ),
    ],
)
async def test_error_body_cut_short_or_too_long_is_still_that_error(
    incoming: tuple[Item, ...], body: bytes
) -> None:
    wire = Wire(*incoming)
    pool = pool_of(wire)
    async with pool.lease(ORIGIN) as lease:
        response = await lease.exchange(GET)
        assert response.status in (403, 500)
        assert await response.read(100) == body
    assert wire.closed


@pytest.mark.parametrize(
    "incoming",
    [
        (answer(bytes(101)),),
        (CHUNKED, *[b"8\r\n12345678\r\n"] * 13),
        (b"HTTP/1.0 200 OK\r\n\r\n" + bytes(101),),
    ],
    ids=["declared", "chunked", "until-the-end"],
)
async def test_body_longer_than_its_limit_is_not_read(incoming: tuple[Item, ...]) -> None:
    response = await get(Wire(*incoming, NEVER))
    with pytest.raises(ContentError, match="100"):
        await response.read(100)


@pytest.mark.parametrize(
    "said",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
        b"\x15\x03\x01\x00\x02\x02\x16",
        b"<html>hello</html>\r\n\r\n",
        b"HTTP/1.1 200\x00OK\r\n\r\n",
        b"HTTP/1.1 099 Low\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n",
        framing(200, "Content-Length: -1"),
        framing(200, "Content-Length: 1", "Content-Length: 2"),
        framing(200, "Content-Length: 1" + "0" * 5000),
        framing(200, "Transfer-Encoding: gzip, chunked"),
        framing(200, "no colon"),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
)
async def test_what_is_not_http_is_one_clear_error_and_is_not_tried_again(said: bytes) -> None:
    wire = Wire(answers=((ACCEPTED,), (said, End.EOF)))
    async with pool_of(wire).lease(ORIGIN) as lease:
        await lease.exchange(POST)
        with pytest.raises(
            ProtocolBroken, match=r"registry\.test does not speak HTTP/1\.1"
        ) as caught:
            await lease.exchange(GET)
    assert not caught.value.retryable
    assert "\n" not in str(caught.value)
    assert wire.closed


@pytest.mark.rule("R17")
async def test_malformed_chunk_is_an_error() -> None:
    with pytest.raises(ProtocolBroken):
        await whole(await get(Wire(CHUNKED + b"zz\r\nhello\r\n")))


@pytest.mark.rule("R14")
@pytest.mark.parametrize(
    "flood",
    [(b"X: y\r\n",), (b"x" * 1000,), (b"X: " + b"y" * 100_000,)],
    ids=["headers", "line", "at-once"],
)
async def test_endless_head_is_bounded(flood: tuple[bytes, ...]) -> None:
    wire = Wire(b"HTTP/1.1 200 OK\r\n", *flood * 100_000, keep=False)
    with pytest.raises(ProtocolBroken, match="65536"):
        await get(wire)
    assert len(wire.incoming) > 50_000


async def test_head_as_long_as_signed_locations_make_it_is_read() -> None:
    response = await get(Wire(answer(b"", "Location: /" + "x" * 60_000)))
    assert len(response.headers.get("location") or "") == 60_001


async def test_repeated_headers_are_kept_apart() -> None:
    response = await get(Wire(answer(b"", "WWW-Authenticate: a", "www-authenticate: b")))
    assert response.headers.all("www-authenticate") == ["a", "b"]
    assert (response.headers.get("www-authenticate"), response.headers.get("x")) == ("a", None)


# The states of a connection.


async def test_an_exchange_goes_round_its_states_once() -> None:
    wire = Wire(sends=(1000, 2, WANT_WRITE), answers=((CREATED,),))
    states: list[State] = []
    wire.tick = lambda: states.append(sending.state)
    sending = connection(wire)
    assert sending.state is State.IDLE
    response = await sending.exchange(PUT, memoryview(b"a"), Blob(b"bcd", length=4), 300)
    assert set(states) <= {State.SENDING, State.WAITING}
    assert State.SENDING in states
    assert sending.state is State.ANSWERED
    assert await response.finish()
    assert sending.state is State.IDLE
    sending.close()
    assert sending.state is State.CLOSED


@pytest.mark.parametrize("stopped", [False, True], ids=["sending", "write-failed"])
async def test_an_early_answer_never_leads_to_an_idle_connection(stopped: bool) -> None:
    wire = Wire(sends=(1000, End.RESET) if stopped else (1000, NEVER))
    wire.after(0, answer(b"no", status=413))
    sending = connection(wire)
    response = await sending.exchange(PUT, memoryview(b"a"), Blob(b"bcd", length=4), 300)
    assert (sending.state, response.is_early) == (State.ANSWERED, True)
    assert await response.read(10) == b"no"
    assert not await response.finish()
    assert sending.state is State.ANSWERED


@pytest.mark.parametrize(
    ("method", "head"),
    [
        ("HEAD", framing(200, LENGTH)),
        ("GET", framing(204)),
        ("GET", framing(304, LENGTH)),
        ("POST", framing(202, "Content-Length: 0")),
        ("PUT", framing(500, "Content-Length: 0")),
    ],
)
async def test_an_answer_without_a_body_ends_with_its_head(method: str, head: bytes) -> None:
    wire = Wire(head, NEVER)
    response = await get(wire, Request(method, "/"))
    wire.reads.clear()
    assert await response.read(10) == b""
    assert await response.finish()
    assert wire.reads == []


# Keeping a connection.


@pytest.mark.rule("R17")
@pytest.mark.parametrize(
    ("method", "incoming", "kept"),
    [
        ("GET", (answer(b"abc"),), True),
        ("GET", (answer(b""),), True),
        ("GET", (answer(b"abc", "Connection: keep-alive"),), True),
        ("GET", (answer(b"abc", status=404),), True),
        ("GET", (framing(204),), True),
        ("HEAD", (framing(200, LENGTH),), True),
        ("GET", (CHUNKED + b"3\r\nabc\r\n0\r\n\r\n",), True),
        ("GET", (answer(b"abc", "Connection: close"),), False),
        ("GET", (answer(b"abc", "connection: Keep-Alive, CLOSE"),), False),
        ("GET", (answer(b"abc", "Connection: x", "Connection: close"),), False),
        ("GET", (answer(b"abc", version="1.0"),), False),
        ("GET", (answer(b"abc", "Connection: keep-alive", version="1.0"),), False),
        ("GET", (b"HTTP/1.1 200 OK\r\n\r\nabc", End.EOF), False),
        ("GET", (framing(200, LENGTH, CODED) + b"3\r\nabc\r\n0\r\n\r\n",), False),
        ("GET", (answer(b"abc") + b"x",), False),
        ("GET", (answer(b"abc", status=404) + b"x",), False),
        ("GET", (CHUNKED + b"3\r\nabc\r\n0\r\n\r\nx",), False),
        ("HEAD", (framing(200, LENGTH) + b"abc",), False),
        ("GET", (framing(204) + b"HTTP/1.1 200 OK\r\n\r\n",), False),
        ("GET", (answer(b"abc"), b"x"), False),
        ("GET", (answer(b"abc"), Pause(1), b"HTTP/1.1 200 OK\r\n\r\n"), False),
        ("GET", (answer(b"abc"), Pause(1), End.EOF), False),
        ("GET", (answer(b"abc"), End.RESET), False),
    ],
)
async def test_connection_is_kept_only_after_one_whole_clean_exchange(
    method: str, incoming: tuple[Item, ...], kept: bool
) -> None:
    first, second = Wire(*incoming), Wire(answer(b"second"))
    pool = pool_of(first, second)
    async with pool.lease(ORIGIN) as lease:
        await (await lease.exchange(Request(method, "/"))).read(100)
    await anyio.sleep(2)
    if isinstance(first.incoming[0] if first.incoming else None, Pause):
        first.incoming.popleft()  # its time is over
    if kept:
        first.feed(Pause(0), answer(b"again"))
    async with pool.lease(ORIGIN) as lease:
        assert await (await lease.exchange(GET)).read(100) == (b"again" if kept else b"second")
    assert bool(first.closed) is not kept


@pytest.mark.parametrize(
    ("unread", "kept"),
    [(10, True), (64 * 1024 - 100, True), (65 * 1024, False), (10_000_000, False)],
)
async def test_little_that_is_left_is_read_to_keep_the_connection(unread: int, kept: bool) -> None:
    wire = Wire(answer(bytes(unread)))
    async with pool_of(wire).lease(ORIGIN) as lease:
        await lease.exchange(GET)
    assert bool(wire.closed) is not kept
    assert sum(len(each) for each in wire.incoming if isinstance(each, bytes)) >= unread - 90_000


async def test_chunked_rest_without_end_is_not_read_to_keep_the_connection() -> None:
    wire = Wire(CHUNKED, *[b"1000\r\n" + bytes(4096) + b"\r\n"] * 100)
    async with pool_of(wire).lease(ORIGIN) as lease:
        await lease.exchange(GET)
    assert wire.closed
    assert len(wire.incoming) > 70


@pytest.mark.parametrize(
    "rest", [(NEVER,), (Pause(0.6), b"a", Pause(0.6), b"b", NEVER)], ids=["stalled", "slow"]
)
async def test_rest_of_a_body_is_not_waited_for(
    elapsed: Callable[[], float], rest: tuple[Item, ...]
) -> None:
    wire = Wire(answer(bytes(10))[:-10], *rest)
    async with pool_of(wire).lease(ORIGIN) as lease:
        await lease.exchange(GET)
    assert wire.closed
    assert elapsed() == pytest.approx(1)


# Time-outs.


@pytest.mark.parametrize(
    "incoming",
    [
        (),
        (b"HTTP/1.1 200 OK\r\n", *[Pause(10), b"X: y\r\n"] * 20),
        (*[Pause(10), b"HTTP/1.1 100 Continue\r\n\r\n"] * 20,),
    ],
    ids=["silent", "dripping", "interim"],
)
async def test_head_takes_sixty_seconds_at_most(
    elapsed: Callable[[], float], incoming: tuple[Item, ...]
) -> None:
    wire = Wire(*incoming)
    async with pool_of(wire).lease(ORIGIN) as lease:
        with pytest.raises(TimedOut, match="60 s"):
            await lease.exchange(GET)
    assert elapsed() == pytest.approx(60)
    assert wire.closed


async def test_head_of_a_manifest_put_may_take_longer() -> None:
    async with pool_of(Wire(Pause(299), CREATED), Wire()).lease(ORIGIN) as lease:
        assert (await lease.exchange(PUT, 300)).status == 201


@pytest.mark.parametrize(
    ("head", "piece"),
    [(answer(bytes(9))[:-9], b"abc"), (CHUNKED, b"1\r\na")],
    ids=["direct", "chunked"],
)
async def test_silent_body_ends_after_the_idle_time(
    elapsed: Callable[[], float], head: bytes, piece: bytes
) -> None:
    response = await get(Wire(head, Pause(59), piece, NEVER))
    with pytest.raises(TimedOut, match="60 s"):
        await whole(response)
    assert elapsed() == pytest.approx(59 + 60)


@pytest.mark.parametrize("sends", [(NEVER,), (1000, NEVER)], ids=["first", "second"])
async def test_target_that_takes_nothing_ends_after_the_idle_time(
    elapsed: Callable[[], float], sends: tuple[Item, ...]
) -> None:
    with pytest.raises(TimedOut, match="60 s"):
        await put(Wire(sends=sends), Blob(b"a", b"b"))
    # The last words are waited for after that.
    assert elapsed() == pytest.approx(62)


async def test_no_total_on_a_body_that_moves(elapsed: Callable[[], float]) -> None:
    parts: list[Item] = [item for _ in range(100) for item in (Pause(50), bytes(60_000))]
    response = await get(Wire(answer(bytes(6_000_000))[:-6_000_000], *parts))
    assert len(await whole(response, PIECE)) == 6_000_000
    assert elapsed() == pytest.approx(5000)


@pytest.mark.parametrize("framed", [False, True], ids=["direct", "chunked"])
async def test_body_slower_than_one_kibibyte_a_second_is_stalled(
    elapsed: Callable[[], float], framed: bool
) -> None:
    packet = b"5000\r\n" + bytes(20480) + b"\r\n" if framed else bytes(20480)
    parts: list[Item] = [item for _ in range(100) for item in (Pause(21), packet)]
    response = await get(
        Wire(CHUNKED if framed else framing(200, "Content-Length: 2048000"), *parts)
    )
    with pytest.raises(TimedOut, match="of the body moved"):
        await whole(response, PIECE)
    assert elapsed() == pytest.approx(315)  # the first packet after 300 s


async def test_body_that_becomes_slow_after_a_fast_beginning_is_stalled(
    elapsed: Callable[[], float],
) -> None:
    """Five minutes are judged by themselves, not with what went before."""
    fast: list[Item] = [item for _ in range(10) for item in (Pause(30), bytes(1_000_000))]
    slow: list[Item] = [item for _ in range(100) for item in (Pause(30), b"x")]
    response = await get(Wire(framing(200, "Content-Length: 99000000"), *fast, *slow))
    with pytest.raises(TimedOut, match="of the body moved"):
        await whole(response, 4 * PIECE)
    assert elapsed() == pytest.approx(600)


async def test_target_slower_than_one_kibibyte_a_second_is_stalled(
    elapsed: Callable[[], float],
) -> None:
    sends: list[Item] = [item for _ in range(100) for item in (Pause(50), 1000)]
    with pytest.raises(TimedOut, match="of the body moved"):
        await put(Wire(sends=(1000, *sends)), Blob(b"a", bytes(PIECE)))
    assert elapsed() == pytest.approx(302)


async def test_body_that_drips_framing_only_is_stalled(elapsed: Callable[[], float]) -> None:
    """A byte of a chunk's extension a minute would keep a body open for weeks."""
    parts: list[Item] = [item for _ in range(100) for item in (Pause(50), b"x")]
    response = await get(Wire(CHUNKED + b"5;", *parts))
    with pytest.raises(TimedOut, match="of the body moved"):
        await whole(response)
    assert elapsed() == pytest.approx(300)


async def test_slow_source_is_not_held_against_the_target(elapsed: Callable[[], float]) -> None:
    """Only the time that the sender waited for this peer counts, whatever the listener heard
    meanwhile.
    """
    interim: list[Item] = [item for _ in range(60) for item in (Pause(20), INTERIM[1])]
    wire = Wire(*interim)
    wire.after(head_size(10) + 10, CREATED)
    blob = Blob(*[b"x"] * 10, pause=100)
    assert (await put(wire, blob, seconds=1000)).status == 201
    assert elapsed() > 900


async def test_answer_is_waited_for_after_the_last_piece_as_long_as_the_caller_says(
    elapsed: Callable[[], float],
) -> None:
    wire = Wire(sends=(1000, Pause(50), 1, Pause(50)))
    with pytest.raises(TimedOut, match="17 s"):
        await put(wire, Blob(b"a", b"bc", pause=50), seconds=17)
    assert elapsed() == pytest.approx(50 + 100 + 17)


# The pool.


async def test_connection_used_last_is_taken_first() -> None:
    pool, idle = pool_of(), [connection(Wire()) for _ in range(3)]
    for each in idle:
        pool.keep(each)
    assert [pool.reuse(ORIGIN) for _ in range(4)] == [*reversed(idle), None]


async def test_idle_connections_are_bounded_and_the_oldest_goes() -> None:
    pool, wires = pool_of(), [Wire() for _ in range(66)]
    for wire in wires:
        pool.keep(connection(wire))
    assert [bool(wire.closed) for wire in wires] == [True] * 2 + [False] * 64


async def test_idle_connections_age_at_every_origin() -> None:
    pool, old, young = pool_of(), Wire(), Wire()
    pool.keep(Connection(Origin("https", "cdn.test", 443), old, Timeouts()))
    await anyio.sleep(30)
    pool.keep(connection(young))
    await anyio.sleep(20)
    assert pool.reuse(ORIGIN) is not None
    assert (old.closed, young.closed) == (1, 0)
    pool.keep(connection(young))
    await anyio.sleep(50)
    assert pool.reuse(ORIGIN) is None
    assert young.closed == 1


@pytest.mark.parametrize("item", [End.EOF, End.RESET, b"x"], ids=["left", "reset", "spoke"])
async def test_dead_idle_connections_are_closed_and_passed_over(item: Item) -> None:
    pool, living, dead = pool_of(), Wire(), Wire(item)
    pool.keep(connection(living))
    pool.keep(connection(dead))
    taken = pool.reuse(ORIGIN)
    assert taken is not None
    assert (living.closed, dead.closed) == (0, 1)
    assert dead.writes == []


async def test_origins_do_not_share_connections() -> None:
    pool = pool_of()
    pool.keep(connection(Wire()))
    assert pool.reuse(Origin("https", "registry.test", 80)) is None
    assert pool.reuse(Origin("http", "registry.test", 81)) is None


async def test_closing_the_pool_closes_what_is_idle() -> None:
    pool, wires = pool_of(), [Wire(), Wire()]
    for wire in wires:
        pool.keep(connection(wire))
    pool.close()
    assert [wire.closed for wire in wires] == [1, 1]
    assert pool.reuse(ORIGIN) is None


async def test_many_exchanges_use_one_connection() -> None:
    wires = Wire(answers=((answer(),),) * 5), Wire()
    pool = pool_of(*wires)
    for _ in range(5):
        async with pool.lease(ORIGIN) as lease:
            await (await lease.exchange(GET)).read(10)
    assert [wire.dialled for wire in wires] == ["by the pool", ""]


# Others run, and memory is bounded.


async def turns(work: Callable[[], object]) -> int:
    """Return how often another task ran while `work` did."""
    count = 0

    async def others() -> None:
        nonlocal count
        while True:
            await anyio.lowlevel.checkpoint()
            count += 1

    async with anyio.create_task_group() as group:
        group.start_soon(others)
        await anyio.lowlevel.checkpoint()
        count = 0
        await work()  # type: ignore[misc]
        group.cancel_scope.cancel()
    return count


@pytest.mark.parametrize("framed", [False, True], ids=["direct", "chunked"])
async def test_others_run_once_a_piece_while_everything_is_there(framed: bool) -> None:
    pieces = 50
    body = b"40\r\n" + bytes(64) + b"\r\n" if framed else bytes(64)
    wire = Wire(
        CHUNKED if framed else framing(200, f"Content-Length: {64 * pieces}"),
        *[body] * pieces,
        b"0\r\n\r\n",
    )
    response = await get(wire)
    assert await turns(lambda: whole(response)) >= pieces - 1


async def test_others_run_while_a_peer_floods_interim_answers() -> None:
    """Without a turn for others no deadline could ever end it."""
    wire = Wire(*INTERIM * 100, CREATED)
    assert await turns(lambda: get(wire)) >= 290


async def test_first_few_bodies_are_read_in_large_pieces() -> None:
    """Fifty large pieces would take 12 MB more, and save little CPU where as many bodies wait."""
    buffers = Buffers()
    with ExitStack() as others:
        few = [len(others.enter_context(buffers.lending(1 << 30))) for _ in range(15)]
        with buffers.lending(1 << 30) as last, buffers.lending(1 << 30) as behind:
            assert (*few, len(last)) == (LARGE_PIECE,) * 16
            assert len(behind) == PIECE
        with buffers.lending(PIECE + 1) as short, buffers.lending(100) as shorter:
            assert (len(short), len(shorter)) == (PIECE + 1, 100)


async def test_relay_of_many_pieces_keeps_a_few_in_memory() -> None:
    size = 64 * PIECE
    source, target = Wire(framing(200, f"Content-Length: {size}"), keep=False), Wire(keep=False)
    packet = bytes(PIECE)
    source.incoming.extend([packet] * 64)
    response = await get(source)

    class Relayed(Blob):
        def __init__(self) -> None:
            super().__init__(length=size)
            self.buffer = memoryview(bytearray(PIECE))

        async def next(self) -> memoryview:
            return self.buffer[: await response.read_into(self.buffer)]

    tracemalloc.start()
    try:
        relayed = Relayed()
        target.after(head_size(size) + size, CREATED)
        first = await relayed.next()
        assert (await connection(target).exchange(PUT, first, relayed, 300)).status == 201
        now, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert target.taken == head_size(size) + size
    # The buffer, and the first piece behind its head; nothing of it stays.
    assert peak < 2.5 * PIECE
    assert now < 1.5 * PIECE


async def test_copy_of_the_first_piece_is_gone_once_it_is_sent() -> None:
    """It would cost every stream a piece of memory for as long as it lasts."""
    held: list[int] = []

    def measure() -> None:
        if blob.given == 2:
            held.append(tracemalloc.get_traced_memory()[0])

    wire = Wire(keep=False)
    blob = Blob(bytes(8 * PIECE), b"b", b"c")
    blob.tick = measure
    first = await blob.next()
    wire.after(head_size(8 * PIECE + 2) + 8 * PIECE + 2, CREATED)
    tracemalloc.start()
    try:
        await connection(wire).exchange(PUT, first, blob, 300)
    finally:
        tracemalloc.stop()
    assert len(held) == 1
    assert held[0] < PIECE


async def test_deadline_of_the_policy_is_finite_everywhere() -> None:
    """A time-out of infinity in the policy would be a hang somewhere."""
    policy = Timeouts()
    assert all(0 < seconds < math.inf for seconds in policy)
    assert (policy.connect, policy.tls, policy.head, policy.manifest_put) == (10, 10, 60, 300)
    assert (policy.finish, policy.longest_finish, policy.idle) == (60, 900, 60)
    assert (policy.slowest_bytes_per_second, policy.slow_window) == (1024, 300)
